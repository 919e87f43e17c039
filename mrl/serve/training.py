"""Handles the calls of a training client: sessions, models, passes, steps, saves (docs/serve.md).

Everything here runs on the thread of the HTTP server. The ranks' work is queued as a `PreparedOperation`. Its `answer`
turns the outcome into an answer, on the main thread.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from mrl.config.schema import LoraConfig
from mrl.engine.base import Completion
from mrl.engine.trained_state import UpdateSettings
from mrl.errors import UserError
from mrl.serve import datums
from mrl.serve import operations as ops
from mrl.serve.app import ClientRequest, future_response, json_result
from mrl.serve.ledger import ENDED, PREFIX, Ledger, ModelRecord, Part, SamplerRecord, SavedRecord, check_name
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import PROTOBUF, Future, QueueFull, RequestQueue, Result
from mrl.serve.requests import RequestError, field, metadata_of, number, seconds_of

OLDEST_CLIENT = (0, 29)
MIN_EPS = 1e-30
"""AdamW divides by no less: with 0, what has had no gradient yet, as what pads adapters, would be no number."""


@dataclasses.dataclass(frozen=True)
class PreparedOperation:
    """An operation and the functions that turn its outcome into an answer."""

    operation: Any
    answer: Callable[[Any], Result]
    check: Callable[[], None] = lambda: None  # called just before it is done; may raise UserError
    fallback: Any = None  # an operation that is done if `check` raised
    on_failure: Callable[[str], None] = lambda line: None  # told why, where nothing came of it
    progress: Callable[[Sequence[Completion]], None] | None = None  # told of completions while they are drawn


@dataclasses.dataclass(frozen=True)
class SamplingQueue:
    """The key of a queue: samples of a save made at a time, of a snapshot, or of the base (neither)."""

    path: str | None
    saved: float | None
    snapshot: str | None


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """The model that is served.

    base: the model's name, for clients. tokenizer: where they load its tokenizer from."""

    base: str
    tokenizer: str
    limits: datums.Limits
    lora: LoraConfig | None  # the adapters of the engine; None: one model, of which all weights train
    max_models: int
    exports: pathlib.Path | None = None  # the folder of snapshots for inference servers


