"""Holds the models of a server over its one engine.

Every rank has these and does each operation together with the others. The engine holds the active model. The trained
state of the others waits in host memory (`mrl.engine.trained_state`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.sums import DENOMINATOR, SummedLoss
from mrl.batch import Batch
from mrl.config.schema import LoraConfig
from mrl.config.serve import ServeKeys
from mrl.engine import guards
from mrl.engine.base import BaseEngine, Completion, GenerateRequest
from mrl.engine.collective import all_ranks, call_on_every_rank, on_main
from mrl.engine.kept import KeptSequences
from mrl.engine.lora.folder import adapters, read_adapter, write_adapter
from mrl.engine.sampling import SamplingKey
from mrl.engine.trained_state import TrainedState
from mrl.errors import CheckpointError, UserError, first_line, one_line
from mrl.rollout.stops import EndTokens, StopTexts
from mrl.serve import operations as ops
from mrl.serve import padded
from mrl.serve.ledger import PREFIX
from mrl.serve.operations import DrawSamples, ModelKind
from mrl.weights.pt_file import read_pt, write_pt
from mrl.weights.tokenizer_files import add_end_tokens


@dataclasses.dataclass(frozen=True)
class HeldModel:
    """A model that waits, or a snapshot."""

    kind: ModelKind
    state: TrainedState


@dataclasses.dataclass(frozen=True)
class SampleOutcome:
    """The outcome of an `ops.DrawSamples`."""

    completions: Sequence[Completion]
    prompt_log_probs: Sequence[float] | None  # for tokens after the first
    top_of_prompt: tuple[Tensor, Tensor] | None  # log-probs [tokens - 1, top], and their ids
    top_of_samples: Sequence[tuple[Tensor, Tensor]] | None  # for each completion [tokens, top]


_Read = tuple[Tensor, Tensor, Tensor]
"""(log-probs of the tokens after the first [T], the largest ones [T, top], their ids)."""

FAULTS = frozenset({guards.FaultKind.NO_GRADIENT, guards.FaultKind.NOT_FINITE, guards.FaultKind.REPLICAS_DIFFER})
"""Faults of any step. A client may want a zero gradient, or a parameter that stays."""


def prompt_number(tokens: Sequence[int]) -> int:
    """Returns a number for a prompt's noise: with one seed, equal prompts get equal samples."""
    return int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:7], "big")


class _RunningSample:
    """A sample that is being drawn, in parts."""

    def __init__(self, sample: DrawSamples) -> None:
        self.sample = sample
        self.prompt = prompt_number(sample.tokens)  # requests of equal numbers and seeds are equal
        self.completions = [Completion([], [], finished=False) for _ in range(sample.count)]  # so far

    @property
    def unfinished(self) -> list[int]:
        """The indices of the completions that are not whole."""
        most = self.sample.max_new_tokens
        return [i for i, one in enumerate(self.completions) if not one.finished and len(one.tokens) < most]

    def add(self, index: int, more: Completion) -> None:
        """Adds new tokens to a completion."""
        before = self.completions[index]
        self.completions[index] = Completion(
            before.tokens + more.tokens, before.log_probs + more.log_probs, more.finished
        )


