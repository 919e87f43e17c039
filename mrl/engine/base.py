"""The engine contract: what a trainer may ask of a model, whatever runs it.

An engine hides parallelism and micro-batches. Every rank runs the same program and calls every method
together (they are collective). See docs/loss.md for who divides the loss, by what, over which group.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import Batch
from mrl.config.checks import check_muon
from mrl.config.schema import OptimizerConfig, RoleConfig
from mrl.converters.mtp import COUNT as MTP_COUNT
from mrl.converters.rules import value_head_config
from mrl.converters.safetensors_io import HFWriter, SafetensorsReader, TensorInfo
from mrl.converters.table import Family
from mrl.engine import background, collective, saving
from mrl.engine.checks import EngineChecks
from mrl.engine.collective import Predictions
from mrl.engine.guards import Problem
from mrl.engine.kept import KeptSequences
from mrl.engine.lora.folder import read_fitting, write_adapter
from mrl.engine.offload import KINDS, Offload
from mrl.engine.requests import CACHE_TOKENS, PREFILL_TOKENS, Completion, GenerateRequest, no_progress
from mrl.engine.schedule import learning_rate
from mrl.engine.stored_weights import mtp_tensors_of_folder
from mrl.engine.trained_state import TrainedState, UpdateSettings

T = TypeVar("T")
Ctx = dict[str, Any]
Outcome = tuple[Any, ...]
"""What `forward_backward_step` returns: `(Predictions, float, Ctx)`, or `(Predictions, Ctx)` where it was
`forward_only`. To type both, every engine would write its signature three times."""

LossFn = Callable[[Batch, Predictions, Ctx], tuple[Tensor, Ctx]]
"""`fn(data, predictions, ctx) -> (loss_sum, ctx)`.

