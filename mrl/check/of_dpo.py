"""Checks the step of `mrl dpo`: pairs or single answers, with the start and noise as the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algorithms.preference import with_reference
from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.folder import CheckedModel
from mrl.check.rows import MIN_TOKENS, Rows, counted, first_items, shortened
from mrl.config.command import Part
from mrl.config.dpo import DPOConfig
from mrl.data.dataset import Example
from mrl.data.preferences import Answer, batch_of
from mrl.trainers.dpo import DPOTask

KL = 1.0
"""The KL for kto instead of its estimate, in units of 1 / beta."""


class CheckedDPO(CommandCheck[DPOConfig]):
    def subjects(self, config: DPOConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        [part] = parts
        task = DPOTask(config)
        loss = reference.Loss(of_group=PreferenceOracle(config.loss.name, config.loss.resolved), group=config.group)
        return [Subject(part, task.role(folders[part.role]), task.loss_fn, task.denominator, loss)]

    def rows(
        self, config: DPOConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        found, words = first_items(DPOTask, config, subject.config.model.path, rows=sequences)
        length = max(length // max(len(row.answers) for row in found), MIN_TOKENS)
        shown = [
            dataclasses.replace(row, answers=tuple(_cut(answer, length) for answer in row.answers)) for row in found
        ]
        if shown != found:
            words += f", of each answer at most {length} tokens around the first that trains"
        answers = [answer for row in shown for answer in row.answers]
        examples = [Example(answer.ids, answer.mask, False, answer.multi_modal_inputs) for answer in answers]
        batch, ctx = batch_of(shown, group=config.group), {}
        log_probs_S = torch.zeros(len(answers), dtype=torch.float64)
        if config.loss.needs_reference:
            scale = 1 / float(config.loss.value("beta"))
            log_probs_S = _near_the_start(model.path, examples, scale, seed=config.seed, device=device)
            batch = with_reference(batch, log_probs_S)
            words += "; the reference's log-probs are those of the start and noise"
            if not config.loss.is_paired:
                ctx["kl"] = KL * scale
                words += f", and the KL is {ctx['kl']:g}"
        weights = [row.weight for row in shown for _ in row.answers]
        tokens = sum(
            weight * sum(answer.mask) for weight, answer in zip(weights, answers, strict=True) if answer.is_chosen
        )
        of_all = {"units": sum(weights) / config.group, "chosen_tokens": tokens, "kl": ctx.get("kl", 0.0)}
        fields = [
            {
                name: torch.tensor(value, dtype=torch.float64)
                for name, value in {"weight": weight, "chosen": answer.is_chosen, "reference": ref, **of_all}.items()
            }
            for weight, answer, ref in zip(weights, answers, log_probs_S.tolist(), strict=True)
        ]
        return Rows(examples, fields, batch, counted(words, batch), ctx)


def _cut(answer: Answer, length: int) -> Answer:
    """Returns an answer to the end of its prompt, of at most `length` tokens."""
    short = shortened(Example(answer.ids, answer.mask, False, answer.multi_modal_inputs), length)
    return dataclasses.replace(answer, ids=list(short.ids), mask=[int(trains) for trains in short.mask])


@torch.no_grad()
def _near_the_start(
    folder: str, examples: Sequence[Example], scale: float, *, seed: int, device: str
) -> Tensor:  # fmt: skip
    """Returns [S] float64: the log-probs of answers by the model in the folder, with noise of the size `scale`.

    With the noise no log-ratio is 0, and none is so large that the loss has no slope.
    """
    model = reference.load(folder).to(device).eval()
    found = []
    for example in examples:
        log_probs_T, _ = reference.predict(model, example)
        found.append(float((log_probs_T.double().cpu() * torch.tensor(example.mask[1:])).sum()))
    generator = torch.Generator().manual_seed(seed)
    noise_S = torch.randn(len(found), generator=generator, dtype=torch.float64)
    return torch.tensor(found, dtype=torch.float64) + scale * noise_S


@dataclasses.dataclass(frozen=True)
class PreferenceOracle:
    """Computes a loss of mrl/algorithms/preference.py in plain torch, of one pair, or of one answer of kto.

    by: the values of its keys. Each sequence has the fields weight, chosen and reference of its own, and units,
    chosen_tokens and kl of the whole batch.
    """

    name: str
    by: Mapping[str, float]

    def __call__(
        self, log_probs: Sequence[Tensor], masks: Sequence[Tensor], fields: Sequence[reference.Fields]
    ) -> Tensor:
        trained = [(mask_T != 0).double() for mask_T in masks]
        sums = [(lp_T.double() * m_T).sum() for lp_T, m_T in zip(log_probs, trained, strict=True)]
        means = [of_one / m_T.sum() for of_one, m_T in zip(sums, trained, strict=True)]
        weight, units = fields[0]["weight"], fields[0]["units"]
        if self.name == "kto":
            loss = self._of_answer(sums[0] - fields[0]["reference"], fields[0])
        else:
            loss = self._of_pair(*(self._score(*of_one) for of_one in zip(sums, means, trained, fields, strict=True)))
        total = weight * loss / units
        for of_one, own in zip(sums, fields, strict=True):
            if own["chosen"] and self.by["sft_weight"]:
                total = total - self.by["sft_weight"] * own["weight"] * of_one / own["chosen_tokens"]
        return total

    def _score(self, log_prob: Tensor, mean: Tensor, trained_T: Tensor, own: reference.Fields) -> Tensor:
        if self.name == "simpo":
            return mean
        if self.name == "orpo":
            return mean - torch.log1p(-mean.exp())
        ratio = log_prob if self.by.get("reference_free") else log_prob - own["reference"]
        return ratio / trained_T.sum() if self.by["length_normalized"] else ratio

    def _of_pair(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        beta, gap = self.by["beta"], chosen - rejected
        if self.name == "ipo":
            return (gap - 0.5 / beta) ** 2
        if self.name == "orpo":
            return -beta * logsigmoid(gap)
        if self.name == "simpo":
            return -logsigmoid(beta * gap - self.by["gamma"])
        wrong = self.by["label_smoothing"]
        return -(1 - wrong) * logsigmoid(beta * gap) - wrong * logsigmoid(-beta * gap)

    def _of_answer(self, ratio: Tensor, own: reference.Fields) -> Tensor:
        above = self.by["beta"] * (ratio - own["kl"])
        if own["chosen"]:
            return self.by["desirable_weight"] * torch.sigmoid(-above)
        return self.by["undesirable_weight"] * torch.sigmoid(above)


CHECKED = CheckedDPO()
