"""Makes links to saves, for a client that fetches files with a plain download and sends no key.

Whoever has a link may follow it until it is out of date.
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
from typing import Literal

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, JSONResponse, Response

from mrl.serve.app import ClientRequest
from mrl.serve.ledger import Ledger, SavedRecord
from mrl.serve.requests import RequestError

VALID_S = 3600
ROOT = "/api/v1/links"
Kind = Literal["file", "archive"]
_PARTIAL = ".tmp-"


class DownloadLinks:
    """Handle download links. The secret that signs is of one start of the server."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.secret = ledger, secrets.token_bytes(32)
        for left in ledger.folder.glob(f"{_PARTIAL}*"):  # left by a server that was killed while it sent them
            left.unlink(missing_ok=True)

    def to_files(self, request: ClientRequest, saved: SavedRecord) -> JSONResponse:
        """Returns an answer with a link for each file of a save."""
        folder = self._folder(saved)
        names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        until = int(time.time()) + VALID_S
        urls = {name: self._url(request, "file", saved, name, until) for name in names}
        return JSONResponse({"urls": urls, "expires": iso_time(until)})

    def to_archive(self, request: ClientRequest, saved: SavedRecord) -> JSONResponse:
        """Returns an answer with a link for a whole save, as one tar file."""
        until = int(time.time()) + VALID_S
        return JSONResponse({"url": self._url(request, "archive", saved, "all.tar", until), "expires": iso_time(until)})

    def _url(self, request: ClientRequest, kind: Kind, saved: SavedRecord, file: str, until: int) -> str:
        what = f"{kind}/{saved.run}/{saved.part}/{saved.name}/{file}"
        return f"{str(request.request.base_url).rstrip('/')}{ROOT}/{until}/{self._signature(str(until), what)}/{what}"

    def _signature(self, until: str, what: str) -> str:
        return hmac.new(self.secret, f"{until}/{what}".encode(), hashlib.sha256).hexdigest()

    def _folder(self, saved: SavedRecord) -> pathlib.Path:
        return self.ledger.folder_of(saved.run, saved.part, saved.name)

    async def follow(self, request: ClientRequest) -> Response:
        """Answers a link with its file or archive."""
        until, path = request.path["until"], request.path["what"]
        expected = self._signature(until, path).encode()
        if not hmac.compare_digest(expected, request.path["signature"].encode()) or int(until) < time.time():
            raise RequestError(403, "the link is out of date, or none of this server: ask for another")
        kind, run, part, name, file = path.split("/", 4)
        saved = self.ledger.saved.get(f"tinker://{run}/{part}/{name}")
        if saved is None:
            raise RequestError(404, "what the link leads to was deleted")
        folder = self._folder(saved)
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


def iso_time(seconds: float) -> str:
    """Returns a time of seconds since 1970 in ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
