"""What the ranks of a test world run of `mrl dpo`, and log-probs by transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.config.dpo import DPOConfig
from mrl.config.load import from_dict
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.trainers import dpo
from tests.trainers.cases import HAPPENINGS, outcome


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """As `tests.trainers.cases.train`."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: dpo.run(from_dict(config, DPOConfig), "mrl dpo config.yaml"))


def passes(config: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """(role, what kind of pass, sequences) of each pass of a run of `mrl dpo` through a whole batch, alone, in order."""
    found, step = [], FSDPEngine.forward_backward_step

    def noting(self: FSDPEngine, batch: Batch, ctx: Any = None, forward_only: bool = False, **options: Any) -> Any:
        role = "" if self.config.optimizer is not None else "reference"
        found.append((role, "forward" if forward_only else "train", batch.num_sequences))
        return step(self, batch, ctx, forward_only, **options)

    with mock.patch.object(FSDPEngine, "forward_backward_step", noting):
        assert train(config)[0] == "done"
    return found


def log_prob(model: Any, ids: list[int], mask: list[int], images: Mapping[str, Any]) -> Tensor:
    """The answer's, in float64. images: what a model that reads images gets of them."""
    tokens = torch.tensor([ids])
    if hasattr(model.config, "image_token_id"):
        images = {**images, "mm_token_type_ids": (tokens == model.config.image_token_id).int()}
    logits = model(tokens, **images).logits[0, :-1].double().log_softmax(-1)
    of_labels = logits.gather(1, tokens[0, 1:, None])[:, 0]
    return of_labels[torch.tensor(mask[1:], dtype=torch.bool)].sum()


def kl_of_others(model: Any, reference: Any, answers: list) -> float:
    """kto's z: each prompt with the answer of the next one, good answers first."""
    order = sorted(range(len(answers)), key=lambda i: not answers[i].is_chosen)
    kl = 0.0
    with torch.no_grad():
        for i, j in zip(order, [*order[1:], order[0]], strict=True):
            begin, prompt = len(answers[j].prompt), answers[i].prompt
            ids, mask = prompt + answers[j].ids[begin:], [0] * len(prompt) + answers[j].mask[begin:]
            of_both = (log_prob(of, ids, mask, answers[i].multi_modal_inputs) for of in (model, reference))
            kl += float(next(of_both) - next(of_both)) / len(order)
    return max(0.0, kl)
