"""The FSDP engine: a transformers model sharded over all ranks with FSDP2. Each has data (cp: positions) of its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import Batch
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
from mrl.engine.fsdp import dcp_checkpoint, forward, generate
from mrl.engine.fsdp.checks import FSDPChecks, check_shared_sequences
from mrl.engine.fsdp.delta_net import delta_nets
from mrl.engine.fsdp.mesh import build_mesh
from mrl.engine.fsdp.model import Model
from mrl.engine.fsdp.names import TableFiles
from mrl.engine.fsdp.optim import Optimizer
from mrl.engine.generation import check_room
from mrl.engine.kept import KeptSequences
from mrl.engine.microbatch import lengths_of_groups, plan_micro_batches, token_budget
from mrl.engine.offload import Offload
from mrl.engine.rng import Generators
from mrl.engine.trained_state import TrainedState, UpdateSettings, clone_tensors, restore_tensors
from mrl.kernels import delta_rule, operators
from mrl.ops import devices
from mrl.weights.accounting import SCORE
from mrl.weights.hf_config import changes_to_text, read_hf_config
from mrl.weights.table import Family, HFConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FSDPEngine(FSDPChecks, BaseEngine):
    """Holds one model over all ranks, a shard of every weight on each.

    A rank computes its own share of the data. The `engine.parallel.cp` ranks of a group compute one share together
    (Ulysses).
    """

    def __init__(self, config: RoleConfig) -> None:
        super().__init__(config)
        kind = devices.device_type(config.engine.device)
        collective.join_processes(kind)
        self._device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        self.mesh = build_mesh(kind, config.engine)
        if config.engine.parallel.cp > 1:
            check_shared_sequences(config.engine.parallel.cp, read_hf_config(config.model.path))
        self.group = self.mesh.dp_group
        self.optimizer: Optimizer | None = None
        self._kernels: list[str] | None = None  # of the model, once it is built
        self.seen_images = False  # of the accumulated gradients
        self._spent = False  # by an optimizer step, since gradients were zeroed

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def dp_size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def notes(self) -> list[str]:
        return operators.notes() + delta_rule.notes(self.chosen) if self.device.type == "cuda" else []

    @property
    def chosen(self) -> dict[str, str]:
        if self.device.type != "cuda":
            return {}
        types = read_hf_config(self.config.model.path).get("layer_types") or ()
        found = {}
        if "linear_attention" in types:
            found[delta_rule.NAME] = delta_rule.choice(DTYPES[self.config.model.dtype])
        if self._kernels is not None and operators.CAN_COMPILE:
            found["kernels"] = ", ".join(self._kernels) or "none of layers"
        return found

    # -- life ---------------------------------------------------------------------------------------------------------

    def init_model(self, read: Read | None = None) -> None:
        # ranks have different data, or different tokens and heads of the same, and so different dropout
        self.generators = Generators(self.config.seed + dist.get_rank(), self.device)
        self.model = Model(self.config, self.device, self.mesh, read)
        self._kernels = self.model.kernels
        if self.config.optimizer is not None:
            self.optimizer = Optimizer(self.model.trained(), self.config.optimizer, self.mesh.shard_group)
        self.offload = Offload(self.config.engine.offload, self._state())
        self.model.module.eval()

    def _state(self) -> dict[str, Callable[[], Iterator[Tensor]]]:
        """Returns what there is of each kind of state on this rank, for `engine.offload`."""
        parameters, optimizer = list(self.model.module.parameters()), self.optimizer
        return {
            "parameters": lambda: (p.detach().to_local() for p in parameters),
            "gradients": lambda: (p.grad.to_local() for p in parameters if p.grad is not None),
            "optimizer": lambda: (m.to_local() for m in (optimizer.moments() if optimizer else {}).values()),
        }

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        with self.offload.used("parameters", "gradients"):
            self.model.module.train()
            try:
                yield
            finally:
                self.model.module.eval()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        was_training = self.model.module.training
        with self.offload.used("parameters"), torch.no_grad():
            self.model.module.eval()
            try:
                yield
            finally:
                self.model.module.train(was_training)

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    def forward_backward_step(
        self,
        batch: Batch,
        ctx: Ctx | None = None,
        forward_only: bool = False,
        preprocess_fn: PreprocessFn | None = None,
        postprocess_fn: PostprocessFn | None = None,
    ) -> Outcome:
        assert forward_only or self.loss_fn is not None, "call set_loss_fn before training"
        assert forward_only or not self._spent, "gradients are spent; call optimizer_zero_grad first"
        ctx = dict(PLAIN_CTX if ctx is None else ctx)
        denominator = collective.denominator_of(batch, self.loss_denominator)
        order = self._plan(batch)
        predictions: list[Predictions] = []
        sums: dict[tuple[str, str], float] = {}
        kinds = ("parameters",) if forward_only else ("parameters", "gradients")
        deferred = self.config.engine.fsdp.defer_sync
        with (
            self.offload.used(*kinds), self.generators.installed(), torch.set_grad_enabled(not forward_only),
            self.model.keep_gathered() if deferred or self.model.stays_gathered else contextlib.nullcontext(),
        ):  # fmt: skip
            for number, indices in enumerate(order, 1):
                if deferred:
                    self.model.sync_in_backward(number == len(order))
                predicted, of_micro_batch = self._micro_batch(
                    batch.select(indices), {**ctx, "metrics": {}}, denominator, forward_only, preprocess_fn,
                    postprocess_fn,
                )  # fmt: skip
                predictions.append(predicted)
                for name, value in of_micro_batch.items():
                    sums[name] = sums.get(name, 0.0) + value
        if forward_only:
            # no backward pass comes to free what stays gathered (fsdp.reshard_after_forward false)
            self.model.reshard()
        sums = collective.sum_in_rank_order(sums, self.group)
        ctx["metrics"] = {name[1]: value / denominator for name, value in sums.items() if name[0] == "metrics"}
        loss = sums.get(("loss", ""), 0.0) / denominator
        whole = collective.to_batch_order(predictions, order, batch)
        if forward_only:
            return whole, ctx | ({"loss": loss} if self.loss_fn is not None else {})
        return whole, loss, ctx

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Returns the sequences of each micro-batch; the same number of micro-batches on every rank."""
        micro, trains = self.config.engine.micro_batch, self.config.optimizer is not None
        longest = max(lengths_of_groups(batch.lengths.tolist(), batch.group, packed=self.config.packing), default=0)
        tokens = None if micro.size is not None else token_budget(micro.token_limit, longest, trains=trains)
        return plan_micro_batches(
            batch.lengths.tolist(),
            group=batch.group,
            size=micro.size,
            tokens=tokens,
            packed=self.config.packing,
            agree=lambda count: int(self.max_over_ranks(count)[0]),
        )

    def _micro_batch(
        self,
        data: Batch,
        ctx: Ctx,
        denominator: float,
        forward_only: bool,
        preprocess_fn: PreprocessFn | None,
        postprocess_fn: PostprocessFn | None,
    ) -> tuple[Predictions, dict[tuple[str, str], float]]:
        """Runs one micro-batch forward and backward. Returns detached predictions and its sums: the loss, each metric.

        A micro-batch without sequences runs the model on a dummy token, because gathering weights and reducing
        gradients takes every rank. Hooks and the loss function do not see it.
        """
        if preprocess_fn is not None and data.num_sequences:
            data, ctx = preprocess_fn(data, ctx)
        inputs = forward.prepare(
            data, packed=self.config.packing, device=self.device, ulysses=self.mesh.ulysses,
            reads_images=self.model.reads_images, rotary=self.model.rotary,
        )  # fmt: skip
        self.seen_images |= bool(data.multi_modal_inputs)
        data = data.to(self.device)
        predictions = self.model.module(
            functools.partial(forward.predict, inputs=inputs, head=self.config.head, ctx=ctx, rule=self.model.rule)
        )
        loss = sum(value.sum() for value in predictions.values()) * 0.0
        sums: dict[tuple[str, str], float] = {}
        if data.num_sequences:
            if postprocess_fn is not None:
                predictions, ctx = postprocess_fn(data, predictions, ctx)
            if self.loss_fn is not None:
                loss_sum, ctx = self.loss_fn(data, predictions, ctx)
                loss = loss + loss_sum
                sums["loss", ""] = float(loss_sum.detach())
                sums |= {("metrics", name): float(value) for name, value in ctx.get("metrics", {}).items()}
        if not forward_only:
            forward.fsdp_loss(loss, denominator=denominator, ranks=self.world_size).backward()
        return {name: value.detach() for name, value in predictions.items()}, sums

    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        return collective.join_shares(predictions, batch, self.group)

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        for parameter in self.model.trained().values():
            parameter.grad = None
        self.offload.forget("gradients")
        self.seen_images = self._spent = False

    def optimizer_step(self, update: UpdateSettings | None = None) -> GradNorm:
        with self.offload.used("parameters", "gradients", "optimizer"):
            norm = self._trained().step(update or self._update())
            self.offload.spend("gradients")
        self._spent = True
        return norm

    def trained_state(self) -> TrainedState:
        optimizer, spent = self._trained(), self._spent
        with self.offload.used("parameters", "gradients", "optimizer"):
            gradients = None if spent else optimizer.gradients()
            weights = clone_tensors(p.to_local() for p in optimizer.parameters.values())
            moments = clone_tensors(m.to_local() for m in optimizer.moments().values())
        return TrainedState(weights, moments, optimizer.updates, gradients, spent)

    @torch.no_grad()
    def set_trained_state(self, state: TrainedState) -> None:
        optimizer = self._trained()
        with self.offload.used("parameters", "gradients", "optimizer"):
            restore_tensors((p.to_local() for p in optimizer.parameters.values()), state.weights)
            restore_tensors((m.to_local() for m in optimizer.moments().values()), state.moments)
            optimizer.updates = state.updates
            optimizer.set_gradients(state.gradients)
        self._spent = state.spent

    def _watched(self) -> Iterator[guards.WatchedParameter]:
        adapters, scores = self.model.adapters, self.config.head == "value"
        waiting = adapters.zero_b_names() if adapters is not None else ()
        for name, p in self.model.trained().items():
            gradient = None if p.grad is None else p.grad.to_local()
            idle = not self.seen_images and self.model.is_of_images(name)
            if scores and adapters is None and p is self.model.hf.get_output_embeddings().weight:
                name = SCORE  # which is where the output layer was
            yield guards.WatchedParameter(
                name, p.detach().to_local(), gradient, may_be_idle=idle, waits=name in waiting
            )

    def guard_before_step(self) -> Any:
        with self.offload.used("parameters", "gradients"):
            return guards.inspect(self._watched(), lr=self._learning_rate(), eps=self._trained().config.eps)

    def guard_after_step(self, token: Any) -> list[guards.Problem]:
        with self.offload.used("parameters"):
            weights = [(w.name, w.weight) for w in self._watched()]
            replicas = guards.replica_problems(weights, self.mesh.replica_group)
            return guards.problems(token, weights) + guards.merge_problems(replicas)

    def _trained(self) -> Optimizer:
        assert self.optimizer is not None, "this role has no optimizer"
        return self.optimizer

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _small_files(self, state: Mapping[str, Any]) -> tuple[bytes, bytes]:
        return dcp_checkpoint.small_files(self.model, self.optimizer, self.generators, self.schedule_step, state)

    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        with self.offload.used("parameters", "optimizer"), self.generators.installed():
            dcp_checkpoint.save(folder, self.model, self.optimizer, self._small_files(state))

    def stage_state(self, state: Mapping[str, Any]) -> Write:
        with self.offload.used("parameters", "optimizer"), self.generators.installed():
            return dcp_checkpoint.stage(self.model, self.optimizer, self._small_files(state))

    def load_state(self, folder: str) -> dict[str, Any]:
        generators = self.generators
        with self.offload.used("parameters", "optimizer"), generators.installed():
            self.schedule_step, state = dcp_checkpoint.load(folder, self.model, self.optimizer, generators=generators)
        return state

    def saved_state(self, folder: str) -> dict[str, Any] | None:
        return dcp_checkpoint.state_of(folder)

    def load_hf(self, path: str) -> None:
        with self.offload.used("parameters"):
            self.model.load_hf(path)

    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        assert self.model.adapters is not None, "there are no adapters"
        with self.offload.used("parameters"):
            self.model.adapters.load(tensors)

    def set_adapter_scale(self, scale: float) -> None:
        assert self.model.adapters is not None, "there are no adapters"
        self.model.adapters.set_scale(scale)

    # -- generation and weights out -----------------------------------------------------------------------------------

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_tokens: int = CACHE_TOKENS,
        prefill_tokens: int = PREFILL_TOKENS,
        progress: Callable[[int, int], None] = no_progress,
        kept: KeptSequences | None = None,
    ) -> list[Completion]:
        assert self.config.head == "lm", "a value head generates nothing"
        self.model.check_generates(max((len(r.tokens) + r.max_new_tokens for r in requests), default=0))
        check_room(requests, cache_tokens)
        kept = KeptSequences(0) if kept is None else kept
        alone = self.world_size == 1  # then the shards are the model, and gathering them at every step is for nothing
        with self.eval_mode(), self.model.keep_gathered() if alone else contextlib.nullcontext():
            completions = generate.generate(
                self.model.module,
                [(i, requests[i]) for i in kept.share(requests, dist.get_rank(), self.world_size)],
                device=self.device,
                any_rank=bool if alone else lambda here: bool(self.max_over_ranks(here)[0]),
                cache_tokens=cache_tokens,
                prefill_tokens=prefill_tokens,
                progress=progress,
                kept=kept,
                rule=self.model.rule,
                recurrent=bool(delta_nets(self.model.hf)),
            )
        everyone = collective.all_ranks().gather(completions)
        completions = {i: completion for part in everyone for i, completion in part.items()}
        return [completions[i] for i in range(len(requests))]

    def hf_weights(self, *, everywhere: bool = False) -> TensorStream:
        with self.offload.used("parameters"):
            dtype = DTYPES[self.config.model.dtype]
            yield from self.model.stream(lambda tensor: tensor, dtype, everywhere=everywhere)

    def hf_gradients(self) -> TensorStream:
        def gradient(p: torch.nn.Parameter) -> Tensor:
            return torch.zeros_like(p) if p.grad is None else p.grad

        assert not self._spent, "optimizer_step has spent the gradients"
        with self.offload.used("parameters", "gradients"):
            if self.config.model.lora is not None:
                yield from self.model.stream_trained(gradient)
            else:
                yield from self.model.stream(gradient, torch.float32, fixed=False)

    def adapter_weights(self) -> TensorStream:
        assert self.config.model.lora is not None, "there are no adapters"
        with self.offload.used("parameters"):
            yield from self.model.stream_trained(lambda parameter: parameter)

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.model.adapters is None else self.model.adapters.disabled()

    def export_hf(self, path: str, *, merged: bool = False) -> None:
        if self.exports_adapter and not merged:
            self.export_adapter(path)
            return
        model, infos = self.model, self.model.file_infos(DTYPES[self.config.model.dtype])
        if isinstance(model.files, TableFiles):
            self._write_hf(path, infos, model.family, model.hf_config)
            return
        names = model.files.names
        infos |= {copy: infos[of] for copy, of in names.copies.items()}
        self._write_hf(path, infos, None, model.hf_config, names.copies, names.carried)

    def _config_changes(self, family: Family | None, hf_config: HFConfig) -> dict[str, Any]:
        changes = super()._config_changes(family, hf_config)
        text = hf_config.get("text_config") or {}
        if self.config.model.init != "random" or text.get("model_type") != self.model.hf.config.model_type:
            return changes
        return changes_to_text(self.config.model.path) | changes
