"""Defines the engine contract: what a trainer may ask of a model, for any backend.

An engine hides parallelism and micro-batches. Every rank runs the same program and calls every method together (they
are collective). docs/loss.md says who divides the loss, by what, over which group.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import Batch
from mrl.config.checks import check_muon
from mrl.config.schema import OptimizerConfig, RoleConfig
from mrl.engine import background, collective, saving
from mrl.engine.checks import EngineChecks
from mrl.engine.collective import Predictions, TensorStream
from mrl.engine.guards import Problem
from mrl.engine.kept import KeptSequences
from mrl.engine.lora.folder import read_fitting, write_adapter
from mrl.engine.offload import KINDS, Offload
from mrl.engine.requests import CACHE_TOKENS, PREFILL_TOKENS, Completion, GenerateRequest, no_progress
from mrl.engine.schedule import learning_rate
from mrl.engine.stored_weights import Read, mtp_tensors_of_folder
from mrl.engine.trained_state import TrainedState, UpdateSettings
from mrl.weights.accounting import OWN_COUNT, count_key
from mrl.weights.composites import COMPOSITES, CarriedReader
from mrl.weights.hf_config import changes_to_text
from mrl.weights.rules import value_head_config
from mrl.weights.safetensors_io import HFWriter, TensorInfo
from mrl.weights.table import Family, HFConfig

T = TypeVar("T")
Ctx = dict[str, Any]
Outcome = tuple[Any, ...]
"""The result of `forward_backward_step`: `(Predictions, float, Ctx)`, or `(Predictions, Ctx)` with `forward_only`. To
type both, every engine would write its signature three times."""

LossFn = Callable[[Batch, Predictions, Ctx], tuple[Tensor, Ctx]]
"""`fn(data, predictions, ctx) -> (loss_sum, ctx)`.

data: one micro-batch, whole (also under context parallelism). predictions: token-aligned tensors [T]: "log_probs" and
"entropy" (lm head; 0 for labels with loss mask 0) or "values" (value head). loss_sum: a scalar *sum* over what counts,
never a mean. ctx: a private copy of the caller's. `ctx["metrics"]` (name -> scalar sum) is summed over micro-batches
and data-parallel ranks, and divided by the same denominator as the loss.
"""

PreprocessFn = Callable[[Batch, Ctx], tuple[Batch, Ctx]]
"""Changes a micro-batch and its ctx before the model's inputs are made."""

PostprocessFn = Callable[[Batch, Predictions, Ctx], tuple[Predictions, Ctx]]
"""Changes a micro-batch's predictions and its ctx before the loss."""

PLAIN_CTX: Ctx = {"temperature": 1.0}
"""The ctx of a call without one: the model's own log-probs, without entropies."""


class GradNorm(float):
    """Holds a global L2 gradient norm before clipping. `skipped` is the reason if no update was made, else None."""

    skipped: str | None

    def __new__(cls, value: float, skipped: str | None = None) -> "GradNorm":
        norm = super().__new__(cls, value)
        norm.skipped = skipped
        return norm


