"""The Megatron engine: GPTModel through megatron's schedules, optimizer and checkpoints, in any layout."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import Batch
from mrl.config.checks import check_backend
from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
from mrl.converters.families import family_for
from mrl.converters.hf_config import read_hf_config
from mrl.converters.random_weights import RandomWeights
from mrl.converters.rules import buffer_names, expected_hf_names, padded_vocab
from mrl.converters.safetensors_io import tensor_infos
from mrl.converters.stacks import reading
from mrl.engine import collective, guards
from mrl.engine.base import (
    CACHE_TOKENS,
    PREFILL_TOKENS,
    BaseEngine,
    Completion,
    Ctx,
    GenerateRequest,
    GradNorm,
    Predictions,
    tell_nobody,
)
from mrl.engine.kept import KeptSequences
from mrl.engine.lora.folder import adapters
from mrl.engine.lora.identity import facts
from mrl.engine.microbatch import plan_micro_batches, token_budget
from mrl.engine.offload import Offload
from mrl.engine.saving import starting_weights
from mrl.errors import ConfigError
from mrl.mcore_models import platform

platform.prepare()  # before anything below imports megatron

from megatron.core import parallel_state  # noqa: E402

from mrl.engine.megatron import dist_checkpoint, generate, lora, optim, pipeline, watched, weights  # noqa: E402
from mrl.engine.megatron.groups import MegatronState  # noqa: E402
from mrl.mcore_models.build import build_chunks, transformer_config  # noqa: E402
from mrl.parallel import ParallelDims  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def installed(method):
    """Runs a method with megatron's globals set to this engine's (see groups.py)."""

    @functools.wraps(method)
    def inside(self: "MegatronEngine", *args: Any, **kwargs: Any):
        with self.state.installed():
            return method(self, *args, **kwargs)

    return inside


class MegatronEngine(BaseEngine):
    """One model over all ranks, in the layout of `config.engine.parallel`."""

    backend = "megatron"

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        check_backend(engine)

    def __init__(self, config: RoleConfig) -> None:
        super().__init__(config)
        if platform.device_type(config.engine.device) != platform.device_type():
            raise ConfigError(
                'engine.device: value "cpu", but megatron uses the GPU that is visible; set CUDA_VISIBLE_DEVICES= too'
            )
        collective.join_processes(platform.device_type())
        parallel = config.engine.parallel
        self.dims = ParallelDims(
            world_size=dist.get_world_size(), tp=parallel.tp, pp=parallel.pp, vpp=parallel.vpp, cp=parallel.cp,
            ep=parallel.ep, etp=parallel.expert_tp, sp=parallel.sequence_parallel,
        )  # fmt: skip
        self.dtype = DTYPES[config.model.dtype]
        self.hf = read_hf_config(config.model.path)
        self.family = family_for(self.hf)
        self.model_config = transformer_config(
            self.hf, self.dims, dtype=self.dtype, recompute=config.engine.recompute, aux_loss=config.engine.moe.aux_loss,
            z_loss=config.engine.moe.z_loss,
        )  # fmt: skip
        self.state = MegatronState(self.dims, config.seed)
        self.coords = self.state.coords
        self.spec = "te" if platform.has_transformer_engine() else "local"
        self.setup = pipeline.Setup(
            dims=self.dims, coords=self.coords, packed=config.packing, thd=self.spec == "te", head=config.head,
            vocab_size=self.hf["vocab_size"],
        )  # fmt: skip
        self.chunks: Sequence[Any] = ()
        self.adapters: lora.Shapes = {}
        self.adapter_facts: dict[str, Any] | None = None  # what a checkpoint says of them
        self.optimizer: Any = None
        self._reduced = False

    # -- where and who ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return platform.device()

    @property
    def dp_rank(self) -> int:
        return self.coords.dp_rank

    @property
    def dp_size(self) -> int:
        return self.dims.dp

    # -- life ---------------------------------------------------------------------------------------------------------

    def init_model(self) -> None:
        with self.state.installed():
            self.state.check()
            config, head = self.config, self.config.head
            self.rules = weights.rules_here(self.family, self.hf, self.dims, self.coords, spec=self.spec, head=head)
            models = build_chunks(
                self.model_config, self.hf, dims=self.dims, chunks=weights.plans_here(self.hf, self.dims, self.coords),
                padded_vocab=padded_vocab(self.hf["vocab_size"], self.dims.tp), head=head,
            )  # fmt: skip
            self.models, self.chunks = models, models
            if config.model.lora is not None:
                self.adapters = adapters(config.model.path, config.model.lora, head)
                self.rules = lora.attach(
                    models, self.rules, self.adapters, config.model.lora, self.family, head=head, spec=self.spec
                )
            if config.optimizer is None:
                for model in models:
                    model.requires_grad_(False)
            else:
                self.chunks = optim.wrap(models, self.model_config)
                self.optimizer = optim.build_optimizer(config.optimizer, self.chunks, self.dtype)
            with self._source() as read:
                self._fill(read)
            self.adapter_facts = facts(config, self.family, self.hf)
            self.offload = Offload(config.engine.offload, optim.offloadable(models, self.chunks, self.optimizer))

    @contextlib.contextmanager
    def _source(self) -> Iterator[Callable[[str], Any]]:
        """Where weights start from: Hugging Face name -> tensor or lazy slice."""
        if self.config.model.init == "random":
            shapes = expected_hf_names(self.family, self.hf, head=self.config.head)
            random = RandomWeights(shapes, seed=self.config.seed, std=self.hf.get("initializer_range") or 0.02)
            yield reading(random, self.family)
            return
        trained = self.config.optimizer is not None
        with starting_weights(
            self.config.model.path, self.family, self.hf, head=self.config.head, trained=trained
        ) as read:
            yield read

    def _fill(self, read: Callable[[str], Any]) -> None:
        """Sets this rank's weights, and masters where there are any; adapters start anew, which leaves the model as it is."""
        read = lora.reading(read, lora.Initial(self.adapters, self.config.seed))
        weights.load(self.models, self.rules, read)
        if self.optimizer is not None:
            weights.load_masters(self.optimizer, self.models, self.rules, read)

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        with self.state.installed(), self.offload.used("parameters", "gradients"):
            for model in self.models:
                model.train()
            yield

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        with self.state.installed(), self.offload.used("parameters"), torch.no_grad():
            for model in self.models:
                model.eval()
            yield

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    @installed
    def forward_backward_step(
        self,
        batch: Batch,
        ctx: Ctx | None = None,
        forward_only: bool = False,
        preprocess_fn: Callable[[Batch, Ctx], tuple[Batch, Ctx]] | None = None,
        postprocess_fn: Callable[[Batch, Predictions, Ctx], tuple[Predictions, Ctx]] | None = None,
    ) -> tuple[Predictions, float, Ctx] | tuple[Predictions, Ctx]:
        assert forward_only or self.loss_fn is not None, "call set_loss_fn before training"
        assert forward_only or not self._reduced, "gradients were reduced already; call optimizer_zero_grad first"
        ctx = dict(ctx or {})
        order = self._plan(batch)
        micro_batches = [
            pipeline.make_micro_batch(batch.select(indices), ctx, preprocess_fn, self.setup) for indices in order
        ]
        call = self._call(batch, forward_only, postprocess_fn)
        with torch.set_grad_enabled(not forward_only):
            pipeline.run(self.chunks, self.model_config, micro_batches, self.setup, call)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        payload = None
        if last:
            sums = collective.add_over(pipeline.totals(micro_batches), self._host_dp_group())
            payload = (sums, collective.in_batch_order([mb.predictions for mb in micro_batches], order, batch))
        sums, predictions = pipeline.from_last_stage(payload, self.device)
        metrics = {
            name.removeprefix("metrics/"): value / call.denominator for name, value in sums.items() if name != "loss"
        }
        ctx["metrics"] = metrics
        loss = sums.get("loss", 0.0) / call.denominator
        if forward_only:
            return predictions, ctx | ({"loss": loss} if call.loss_fn is not None else {})
        return predictions, loss, ctx

    def _plan(self, batch: Batch) -> list[list[int]]:
        """The sequences of each micro-batch; the same number of micro-batches on every data-parallel rank."""
        micro, trains = self.config.engine.micro_batch, self.config.optimizer is not None
        tokens = None if micro.size is not None else token_budget(micro.tokens, batch.max_length, trains=trains)

        def most(count: int) -> int:
            if self.dims.dp == 1:
                return count
            highest = torch.tensor([count], device=self.device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            return int(highest)

        multiple = self.dims.pp if self.dims.vpp > 1 else 1
        return plan_micro_batches(
            batch.lengths.tolist(),
            size=micro.size,
            tokens=tokens,
            packed=self.config.packing,
            multiple_of=multiple,
            agree=most,
        )

    def _call(self, batch: Batch, forward_only: bool, postprocess_fn: Callable | None) -> pipeline.Call:
        denominator = collective.denominator_of(batch, self.loss_denominator)
        share = 1.0
        if not forward_only and (self.config.engine.moe.aux_loss or self.config.engine.moe.z_loss):
            mine = torch.tensor([float(batch.loss_mask.sum())], dtype=torch.float64, device=self.device)
            dist.all_reduce(mine, group=parallel_state.get_data_parallel_group())
            share = float(mine) / float(batch.denominators["tokens"] or 1.0) or 1.0
        return pipeline.Call(self.loss_fn, denominator, share, forward_only, postprocess_fn)

    @installed
    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        return collective.join_shares(predictions, batch, self._host_dp_group())

    def _host_dp_group(self) -> dist.ProcessGroup:
        """This rank's data-parallel group for Python objects, which go over gloo."""
        return parallel_state.get_data_parallel_group_gloo()

    # -- the optimizer ------------------------------------------------------------------------------------------------

    @installed
    def optimizer_zero_grad(self) -> None:
        with self.offload.used("gradients"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reduced = False

    def _reduce(self) -> None:
        if not self._reduced:
            optim.reduce_gradients(self.chunks)
            self._reduced = True

    @installed
    def optimizer_step(self) -> GradNorm:
        with self.offload.used("parameters", "gradients", "optimizer"):
            self._reduce()
            optim.set_learning_rate(self.optimizer, self._learning_rate())
            return optim.step(self.optimizer, self.config.optimizer.clip_grad)

    @installed
    def guard_before_step(self) -> Any:
        with self.offload.used("parameters", "gradients", "optimizer"):
            self._reduce()
            return guards.inspect(watched.watched(self), lr=self._learning_rate(), eps=self.config.optimizer.eps)

    @installed
    def guard_after_step(self, token: Any) -> list[str]:
        with self.offload.used("parameters", "gradients", "optimizer"):
            changed = guards.problems(token, ((w.name, w.weight) for w in watched.watched(self)))
            return changed + watched.replica_problems(self)

    # -- state in and out ---------------------------------------------------------------------------------------------

    @installed
    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        with self.offload.used("parameters", "optimizer"):
            dist_checkpoint.save(self, folder, state)

    @installed
    def load_state(self, folder: str) -> dict[str, Any]:
        with self.offload.used("parameters", "optimizer"):
            return dist_checkpoint.load(self, folder)

    @installed
    def load_hf(self, path: str) -> None:
        stored = starting_weights(path, self.family, self.hf, head=self.config.head, trained=False)
        with self.offload.used("parameters", "optimizer"), stored as read:
            self._fill(read)

    @installed
    def set_adapters(self, tensors: Mapping[str, Tensor]) -> None:
        with self.offload.used("parameters", "optimizer"):
            read = lora.fill(self.models, self.rules, tensors)
            if self.optimizer is not None:
                weights.load_masters(self.optimizer, self.models, self.rules, read)

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        cache_tokens: int = CACHE_TOKENS,
        prefill_tokens: int = PREFILL_TOKENS,
        told: Callable[[int, int], None] = tell_nobody,
        kept: KeptSequences | None = None,
    ) -> list[Completion]:
        assert self.config.head == "lm", "a value head generates nothing"
        with self.eval_mode():
            limits = {"cache_tokens": cache_tokens, "prefill_tokens": prefill_tokens}
            return generate.run(self, requests, **limits, told=told, kept=kept)

    def _stream(self, value: Callable[[torch.nn.Parameter], Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        with self.state.installed(), self.offload.used(kind):
            yield from weights.stream(
                self.models, value, self.family, self.hf, self.dims, self.coords, spec=self.spec,
                head=self.config.head, buffers=kind == "parameters",
            )  # fmt: skip

    def hf_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapters:
            return self._stream(lora.merged(self.models, self.rules), "parameters")
        return self._stream(lambda parameter: parameter.data, "parameters")

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._stream_adapters(lambda parameter: parameter.data.float(), "parameters")

    def _stream_adapters(self, value: Callable[[Tensor], Tensor], kind: str) -> Iterator[tuple[str, Tensor]]:
        with self.state.installed(), self.offload.used(kind):
            yield from lora.stream(self, value)

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        return lora.off(self.models)

    def hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        with self.state.installed(), self.offload.used("gradients"):
            self._reduce()
            optim.whole_gradients(self.chunks)
        stream = self._stream_adapters if self.adapters else self._stream
        return stream(lambda parameter: parameter.main_grad, "gradients")

    def export_hf(self, path: str, *, merged: bool = False) -> None:
        if self.exports_adapter and not merged:
            self.export_adapter(path)
            return
        shapes = expected_hf_names(self.family, self.hf, head=self.config.head)
        exact = {name: shapes[name] for name in buffer_names(self.family, self.hf)}
        infos = tensor_infos(shapes, self.dtype) | tensor_infos(exact, torch.float32)
        self._write_hf(path, infos, self.family, self.hf)
