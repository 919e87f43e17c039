"""The operations that the main rank tells all ranks to do. They are sent as they are: plain data and tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from mrl.batch import Batch
from mrl.engine.sampling import SamplingParams
from mrl.engine.trained_state import UpdateSettings


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """The settings of a model without its weights. Its checkpoints have them too."""

    rank: int | None = None  # its adapters' rank; None: all weights train
    seed: int = 0  # for A at the start
    attention: bool = True  # modules that have adapters
    mlp: bool = True
    alpha: float | None = None  # its adapters' alpha: the server may be started again with another
    rslora: bool = False

    def __str__(self) -> str:
        where = " and ".join(name for name, has in (("attention", self.attention), ("MLP", self.mlp)) if has)
        return "all weights" if self.rank is None else f"adapters of rank {self.rank}, alpha {self.alpha} on {where}"


@dataclasses.dataclass(frozen=True)
class CreateModel:
    """Create a model from the base's weights."""

    model: str
    kind: ModelKind


@dataclasses.dataclass(frozen=True)
class LoadModel:
    """Load a model from a checkpoint, whatever it was before. optimizer: with the optimizer's state."""

    model: str
    kind: ModelKind
    folder: str
    optimizer: bool


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """Run a forward pass over data, and a backward pass unless `forward_only`."""

    model: str
    batch: Batch
    loss: str
    options: Mapping[str, float]
    forward_only: bool


@dataclasses.dataclass(frozen=True)
class OptimizerStep:
    """Makes an optimizer step on the gradients that have accumulated."""

    model: str
    update: UpdateSettings


@dataclasses.dataclass(frozen=True)
class DropGradients:
    """Drop the gradients that have accumulated."""

    model: str


@dataclasses.dataclass(frozen=True)
class SaveCheckpoint:
    """Save a checkpoint: `folder/step_XXXXXXXX`."""

    model: str
    folder: str


@dataclasses.dataclass(frozen=True)
class ExportWeights:
    """Export weights for others to read: an adapter's folder, or a Hugging Face folder."""

    model: str
    folder: str


@dataclasses.dataclass(frozen=True)
class TakeSnapshot:
    """Takes a snapshot of a model's weights, to sample from. folder: for inference servers, if there are some."""

    model: str
    snapshot: str
    folder: str | None = None


@dataclasses.dataclass(frozen=True)
class LoadSnapshot:
    """Load a snapshot that `ExportWeights` wrote."""

    snapshot: str
    kind: ModelKind
    folder: str


@dataclasses.dataclass(frozen=True)
class DrawSamples:
    """Draw completions of one prompt, and log-probs of its tokens."""

    tokens: Sequence[int]
    count: int
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    stop_tokens: Sequence[int]
    stop: Sequence[str]
    prompt_log_probs: bool = False
    top_of_prompt: int = 0  # the so many largest at each token of the prompt
    top_of_samples: int = 0  # and of the completions


@dataclasses.dataclass(frozen=True)
class ContinueSampling:
    """Draw more tokens of all samples of one snapshot; None is the base model.

    A sample that ends within `tokens` more is answered. The rest continues with the next operation.
    """

    snapshot: str | None
    begun: Mapping[str, DrawSamples]  # new samples, by unique names
    tokens: int
    left: Sequence[str] = ()  # samples to drop


@dataclasses.dataclass(frozen=True)
class ForgetModels:
    """Forget models and snapshots that nobody asks for any more."""

    models: Sequence[str] = ()
    snapshots: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class SuspendModels:
    """Writes all models and snapshots, with accumulated gradients, for the next start in the same layout."""

    folder: str


@dataclasses.dataclass(frozen=True)
class ResumeModels:
    """Restore what `SuspendModels` wrote."""

    folder: str


@dataclasses.dataclass(frozen=True)
class Idle:
    """Do nothing: ranks that wait for long would take the main rank for dead."""


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """End the server."""