class TrainingHandlers:
    """Handle the calls of a training client."""

    def __init__(self, served: ServedModel, ledger: Ledger, request_queue: RequestQueue) -> None:
        self.served, self.ledger, self.request_queue = served, ledger, request_queue
        self.lost: dict[str, dict[int, str]] = {}  # model -> numbers of passes that came to nothing since its last step

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def create_session(self, request: ClientRequest) -> Response:
        version = field(request.json, "sdk_version", str, "")
        if parse_version(version) < OLDEST_CLIENT:
            oldest = ".".join(map(str, OLDEST_CLIENT))
            raise RequestError(
                400,
                f"tinker {version or 'of no version'} is too old for this server: pip install -U 'tinker>={oldest}'",
            )
        id = f"s{secrets.token_hex(8)}"
        self.ledger.session(id)
        return JSONResponse({"session_id": id, "info_message": self._differences()})

    def _differences(self) -> str:
        lora = self.served.lora
        if lora is None:
            return (
                f"mrl serve: all weights of {self.served.base} train, of one model at a time; lora_config is not read"
            )
        return (
            f"mrl serve: adapters of rank 1 to {lora.rank} on {self.served.base}, alpha {lora.alpha:g}; the output "
            "layer has none (train_unembed is not read)"
        )

    async def session_heartbeat(self, request: ClientRequest) -> Response:
        id = field(request.json, "session_id", str)
        if self.ledger.sessions.get(id, ENDED) == ENDED:  # a late one revives none
            raise RequestError(410, f"there is no session {id[:40]} here (any more)")
        self.ledger.record_heartbeat(id)
        return JSONResponse({})

    async def finish_session(self, request: ClientRequest) -> Response:
        """Ends a session. Its models are freed once they have done their work."""
        id = request.path["id"]
        if self.ledger.sessions.get(id, ENDED) != ENDED:  # the first one counts
            self.ledger.finish(id)
        return JSONResponse({"session_id": id})

    def _session(self, body: Mapping[str, Any]) -> str:
        id = field(body, "session_id", str)
        if id not in self.ledger.sessions:
            raise UserError("session_id", id, "is no session of this server", "make a new ServiceClient")
        if self.ledger.sessions[id] == ENDED:  # its models would be freed at once
            raise UserError("session_id", id, "has ended", "make a new ServiceClient")
        # its last heartbeat may be hours old, sent to an earlier start of the server
        self.ledger.record_heartbeat(id)
        return id

    # -- models ------------------------------------------------------------------------------------------------------

    async def create_model(self, request: ClientRequest) -> Response:
        body = request.json
        record = self._new_model(body, self._kind(field(body, "lora_config", dict, {})))
        base = field(body, "base_model", str, self.served.base)
        if base != self.served.base:
            raise UserError("base_model", base, "is not served here", f"give {self.served.base}")
        self._check_optimizer(body)
        return future_response(self._begin(record, ops.CreateModel(record.id, record.kind)))

    def _new_model(self, body: Mapping[str, Any], kind: ModelKind) -> ModelRecord:
        session, count = self._session(body), number(body, "model_seq_id")
        metadata = metadata_of(body)
        return ModelRecord(f"{session}:train:{count}", session, kind, self.served.base, metadata, time.time())

    def _begin(self, record: ModelRecord, operation: ops.CreateModel | ops.LoadModel) -> Future:
        """Puts the first operation of a model on its own queue, once."""

        def begun(_: Any) -> Result:
            self.ledger.models[record.id].here = True
            return json_result({"model_id": record.id, "path": getattr(operation, "path", None)})

        future = self.request_queue.future_of(record.id, 0)
        if future is not None:
            return future
        known = self.ledger.models.get(record.id)
        if known is None:
            held = [model for model in self.ledger.models.values() if model.here or self.request_queue.has(model.id)]
            most = 1 if self.served.lora is None else self.served.max_models
            full = len(held) >= most
            if full and any(self.ledger.sessions.get(model.session, ENDED) == ENDED for model in held):
                raise QueueFull  # one is about to be freed
            self.request_queue.check_room(0)
            if full:
                fix = "close a ServiceClient first, or raise serve.max_models (without model.lora one model trains)"
                raise UserError("model", record.id, f"is one more than the {most} that can be held at once", fix)
            self.ledger.model(record)
            self.request_queue.open(record.id, first=0)
        elif not self.request_queue.has(record.id):
            raise self._lost(record.id)
        return self.request_queue.put(record.id, 0, PreparedOperation(operation, begun), model=record.id)

    def _kind(self, config: Mapping[str, Any]) -> ModelKind:
        lora = self.served.lora
        if lora is None:
            return ModelKind()
        rank = number(config, "rank", lora.rank, least=1)
        if rank > lora.rank:
            fix = f"give at most {lora.rank}, or serve with model.lora.rank={rank}"
            raise UserError("lora_config.rank", rank, f"is above the rank {lora.rank} of this server", fix)
        attention, mlp = (field(config, f"train_{part}", bool, True) for part in ("attn", "mlp"))
        if not attention and not mlp:
            raise UserError("lora_config", why="trains neither attention nor MLP", fix="set train_attn or train_mlp")
        return ModelKind(rank, number(config, "seed", 0), attention, mlp, lora.alpha, lora.rslora)

    def _check_optimizer(self, body: Mapping[str, Any]) -> None:
        kind = field(body, "optimizer_config", dict, {}).get("type", "adamw")
        if kind != "adamw":
            raise UserError("optimizer_config.type", kind, "is not known here", "use adamw")

    def _model(self, body: Mapping[str, Any]) -> ModelRecord:
        id = field(body, "model_id", str)
        if id not in self.ledger.models:
            raise UserError("model_id", id, "is no model of this server", "create one")
        if not self.request_queue.has(id):
            raise self._lost(id)
        self.ledger.models[id].asked_at = time.time()
        return self.ledger.models[id]

    def _lost(self, id: str) -> UserError:
        saved = [one for one in self.ledger.saved.values() if one.run == id and one.part == "weights"]
        why = "is gone: the server was started anew, its client was gone for long, or it could not be made"
        fix = "nothing of it was saved: create another"
        if saved:
            fix = f"go on from {max(saved, key=lambda one: one.time).path}"
        return UserError("model_id", id, why, fix)

    def model_status(self, id: str) -> UserError:
        """Returns why a result of a model is not known."""
        if id not in self.ledger.models:
            return UserError("model_id", id, "is no model of this server", "create one")
        if not self.request_queue.has(id):
            return self._lost(id)
        why = "has done this, and its result is no longer kept"
        return UserError("model_id", id, why, "go on: its next call comes after it")

    async def get_info(self, request: ClientRequest) -> Response:
        id = field(request.json, "model_id", str)
        if id not in self.ledger.models:
            raise UserError("model_id", id, "is no model of this server", "create one")
        kind = self.ledger.models[id].kind
        data = {"model_name": self.served.base, "tokenizer_id": self.served.tokenizer, "arch": "unknown"}
        about = {"model_id": id, "model_data": data, "is_lora": kind.rank is not None, "model_name": self.served.base}
        return JSONResponse(about | {"lora_rank": kind.rank, "optimizer_config": {"type": "adamw"}, "type": "get_info"})

    async def unload_model(self, request: ClientRequest) -> Response:
        id = field(request.json, "model_id", str)
        known = self.request_queue.future_of("unload", id)
        if known is not None:
            return future_response(known)  # its answer was lost, and the model is gone by now
        self._model(request.json)

        def done(_: Any) -> Result:
            self.forget(id, UserError("model_id", id, "was unloaded", "create another"))
            return json_result({"model_id": id})

        work = PreparedOperation(ops.ForgetModels(models=[id]), done)
        return future_response(self.request_queue.put_batched(("unload", id), ("unload", id), work))

    def restore(self, ids: Collection[str], snapshots: Collection[str]) -> str:
        """Records that the ranks hold models and snapshots of an earlier start. Returns how many, in words."""
        for id in ids:
            self.ledger.models[id].here = True
        for session in {name.partition(":")[0] for name in (*ids, *snapshots)} & self.ledger.sessions.keys():
            if self.ledger.sessions[session] != ENDED:
                self.ledger.sessions[session] = time.time()
        return f"{len(ids)} {'model' if len(ids) == 1 else 'models'}" if ids else ""

    def forget(self, id: str, why: UserError) -> None:
        """Records that the ranks no longer have a model."""
        self.ledger.models[id].here = False
        self.request_queue.drop(id, why)
        self.lost.pop(id, None)

    # -- passes and steps --------------------------------------------------------------------------------------------

    async def _queue_call(
        self, body: Mapping[str, Any], prepare: Callable[[ModelRecord, int], PreparedOperation],
        lost: Callable[[str], None] = lambda line: None,
    ) -> Response:  # fmt: skip
        """Promises a call of a model.

        A call that is sent again gets its first future, whatever has changed since. Later calls do not wait for one
        that is refused. lost: is told why a call is refused.
        """
        model, count = self._model(body), number(body, "seq_id", least=1)
        known = self.request_queue.future_of(model.id, count)
        if known is None:
            try:
                work = await run_in_threadpool(prepare, model, count)  # images may take long to read
            except UserError as error:
                lost(str(error))
                self.request_queue.refuse(model.id, count)
                raise
            try:
                known = self.request_queue.put(model.id, count, work, model=model.id)
            except KeyError:  # it was freed meanwhile
                raise self._lost(model.id) from None
        return future_response(known)

    def fail_pass(self, model: str, number: int, line: str) -> None:
        """Records why a pass failed. The step after it fails too.

        A client sends a large batch in several passes, so the step would use the gradients of a part of it.
        """
        self.lost.setdefault(model, {})[number] = line

    def _check_passes(self, model: ModelRecord, number: int) -> None:
        """Raises UserError if a pass before the step with this number failed."""
        lost = self.lost.get(model.id, {})
        before = sorted(each for each in lost if each < number)
        if before:
            line = lost[before[0]]
            for each in before:
                del lost[each]
            why = f"has the gradients of a part of what was sent, as a forward_backward failed ({line})"
            raise UserError("optim_step", why=why, fix="they are forgotten: send the batch again, and a step after it")

    async def forward_backward(self, request: ClientRequest) -> Response:
        call = await run_in_threadpool(datums.read_call, request.body)

        def lose(line: str) -> None:
            if not call.forward_only:
                self.fail_pass(call.model, call.number, line)

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            options, batch = datums.options_of(call), datums.batch_of(call, self.served.limits)

            def answer(found: Any) -> Result:
                log_probs, loss = found
                return Result(datums.answer(batch, log_probs, {"loss": loss}), PROTOBUF)

            return PreparedOperation(
                ops.ForwardPass(model.id, batch, call.loss, options, call.forward_only), answer, on_failure=lose
            )

        body = {"model_id": call.model, "seq_id": call.number}
        return await self._queue_call(body, prepare, lose)

    async def optim_step(self, request: ClientRequest) -> Response:
        body = request.json

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            other = field(body, "optimizer_params", dict, {})
            self._check_optimizer({"optimizer_config": other})
            given = field(body, "adam_params", dict, other)
            return PreparedOperation(
                ops.OptimizerStep(model.id, update_of(given)), lambda found: json_result({"metrics": found}),
                lambda: self._check_passes(model, count), ops.DropGradients(model.id),
            )  # fmt: skip

        return await self._queue_call(body, prepare)

    # -- saves -------------------------------------------------------------------------------------------------------

    async def save_weights(self, request: ClientRequest) -> Response:
        body = request.json

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            name = field(body, "path", str, "") or f"step{count:08d}"
            return self._save(ops.SaveCheckpoint, model, "weights", name, body)

        return await self._queue_call(body, prepare)

    def _save(
        self, operation: type[ops.SaveCheckpoint | ops.ExportWeights], model: ModelRecord, part: Part, name: str,
        body: Mapping[str, Any],
    ) -> PreparedOperation:  # fmt: skip
        """Prepares a save or an export under a name.

        Whether the name is free is checked now and again just before the save, because two saves may wait at once. Of
        an export peft loads the folder over the base, or transformers loads it if all weights train.
        """
        check_name(name)
        ttl, metadata = seconds_of(body), metadata_of(body)
        path = f"{PREFIX}{model.id}/{part}/{name}"
        overwrite = field(body, "overwrite", bool, part == "sampler_weights")

        def check() -> None:
            if path in self.ledger.saved and not overwrite:
                raise UserError("path", name, "is saved already", "give another name, or overwrite=True")

        check()
        folder = self.ledger.folder_at(model.id, part, name)

        def saved(_: Any) -> Result:
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            now = time.time()
            expires = None if ttl is None else now + ttl
            self.ledger.save(SavedRecord(model.id, part, name, model.kind, model.base, now, size, expires, metadata))
            return json_result({"path": path, "size_bytes": size})

        return PreparedOperation(operation(model.id, str(folder)), saved, check)

    async def save_weights_external(self, request: ClientRequest) -> Response:
        body = request.json

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            if body.get("age_encryption_recipients"):
                why = "are not known here: files are written as they are"
                raise UserError("age_encryption_recipients", why=why, fix="leave them out")
            return self._save(ops.ExportWeights, model, "external_weights", field(body, "path", str), body)

        return await self._queue_call(body, prepare)

    async def load_weights(self, request: ClientRequest) -> Response:
        """Makes a model of a save, or loads one into the model of `model_id`, as clients before 0.38 ask."""
        body = request.json
        if "session_id" in body:
            id = f"{self._session(body)}:train:{number(body, 'model_seq_id')}"
            known = self.request_queue.future_of(id, 0)
            if known is not None:
                return future_response(known)  # though what it was made of may be deleted by now
            load, saved = self._to_load(body, None)
            return future_response(self._begin(self._new_model(body, saved.kind), load))

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            load, saved = self._to_load(body, model)
            return PreparedOperation(load, lambda _: json_result({"path": saved.path, "model_id": model.id}))

        return await self._queue_call(body, prepare)

    def _to_load(self, body: Mapping[str, Any], model: ModelRecord | None) -> tuple[ops.LoadModel, SavedRecord]:
        """Returns the operation that loads a save into `model`; None: into a new one. Raises UserError."""
        saved = self.ledger.find(field(body, "path", str))
        if saved.part != "weights":
            raise UserError("path", saved.path, "has weights to sample from alone", "give one of save_state")
        if field(body, "base_model", str, saved.base) != self.served.base:
            raise UserError("path", saved.path, f"is of {saved.base}", f"this server has {self.served.base}")
        self._check_optimizer(body)
        self._check_kind(saved, model)
        folder = str(self.ledger.folder_of(saved))
        made = self._new_model(body, saved.kind) if model is None else model
        return ops.LoadModel(made.id, made.kind, folder, field(body, "optimizer", bool, False)), saved

    def _check_kind(self, saved: SavedRecord, model: ModelRecord | None) -> None:
        lora = self.served.lora
        if (saved.kind.rank is None) != (lora is None):
            what = "all weights" if saved.kind.rank is None else "adapters"
            raise UserError("path", saved.path, f"has {what}", "serve with the model.lora that it was saved under")
        if model is not None and dataclasses.replace(saved.kind, seed=model.kind.seed) != model.kind:
            fix = "use create_training_client_from_state, which makes a model of its kind"
            raise UserError("path", saved.path, f"has {saved.kind}, the model {model.kind}", fix)

    async def save_weights_for_sampler(self, request: ClientRequest) -> Response:
        body = request.json

        def prepare(model: ModelRecord, count: int) -> PreparedOperation:
            name = field(body, "path", str, "")
            if not name:
                return self._freeze(model, count, body)
            return self._save(ops.ExportWeights, model, "sampler_weights", name, body)

        return await self._queue_call(body, prepare)

    def _freeze(self, model: ModelRecord, count: int, body: Mapping[str, Any]) -> PreparedOperation:
        id = f"{model.session}:sample:{number(body, 'sampling_session_seq_id')}"
        snapshot = f"{model.id}:{count}"

        def frozen(_: Any) -> Result:
            self.ledger.sampler(SamplerRecord(id, model.session, model.base, snapshot=snapshot))
            return json_result({"sampling_session_id": id})

        exports = self.served.exports
        folder = None if exports is None else str(exports / f"{model.id}-{count}".replace(":", "-"))
        return PreparedOperation(ops.TakeSnapshot(model.id, snapshot, folder), frozen)


def update_of(given: Mapping[str, Any]) -> UpdateSettings:
    """Returns the optimizer step that a client asks for, with the client's defaults. Raises UserError."""
    values = {
        name: field(given, name, float, default)
        for name, default in (
            ("learning_rate", 1e-4), ("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-12), ("weight_decay", 0.0),
            ("grad_clip_norm", 0.0),
        )
    }  # fmt: skip
    for name, value in values.items():
        least, most = {"eps": (MIN_EPS, 1.0), "grad_clip_norm": (0.0, math.inf)}.get(name, (0.0, 1e6))
        if value < least or value > most or (name.startswith("beta") and value >= 1):
            room = "0 or more, and less than 1" if name.startswith("beta") else f"{least:g} to {most:g}"
            raise UserError(f"adam_params.{name}", value, "is out of range", f"give {room}")
    return UpdateSettings(
        values["learning_rate"], (values["beta1"], values["beta2"]), values["eps"], values["weight_decay"],
        values["grad_clip_norm"],
    )  # fmt: skip


def parse_version(version: str) -> tuple[int, int]:
    """Returns the first two numbers of a version, zeros if it has none."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
