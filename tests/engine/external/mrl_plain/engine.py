"""An engine in the simplest way that keeps the contract of mrl/engine/base.py: every rank holds the whole model and runs its
sequences one after another; before an optimizer step, gradients are added up over the ranks.

Who divides the loss, by what: a loss function returns sums, each backward pass is of `loss_sum / denominator`, and
all-reduce adds up what the ranks have. Nothing multiplies, so nothing has to be cancelled.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mrl.batch import Batch
from mrl.config.checks import micro_batch_tokens
from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, RoleConfig
from mrl.engine import base, collective, guards
from mrl.engine.base import BaseEngine, Completion, Ctx, GenerateRequest, GradNorm, Outcome, Predictions
from mrl.engine.generation import check_room
from mrl.engine.kept import share
from mrl.engine.logprobs import VocabShard, log_probs_from_hidden
from mrl.engine.microbatch import plan_micro_batches
from mrl.engine.offload import Offload
from mrl.engine.rng import Generators
from mrl.engine.sampling import SamplingRows, choose, noise_key
from mrl.errors import CheckpointError, ConfigError
from mrl.ops import devices
from mrl.weights.mcore_weights import architecture, check_architecture
from mrl.weights.pt_file import load_pt
from mrl.weights.safetensors_io import tensor_infos
from mrl_plain.model import Model

BUCKET_MB = 25


class PlainEngine(BaseEngine):
    backend = "plain"
    supports = (
        "engine.offload.parameters", "engine.offload.gradients", "engine.offload.optimizer", "engine.options.bucket_mb",
    )  # fmt: skip

    @classmethod
    def check_config(cls, model: ModelConfig, engine: EngineConfig) -> None:
        super().check_config(model, engine)
        megabytes = engine.options.get("bucket_mb", BUCKET_MB)
        if not (type(megabytes) in (int, float) and 0 < megabytes < math.inf):
            raise ConfigError("engine.options.bucket_mb", megabytes, "is no size", "give a number above 0")

    def __init__(self, config: RoleConfig) -> None:
        super().__init__(config)
        kind = devices.device_type(config.engine.device)
        collective.join_processes(kind)
        self._device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        self.bucket = int(config.engine.options.get("bucket_mb", BUCKET_MB) * 2**20) // 4  # fp32 elements
        self.adamw: torch.optim.AdamW | None = None
        self._reduced = False

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dp_rank(self) -> int:
        return dist.get_rank()

    @property
    def dp_size(self) -> int:
        return dist.get_world_size()

    # -- life ---------------------------------------------------------------------------------------------------------

    def init_model(self) -> None:
        self.generators = Generators(self.config.seed + self.dp_rank, self.device)
        self.model = Model(self.config, self.device)
        self.parameters = self.model.parameters()
        if self.config.optimizer is not None:
            self.adamw = _adamw(list(self.parameters.values()), self.config.optimizer)
        self.offload = Offload(
            self.config.engine.offload,
            {
                "parameters": lambda: (p.detach() for p in self.parameters.values()),
                "gradients": lambda: (p.grad for p in self.parameters.values() if p.grad is not None),
                "optimizer": lambda: (self.moment(p, name) for p in self.parameters.values() for name in self.moments),
            },
        )

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self.adamw is not None else ()

    def moment(self, parameter: nn.Parameter, name: str) -> Tensor:
        return self.adamw.state[parameter][name]

    @contextlib.contextmanager
    def train_mode(self) -> Iterator[None]:
        with self.offload.used("parameters", "gradients"):
            self.model.hf.train()
            try:
                yield
            finally:
                self.model.hf.eval()

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        was_training = self.model.hf.training
        with self.offload.used("parameters"), torch.no_grad():
            self.model.hf.eval()
            try:
                yield
            finally:
                self.model.hf.train(was_training)

    # -- a mini-batch -------------------------------------------------------------------------------------------------

    def forward_backward_step(
        self, batch: Batch, ctx: Ctx | None = None, forward_only: bool = False, preprocess_fn=None, postprocess_fn=None
    ) -> Outcome:
        assert forward_only or not self._reduced, "gradients were reduced already; call optimizer_zero_grad first"
        ctx, sums, predictions = dict(base.PLAIN_CTX if ctx is None else ctx), {}, []
        denominator = collective.denominator_of(batch, self.loss_denominator)
        order = self._plan(batch)
        kinds = ("parameters",) if forward_only else ("parameters", "gradients")
        with self.offload.used(*kinds), self.generators.installed(), torch.set_grad_enabled(not forward_only):
            for indices in order:
                data, own = batch.select(indices), {**ctx, "metrics": {}}
                if preprocess_fn is not None and indices:
                    data, own = preprocess_fn(data, own)
                data = data.to(self.device)
                predicted = self._predict(data, own)
                if postprocess_fn is not None and indices:
                    predicted, own = postprocess_fn(data, predicted, own)
                if self.loss_fn is not None and indices:
                    loss_sum, own = self.loss_fn(data, predicted, own)
                    if not forward_only:
                        (loss_sum / denominator).backward()
                    for name, value in {"": loss_sum, **own.get("metrics", {})}.items():
                        sums[name] = sums.get(name, 0.0) + float(value)
                predictions.append({name: value.detach() for name, value in predicted.items()})
        sums = collective.sum_in_rank_order(sums, dist.group.WORLD)
        loss = sums.pop("", 0.0) / denominator
        ctx["metrics"] = {name: value / denominator for name, value in sums.items()}
        whole = collective.to_batch_order(predictions, order, batch)
        if forward_only:
            return whole, ctx | ({"loss": loss} if self.loss_fn is not None else {})
        return whole, loss, ctx

    def _plan(self, batch: Batch) -> list[list[int]]:
        """The sequences of each micro-batch. No rank waits for another here, and so the ranks' numbers may differ."""
        micro = self.config.engine.micro_batch
        tokens = micro_batch_tokens(micro, batch.max_length)
        return plan_micro_batches(batch.lengths.tolist(), size=micro.size, tokens=tokens, packed=self.config.packing)

    def _predict(self, data: Batch, ctx: Ctx) -> Predictions:
        """Log-probs [T] of the labels that train, and entropies where asked for; or values [T]."""
        weights = self.model.cast()
        head = self.model.head(weights)
        sequences = data.tokens.split(data.lengths.tolist()) if data.num_sequences else ()
        hidden = torch.cat([head[:0], *(self.model.hidden(weights, tokens) for tokens in sequences)])
        if self.config.head == "value":
            return {"values": (hidden @ head.t())[:, 0].float()}
        log_probs, entropy = log_probs_from_hidden(
            hidden, head, data.labels, shard=VocabShard(head.shape[0]), rows=data.loss_mask.nonzero()[:, 0],
            temperature=ctx["temperature"], entropy=ctx.get("entropy", "none"),
        )  # fmt: skip
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    def unshard_data(self, predictions: Predictions, batch: Batch) -> Predictions:
        return collective.join_shares(predictions, batch, dist.group.WORLD)

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.offload.forget("gradients")
        self._reduced = False

    def _reduce(self) -> None:
        """Adds the gradients up over all ranks, `bucket_mb` at a time. A rank without data has zeros."""
        if self._reduced:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters.values()]
        flat = torch.cat([g.flatten() for g in gradients])
        for part in flat.split(self.bucket):
            dist.all_reduce(part)
        for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(summed.view_as(g))
        self._reduced = True

    def optimizer_step(self) -> GradNorm:
        with self.offload.used("parameters", "gradients", "optimizer"):
            self._reduce()
            gradients = [p.grad for p in self.parameters.values()]
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
            if not math.isfinite(norm):
                return GradNorm(norm, skipped=f"the gradient norm is {norm}")
            limit = self.config.optimizer.clip_grad
            if limit and norm > limit:
                torch._foreach_mul_(gradients, limit / (norm + 1e-6))
            for group in self.adamw.param_groups:
                group["lr"] = self._learning_rate()
            self.adamw.step()
        return GradNorm(norm)

    def guard_before_step(self) -> Any:
        with self.offload.used("parameters", "gradients"):
            self._reduce()
            watched = [guards.WatchedParameter(name, p.detach(), p.grad) for name, p in self.parameters.items()]
            return guards.inspect(watched, lr=self._learning_rate(), eps=self.config.optimizer.eps)

    def guard_after_step(self, token: Any) -> list[guards.Problem]:
        with self.offload.used("parameters"):
            weights = [(name, p.detach()) for name, p in self.parameters.items()]
            return guards.problems(token, weights) + guards.merge_problems(
                guards.replica_problems(weights, dist.group.WORLD)
            )

    # -- state in and out ---------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        named = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        return named | {f"{m}.{name}": self.moment(p, m) for name, p in self.parameters.items() for m in self.moments}

    def save_state(self, folder: str, state: Mapping[str, Any]) -> None:
        with self.offload.used("parameters", "optimizer"):
            if self.is_main:
                updates = 0 if self.adamw is None else int(next(iter(self.adamw.state.values()))["step"])
                about = architecture(self.model.family, self.model.hf_config)
                facts = {"schedule_step": self.schedule_step, "updates": updates, "state": dict(state), "about": about}
                torch.save(facts | {"tensors": self._tensors()}, os.path.join(folder, "state.pt"))
        with self.generators.installed():
            torch.save(self.generators.states(), os.path.join(folder, f"rng_{self.dp_rank}.pt"))

    def load_state(self, folder: str) -> dict[str, Any]:
        with self.offload.used("parameters", "optimizer"):
            facts = load_pt(os.path.join(folder, "state.pt"), mmap=True)
            check_architecture(facts["about"], self.model.family, self.model.hf_config, folder)
            mine, theirs = self._tensors(), facts["tensors"]
            for name in sorted(mine.keys() ^ theirs.keys()) or (n for n in mine if mine[n].shape != theirs[n].shape):
                raise CheckpointError(
                    f"{folder}: is of another model: {name} differs; resume with the model it was made from"
                )
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
            for state in self.adamw.state.values() if self.adamw is not None else ():
                state["step"].fill_(facts["updates"])
        self.schedule_step = facts["schedule_step"]
        rng = os.path.join(folder, f"rng_{self.dp_rank}.pt")
        if os.path.exists(rng):  # a rank more than there were keeps its own
            with self.generators.installed():
                self.generators.restore(load_pt(rng))
        return facts["state"]

    def load_hf(self, path: str) -> None:
        with self.offload.used("parameters"):
            self.model.load_hf(path)

    def hf_weights(self, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        with self.offload.used("parameters"):
            mine = everywhere or self.is_main
            yield from self.model.stream(lambda parameter: parameter, self.model.dtype) if mine else ()

    def hf_gradients(self) -> Iterator[tuple[str, Tensor]]:
        with self.offload.used("parameters", "gradients"):
            self._reduce()
            yield from self.model.stream(lambda parameter: parameter.grad, torch.float32) if self.is_main else ()

    def export_hf(self, path: str) -> None:
        infos = tensor_infos(self.model.file_shapes, self.model.dtype)
        self._write_hf(path, infos, self.model.family, self.model.hf_config)

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerateRequest], *, cache_tokens=base.CACHE_TOKENS, prefill_tokens=base.PREFILL_TOKENS,
        progress: Callable[[int, int], None] = base.no_progress, kept: base.KeptSequences | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Nothing is cached or kept: each token takes a forward of all before it."""
        check_room(requests, cache_tokens)
        mine = share(len(requests), self.dp_rank, self.dp_size)
        with self.eval_mode():
            weights, found = self.model.cast(), []
            for number, i in enumerate(mine, start=1):
                found.append(self._complete(requests[i], weights))
                progress(number, len(mine))
        everyone: list[list[Completion]] = [[]] * self.dp_size
        dist.all_gather_object(everyone, found)
        return [completion for part in everyone for completion in part]

    def _complete(self, request: GenerateRequest, weights: dict[str, Tensor]) -> Completion:
        done, head, kind = Completion([], [], False), self.model.head(weights), request.sampling
        while len(done.tokens) < request.max_new_tokens and not done.finished:
            tokens = [*request.tokens, *done.tokens]
            hidden = self.model.hidden(weights, torch.tensor(tokens, device=self.device))
            rows = SamplingRows.of([kind], [0 if kind.greedy else noise_key(request.key, len(tokens))], self.device)
            token, log_prob = choose(hidden[-1:] @ head.t(), rows, VocabShard(head.shape[0]))
            new = [*done.tokens, token.item()]
            ends = new[-1] in request.stop_tokens or (request.stop_at is not None and request.stop_at(new))
            done = Completion(new, [*done.log_probs, log_prob.item()], ends)
        return done


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Its state exists from the start, so that it can be offloaded and a checkpoint be read into it."""
    decayed, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, foreach=True)
    for p in parameters:
        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        adamw.state[p] = {"step": torch.zeros(()), **zeros}
    return adamw
