"""Checks the steps of `mrl sft`, `mrl dpo`, `mrl rm` and `mrl ppo`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.algorithms.losses import ActorLoss, CriticLoss
from mrl.algorithms.preference import with_reference
from mrl.algorithms.recipes import check_algorithm
from mrl.algorithms.sft import sft_loss
from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.folder import CheckedModel
from mrl.check.reference import TokenWeights
from mrl.check.rows import MIN_TOKENS, Rows, counted, first_items, first_rows, shortened
from mrl.config.command import Part
from mrl.config.dpo import DPOConfig
from mrl.config.ppo import PPOConfig
from mrl.config.rm import RMConfig
from mrl.config.roles import ROLES, role_configs
from mrl.config.schema import SFTConfig
from mrl.data.dataset import Example
from mrl.data.mixture import train_rows
from mrl.data.preferences import Answer, batch_of
from mrl.data.prompts import PromptDataset, PromptSource
from mrl.data.scored import ScoredSequence, scored_batch
from mrl.data.tokenizer import load_tokenizer
from mrl.rollout.base import Trajectory, trajectories_to_batch
from mrl.trainers.dpo import DPOTask
from mrl.trainers.rm import RMTask
from mrl.trainers.sft import SFTTask
from mrl.weights.hf_config import read_hf_config, vocab_size_of


class CheckedSFT(CommandCheck[SFTConfig]):
    """Checks the step of `mrl sft`."""

    def subjects(self, config: SFTConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        [part] = parts
        return [Subject(part, SFTTask(config).role(folders[part.role]), sft_loss, "tokens", reference.Loss())]

    def rows(
        self, config: SFTConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        rows = first_rows(
            config.data, subject.config.model, of_batch=config.train.global_batch_size, seed=config.seed,
            sequences=sequences, length=length,
        )  # fmt: skip
        if config.teacher is None:
            return rows
        return dataclasses.replace(rows, words=f"{rows.words}; the loss is that of labels alone, without the teacher")


SFT = CheckedSFT()

KL = 1.0
"""The KL for kto instead of its estimate, in units of 1 / beta."""


class CheckedDPO(CommandCheck[DPOConfig]):
    """Checks the step of `mrl dpo`: pairs or single answers, with the start and noise as the reference."""

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
            dataclasses.replace(row, answers=tuple(_cut_answer(answer, length) for answer in row.answers))
            for row in found
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


def _cut_answer(answer: Answer, length: int) -> Answer:
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


DPO = CheckedDPO()


class CheckedRM(CommandCheck[RMConfig]):
    """Checks the step of `mrl rm`: pairs, graded answers or answers of steps, with a value head."""

    def subjects(self, config: RMConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        [part] = parts
        task = RMTask(config)
        oracle = ScoreOracle(config.loss.name, config.loss.resolved_centering)
        loss = reference.Loss(head="value", of_group=oracle, group=config.group)
        return [Subject(part, task.role(folders[part.role]), task.loss_fn, task.denominator, loss)]

    def rows(
        self, config: RMConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        found, words = first_items(RMTask, config, subject.config.model.path, rows=sequences)
        length = max(length // config.group, MIN_TOKENS)
        shown = [
            dataclasses.replace(row, sequences=tuple(_cut_sequence(one, length) for one in row.sequences))
            for row in found
        ]
        if shown != found:
            words += f", of each sequence at most {length} tokens up to the first that is scored, or from the start"
        batch = scored_batch(shown, group=config.group)
        units = sum(row.weight * len(one.places) for row in shown for one in row.sequences) / config.group
        examples, fields = [], []
        for row in shown:
            for one in row.sequences:
                at = dict(zip(one.places, one.targets, strict=True))
                # the batch has no value of a sequence's last token: one more stands behind it (mrl/data/scored.py)
                mask = [0, *(int(place in at) for place in range(len(one.ids)))]
                examples.append(Example([*one.ids, 0], mask, False))
                targets = torch.tensor([at.get(place, 0.0) for place in range(len(one.ids))], dtype=torch.float64)
                numbers = {"margin": row.margin, "weight": row.weight, "units": units}
                fields.append({"targets": targets, **{name: torch.tensor(value) for name, value in numbers.items()}})
        return Rows(examples, fields, batch, counted(words, batch))


def _cut_sequence(sequence: ScoredSequence, length: int) -> ScoredSequence:
    """Returns at most `length` tokens of a sequence, with a scored one.

    They are the first tokens, or those up to the first scored one if it comes later.
    """
    stop = max(length, sequence.places[0] + 1)
    start = stop - length
    kept = [(at, target) for at, target in zip(sequence.places, sequence.targets, strict=True) if at < stop]
    places, targets = zip(*((at - start, target) for at, target in kept), strict=True)
    return ScoredSequence(sequence.ids[start:stop], places, targets)


@dataclasses.dataclass(frozen=True)
class ScoreOracle:
    """Computes a loss of mrl/algorithms/scores.py in plain torch, for one pair or one sequence.

    Scores are read at tokens with a mask that is not 0.
    """

    name: str
    centering: float

    def __call__(self, values: Sequence[Tensor], masks: Sequence[Tensor], fields: Sequence[reference.Fields]) -> Tensor:
        scores = [values_T[mask_T != 0].double() for values_T, mask_T in zip(values, masks, strict=True)]
        if self.name == "bradley_terry":
            chosen, rejected = scores
            total = self.centering * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected - fields[0]["margin"])
        else:
            wanted = fields[0]["targets"][masks[0] != 0]
            total = (scores[0] - wanted) ** 2
            if self.name == "steps":
                total = -wanted * logsigmoid(scores[0]) - (1 - wanted) * logsigmoid(-scores[0])
        return fields[0]["weight"] * total.sum() / fields[0]["units"]


RM = CheckedRM()


NEW_TOKENS = 24
"""Tokens that the actor samples after each prompt; rollout.max_new_tokens if that is less."""


class CheckedPPO(CommandCheck[PPOConfig]):
    """Checks the step of `mrl ppo`: actor and critic on completions that transformers samples.

    Advantages and returns are noise.
    """

    def subjects(self, config: PPOConfig, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        by_role = {part.role: part for part in parts}
        recipe = check_algorithm(config)
        # what does not train is not checked, so any folder serves
        configs = role_configs(config, dict.fromkeys(ROLES, folders["actor"]) | dict(folders), recipe)
        length, how = config.rollout.max_new_tokens, recipe.aggregation
        weights: dict[str, TokenWeights] = {
            "token_mean": reference.token_mean,
            "sequence_mean": reference.sequence_mean,
            "fixed_length": functools.partial(reference.fixed_length, length=length),
        }
        actor = ActorLoss(aggregation=how, fixed_length=length, objective="policy_gradient")
        loss = reference.Loss(reference.policy_gradient, weights[how], temperature=config.rollout.temperature)
        subjects = [Subject(by_role["actor"], configs["actor"], actor, actor.denominator, loss)]
        if "critic" in by_role:
            critic = CriticLoss(aggregation=how, fixed_length=length)
            loss = reference.Loss(reference.squared_error, weights[how], head="value")
            subjects.append(Subject(by_role["critic"], configs["critic"], critic, critic.denominator, loss))
        return subjects

    def rows(
        self, config: PPOConfig, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        actor = reference.load(model.path).to(device).eval()
        return _completions(config, subject.config.model.path, actor, sequences=sequences, length=length)


def _completions(
    config: PPOConfig, folder: str, model: torch.nn.Module, *, sequences: int, length: int
) -> Rows:  # fmt: skip
    """Returns prompts with completions that `model` samples. folder: the actor's, with its tokenizer."""
    tokenizer = load_tokenizer(folder, config.actor.model.trust_remote_code, config.data.chat_template)
    vocab_size = vocab_size_of(read_hf_config(folder))
    dataset = train_rows(config.data, lambda data: PromptDataset(data, tokenizer, vocab_size=vocab_size))
    samples = min(config.rollout.samples_per_prompt, 2)
    prompts = PromptSource(dataset, seed=config.seed, shuffle=config.data.shuffle).take(max(1, sequences // samples))
    new = min(config.rollout.max_new_tokens, NEW_TOKENS)
    room = max(1, length - new)
    trajectories = []
    torch.manual_seed(config.seed)
    for prompt in prompts:
        ids = prompt.tokens[-room:]
        for sample, completion in enumerate(_sampled(model, ids, samples, new, config.rollout.temperature)):
            mask = [0] * len(ids) + [1] * len(completion)
            log_probs = [0.0] * len(mask)
            trajectories.append(Trajectory(prompt, sample, ids + completion, mask, log_probs, "", False))
    generator = torch.Generator().manual_seed(config.seed)
    fields = [
        {name: torch.randn(len(t.tokens) - 1, generator=generator) for name in ("advantages", "returns")}
        for t in trajectories
    ]
    batch = trajectories_to_batch(trajectories)
    noise = {name: torch.cat([of[name] for of in fields]) for name in ("advantages", "returns")}
    batch = dataclasses.replace(batch, token_fields={**noise, "old_values": torch.zeros(batch.num_tokens)})
    words = f"data.train: the first {len(prompts)} prompts, {samples} completions of each of at most {new} tokens"
    if any(len(prompt.tokens) > room for prompt in prompts):
        words += f", of each prompt the last {room} tokens"
    examples = [Example(t.tokens, t.mask, False) for t in trajectories]
    return Rows(examples, fields, batch, counted(f"{words}; advantages and returns are noise", batch))


@torch.no_grad()
def _sampled(
    model: torch.nn.Module, ids: list[int], samples: int, new: int, temperature: float
) -> list[list[int]]:  # fmt: skip
    """Returns completions of a prompt, drawn by transformers."""
    device = next(model.parameters()).device
    made = model.generate(  # type: ignore[operator]
        torch.tensor([ids], device=device), do_sample=True, temperature=temperature, max_new_tokens=new, top_k=0,
        num_return_sequences=samples, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [row[len(ids) :].tolist() for row in made]


PPO = CheckedPPO()
