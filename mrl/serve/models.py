"""The models of a server over its one engine. Every rank has these and does each operation together with the others.

The engine holds the model whose turn it is; what trains of the others waits in host memory
(`mrl.engine.trained_state`).
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
from mrl.converters.pt_file import read_pt, write_pt
from mrl.converters.tokenizer_files import add_end_tokens
from mrl.engine import guards
from mrl.engine.base import BaseEngine, Completion, GenerateRequest
from mrl.engine.collective import all_ranks, on_every, on_main
from mrl.engine.kept import KeptSequences
from mrl.engine.lora.folder import adapters, read_adapter, write_adapter
from mrl.engine.sampling import SamplingKey
from mrl.engine.trained_state import TrainedState
from mrl.errors import CheckpointError, UserError, first_line, one_line
from mrl.rollout.stops import EndTokens, StopTexts
from mrl.serve import operations as ops
from mrl.serve import padded
from mrl.serve.ledger import PREFIX
from mrl.serve.operations import Kind, Sample


@dataclasses.dataclass(frozen=True)
class Held:
    """A model that waits for its turn, or is sampled from."""

    kind: Kind
    state: TrainedState


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What became of a `Sample`."""

    completions: Sequence[Completion]
    prompt_log_probs: Sequence[float] | None  # of the tokens after the first
    top_of_prompt: tuple[Tensor, Tensor] | None  # log-probs [tokens - 1, top], and their ids
    top_of_samples: Sequence[tuple[Tensor, Tensor]] | None  # of each completion [tokens, top]


_Read = tuple[Tensor, Tensor, Tensor]
"""(log-probs of the tokens after the first [T], the largest ones [T, top], their ids)."""

FAULTS = frozenset({guards.Kind.NO_GRADIENT, guards.Kind.NOT_FINITE, guards.Kind.REPLICAS_DIFFER})
"""What is wrong after any step. That a gradient is zero, or a parameter stays, may be as a client wants it."""

STOPS = 256
"""Sets of stop texts that are remembered, each with what it has learnt of the vocabulary."""

THAWED = 16
"""Saved snapshots that are held at once, beside those that are being sampled from."""


def prompt_number(tokens: Sequence[int]) -> int:
    """Returns a number that a prompt's noise follows from: with the same seed the same prompt gets the same samples."""
    return int.from_bytes(hashlib.sha256(repr(list(tokens)).encode()).digest()[:7], "big")


@dataclasses.dataclass
class _Running:
    """A sample that is being drawn, in parts."""

    sample: Sample
    prompt: int  # a number of the prompt: requests of equal numbers and seeds are equal
    completions: list[Completion]  # so far

    @staticmethod
    def of(sample: Sample) -> _Running:
        nothing = [Completion([], [], finished=False) for _ in range(sample.count)]
        return _Running(sample, prompt_number(sample.tokens), nothing)

    @property
    def going(self) -> list[int]:
        """The completions that are not whole."""
        most = self.sample.max_new_tokens
        return [i for i, one in enumerate(self.completions) if not one.finished and len(one.tokens) < most]

    def add(self, index: int, more: Completion) -> None:
        """Adds what was drawn to a completion."""
        before = self.completions[index]
        self.completions[index] = Completion(
            before.tokens + more.tokens, before.log_probs + more.log_probs, more.finished
        )