class BaseEngine(EngineChecks, abc.ABC):
    """Runs one model with its optimizer, over all ranks of the process group.

    An engine that supports "model.lora" overrides `adapter_weights`, `set_adapters` and `without_adapters`.
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
        """Uses `fn` in later steps, None for no loss. Its sums are divided by `batch.denominators[denominator]`."""
        self.loss_fn, self.loss_denominator = fn, denominator

    @property
    def notes(self) -> list[str]:
        """Returns lines for the user on what the engine chose, as `notes_on` does. It works before `init_model`."""
        return []

    @property
    def chosen(self) -> dict[str, str]:
        """Returns the engine's choices that affect numbers and speed, by name.

        A run's config.yaml and checkpoints keep them, because two machines may choose differently under one config.
        """
        return {}

    def keep_choices(self, chosen: Mapping[str, str]) -> None:  # noqa: B027 - an engine without choices keeps none
        """Chooses as `chosen` of a checkpoint says, if the config leaves it open and this machine can. Collective.

        Call it before `init_model`.
        """

    def set_total_steps(self, total_steps: int) -> None:
        """Sets the run's length, if it is known only after the engine is made. Call it before the first step."""
        self.config = dataclasses.replace(self.config, total_steps=total_steps)

    @property
    def is_main(self) -> bool:
        """Returns whether this process logs and writes for all. Exactly one process does."""
        return collective.is_main()

    @property
    def world_size(self) -> int:
        """Returns the number of processes, and of devices, that the engine runs on."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def on_main(self, fn: Callable[[], T]) -> T:
        """Calls `fn` on the main process only and returns its result on every rank, after it is done.

        A UserError that `fn` raises is raised on every rank. So all ranks act on what the main process finds in a
        folder.
        """
        return collective.on_main(fn)

    def max_over_ranks(self, *values: float) -> list[float]:
        """Returns the largest of each value over all ranks, the same on every rank."""
        return collective.max_over_ranks(self.device, *values)

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Returns the device of the model's computation."""

    @property
    @abc.abstractmethod
    def dp_rank(self) -> int:
        """Returns this rank's data-parallel index. Ranks that share it see the same data."""

    @property
    @abc.abstractmethod
    def dp_size(self) -> int:
        """Returns the data-parallel degree."""

    @abc.abstractmethod
    def init_model(self, read: Read | None = None) -> None:
        """Builds or loads model, optimizer and LR schedule. Afterwards every other method may be called.

        read: gives the initial weights instead of the folder `model.path` (Hugging Face name -> tensor or lazy slice).
        The model's family must have a table in mrl. An engine of another package need not take it.
        """

    @abc.abstractmethod
    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        """Brings parameters and gradients to the device, with dropout on. On exit, state that the config offloads goes
        back.

        The optimizer's state comes when `optimizer_step` needs it.
        """

    @abc.abstractmethod
    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        """Brings parameters to the device, with dropout off and without gradients."""

    @abc.abstractmethod
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: Ctx | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Outcome:
        """Runs this rank's share of a mini-batch (see `shard_data`), micro-batch by micro-batch.

        ctx has these entries, and the caller's own; None is `PLAIN_CTX`.

        - "temperature": an lm head divides its logits by it. Every ctx has it.
        - "entropy": "none" (the default), "detached" or "differentiable".
        - "first_temperature": the temperature for the first of several labels of a token, if it is another one.
        - "top": with `forward_only`, how many of the largest log-probs to return for each token whose label trains.
          They are "top_log_probs" and "top_tokens" [T, top].
        - "last": true if no further call adds to the gradients before `optimizer_step`. An engine may then reduce them
          while it computes, and another call that trains is an error.

        Gradients accumulate until `optimizer_zero_grad`. Returns `(predictions, loss, ctx)`, or `(predictions, ctx)`
        with `forward_only`. predictions: [T, ...] in the order of `batch`, detached, on every rank of the replica.
        loss: the global mean, the same float on every rank, and so is `ctx["metrics"]`. With `forward_only` and a loss
        function, `ctx["loss"]` has the loss.
        """

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drops accumulated gradients."""

    @abc.abstractmethod
    def optimizer_step(self, update: UpdateSettings | None = None) -> GradNorm:
        """Clips by the global norm and updates the parameters.

        update: the settings of the step; None: the config's optimizer and its schedule. If the gradient is not finite,
        nothing is updated and the result says so. The step spends the gradients. Call `optimizer_zero_grad` before
        `hf_gradients` or the next `forward_backward_step` that trains.
        """

    @classmethod
    def holds_several_models(cls) -> bool:
        """Returns whether it has `trained_state`, by which `mrl serve` exchanges the models that it holds."""
        return cls.trained_state is not BaseEngine.trained_state

    def trained_state(self) -> TrainedState:
        """Returns a copy, in host memory, of what trains: parameters, the optimizer's state, accumulated gradients.

        It is this rank's alone. Gradients are copied as they have accumulated, because only `optimizer_step` reduces
        them.
        """
        raise NotImplementedError(f"the {self.backend} engine holds one model")

    def set_trained_state(self, state: TrainedState) -> None:
        """Restores a `trained_state` of this engine. Training continues as if nothing had come between."""
        raise NotImplementedError(f"the {self.backend} engine holds one model")

    @abc.abstractmethod
    def guard_before_step(self) -> Any:
        """Records parameters and gradients just before an `optimizer_step`, for `guard_after_step`."""

    @abc.abstractmethod
    def guard_after_step(self, token: Any) -> list[Problem]:
        """Returns the faults of the `optimizer_step` since `guard_before_step` gave `token`; empty if there are none.

        The list is the same on every rank. It has an entry for each parameter with a fault: its gradient is missing or
        not finite, it did not change, or its replicas differ. An entry of `FaultKind.WAITS` is no fault: it is A of an
        adapter with B zero, and the next step can check it again.
        """

    def lr_scheduler_step(self) -> float:
        """Advances the schedule by one step. Returns the LR of the step that was just made."""
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
        """Returns this data-parallel rank's share of a global mini-batch that every rank holds, balanced by tokens."""
        return collective.share_of(batch, self.dp_rank, self.dp_size)

    @abc.abstractmethod
    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        """Joins token-aligned tensors of all shares, in the order of the global `batch`. It undoes `shard_data`."""

    def to(self, device: str, model: bool = True, optimizer: bool = True, gradients: bool | None = None) -> None:
        """Moves model and/or optimizer state to "device" (for computation) or to "host".

        gradients: whether accumulated gradients move too; by default they go with the model. Each method brings the
        state that it needs and puts it back, so an engine on the host still works.
        """
        if device not in ("device", "host"):
            raise ValueError(f"device {device!r}: use 'device' (where the engine computes) or 'host'")
        move = self.offload.restore if device == "device" else self.offload.park
        for kind, wanted in zip(KINDS, (model, model if gradients is None else gradients, optimizer), strict=True):
            if wanted:
                move(kind)

    @abc.abstractmethod
    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        """Writes model, optimizer, schedule, RNG and the caller's `state` into `folder`, an empty one all ranks see."""

    @abc.abstractmethod
    def load_state(self, folder: str) -> dict[str, Any]:
        """Restores what `save_state` wrote, also into another layout. Returns the caller's `state`.

        Raises CheckpointError on every rank, before anything has changed, if another model or optimizer wrote it.
        """

    def stage_state(self, state: Mapping[str, Any]) -> background.Write:
        """Copies the state of `save_state` to host memory. Returns a function that writes the copy, in a thread."""
        raise NotImplementedError

    @property
    def saves_in_background(self) -> bool:
        """Returns whether there is a `stage_state`. An engine of another package may have none."""
        return type(self).stage_state is not BaseEngine.stage_state

    def save_checkpoint(
        self,
        local_path: str,
        remote_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> str:
        """Saves the state of `save_state` as `local_path/step_XXXXXXXX`: whole or nothing. Returns that folder."""

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
        """Returns the trainer's `state` of a checkpoint's folder, without loading anything; None if it cannot be read.

        Not collective.
        """
        return None

    @abc.abstractmethod
    def load_hf(self, path: str) -> None:
        """Replaces the model's weights, and the optimizer's fp32 masters, by those of a Hugging Face folder.

        They are read as in `init_model`. The optimizer's moments stay. Raises ModelError, before anything has changed,
        if the folder's tensors are not those of this model.
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
        """Completes the prompts, in their order. The result is the same on every rank and layout (fp32).

        Every rank passes all requests. A completion depends only on its request and the weights. cache_tokens: tokens
        whose keys and values each replica keeps at once. It limits how many sequences run together, and each has room
        for the longest request. prefill_tokens: the most prompt tokens in one forward. progress: called after each
        forward with the number of this replica's complete requests, and of all its requests. kept: keys and values of
        earlier calls. Completions are the same without it, and an engine may ignore it. Raises ConfigError if one
        request alone does not fit.
        """

    @abc.abstractmethod
    def hf_weights(self, *, everywhere: bool = False) -> TensorStream:
        """Streams (Hugging Face name, whole tensor) on rank 0; other ranks take part and get nothing.

        A tensor is new memory, on the engine's device or on the host. The reader decides where it goes, and the engine
        keeps no reference. everywhere: every rank gets all tensors, in the same order. Adapters are merged into the
        weights that they adapt.
        """

    def adapter_weights(self) -> TensorStream:
        """Streams the adapters, and a value head's score, as `hf_weights` does, under the names of peft's files.

        They are fp32 and on the host.
        """
        raise NotImplementedError(f"the {self.backend} engine has no adapters")

    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces adapters, their masters and a value head's score by tensors of `adapter_weights`, on every rank.

        The optimizer's moments stay.
        """
        raise NotImplementedError(f"the {self.backend} engine has no adapters")

    def set_adapter_scale(self, scale: float) -> None:
        """Multiplies B A by `scale` from now on, instead of the scale of `model.lora`. Checkpoints do not hold it."""
        raise NotImplementedError(f"the {self.backend} engine has no adapters of other scales")

    def load_adapter(self, path: str) -> None:
        """Replaces the adapters by those of a folder that mrl or peft wrote for the same selection (`set_adapters`).

        Raises ModelError, before anything has changed, for other tensors or another scale.
        """
        model = self.config.model
        assert model.lora is not None, "there are no adapters"
        self.set_adapters(read_fitting(path, model.path, model.lora, self.config.head))

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Runs forward passes inside as the base model does, to the bit. A value head stays as trained."""
        assert self.config.model.lora is None, f"the {self.backend} engine has no adapters"
        return contextlib.nullcontext()

    @abc.abstractmethod
    def hf_gradients(self) -> TensorStream:
        """Streams the accumulated gradients (fp32) as `hf_weights` does, reduced as `optimizer_step` would use them.

        With adapters they are those of `adapter_weights`, under the same names, because nothing else has a gradient. A
        parameter that the model declares to need no gradient is left out. Call it after the last
        `forward_backward_step` of an optimizer step. Megatron's reduction ends the accumulation, so another one before
        `optimizer_zero_grad` is refused.
        """

    @abc.abstractmethod
    def export_hf(self, path: str, *, merged: bool = False) -> None:
        """Writes a folder that transformers loads: weights, config, tokenizer, generation config.

        MTP layers that do not train are left out, and config.json says so. If `exports_adapter` and not `merged`, it
        writes the folder of `export_adapter`.
        """

    @property
    def exports_adapter(self) -> bool:
        """Returns whether the config asks for the adapters alone, not for the model with them merged."""
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
        hf_config: HFConfig,
        copies: Mapping[str, str] = types.MappingProxyType({}),
        carried: Collection[str] = (),
    ) -> None:
        """Does `export_hf` with the tensors of `hf_weights`. infos: their dtypes and shapes. Collective.

        copies: a name -> the name of the tensor that is written again under it. carried: tensors of `model.path` to
        copy unchanged, if mrl has no table of the family.
        """
        folder, random = self.config.model.path, self.config.model.init == "random"
        with contextlib.ExitStack() as ends:
            if self.is_main:
                beside = CarriedReader(folder, None if random else family, carried)
                ends.callback(beside.close)
                changes = self._config_changes(family, hf_config)
                added = {name: info for name, info in beside.tensors.items() if name not in infos}  # others train
                writer = HFWriter(path, {**infos, **added}, companions=folder, config_changes=changes)
                out = ends.enter_context(writer)
                for name in added:
                    out.add(name, beside(name)[()])
            for name, tensor in self.hf_weights():  # empty on other ranks
                for written in (name, *(copy for copy, of in copies.items() if of == name)):
                    out.add(written, tensor)
        collective.wait_for_all()

    def _config_changes(self, family: Family | None, hf_config: HFConfig) -> dict[str, Any]:
        """Returns the changes of an export in config.json. family: None if mrl has no table of it."""
        changes, random = {}, self.config.model.init == "random"
        if random and hf_config["model_type"] in COMPOSITES:
            changes = changes_to_text(self.config.model.path)  # there are no weights of more to go with it
        if self.config.head == "value":
            changes |= value_head_config({**hf_config, **changes})
        if family is None or self.config.mtp is not None:
            return changes
        left_out = mtp_tensors_of_folder(self.config.model.path, family, hf_config)
        return changes | ({count_key(hf_config): 0} if left_out or random and OWN_COUNT in hf_config else {})
