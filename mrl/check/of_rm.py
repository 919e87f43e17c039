"""Checks the step of `mrl rm`: pairs, graded answers or answers of steps, with a value head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.folder import CheckedModel
from mrl.check.rows import MIN_TOKENS, Rows, counted, first_items
from mrl.config.command import Part
from mrl.config.rm import RMConfig
from mrl.data.dataset import Example
from mrl.data.scored import ScoredSequence, scored_batch
from mrl.trainers.rm import RMTask


class CheckedRM(CommandCheck[RMConfig]):
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
        shown = [dataclasses.replace(row, sequences=tuple(_cut(one, length) for one in row.sequences)) for row in found]
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


def _cut(sequence: ScoredSequence, length: int) -> ScoredSequence:
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


CHECKED = CheckedRM()