class Models:
    """Models that train, and snapshots of them, by name. lora: the adapters of the engine; None: all weights train.
    folder: of the base model."""

    def __init__(
        self, engine: BaseEngine, tokenizer: PreTrainedTokenizerBase, lora: LoraConfig | None, folder: str,
        keys: ServeKeys,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.lora, self.folder, self.keys = engine, tokenizer, lora, folder, keys
        self.start = engine.trained_state()
        self.waiting: dict[str, Held] = {}
        self.snapshots: dict[str, Held] = {}
        self.folders: dict[str, str] = {}  # of snapshots that inference servers load
        self.active: tuple[str, Kind] | None = None
        self.shown: tuple[str | None] | None = None  # the snapshot that the engine has, where it has no active model
        self.accumulated: set[str] = set()  # models that have gradients
        self.watched: set[str] = set()  # models that have made a step since this start, which was looked at
        self.running: dict[str | None, tuple[dict[str, _Running], KeptSequences]] = {}  # by snapshot
        self._stops: dict[tuple[str, ...], StopTexts] = {}
        self.spoken = time.monotonic()  # when the main rank told the others of an operation last
        self._do: Mapping[type, Callable[[Any], Any]] = {
            ops.Create: self._create, ops.Load: self._load, ops.Pass: self._pass, ops.Step: self._step,
            ops.Drop: self._drop, ops.Save: self._save, ops.Export: self._export, ops.Freeze: self._freeze,
            ops.Thaw: self._thaw, ops.SampleAll: self._sample_all, ops.Forget: self._forget,
            ops.Suspend: self._suspend, ops.Resume: self._resume,
        }  # fmt: skip

    @functools.cached_property
    def ends(self) -> EndTokens:
        """The tokens that end a completion."""
        return EndTokens.of(self.folder, self.tokenizer)

    def do(self, operation: Any) -> Any:
        """Does an operation and returns what came of it. Collective. A UserError is raised on every rank alike, and the
        models are as they were, but for gradients where memory ran out."""
        try:
            return self._do[type(operation)](operation)
        except torch.OutOfMemoryError as error:
            if all_ranks().size > 1 or not isinstance(operation, (ops.Pass, ops.SampleAll)):
                raise  # others wait for this rank, or the model is half of what it was
            line = one_line(error, 160)
        return self._ran_out(operation, line)  # here, as the error has held on to what the engine was computing

    def _ran_out(self, operation: ops.Pass | ops.SampleAll, line: str) -> NoReturn:
        """Goes on without what a call was computing, which was too much for the device. Raises OwnFault."""
        torch.cuda.empty_cache()
        if isinstance(operation, ops.SampleAll):
            self.running.pop(operation.snapshot, None)
            raise OwnFault(
                "asample", why=f"ran out of memory ({line})", fix="ask for fewer, or lower serve.cache_tokens"
            )
        if not operation.forward_only:
            self._drop(ops.Drop(operation.model))
        raise OwnFault("forward_backward", why=f"ran out of memory ({line})", fix="lower engine.micro_batch.tokens")

    # -- whose turn it is --------------------------------------------------------------------------------------------

    def _put_away(self) -> None:
        self.shown = None
        if self.active is not None:
            name, kind = self.active
            self.waiting[name] = Held(kind, self.engine.trained_state())
        self.active = None

    def _take(self, name: str) -> Kind:
        """Gives the engine the model `name`."""
        if self.active is None or self.active[0] != name:
            if name not in self.waiting:
                raise UserError("model_id", name, "is gone", "create another")
            self._put_away()
            held = self.waiting[name]
            self._fill(held)
            del self.waiting[name]
            self.active = name, held.kind
        return self.active[1]

    def _fill(self, held: Held) -> None:
        self.engine.set_trained_state(held.state)
        if self.lora is not None:
            self.engine.set_adapter_scale(self._scale(held.kind))

    def _scale(self, kind: Kind) -> float:
        lora = self._lora_of(kind)
        return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)

    def _lora_of(self, kind: Kind) -> LoraConfig:
        assert self.lora is not None and kind.rank is not None
        if kind.alpha is None:  # the base, whose adapters are zero
            return dataclasses.replace(self.lora, rank=kind.rank)
        return dataclasses.replace(self.lora, rank=kind.rank, alpha=kind.alpha, rslora=kind.rslora)

    def _shapes(self, kind: Kind) -> padded.Shapes:
        return adapters(self.folder, self._lora_of(kind), "lm")

    # -- models that train -------------------------------------------------------------------------------------------

    def _create(self, asked: ops.Create) -> None:
        self._put_away()
        self._fill(Held(asked.kind, self.start))
        if self.lora is not None:
            kind = asked.kind
            start = padded.initial(
                self._shapes(kind), self.lora.rank, kind.seed, attention=kind.attention, mlp=kind.mlp
            )
            self.engine.set_adapters(start)
        self.engine.optimizer_zero_grad()
        self.active = asked.model, asked.kind

    def _load(self, asked: ops.Load) -> None:
        self._put_away()
        self._fill(Held(asked.kind, self.start))
        self.engine.load_checkpoint(asked.folder)
        if not asked.optimizer:
            state = self.engine.trained_state()
            moments = [torch.zeros_like(moment) for moment in state.moments]
            self.engine.set_trained_state(dataclasses.replace(state, moments=moments, updates=0))
        self.engine.optimizer_zero_grad()
        self._forget(ops.Forget(models=[asked.model]))  # as it was before
        self.active = asked.model, asked.kind

    def _pass(self, asked: ops.Pass) -> tuple[Tensor, float]:
        """Returns the log-probs of all positions and the loss."""
        self._take(asked.model)
        self.engine.set_loss_fn(SummedLoss(asked.loss, asked.options), DENOMINATOR)
        share = self.engine.shard_data(asked.batch)
        if asked.forward_only:
            with self.engine.eval_mode():
                found, ctx = self.engine.forward_backward_step(share, forward_only=True)
            loss = ctx["loss"]
        else:
            with self.engine.train_mode():
                found, loss, _ = self.engine.forward_backward_step(share)
            self.accumulated.add(asked.model)
        return self.engine.unshard_data(found, asked.batch)["log_probs"], loss

    def _step(self, asked: ops.Step) -> dict[str, float]:
        self._take(asked.model)
        if asked.model not in self.accumulated:
            raise UserError("optim_step", why="has no gradient", fix="call forward_backward before it")
        self.accumulated.discard(asked.model)
        watch = self.keys.guards and asked.model not in self.watched
        before = self.engine.guard_before_step() if watch else None
        norm = self.engine.optimizer_step(asked.update)
        problems = [one for one in self.engine.guard_after_step(before) if one.kind in FAULTS] if watch else []
        self.engine.optimizer_zero_grad()
        if norm.skipped is not None:
            fix = "look at the last data and the learning rate"
            raise UserError("optim_step", why=f"updated nothing: {norm.skipped}", fix=fix)
        if problems:
            what = "; ".join(map(str, problems[:5]))
            raise OwnFault("optim_step", why=f"did not train the model as it should: {what}", fix="report this")
        self.watched.add(asked.model)
        return {"grad_norm": float(norm)}

    def _drop(self, asked: ops.Drop) -> None:
        self._take(asked.model)
        self.engine.optimizer_zero_grad()
        self.accumulated.discard(asked.model)

    def _save(self, asked: ops.Save) -> str:
        """Returns the folder of the checkpoint."""
        kind = self._take(asked.model)
        state = {"model": asked.model, "kind": dataclasses.asdict(kind)}
        number = self.engine.trained_state().updates
        return self.engine.save_checkpoint(asked.folder, global_step=number, max_ckpt_to_keep=1, state=state)

    def _export(self, asked: ops.Export) -> None:
        """Writes the folder whole or not at all."""
        kind = self._take(asked.model)
        partial = f"{asked.folder}.partial"
        _write(lambda: shutil.rmtree(partial, ignore_errors=True), partial)
        if self.lora is None:
            self.engine.export_hf(partial)
        else:
            of_rank, shapes = self._lora_of(kind), self._shapes(kind)
            tensors = dict(self.engine.adapter_weights())
            own = padded.narrowed(tensors, shapes, self.lora.rank) if tensors else {}  # they come on the main rank
            _write(lambda: write_adapter(partial, of_rank, self.folder, own.items()), partial)
        _write(lambda: add_end_tokens(partial, self.folder, self.ends.own, self.ends.added), partial)
        _write(lambda: _replace(partial, asked.folder), asked.folder)

    # -- from one start to the next ------------------------------------------------------------------------------------

    def _suspend(self, asked: ops.Suspend) -> None:
        """Every rank writes what it holds: nothing is gathered, and nothing changes its layout."""
        self._put_away()
        _write(lambda: os.makedirs(asked.folder), asked.folder)
        parts = {"models": self.waiting, "snapshots": self.snapshots}
        plain: dict[str, Any] = {p: {name: _as_plain(held) for name, held in of.items()} for p, of in parts.items()}
        plain["accumulated"], path = sorted(self.accumulated), self._own_file(asked.folder)
        on_every(lambda: _written(lambda: write_pt(path, plain), path))

    def _resume(self, asked: ops.Resume) -> None:
        """Takes over what was suspended; nothing of it on any rank where one cannot read its own. Raises UserError."""
        self.waiting, self.snapshots, self.accumulated = on_every(lambda: self._suspended(asked.folder))

    def _suspended(self, folder: str) -> tuple[dict[str, Held], dict[str, Held], set[str]]:
        path = self._own_file(folder)
        found = read_pt(path, fields=("models", "snapshots", "accumulated"))
        try:
            models, snapshots = (
                {name: _of_plain(plain) for name, plain in found[part].items()} for part in ("models", "snapshots")
            )
            return models, snapshots, set(found["accumulated"])
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(path, why=f"is damaged ({type(error).__name__}: {first_line(error)})") from error

    def _own_file(self, folder: str) -> str:
        return os.path.join(folder, f"rank_{all_ranks().rank:05d}.pt")

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _frozen(self, kind: Kind) -> Held:
        """Returns the weights that the engine has now, without what only training needs."""
        state = self.engine.trained_state()
        moments = self.start.moments
        return Held(kind, dataclasses.replace(state, moments=moments, updates=0, gradients=None, spent=False))

    def _freeze(self, asked: ops.Freeze) -> None:
        kind = self._take(asked.model)
        self.snapshots[asked.snapshot] = self._frozen(kind)
        if asked.folder is not None:
            self._export(ops.Export(asked.model, asked.folder))
            self.folders[asked.snapshot] = asked.folder
        of_model = [name for name in self.snapshots if name.startswith(f"{asked.model}:")]
        self._forget(ops.Forget(snapshots=of_model[: -self.keys.snapshots]))

    def _thaw(self, asked: ops.Thaw) -> None:
        self._put_away()
        self._fill(Held(asked.kind, self.start))
        if self.lora is None:
            self.engine.load_hf(asked.folder)
        else:
            _, tensors = on_every(lambda: read_adapter(asked.folder))  # what one rank cannot read, none goes on with
            self.engine.set_adapters(padded.widened(tensors, self._shapes(asked.kind), self.lora.rank))
        self.snapshots[asked.snapshot] = self._frozen(asked.kind)
        thawed = [name for name in self.snapshots if name.startswith(PREFIX) and name not in self.running]
        most = self.keys.snapshots if self.lora is None else THAWED  # a whole model each, or adapters
        self._forget(ops.Forget(snapshots=thawed[:-most]))  # it is read again when it is asked for again

    def _forget(self, asked: ops.Forget) -> None:
        for name in asked.models:
            self.waiting.pop(name, None)
            self.accumulated.discard(name)
            self.watched.discard(name)
            if self.active is not None and self.active[0] == name:
                self.active = None
        for name in asked.snapshots:
            self.snapshots.pop(name, None)
            self.running.pop(name, None)
            if (folder := self.folders.pop(name, None)) is not None:
                on_main(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))  # type: ignore[misc]

    # -- sampling ----------------------------------------------------------------------------------------------------

    def _sample_all(self, asked: ops.SampleAll) -> dict[str, Sampled]:
        """Returns what has ended, by the names of its samples."""
        running, kept = self.running.setdefault(asked.snapshot, ({}, KeptSequences(self.keys.cache_tokens)))
        for _, of_snapshot in self.running.values():  # together they have the room of one
            of_snapshot.shrink(self.keys.cache_tokens // len(self.running))
        running |= {name: _Running.of(sample) for name, sample in asked.begun.items()}
        for name in asked.left:
            running.pop(name, None)
        try:
            return self._drawn(asked, running, kept)
        except UserError:  # all that is drawn from there has failed
            self.running.pop(asked.snapshot, None)
            raise

    def _drawn(
        self, asked: ops.SampleAll, running: dict[str, _Running], kept: KeptSequences
    ) -> dict[str, Sampled]:  # fmt: skip
        self._show(asked.snapshot)
        for _, other in self.running.values():
            if other is not kept:  # of weights that are made ready for drawing there is one copy
                other.prepared.value = None
        going = [(one, i) for one in running.values() for i in one.going]
        requests = [self._request(one, i, asked.tokens) for one, i in going]
        drawn = [] if not requests else self.engine.generate(
            requests, cache_tokens=self.keys.cache_tokens, prefill_tokens=self.keys.prefill_tokens, kept=kept
        )  # fmt: skip
        for (one, i), completion in zip(going, drawn, strict=True):
            one.add(i, completion)
        ended = {name: one for name, one in running.items() if not one.going}
        for name in ended:
            del running[name]
        if not running:
            del self.running[asked.snapshot]
        return dict(zip(ended, self._with_log_probs(list(ended.values())), strict=True))

    def _show(self, snapshot: str | None) -> None:
        """Gives the engine the weights of a snapshot; None is the base model."""
        if self.shown != (snapshot,):
            self._put_away()
            kind = Kind(None if self.lora is None else self.lora.rank)
            self._fill(Held(kind, self.start) if snapshot is None else self.snapshots[snapshot])
            self.shown = (snapshot,)

    def _request(self, one: _Running, index: int, tokens: int) -> GenerateRequest:
        sample, before = one.sample, one.completions[index].tokens
        stop = tuple(sample.stop)
        if stop and stop not in self._stops:
            if len(self._stops) >= STOPS:
                self._stops.pop(next(iter(self._stops)))
            self._stops[stop] = StopTexts(self.tokenizer, stop)
        stops = self._stops.get(stop)
        return GenerateRequest(
            tokens=[*sample.tokens, *before], max_new_tokens=min(tokens, sample.max_new_tokens - len(before)),
            stop_tokens=sample.stop_tokens, sampling=sample.sampling,
            key=SamplingKey(seed=sample.seed, prompt=one.prompt, sample=index),
            stop_at=None if stops is None else lambda new: stops([*before, *new]),
        )  # fmt: skip

    def _with_log_probs(self, ended: Sequence[_Running]) -> list[Sampled]:
        """Adds what is asked of prompts and of the tokens' neighbours: a forward pass for all that ask alike."""
        asked: dict[tuple[int, float], dict[tuple[int, int | None], Sequence[int]]] = {}
        for i, one in enumerate(ended):
            sample = one.sample
            if (sample.prompt_log_probs or sample.top_of_prompt) and len(sample.tokens) > 1:
                asked.setdefault((sample.top_of_prompt, 1.0), {})[i, None] = sample.tokens
            for k, drawn in enumerate(one.completions if sample.top_of_samples else ()):
                how = sample.top_of_samples, sample.sampling.temperature or 1.0
                asked.setdefault(how, {})[i, k] = [*sample.tokens, *drawn.tokens]
        read: dict[tuple[int, int | None], _Read] = {}
        for how, of in asked.items():
            read |= zip(of, self._read(list(of.values()), *how), strict=True)
        return [self._sampled(one, i, read) for i, one in enumerate(ended)]

    def _sampled(self, one: _Running, i: int, read: Mapping[tuple[int, int | None], _Read]) -> Sampled:
        sample, prompt, of_samples = one.sample, read.get((i, None)), None
        if sample.top_of_samples:
            first = len(sample.tokens) - 1
            whole = [read[i, k] for k in range(len(one.completions))]
            of_samples = [(log_probs[first:], ids[first:]) for _, log_probs, ids in whole]
        log_probs = [] if prompt is None else prompt[0].tolist()
        top = None if prompt is None or not sample.top_of_prompt else prompt[1:]
        return Sampled(one.completions, log_probs if sample.prompt_log_probs else None, top, of_samples)

    def _read(self, sequences: Sequence[Sequence[int]], top: int, temperature: float) -> list[_Read]:
        """Returns of each sequence of T + 1 tokens what the model says of the last T."""
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


def _as_plain(held: Held) -> dict[str, Any]:
    """Returns what torch reads again without running anything."""
    state = {field.name: getattr(held.state, field.name) for field in dataclasses.fields(TrainedState)}
    return {"kind": dataclasses.asdict(held.kind), "state": state}


def _of_plain(plain: Mapping[str, Any]) -> Held:
    return Held(Kind(**plain["kind"]), TrainedState(**plain["state"]))


def _write(fn: Callable[[], Any], path: str) -> None:
    """Calls `fn`, which writes at `path`, on the main rank. What the file system refuses is a UserError of all."""
    on_main(lambda: _written(fn, path))


def _written(fn: Callable[[], Any], path: str) -> None:
    try:
        fn()
    except OSError as error:
        raise unwritten(error, path) from error


class OwnFault(UserError):
    """The server or its machine is at fault, as a disk that is full: no mistake of a client."""


def unwritten(error: OSError, path: object = "the server's directory") -> OwnFault:
    """Returns the line on what could not be written."""
    at = error.filename or path
    return OwnFault(at, why=f"cannot be written ({error.strerror or error})", fix="make room there, and ask again")


def _replace(partial: str, folder: str) -> None:
    if os.path.exists(folder):
        shutil.rmtree(folder)
    os.rename(partial, folder)
