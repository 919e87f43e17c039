"""Handles the calls that list runs, checkpoints and sessions, and links to saves (docs/serve.md).

A client follows a link by a plain download, and sends no key. Whoever has a link may follow it until it is out of date.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import pathlib
import secrets
import tarfile
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, JSONResponse, Response

from mrl.serve.app import ClientRequest
from mrl.serve.ledger import Ledger, ModelRecord, SavedRecord
from mrl.serve.requests import RequestError, field, number, seconds_of

OWNER = "local"
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
MAX_PAGE = 1000
"""Entries of one answer."""
VALID_S = 3600
ROOT = "/api/v1/links"
_PARTIAL = ".tmp-"


class RecordHandlers:
    """Handles the endpoints of runs, checkpoints, sessions and links. The secret that signs is of one start."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.secret = ledger, secrets.token_bytes(32)
        for left in ledger.folder.glob(f"{_PARTIAL}*"):  # left by a server that was killed while it sent them
            left.unlink(missing_ok=True)

    # -- runs --------------------------------------------------------------------------------------------------------

    async def training_runs(self, request: ClientRequest) -> Response:
        runs = sorted(self.ledger.models.values(), key=lambda model: -model.asked_at)
        page, cursor = _page(request, runs)
        return JSONResponse({"training_runs": [self._run(model) for model in page], "cursor": cursor})

    async def training_run(self, request: ClientRequest) -> Response:
        return JSONResponse(self._run(self._model(request.path["id"])))

    def _model(self, id: str) -> ModelRecord:
        if id not in self.ledger.models:
            raise RequestError(404, f"there is no training run {id[:80]} here")
        return self.ledger.models[id]

    def _run(self, model: ModelRecord) -> dict[str, Any]:
        saved = self._saved_of(model.id)
        return {
            "training_run_id": model.id, "base_model": model.base, "model_owner": OWNER,
            "is_lora": model.kind.rank is not None, "lora_rank": model.kind.rank, "corrupted": False,
            "last_request_time": iso_time(model.asked_at), "user_metadata": model.metadata or None,
            "last_checkpoint": _last(saved, "weights"), "last_sampler_checkpoint": _last(saved, "sampler_weights"),
        }  # fmt: skip

    def _saved_of(self, run: str) -> list[SavedRecord]:
        return sorted((one for one in self.ledger.saved.values() if one.run == run), key=lambda one: one.time)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def checkpoints(self, request: ClientRequest) -> Response:
        page, cursor = _page(request, sorted(self.ledger.saved.values(), key=lambda one: -one.time))
        return JSONResponse({"checkpoints": [as_checkpoint(one) for one in page], "cursor": cursor})

    async def checkpoints_of_run(self, request: ClientRequest) -> Response:
        model = self._model(request.path["id"])
        return JSONResponse({"checkpoints": [as_checkpoint(one) for one in self._saved_of(model.id)]})

    def _found(self, request: ClientRequest) -> SavedRecord:
        return self.ledger.find(f"tinker://{request.path['id']}/{request.path['part']}/{request.path['name']}")

    async def delete_checkpoint(self, request: ClientRequest) -> Response:
        self.ledger.delete(self._found(request).path)
        return Response(status_code=204)

    async def set_ttl(self, request: ClientRequest) -> Response:
        self.ledger.set_ttl(self._found(request), seconds_of(request.json))
        return JSONResponse({})

    async def weights_info(self, request: ClientRequest) -> Response:
        saved = self.ledger.find(field(request.json, "tinker_path", str))
        lora, kind = saved.kind.rank is not None, saved.kind
        parts = {"train_attn": kind.attention, "train_mlp": kind.mlp, "train_unembed": False} if lora else {}
        return JSONResponse({"base_model": saved.base, "is_lora": lora, "lora_rank": kind.rank} | parts)

    # -- sessions ----------------------------------------------------------------------------------------------------

    async def sessions(self, request: ClientRequest) -> Response:
        page, _ = _page(request, sorted(self.ledger.sessions, key=lambda id: -self.ledger.sessions[id]))
        return JSONResponse({"sessions": page})

    async def session(self, request: ClientRequest) -> Response:
        id = request.path["id"]
        if id not in self.ledger.sessions:
            raise RequestError(404, f"there is no session {id[:80]} here")
        runs = [model.id for model in self.ledger.models.values() if model.session == id]
        samplers = [record.id for record in self.ledger.samplers.values() if record.session == id]
        return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers})

    # -- links -------------------------------------------------------------------------------------------------------

    async def external_weights_urls(self, request: ClientRequest) -> Response:
        """Links to each file of a save."""
        saved = self._found(request)
        folder = self.ledger.folder_of(saved)
        names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        until = int(time.time()) + VALID_S
        urls = {name: self._url(request, "file", saved, name, until) for name in names}
        return JSONResponse({"urls": urls, "expires": iso_time(until)})

    async def archive(self, request: ClientRequest) -> Response:
        """Links to a whole save, as one tar file.

        For sampler weights it is the folder that peft or transformers loads.
        """
        until = int(time.time()) + VALID_S
        url = self._url(request, "archive", self._found(request), "all.tar", until)
        return JSONResponse({"url": url, "expires": iso_time(until)})

    def _url(self, request: ClientRequest, kind: str, saved: SavedRecord, file: str, until: int) -> str:
        what = f"{kind}/{saved.run}/{saved.part}/{saved.name}/{file}"
        return f"{str(request.request.base_url).rstrip('/')}{ROOT}/{until}/{self._signature(str(until), what)}/{what}"

    def _signature(self, until: str, what: str) -> str:
        return hmac.new(self.secret, f"{until}/{what}".encode(), hashlib.sha256).hexdigest()

    async def follow_link(self, request: ClientRequest) -> Response:
        """Answers a link with its file or archive."""
        until, path = request.path["until"], request.path["what"]
        expected = self._signature(until, path).encode()
        if not hmac.compare_digest(expected, request.path["signature"].encode()) or int(until) < time.time():
            raise RequestError(403, "the link is out of date, or none of this server: ask for another")
        kind, run, part, name, file = path.split("/", 4)
        saved = self.ledger.saved.get(f"tinker://{run}/{part}/{name}")
        if saved is None:
            raise RequestError(404, "what the link leads to was deleted")
        folder = self.ledger.folder_of(saved)
        try:
            if kind == "file":
                stat = (folder / file).stat()
                return FileResponse(folder / file, media_type="application/octet-stream", stat_result=stat)
            archive = await run_in_threadpool(self._archive, folder)
        except FileNotFoundError:  # deleted just now, or saved again with other files
            raise RequestError(404, "what the link leads to was deleted") from None
        return FileResponse(archive, media_type="application/x-tar", background=BackgroundTask(archive.unlink))

    def _archive(self, folder: pathlib.Path) -> pathlib.Path:
        """Returns a tar file of a folder. Whoever sends it removes it."""
        number, path = tempfile.mkstemp(dir=self.ledger.folder, prefix=_PARTIAL, suffix=".tar")
        try:
            with os.fdopen(number, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
                for each in sorted(folder.rglob("*")):
                    tar.add(each, arcname=str(each.relative_to(folder)), recursive=False)
        except BaseException:
            os.unlink(path)
            raise
        return pathlib.Path(path)


def as_checkpoint(saved: SavedRecord) -> dict[str, Any]:
    """Returns a save as a client is told of it."""
    return {
        "checkpoint_id": f"{saved.part}/{saved.name}",
        "checkpoint_type": TYPES[saved.part],
        "time": iso_time(saved.time), "tinker_path": saved.path, "size_bytes": saved.bytes, "public": False,
        "expires_at": None if saved.expires is None else iso_time(saved.expires),
        "user_metadata": dict(saved.metadata) or None,
    }  # fmt: skip


def _last(saved: Sequence[SavedRecord], part: str) -> dict[str, Any] | None:
    of_part = [one for one in saved if one.part == part]
    return as_checkpoint(of_part[-1]) if of_part else None


def _page(request: ClientRequest, everything: Sequence[Any]) -> tuple[list[Any], dict[str, int]]:
    """Returns the entries that a query asks for by limit and offset, and their position in the whole."""
    query = {name: int(value) if value.isdecimal() else value for name, value in request.request.query_params.items()}
    limit, offset = min(number(query, "limit", 20), MAX_PAGE), number(query, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(everything)}
    return list(everything[offset : offset + limit]), cursor


def iso_time(seconds: float) -> str:
    """Returns a time of seconds since 1970 in ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
