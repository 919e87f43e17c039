"""Runs a GPTModel through megatron's schedules, optimizer and checkpoints, in any layout."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import MTP_MASK, Batch
from mrl.config.checks import parallel_dims
from mrl.config.schema import RoleConfig
from mrl.engine import collective, guards
from mrl.engine.background import Write
from mrl.engine.base import (
    CACHE_TOKENS,
    PLAIN_CTX,
    PREFILL_TOKENS,
    BaseEngine,
    Completion,
    Ctx,
    GenerateRequest,
    GradNorm,
    Outcome,
    PostprocessFn,
    Predictions,
    PreprocessFn,
    Read,
    TensorStream,
    no_progress,
)
from mrl.engine.kept import KeptSequences
from mrl.engine.microbatch import lengths_of_groups, plan_micro_batches, token_budget
from mrl.engine.offload import Offload
from mrl.engine.trained_state import TrainedState, UpdateSettings
from mrl.errors import ConfigError
from mrl.kernels import delta_rule, operators
from mrl.mcore_models import cpu_stand_in
from mrl.ops import devices
from mrl.weights.accounting import copies_of, shared_tensors
from mrl.weights.composites import tensor_names
from mrl.weights.families import fields_of
from mrl.weights.rules import buffer_names, expected_hf_names
from mrl.weights.safetensors_io import tensor_infos

cpu_stand_in.prepare()  # before anything below imports megatron

from megatron.core import parallel_state  # noqa: E402

from mrl import patches  # noqa: E402
from mrl.engine.megatron import (  # noqa: E402
    dist_checkpoint,
    generate,
    lora,
    optim,
    optim_state,
    pipeline,
    streams,
    watched,
)
from mrl.engine.megatron.checks import MegatronChecks, choice_lines  # noqa: E402
from mrl.engine.megatron.model import Model  # noqa: E402
from mrl.mcore_models import fp8  # noqa: E402


def installed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a method with megatron's globals set to this engine's (see groups.py)."""

    @functools.wraps(method)
    def inside(self: "MegatronEngine", *args: Any, **kwargs: Any) -> Any:
        with self.model.state.installed():
            return method(self, *args, **kwargs)

    return inside


def _main_grad(parameter: Any) -> Tensor:
    return parameter.main_grad