class Models:
    """Models that train, and snapshots of them, by name.

    lora: the adapters of the engine; None: all weights train. folder: of the base model.
    """

    def __init__(
        self, engine: BaseEngine, tokenizer: PreTrainedTokenizerBase, lora: LoraConfig | None, folder: str,
        keys: ServeKeys,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.lora, self.folder, self.keys = engine, tokenizer, lora, folder, keys
        self.start = engine.trained_state()
        self.waiting: dict[str, HeldModel] = {}
        self.snapshots: dict[str, HeldModel] = {}
        self.folders: dict[str, str] = {}  # snapshot -> the folder that inference servers load
        self.active: tuple[str, ModelKind] | None = None
        self.shown: tuple[str | None] | None = None  # the engine's snapshot, if it has no active model
        self.accumulated: set[str] = set()  # models that have gradients
        self.watched: set[str] = set()  # models whose first step since this start was checked
        self.running: dict[str | None, tuple[dict[str, _RunningSample], KeptSequences]] = {}  # by snapshot
        self._stop_texts = functools.lru_cache(functools.partial(StopTexts, tokenizer))
        self.spoken = time.monotonic()  # when the main rank told the others of an operation last
        self._do: Mapping[type, Callable[[Any], Any]] = {
            ops.CreateModel: self._create, ops.LoadModel: self._load, ops.ForwardPass: self._pass,
            ops.OptimizerStep: self._step, ops.DropGradients: self._drop, ops.SaveCheckpoint: self._save,
            ops.ExportWeights: self._export, ops.TakeSnapshot: self._freeze, ops.LoadSnapshot: self._thaw,
            ops.ContinueSampling: self._sample_all, ops.ForgetModels: self._forget,
            ops.SuspendModels: self._suspend, ops.ResumeModels: self._resume,
        }  # fmt: skip

    @functools.cached_property
    def end_tokens(self) -> EndTokens:
        """The tokens that end a completion."""
        return EndTokens.of(self.folder, self.tokenizer)

    def do(self, operation: Any) -> Any:
        """Does an operation and returns its outcome. Collective.

        A UserError is raised on every rank alike. The models are then as they were, with one exception: if memory ran
        out in a pass, its model's gradients are dropped.
        """
        try:
            return self._do[type(operation)](operation)
        except torch.OutOfMemoryError as error:
            if all_ranks().size > 1 or not isinstance(operation, (ops.ForwardPass, ops.ContinueSampling)):
                raise  # others wait for this rank, or the model is half of what it was
            line = one_line(error, 160)
        return self._out_of_memory(operation, line)  # here, as the error has held on to what the engine was computing

    def _out_of_memory(self, operation: ops.ForwardPass | ops.ContinueSampling, line: str) -> NoReturn:
        """Drops the work of a call that was too much for the device. Raises ServerFault."""
        torch.cuda.empty_cache()
        why = f"ran out of memory ({line})"
        if isinstance(operation, ops.ContinueSampling):
            self.running.pop(operation.snapshot, None)
            raise ServerFault("asample", why=why, fix="ask for fewer, or lower serve.cache_tokens")
        if not operation.forward_only:
            self._drop(ops.DropGradients(operation.model))
        raise ServerFault("forward_backward", why=why, fix="lower engine.micro_batch.tokens")

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def _park(self) -> None:
        self.shown = None
        if self.active is not None:
            name, kind = self.active
            self.waiting[name] = HeldModel(kind, self.engine.trained_state())
        self.active = None

    def _take(self, name: str) -> ModelKind:
        """Gives the engine the model `name`."""
        if self.active is None or self.active[0] != name:
            if name not in self.waiting:
                raise UserError("model_id", name, "is gone", "create another")
            self._park()
            held = self.waiting[name]
            self._fill(held)
            del self.waiting[name]
            self.active = name, held.kind
        return self.active[1]

    def _fill(self, held: HeldModel) -> None:
        self.engine.set_trained_state(held.state)
        if self.lora is not None:
            self.engine.set_adapter_scale(self._scale(held.kind))

    def _scale(self, kind: ModelKind) -> float:
        lora = self._lora_of(kind)
        return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)

    def _lora_of(self, kind: ModelKind) -> LoraConfig:
        assert self.lora is not None and kind.rank is not None
        if kind.alpha is None:  # the base, whose adapters are zero
            return dataclasses.replace(self.lora, rank=kind.rank)
        return dataclasses.replace(self.lora, rank=kind.rank, alpha=kind.alpha, rslora=kind.rslora)

    def _shapes(self, kind: ModelKind) -> padded.Shapes:
        return adapters(self.folder, self._lora_of(kind), "lm")

    # -- models that train -------------------------------------------------------------------------------------------

    def _create(self, operation: ops.CreateModel) -> None:
        self._park()
        self._fill(HeldModel(operation.kind, self.start))
        if self.lora is not None:
            kind, shapes = operation.kind, self._shapes(operation.kind)
            options = {"attention": kind.attention, "mlp": kind.mlp}
            self.engine.set_adapters(padded.initial_adapters(shapes, self.lora.rank, kind.seed, **options))
        self.engine.optimizer_zero_grad()
        self.active = operation.model, operation.kind

    def _load(self, operation: ops.LoadModel) -> None:
        self._park()
        self._fill(HeldModel(operation.kind, self.start))
        self.engine.load_checkpoint(operation.folder)
        if not operation.optimizer:
            state = self.engine.trained_state()
            moments = [torch.zeros_like(moment) for moment in state.moments]
            self.engine.set_trained_state(dataclasses.replace(state, moments=moments, updates=0))
        self.engine.optimizer_zero_grad()
        self._forget(ops.ForgetModels(models=[operation.model]))  # its earlier state
        self.active = operation.model, operation.kind

    def _pass(self, operation: ops.ForwardPass) -> tuple[Tensor, float]:
        """Returns the log-probs of all positions and the loss."""
        self._take(operation.model)
        self.engine.set_loss_fn(SummedLoss(operation.loss, operation.options), DENOMINATOR)
        share = self.engine.shard_data(operation.batch)
        if operation.forward_only:
            with self.engine.eval_mode():
                found, ctx = self.engine.forward_backward_step(share, forward_only=True)
            loss = ctx["loss"]
        else:
            with self.engine.train_mode():
                found, loss, _ = self.engine.forward_backward_step(share)
            self.accumulated.add(operation.model)
        return self.engine.unshard_data(found, operation.batch)["log_probs"], loss

    def _step(self, operation: ops.OptimizerStep) -> dict[str, float]:
        self._take(operation.model)
        if operation.model not in self.accumulated:
            raise UserError("optim_step", why="has no gradient", fix="call forward_backward before it")
        self.accumulated.discard(operation.model)
        watch = self.keys.guards and operation.model not in self.watched
        before = self.engine.guard_before_step() if watch else None
        norm = self.engine.optimizer_step(operation.update)
        problems = [one for one in self.engine.guard_after_step(before) if one.kind in FAULTS] if watch else []
        self.engine.optimizer_zero_grad()
        if norm.skipped is not None:
            fix = "look at the last data and the learning rate"
            raise UserError("optim_step", why=f"updated nothing: {norm.skipped}", fix=fix)
        if problems:
            what = "; ".join(map(str, problems[:5]))
            raise ServerFault("optim_step", why=f"did not train the model as it should: {what}", fix="report this")
        self.watched.add(operation.model)
        return {"grad_norm": float(norm)}

    def _drop(self, operation: ops.DropGradients) -> None:
        self._take(operation.model)
        self.engine.optimizer_zero_grad()
        self.accumulated.discard(operation.model)

    def _save(self, operation: ops.SaveCheckpoint) -> str:
        """Returns the folder of the checkpoint."""
        kind = self._take(operation.model)
        state = {"model": operation.model, "kind": dataclasses.asdict(kind)}
        number = self.engine.trained_state().updates
        return self.engine.save_checkpoint(operation.folder, global_step=number, max_ckpt_to_keep=1, state=state)

    def _export(self, operation: ops.ExportWeights) -> None:
        """Writes the folder whole or not at all."""
        kind = self._take(operation.model)
        partial = f"{operation.folder}.partial"
        _write(lambda: shutil.rmtree(partial, ignore_errors=True), partial)
        if self.lora is None:
            self.engine.export_hf(partial)
        else:
            of_rank, shapes = self._lora_of(kind), self._shapes(kind)
            tensors = dict(self.engine.adapter_weights())
            own = padded.unpad_rank(tensors, shapes) if tensors else {}  # they come on the main rank
            _write(lambda: write_adapter(partial, of_rank, self.folder, own.items()), partial)
        _write(lambda: add_end_tokens(partial, self.folder, self.end_tokens.own, self.end_tokens.added), partial)
        _write(lambda: _replace(partial, operation.folder), operation.folder)

    # -- from one start to the next ------------------------------------------------------------------------------------

    def _suspend(self, operation: ops.SuspendModels) -> None:
        """Writes what each rank holds: nothing is gathered, and nothing changes its layout."""
        self._park()
        _write(lambda: os.makedirs(operation.folder), operation.folder)
        parts = {"models": self.waiting, "snapshots": self.snapshots}
        plain: dict[str, Any] = {p: {name: _as_plain(held) for name, held in of.items()} for p, of in parts.items()}
        plain["accumulated"], path = sorted(self.accumulated), self._own_file(operation.folder)
        call_on_every_rank(lambda: _written(lambda: write_pt(path, plain), path))

    def _resume(self, operation: ops.ResumeModels) -> None:
        """Takes over what was suspended, on all ranks or on none. Raises UserError if a rank cannot read its own."""
        self.waiting, self.snapshots, self.accumulated = call_on_every_rank(lambda: self._suspended(operation.folder))

    def _suspended(self, folder: str) -> tuple[dict[str, HeldModel], dict[str, HeldModel], set[str]]:
        path = self._own_file(folder)
        state = read_pt(path, fields=("models", "snapshots", "accumulated"))
        try:
            models, snapshots = (
                {name: _of_plain(plain) for name, plain in state[part].items()} for part in ("models", "snapshots")
            )
            return models, snapshots, set(state["accumulated"])
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(path, why=f"is damaged ({type(error).__name__}: {first_line(error)})") from error

    def _own_file(self, folder: str) -> str:
        return os.path.join(folder, f"rank_{all_ranks().rank:05d}.pt")

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _snapshot_weights(self, kind: ModelKind) -> HeldModel:
        """Returns the engine's present weights, without the state that only training needs."""
        state = self.engine.trained_state()
        moments = self.start.moments
        return HeldModel(kind, dataclasses.replace(state, moments=moments, updates=0, gradients=None, spent=False))

    def _freeze(self, operation: ops.TakeSnapshot) -> None:
        kind = self._take(operation.model)
        self.snapshots[operation.snapshot] = self._snapshot_weights(kind)
        if operation.folder is not None:
            self._export(ops.ExportWeights(operation.model, operation.folder))
            self.folders[operation.snapshot] = operation.folder
        of_model = [name for name in self.snapshots if name.startswith(f"{operation.model}:")]
        self._forget(ops.ForgetModels(snapshots=of_model[: -self.keys.snapshots]))

    def _thaw(self, operation: ops.LoadSnapshot) -> None:
        self._park()
        self._fill(HeldModel(operation.kind, self.start))
        if self.lora is None:
            self.engine.load_hf(operation.folder)
        else:
            # if one rank cannot read it, none continues
            _, tensors = call_on_every_rank(lambda: read_adapter(operation.folder))
            self.engine.set_adapters(padded.pad_rank(tensors, self._shapes(operation.kind), self.lora.rank))
        self.snapshots[operation.snapshot] = self._snapshot_weights(operation.kind)
        thawed = [name for name in self.snapshots if name.startswith(PREFIX) and name not in self.running]
        self._forget(ops.ForgetModels(snapshots=thawed[: -self.keys.snapshots]))  # read again when asked for again

    def _forget(self, operation: ops.ForgetModels) -> None:
        for name in operation.models:
            self.waiting.pop(name, None)
            self.accumulated.discard(name)
            self.watched.discard(name)
            if self.active is not None and self.active[0] == name:
                self.active = None
        for name in operation.snapshots:
            self.snapshots.pop(name, None)
            self.running.pop(name, None)
            folder = self.folders.pop(name, None)
            if folder is not None:
                on_main(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))  # type: ignore[misc]

    # -- sampling ----------------------------------------------------------------------------------------------------

    def _sample_all(self, operation: ops.ContinueSampling) -> dict[str, SampleOutcome]:
        """Returns the outcomes of samples that have ended, by name."""
        running, kept = self.running.setdefault(operation.snapshot, ({}, KeptSequences(self.keys.cache_tokens)))
        for _, of_snapshot in self.running.values():  # together they have the room of one
            of_snapshot.shrink(self.keys.cache_tokens // len(self.running))
        running |= {name: _RunningSample(sample) for name, sample in operation.begun.items()}
        for name in operation.left:
            running.pop(name, None)
        try:
            return self._drawn(operation, running, kept)
        except UserError:  # all that is drawn from there has failed
            self.running.pop(operation.snapshot, None)
            raise

    def _drawn(
        self, operation: ops.ContinueSampling, running: dict[str, _RunningSample], kept: KeptSequences
    ) -> dict[str, SampleOutcome]:  # fmt: skip
        self._show(operation.snapshot)
        for _, other in self.running.values():
            if other is not kept:  # there is room for one copy of prepared weights
                other.prepared.value = None
        going = [(one, i) for one in running.values() for i in one.unfinished]
        requests = [self._request(one, i, operation.tokens) for one, i in going]
        drawn = [] if not requests else self.engine.generate(
            requests, cache_tokens=self.keys.cache_tokens, prefill_tokens=self.keys.prefill_tokens, kept=kept
        )  # fmt: skip
        for (one, i), completion in zip(going, drawn, strict=True):
            one.add(i, completion)
        ended = {name: one for name, one in running.items() if not one.unfinished}
        for name in ended:
            del running[name]
        if not running:
            del self.running[operation.snapshot]
        return dict(zip(ended, self._with_log_probs(list(ended.values())), strict=True))

    def _show(self, snapshot: str | None) -> None:
        """Gives the engine the weights of a snapshot; None is the base model."""
        if self.shown != (snapshot,):
            self._park()
            kind = ModelKind(None if self.lora is None else self.lora.rank)
            self._fill(HeldModel(kind, self.start) if snapshot is None else self.snapshots[snapshot])
            self.shown = (snapshot,)

    def _request(self, one: _RunningSample, index: int, tokens: int) -> GenerateRequest:
        sample, before = one.sample, one.completions[index].tokens
        stops = self._stop_texts(tuple(sample.stop)) if sample.stop else None
        return GenerateRequest(
            tokens=[*sample.tokens, *before], max_new_tokens=min(tokens, sample.max_new_tokens - len(before)),
            stop_tokens=sample.stop_tokens, sampling=sample.sampling,
            key=SamplingKey(seed=sample.seed, prompt=one.prompt, sample=index),
            stop_at=None if stops is None else lambda new: stops([*before, *new]),
        )  # fmt: skip

    def _with_log_probs(self, ended: Sequence[_RunningSample]) -> list[SampleOutcome]:
        """Adds the requested scores: log-probs of prompts, and the likeliest tokens beside each token.

        Samples that ask alike share one forward pass.
        """
        passes: dict[tuple[int, float], dict[tuple[int, int | None], Sequence[int]]] = {}
        for i, one in enumerate(ended):
            sample = one.sample
            if (sample.prompt_log_probs or sample.top_of_prompt) and len(sample.tokens) > 1:
                passes.setdefault((sample.top_of_prompt, 1.0), {})[i, None] = sample.tokens
            for k, drawn in enumerate(one.completions if sample.top_of_samples else ()):
                how = sample.top_of_samples, sample.sampling.temperature or 1.0
                passes.setdefault(how, {})[i, k] = [*sample.tokens, *drawn.tokens]
        read: dict[tuple[int, int | None], _Read] = {}
        for how, of in passes.items():
            read |= zip(of, self._read(list(of.values()), *how), strict=True)
        return [self._sampled(one, i, read) for i, one in enumerate(ended)]

    def _sampled(self, one: _RunningSample, i: int, read: Mapping[tuple[int, int | None], _Read]) -> SampleOutcome:
        sample, prompt, of_samples = one.sample, read.get((i, None)), None
        if sample.top_of_samples:
            first = len(sample.tokens) - 1
            whole = [read[i, k] for k in range(len(one.completions))]
            of_samples = [(log_probs[first:], ids[first:]) for _, log_probs, ids in whole]
        log_probs = [] if prompt is None else prompt[0].tolist()
        top = None if prompt is None or not sample.top_of_prompt else prompt[1:]
        return SampleOutcome(one.completions, log_probs if sample.prompt_log_probs else None, top, of_samples)

    def _read(self, sequences: Sequence[Sequence[int]], top: int, temperature: float) -> list[_Read]:
        """Returns the model's scores of the last T tokens, for each sequence of T + 1 tokens."""
        tokens = [torch.tensor(sequence) for sequence in sequences]
        lengths = [len(ids) - 1 for ids in tokens]
        batch = Batch(
            tokens=torch.cat([ids[:-1] for ids in tokens]), labels=torch.cat([ids[1:] for ids in tokens]),
            loss_mask=torch.ones(sum(lengths)), lengths=torch.tensor(lengths),
            denominators={DENOMINATOR: 1.0, "tokens": float(sum(lengths)), "sequences": float(len(lengths))},
        )  # fmt: skip
        self.engine.set_loss_fn(None, DENOMINATOR)
        with self.engine.eval_mode():
            ctx = {"temperature": temperature, "top": top}
            found, _ = self.engine.forward_backward_step(self.engine.shard_data(batch), ctx, forward_only=True)
            whole = self.engine.unshard_data(found, batch)
        nothing = torch.zeros(sum(lengths), 0)
        names = ("log_probs", "top_log_probs", "top_tokens")
        log_probs, largest, ids = (whole.get(name, nothing).split(lengths) for name in names)
        return list(zip(log_probs, largest, ids, strict=True))


def _as_plain(held: HeldModel) -> dict[str, Any]:
    """Returns plain data that torch reads again without running anything."""
    state = {field.name: getattr(held.state, field.name) for field in dataclasses.fields(TrainedState)}
    return {"kind": dataclasses.asdict(held.kind), "state": state}


def _of_plain(plain: Mapping[str, Any]) -> HeldModel:
    return HeldModel(ModelKind(**plain["kind"]), TrainedState(**plain["state"]))


def _write(fn: Callable[[], Any], path: str) -> None:
    """Calls `fn`, which writes at `path`, on the main rank. A file system's refusal is a UserError on all ranks."""
    on_main(lambda: _written(fn, path))


def _written(fn: Callable[[], Any], path: str) -> None:
    try:
        fn()
    except OSError as error:
        raise write_error_line(error, path) from error


class ServerFault(UserError):
    """The server or its machine is at fault, for example a full disk: no mistake of a client."""


def write_error_line(error: OSError, path: object = "the server's directory") -> ServerFault:
    """Returns the error for a file that could not be written."""
    at = error.filename or path
    return ServerFault(at, why=f"cannot be written ({error.strerror or error})", fix="make room there, and ask again")


def _replace(partial: str, folder: str) -> None:
    if os.path.exists(folder):
        shutil.rmtree(folder)
    os.rename(partial, folder)