data: one micro-batch, whole (also under context parallelism). predictions: token-aligned tensors [T]: "log_probs" and
"entropy" (lm head; 0 where a label's loss mask is 0) or "values" (value head). loss_sum: a scalar *sum* over what
counts, never a mean. ctx: a private copy of the caller's; `ctx["metrics"]` (name -> scalar sum) is summed over
micro-batches and data-parallel ranks and divided by the same denominator as the loss.
"""


PLAIN_CTX: Ctx = {"temperature": 1.0}
"""The ctx of a call that gives none: log-probs as the model itself has them, without entropies."""


class GradNorm(float):
    """A global L2 gradient norm before clipping; `skipped` says why no update was made, None where one was."""

    skipped: str | None

    def __new__(cls, value: float, skipped: str | None = None) -> "GradNorm":
        norm = super().__new__(cls, value)
        norm.skipped = skipped
        return norm


class BaseEngine(EngineChecks, abc.ABC):
    """One model with its optimizer, over all ranks of the process group.

    One that supports "model.lora" has `adapter_weights`, `set_adapters` and `without_adapters` of its own.
    """

    def __init__(self, config: RoleConfig) -> None:
        self.check_config(config.model, config.engine)
        if config.optimizer is not None:
            check_muon(config.optimizer, config.model, config.engine)
        self.config = config
        self.loss_fn: LossFn | None = None
        self.loss_denominator = "tokens"
        self.schedule_step = 0
        self.offload: Offload  # made by init_model

    def set_loss_fn(self, fn: LossFn | None, denominator: str = "tokens") -> None:
        """Use `fn` in later steps, None for none; its sums are divided by `batch.denominators[denominator]`."""
        self.loss_fn, self.loss_denominator = fn, denominator

    @property
    def notes(self) -> list[str]:
        """Lines for the user on what the engine chose, as `notes_on` has them; before `init_model` too."""
        return []

    @property
    def chosen(self) -> dict[str, str]:
        """What the engine chose that numbers and speed depend on, by name: a run's config.yaml and checkpoints keep it,
        as two machines may choose otherwise under one config."""
        return {}

    def set_total_steps(self, total_steps: int) -> None:
        """The run's length, where it is known only after the engine is made; before the first step."""
        self.config = dataclasses.replace(self.config, total_steps=total_steps)

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all: one of them does."""
        return collective.is_main()

    @property
    def world_size(self) -> int:
        """Processes, and devices, that the engine runs on."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def on_main(self, fn: Callable[[], T]) -> T:
        """Calls `fn` on the main process only and returns its result on every rank, after it is done.

        A UserError that `fn` raises is raised on every rank. What the main process finds in a folder, all ranks act on.
        """
        return collective.on_main(fn)

    def max_over_ranks(self, *values: float) -> list[float]:
        """Returns the largest of each value over all ranks, the same on every rank."""
        return collective.max_over_ranks(self.device, *values)

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where the model computes."""

    @property
    @abc.abstractmethod
    def dp_rank(self) -> int:
        """This rank's data-parallel index; ranks that share it see the same data."""

    @property
    @abc.abstractmethod
    def dp_size(self) -> int:
        """Data-parallel degree."""

    @abc.abstractmethod
    def init_model(self, read: Callable[[str], Any] | None = None) -> None:
        """Builds or loads model, optimizer and LR schedule. Afterwards every other method may be called.

        read: where weights come from, in place of the folder of `model.path` (Hugging Face name -> tensor or lazy
        slice, of a family that mrl has a table of); an engine of another package need not take it.
        """

    @abc.abstractmethod
    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        """Brings parameters and gradients to the device and puts back on exit what the config offloads; dropout is on.

        The optimizer's state comes when `optimizer_step` needs it.
        """

    @abc.abstractmethod
    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        """Brings parameters to the device; dropout is off and no gradient is kept."""

    @abc.abstractmethod
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: Ctx | None = None,
        forward_only: bool = False,
        preprocess_fn: Callable[[Batch, Ctx], tuple[Batch, Ctx]] | None = None,
        postprocess_fn: Callable[[Batch, Predictions, Ctx], tuple[Predictions, Ctx]] | None = None,
    ) -> Outcome:
        """Runs this rank's share of a mini-batch (see `shard_data`), micro-batch by micro-batch.

        ctx: "temperature", which an lm head divides its logits by; a caller that gives a ctx says it. "entropy": "none"
        (what is left out), "detached" or "differentiable". "first_temperature": of the first of several labels of a
        token, where it is another. "top": of a `forward_only`, also the so many largest log-probs of each token whose
        label trains, "top_log_probs" and "top_tokens" [T, top]. "last": true where no further call adds to
        the gradients before `optimizer_step`: an engine may reduce them while it computes, and another call that trains
        is then an error. The rest is the caller's own. None is `PLAIN_CTX`. Gradients accumulate until
        `optimizer_zero_grad`. Returns `(predictions, loss, ctx)`, or `(predictions, ctx)` when `forward_only`:
        predictions [T, ...] in the order of `batch`, detached, on every rank of the replica; loss is the global mean
        (the same float on every rank); `ctx["metrics"]` likewise. When `forward_only` and a loss function is set,
        `ctx["loss"]` carries the loss.
        """

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forgets accumulated gradients."""

    @abc.abstractmethod
    def optimizer_step(self, update: UpdateSettings | None = None) -> GradNorm:
        """Clips by the global norm and updates the parameters.

        update: what the step is made by; None: the config's optimizer and its schedule. A gradient that is not finite
        updates nothing, and the result says so. The gradients are spent by it: the next `forward_backward_step` that
        trains and `hf_gradients` come after an `optimizer_zero_grad`.
        """

    def trained_state(self) -> TrainedState:
        """Returns a copy, in host memory, of what trains: parameters, the optimizer's state, accumulated gradients.

        It is this rank's alone. Gradients are as they have accumulated: reduced by none but `optimizer_step`.
        """
        raise NotImplementedError(f"the {self.backend} engine holds one model")

    def set_trained_state(self, state: TrainedState) -> None:
        """Puts back what `trained_state` of this engine gave: what follows is as if nothing had come between."""
        raise NotImplementedError(f"the {self.backend} engine holds one model")

    @abc.abstractmethod
    def guard_before_step(self) -> Any:
        """Remembers parameters and gradients just before an `optimizer_step`, for `guard_after_step`."""

    @abc.abstractmethod
    def guard_after_step(self, token: Any) -> list[Problem]:
        """Returns what went wrong in the `optimizer_step` since `guard_before_step` gave `token`; empty where nothing
        did.

        One for each parameter that has no gradient or one that is not finite, that did not change, or whose
        replicas differ; the same list on every rank. One of `Kind.WAITS` is no fault: A of an adapter whose B
        was zero, which the next step can be asked about.
        """

    def lr_scheduler_step(self) -> float:
        """Advances the schedule by one step. Returns the LR that the step just made was taken with."""
        lr = self._learning_rate()
        self.schedule_step += 1
        return lr

    def _learning_rate(self) -> float:
        """Returns the rate of the step that is made now."""
        config = self.config
        return learning_rate(self.schedule_step, optimizer=self._optimizer_config, total_steps=config.total_steps)

    def _update(self) -> UpdateSettings:
        """Returns how the step that is made now is made, by the config."""
        config = self._optimizer_config
        return UpdateSettings(self._learning_rate(), config.betas, config.eps, config.weight_decay, config.clip_grad)

    @property
    def _optimizer_config(self) -> OptimizerConfig:
        assert self.config.optimizer is not None, "a model that never trains has no optimizer"
        return self.config.optimizer

    def shard_data(self, batch: Batch) -> Batch:
        """This data-parallel rank's share of a global mini-batch that every rank holds, balanced by tokens."""
        return collective.share_of(batch, self.dp_rank, self.dp_size)

    @abc.abstractmethod
    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        """Undoes `shard_data` for token-aligned tensors: joins all shares, in the order of the global `batch`."""

    def to(self, device: str, model: bool = True, optimizer: bool = True, gradients: bool | None = None) -> None:
        """Moves model and/or optimizer state to "device" (where it computes) or to "host".

        gradients: what becomes of the accumulated gradients; by default they go with the model. Each method brings what
        it needs and puts it back where it was, so that an engine on the host still works.
        """
        if device not in ("device", "host"):
            raise ValueError(f"device {device!r}: use 'device' (where the engine computes) or 'host'")
        move = self.offload.restore if device == "device" else self.offload.park
        for kind, wanted in zip(KINDS, (model, model if gradients is None else gradients, optimizer), strict=True):
            if wanted:
                move(kind)
        self.offload.wait()  # whoever builds or restores something next finds the memory free

    @abc.abstractmethod
    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        """Writes model, optimizer, schedule, RNG and the caller's `state` into `folder`, an empty one all ranks see."""

    @abc.abstractmethod
    def load_state(self, folder: str) -> dict[str, Any]:
        """Restores what `save_state` wrote, also into another layout. Returns the caller's `state`.

        Raises CheckpointError on every rank, before anything has changed, for what another model or optimizer wrote.
        """

    def stage_state(self, state: Mapping[str, Any]) -> background.Write:
        """Copies what `save_state` writes to host memory. Returns what writes the copy, in a thread."""
        raise NotImplementedError

    @property
    def saves_in_background(self) -> bool:
        """Whether there is a `stage_state`: an engine of another package may have none."""
        return type(self).stage_state is not BaseEngine.stage_state

    def save_checkpoint(
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> str:
        """Saves what `save_state` writes as `local_path/step_XXXXXXXX`: whole or nothing. Returns that folder."""

        def write(folder: str) -> None:
            self.save_state(folder, state or {})

        return saving.save(
            local_path, global_step, write, backend=self.backend, remote=remote_path, keep=max_ckpt_to_keep
        )

    def load_checkpoint(
        self, local_path: str, remote_path: str | None = None, del_local_after_load: bool = False
    ) -> dict[str, Any]:
        """Restores what `save_checkpoint` saved, also into another layout. Returns the trainer's `state`."""
        with saving.checkpoint_to_load(
            local_path, backend=self.backend, remote=remote_path, delete_local=del_local_after_load
        ) as folder:
            return self.load_state(folder)

    def saved_state(self, folder: str) -> dict[str, Any] | None:
        """Returns the trainer's `state` of a checkpoint's folder and loads nothing; None where that cannot be read.

        Not collective.
        """
        return None

    @abc.abstractmethod
    def load_hf(self, path: str) -> None:
        """Replaces the model's weights, and fp32 masters with an optimizer, by those of a Hugging Face folder.

        They are read as in `init_model`. What the optimizer has gathered stays. Raises ModelError, before anything has
        changed, where the folder's tensors are not those of this model.
        """

    @abc.abstractmethod
    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_tokens: int = CACHE_TOKENS,
        prefill_tokens: int = PREFILL_TOKENS,
        progress: Callable[[int, int], None] = no_progress,
        kept: KeptSequences | None = None,
    ) -> list[Completion]:
        """Completes the prompts, in their order: the same on every rank and layout (fp32).

        Every rank passes all requests. A completion depends on its request and the weights alone. cache_tokens: tokens
        whose keys and values each replica keeps at once, which bounds how many sequences run together; each has room
        for the longest request. prefill_tokens: prompt tokens in one forward at most. progress: called after each
        forward with how many of this replica's requests are complete, and how many it has. kept: what stays from call
        to call of the requests' keys and values; completions are the same without it, and an engine may leave it alone.
        Raises ConfigError where a request alone does not fit.
        """

    @abc.abstractmethod
    def hf_weights(self, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Streams (Hugging Face name, whole tensor) on rank 0; other ranks take part and get nothing. A tensor is new
        memory, on the engine's device or on the host: who reads decides where it goes, and keeps it no longer.

        everywhere: every rank gets them all, in the same order. Adapters are added into the weights that they adapt.
        """

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Streams the adapters, and a value head's score, as `hf_weights`, under the names of peft's files. They are
        fp32 and on the host."""
        raise NotImplementedError(f"the {self.backend} engine has no adapters")

    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces adapters, their masters and a value head's score by what `adapter_weights` gave, on every rank.

        What the optimizer has gathered stays.
        """
        raise NotImplementedError(f"the {self.backend} engine has no adapters")

    def set_adapter_scale(self, scale: float) -> None:
        """Multiplies B A by `scale` from now on, in place of what `model.lora` says; checkpoints do not hold it."""
        raise NotImplementedError(f"the {self.backend} engine has no adapters")

    def load_adapter(self, path: str) -> None:
        """Replaces the adapters by those of a folder that mrl or peft wrote for the same selection (`set_adapters`).

        Raises ModelError, before anything has changed, for other tensors or another scale.
        """
        model = self.config.model
        assert model.lora is not None, "there are no adapters"
        self.set_adapters(read_fitting(path, model.path, model.lora, self.config.head))

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, forward passes are those of the base model, to the bit; a value head stays as trained."""
        assert self.config.model.lora is None, f"the {self.backend} engine has no adapters"
        return contextlib.nullcontext()

    @abc.abstractmethod
    def hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Streams the accumulated gradients (fp32) as `hf_weights`, reduced as `optimizer_step` would use them.

        With adapters they are those of `adapter_weights`, under the same names: nothing else has one. Nor has a
        parameter that a model itself declares to need none. Call it after the last `forward_backward_step` of an
        optimizer step: megatron's reduction ends the accumulation, and another one before `optimizer_zero_grad` is
        refused.
        """

    @abc.abstractmethod
    def export_hf(self, path: str, *, merged: bool = False) -> None:
        """Writes a folder that transformers loads: weights, config, tokenizer, generation config.

        MTP layers that do not train are not in it, and config.json says so. Where `exports_adapter`, it is the folder
        of `export_adapter`, unless `merged`.
        """

    @property
    def exports_adapter(self) -> bool:
        """Whether the config asks for the adapters alone, not for the model with them added in."""
        lora = self.config.model.lora
        return lora is not None and lora.export == "adapter"

    def export_adapter(self, path: str) -> None:
        """Writes the adapters as a folder that peft loads over the model of `model.path`, with the tokenizer."""
        lora, model, streamed = self.config.model.lora, self.config.model.path, self.adapter_weights()
        assert lora is not None, "there are no adapters"
        tensors = list(streamed)  # every rank takes part in the stream
        self.on_main(lambda: write_adapter(path, lora, model, tensors, head=self.config.head))

    def _write_hf(
        self,
        path: str,
        infos: Mapping[str, TensorInfo],
        family: Family | None,
        hf_config: Mapping[str, Any],
        copies: Mapping[str, str] = types.MappingProxyType({}),
        carried: Collection[str] = (),
    ) -> None:
        """Does `export_hf` with the tensors of `hf_weights`, of which `infos` says dtypes and shapes. Collective.

        copies: names under which one of them is written again -> that one's. carried: tensors of `model.path` that are
        written as they are.
        """
        writer: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.is_main:
            changes = self._config_changes(family, hf_config)
            writer = HFWriter(path, infos, companions=self.config.model.path, config_changes=changes)
        with writer as out:
            for name, tensor in self.hf_weights():  # nothing comes on other ranks
                for written in (name, *(copy for copy, of in copies.items() if of == name)):
                    out.add(written, tensor)
            if self.is_main and carried:
                with SafetensorsReader(self.config.model.path) as reader:
                    for name in carried:
                        out.add(name, reader(name)[()])
        collective.wait_for_all()

    def _config_changes(self, family: Family | None, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what an export changes in config.json. family: None where mrl has no table of it."""
        changes = value_head_config(hf_config) if self.config.head == "value" else {}
        if family is None or self.config.mtp is not None:
            return changes
        left_out = mtp_tensors_of_folder(self.config.model.path, family, hf_config)
        return changes | ({MTP_COUNT: 0} if left_out else {})