class MegatronEngine(MegatronChecks, BaseEngine):
    """Runs one model over all ranks, in the layout of `config.engine.parallel`."""

    def __init__(self, config: RoleConfig) -> None:
        super().__init__(config)
        if devices.device_type(config.engine.device) != devices.device_type():
            why = "does not keep megatron from the GPU that is visible"
            raise ConfigError("engine.device", config.engine.device, why, "set CUDA_VISIBLE_DEVICES= too")
        collective.join_processes(devices.device_type())
        self.model = Model(config, parallel_dims(config.engine.parallel, dist.get_world_size()))
        self.setup = pipeline.PipelineConfig.of(self.model, config)
        self._accumulated = False  # gradients have accumulated since they were zeroed
        self._reduced = False
        self._spent = False  # an optimizer step has used them since they were zeroed

    # -- where and who ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return devices.device()

    @property
    def dp_rank(self) -> int:
        return self.model.coords.dp_rank

    @property
    def dp_size(self) -> int:
        return self.model.dims.dp

    @property
    def notes(self) -> list[str]:
        lines = choice_lines(self.model.layer_spec, self.config.engine, fields_of(dict(self.model.hf)))
        # a CPU has one spec, and no kernels
        return lines + operators.notes() + delta_rule.notes(self.chosen) if self.device.type == "cuda" else lines[1:]

    @property
    def chosen(self) -> dict[str, str]:
        found = {"layer_spec": self.model.spec, "experts": self.model.experts}
        if self.device.type == "cuda" and any(self.model.transformer.linear_attention_freq or ()):
            repeatable = self.model.transformer.deterministic_mode
            found[delta_rule.NAME] = delta_rule.choice(self.model.dtype, repeatable=repeatable)
        return {name: value for name, value in found.items() if value is not None}

    # -- life ---------------------------------------------------------------------------------------------------------

    def keep_choices(self, chosen: Mapping[str, str]) -> None:
        kept = chosen.get("layer_spec")
        if self.config.engine.layer_spec == "auto" and kept not in (None, self.model.spec):
            self.model = Model(self.config, self.model.dims, kept)
            self.setup = pipeline.PipelineConfig.of(self.model, self.config)

    @installed
    def init_model(self, read: Read | None = None) -> None:
        """Does what every engine does. read: gives the weights (HF name -> tensor or lazy slice); None: as
        configured."""
        if self.config.engine.megatron.get("fp8"):
            patches.check(fp8.__name__)
        self.model.init(read)
        state = optim.offload_tensors(self.model.chunks, self.model.wrapped, self.model.optimizer)
        drop_copies = {"parameters": self.model.forget_copies, "gradients": self.model.forget_graphs}
        self.offload = Offload(self.config.engine.offload, state, spent=("gradients",), drop_copies=drop_copies)
        self._late = optim.gathers_in_forward(self.model.wrapped)
        # DDP's hooks would gather in the first forward (_make_forward_pre_hook). In generation not every rank has one,
        # and the all-gather would wait forever.
        self._ungathered = self._late
        self._gather()

    def _gather(self) -> None:
        """Gathers parameters that an update has left to the next forward of training (`overlap_param_gather`)."""
        if self._ungathered:
            for chunk in self.model.wrapped:
                chunk.start_param_sync(force_sync=True)
            self._ungathered = False

    def _used(self, *kinds: str) -> contextlib.AbstractContextManager[None]:
        """Does what `Offload.used` does, with whole parameters. A forward that trains gathers them and calls `offload`
        itself."""
        if "parameters" in kinds:
            self._gather()
        return self.offload.used(*kinds)

    def to(self, device: str, model: bool = True, optimizer: bool = True, gradients: bool | None = None) -> None:
        with self.model.state.installed():
            self._gather()
        super().to(device, model, optimizer, gradients)

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        with self.model.state.installed(), self.offload.used("parameters", "gradients"):
            for chunk in self.model.chunks:
                chunk.train()
            yield

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self.model.state.installed(), self._used("parameters"), torch.no_grad():
            for chunk in self.model.chunks:
                chunk.eval()
            yield

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    @installed
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: Ctx | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Outcome:
        assert forward_only or self.loss_fn is not None, "call set_loss_fn before training"
        assert forward_only or not self._reduced, "gradients were reduced already; call optimizer_zero_grad first"
        adds = self._accumulated and not forward_only
        self._accumulated |= not forward_only
        ctx = dict(PLAIN_CTX if ctx is None else ctx)
        order = self._plan(batch)
        micro_batches = [
            pipeline.make_micro_batch(batch.select(indices), ctx, preprocess_fn, self.setup, trains=not forward_only)
            for indices in order
        ]
        last = bool(ctx.get("last")) and not forward_only
        call = self._step_config(batch, forward_only, postprocess_fn, reduces=last and self._reduces_early, adds=adds)
        used = self._used("parameters") if forward_only else self.offload.used("parameters", "gradients")
        with used, torch.set_grad_enabled(not forward_only):
            pipeline.run(self.model.wrapped, self.model.transformer, micro_batches, self.setup, call)
            if self._ungathered and not forward_only:
                optim.finish_gathers(self.model.wrapped)
                self._ungathered = False
            if call.reduces:
                self._reduce()
        payload = None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            sums = collective.sum_in_rank_order(pipeline.sum_micro_batches(micro_batches), self._host_dp_group())
            payload = (sums, collective.to_batch_order([mb.predictions for mb in micro_batches], order, batch))
        sums, predictions = pipeline.broadcast_from_last_stage(payload, self.device)
        loss = sums.pop("loss", 0.0) / call.denominator
        of_mtp = {"mtp_loss": sums.pop("mtp_loss") / call.tokens} if "mtp_loss" in sums else {}
        metrics = {name.removeprefix("metrics/"): value / call.denominator for name, value in sums.items()}
        ctx["metrics"] = metrics | of_mtp
        if forward_only:
            return predictions, ctx | ({"loss": loss} if call.loss_fn is not None else {})
        return predictions, loss, ctx

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Returns the sequences of each micro-batch; the same number of micro-batches on every data-parallel rank."""
        micro, trains = self.config.engine.micro_batch, self.config.optimizer is not None
        lengths = batch.lengths.tolist()
        longest = max(lengths_of_groups(lengths, batch.group, packed=self.config.packing), default=0)
        tokens = None if micro.size is not None else token_budget(micro.token_limit, longest, trains=trains)
        if self.setup.places is not None:  # userbuffers have a fixed size, in training and without
            lengths, tokens = [self.model.dims.places_of(n) for n in lengths], self.setup.places

        def most(count: int) -> int:
            if self.model.dims.dp == 1:
                return count
            highest = torch.tensor([count], device=self.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            return int(highest)

        multiple = self.model.dims.pp if self.model.dims.vpp > 1 else 1
        return plan_micro_batches(
            lengths,
            group=batch.group,
            size=micro.size,
            tokens=tokens,
            packed=self.config.packing,
            multiple_of=multiple,
            agree=most,
        )

    @property
    def _reduces_early(self) -> bool:
        """Returns whether gradients can be reduced while the last backward pass runs.

        Not with adapters: those of experts are summed over other ranks first.
        """
        return self.model.wrapped[0].ddp_config.overlap_grad_reduce and not self.model.adapters

    def _step_config(
        self, batch: Batch, forward_only: bool, postprocess_fn: PostprocessFn | None, *, reduces: bool, adds: bool
    ) -> pipeline.StepConfig:
        denominator = collective.denominator_of(batch, self.loss_denominator)
        share = 1.0
        if not forward_only and (self.config.engine.moe.aux_loss or self.config.engine.moe.z_loss):
            mine = torch.tensor([float(batch.loss_mask.sum())], dtype=torch.float64, device=self.device)
            dist.all_reduce(mine, group=parallel_state.get_data_parallel_group())
            share = float(mine) / float(batch.denominators["tokens"] or 1.0) or 1.0
        of_mtp = MTP_MASK if MTP_MASK in batch.token_fields else "tokens"
        tokens = collective.denominator_of(batch, of_mtp) if self.setup.mtp else 1.0
        return pipeline.StepConfig(
            self.loss_fn, denominator, share, forward_only, postprocess_fn, reduces, adds, tokens
        )

    @installed
    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        return collective.join_shares(predictions, batch, self._host_dp_group())

    def _host_dp_group(self) -> dist.ProcessGroup:
        """Returns this rank's data-parallel group for Python objects, over gloo."""
        return parallel_state.get_data_parallel_group_gloo()

    # -- the optimizer ------------------------------------------------------------------------------------------------

    @installed
    def optimizer_zero_grad(self) -> None:
        with self._used("gradients"):
            # not in a forward: a mini-batch may come in several calls, and their gradients accumulate
            for chunk in self.model.wrapped:
                chunk.zero_grad_buffer()
            self.offload.spend("gradients")
        self.model.optimizer.zero_grad()
        self._accumulated = self._reduced = self._spent = False

    def _reduce(self) -> None:
        if not self._reduced:
            optim.reduce_gradients(self.model.wrapped)
            self._reduced = True

    @installed
    def optimizer_step(self, update: UpdateSettings | None = None) -> GradNorm:
        with self._used("parameters", "gradients", "optimizer"):
            self._reduce()
            detached = self.model.mtp_params if self.model.detaches_mtp else None
            norm = optim.step(self.model.optimizer, update or self._update(), detached)
            self.offload.spend("gradients")
            if self._late:
                optim.gather_in_forward(self.model.wrapped)
                self._ungathered = True
                # DDP gathers a module's parameters before its forward (_make_forward_pre_hook). Adapters are in
                # ParameterDicts, which have no forward, so they would keep the values from before the update.
                if self.model.adapters or "parameters" in self.config.engine.offload:
                    self._gather()
        self._spent = True
        return norm

    @installed
    def trained_state(self) -> TrainedState:
        with self._used("parameters", "gradients", "optimizer"):
            model, unreduced = self.model, self._accumulated and not self._spent
            assert self._spent or not self._reduced, "gradients were reduced for hf_gradients or a guard"
            return optim_state.copy_trained_state(
                model.wrapped, model.optimizer, gradients=unreduced, spent=self._spent
            )

    @installed
    def set_trained_state(self, state: TrainedState) -> None:
        with self._used("parameters", "gradients", "optimizer"):
            optim_state.restore_trained_state(self.model.wrapped, self.model.optimizer, state)
        # copies are made again in the first forward of a mini-batch, and gradients may have accumulated already
        fp8.forget_copies(self.model.chunks)
        self._accumulated = state.gradients is not None
        self._reduced = self._spent = state.spent

    @installed
    def guard_before_step(self) -> Any:
        with self._used("parameters", "gradients", "optimizer"):
            self._reduce()
            return guards.inspect(
                watched.watched_parameters(self.model), lr=self._learning_rate(), eps=self._optimizer_config.eps
            )

    @installed
    def guard_after_step(self, token: Any) -> list[guards.Problem]:
        with self._used("parameters", "optimizer"):
            changed = guards.problems(token, watched.weights(self.model))
            return changed + watched.replica_problems(self.model)

    # -- state in and out ---------------------------------------------------------------------------------------------

    @installed
    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        with self._used("parameters", "optimizer"):
            dist_checkpoint.save(self.model, folder, schedule_step=self.schedule_step, state=state)

    @installed
    def stage_state(self, state: Mapping[str, Any]) -> Write:
        with self._used("parameters", "optimizer"):
            return dist_checkpoint.stage(self.model, schedule_step=self.schedule_step, state=state)

    @installed
    def load_state(self, folder: str) -> dict[str, Any]:
        with self._used("parameters", "optimizer"):
            self.schedule_step, state = dist_checkpoint.load(self.model, folder)
        return state

    def saved_state(self, folder: str) -> dict[str, Any] | None:
        return dist_checkpoint.state_of(folder)

    @installed
    def load_hf(self, path: str) -> None:
        with self._used("parameters", "optimizer"), self.model.weights_of(path, trained=False) as read:
            self.model.fill(read)

    @installed
    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        with self._used("parameters", "optimizer"):
            self.model.set_adapters(tensors)

    def set_adapter_scale(self, scale: float) -> None:
        lora.set_scale(self.model.chunks, scale)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_tokens: int = CACHE_TOKENS,
        prefill_tokens: int = PREFILL_TOKENS,
        progress: Callable[[int, int], None] = no_progress,
        kept: KeptSequences | None = None,
        cuda_graphs: bool = False,
    ) -> list[Completion]:
        """Does what every engine does. cuda_graphs: sequences past their prompt are replayed as graphs on GPUs."""
        assert self.config.head == "lm", "a value head generates nothing"
        with self.eval_mode():
            limits = {"cache_tokens": cache_tokens, "prefill_tokens": prefill_tokens}
            return generate.run(self.model, requests, **limits, progress=progress, kept=kept, cuda_graphs=cuda_graphs)

    def _stream(self, tensors: TensorStream, kind: str) -> TensorStream:
        """Yields `tensors`, which are made of a kind of state."""
        with self.model.state.installed(), self._used(kind):
            yield from tensors

    def hf_weights(self, *, everywhere: bool = False) -> TensorStream:
        model = self.model
        fp8.forget_copies(model.chunks)  # frees memory for the reader of the weights
        value = streams.merge_adapters(model) if model.adapters else (lambda parameter: parameter.data)
        tensors = streams.stream(model, value, dtype=model.dtype, buffers=True, everywhere=everywhere)
        return self._stream(tensors, "parameters")

    def adapter_weights(self) -> TensorStream:
        tensors = streams.stream_trained(self.model, lambda parameter: parameter.data.float())
        return self._stream(tensors, "parameters")

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        return lora.without_adapters(self.model.chunks)

    def hf_gradients(self) -> TensorStream:
        assert not self._spent, "optimizer_step has spent the gradients"
        with self.model.state.installed(), self._used("gradients"):
            self._reduce()
            optim.gather_gradients(self.model.wrapped)
        if self.model.adapters:
            tensors = streams.stream_trained(self.model, _main_grad)
        else:
            tensors = streams.stream(self.model, _main_grad, dtype=torch.float32, buffers=False)
        return self._stream(tensors, "gradients")

    def export_hf(self, path: str, *, merged: bool = False) -> None:
        if self.exports_adapter and not merged:
            self.export_adapter(path)
            return
        model = self.model
        shapes = expected_hf_names(model.family, model.hf, head=self.config.head, mtp=model.mtp)
        exact = {name: shapes[name] for name in buffer_names(model.family, model.hf, mtp=model.mtp)}
        stored = self.on_main(lambda: tensor_names(self.config.model.path)) if model.family.carries else ()
        tied = copies_of(model.family, model.hf, head=self.config.head, mtp=0)
        copies = shared_tensors(model.hf, model.mtp) | {name: of for name, of in tied.items() if name in stored}
        of_copies = {name: shapes[of] for name, of in copies.items()}
        infos = tensor_infos(shapes | of_copies, model.dtype) | tensor_infos(exact, torch.float32)
        self._write_hf(path, infos, model.family, model.hf, copies)
