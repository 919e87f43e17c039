"""The parts of a step in which a run's models compute, each with what lies on the device then."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Distill:
    """How a student learns a teacher's distributions of next tokens."""

    loss: str
    beta: float
    top_k: int | None  # token ids at which both are compared; None: all of the vocabulary
    temperature: float
    first_temperature: float | None = None  # of each token's own label


SAMPLING_RANKS = "sampling ranks"
"""The role of what samples on ranks of its own, beside those that train (`rollout.ranks`)."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One role at work."""

    name: str  # in words, as "update of the actor"
    role: str
    kind: Literal["train", "forward", "sample"]
    sequences: int  # of the global batch that it goes through
    steps: int = 1  # optimizer steps that they are divided over
    cache_tokens: int = 0  # of sampling: tokens whose keys and values a replica keeps
    engine_fraction: float = 0.0  # of sampling by an engine inside the trainer: its share of the GPU's memory
    handed_to_tp: int = 0  # ranks of that engine, where it gets its weights from the role in this phase
    prefill_tokens: int = 0  # of sampling by the role itself: prompt tokens in one forward at most
    temperature: float = 1.0  # of sampling by the role itself, with the next three
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    distill: Distill | None = None  # where it learns distributions of next tokens, or tells them in a forward pass


@dataclasses.dataclass(frozen=True)
class Phases:
    """All phases of a step, and whether roles that do not work wait on the host."""

    phases: tuple[Phase, ...]
    offload_idle: bool = True
    entropy: Literal["none", "detached", "differentiable"] = "none"  # that updates make beside log-probs
    served_tokens: int = 0  # that servers sample at most, while all phases run
    notes: tuple[str, ...] = ()  # lines on what is assumed of the data, or is not in any phase
