"""What the server has promised to remember: sessions, models, what was saved and what can be sampled from.

`ledger.jsonl` in the run's directory has a line for each event, written before the client is told; the next start reads
it. A model's weights are in its checkpoints alone: one that trained on after its last save is gone with the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import threading
import time
import typing
from collections.abc import Collection
from typing import Any, Literal

from mrl.errors import UserError
from mrl.serve.operations import Kind

PREFIX = "tinker://"
ENDED = 0.0
"""When the session of a client that has ended was last heard of."""
Part = Literal["weights", "sampler_weights", "external_weights"]
PARTS: Collection[str] = typing.get_args(Part)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}:train:[0-9]{1,9}")


@dataclasses.dataclass
class ModelRecord:
    """A model of a client."""

    id: str
    session: str
    kind: Kind
    base: str
    metadata: dict[str, Any]
    asked_at: float
    here: bool = False  # whether the ranks have it


@dataclasses.dataclass(frozen=True)
class Saved:
    """What was saved under a name."""

    run: str  # the model's id
    part: Part
    name: str
    kind: Kind
    base: str
    time: float
    bytes: int
    expires: float | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{PREFIX}{self.run}/{self.part}/{self.name}"


@dataclasses.dataclass(frozen=True)
class SamplerRecord:
    """What a sampling client samples from. snapshot: what the ranks hold; path: what was saved, at the time `saved`;
    neither: the base."""

    id: str
    session: str
    base: str
    path: str | None = None
    saved: float | None = None
    snapshot: str | None = None


class Ledger:
    """The records of one server. Every method may be called on any thread; whoever goes through a mapping goes through
    what it was then, as an event makes another one of it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.file = folder / "models", folder / "ledger.jsonl"
        self.suspended = folder / "suspended"
        self.sessions: dict[str, float] = {}  # id -> when it was last heard of
        self.models: dict[str, ModelRecord] = {}
        self.saved: dict[str, Saved] = {}
        self.samplers: dict[str, SamplerRecord] = {}
        self.deleted: set[pathlib.Path] = set()  # folders that `clear` removes
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        text = self.file.read_text(encoding="utf-8") if self.file.exists() else ""
        if text and not text.endswith("\n"):  # of a server that was killed: the next line is not to join its last one
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # it broke off
            getattr(self, f"_on_{event.pop('event')}")(**event)

    def _write(self, event: str, **fields: Any) -> None:
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _append(self.file, json.dumps({"event": event, **fields}) + "\n")
            getattr(self, f"_on_{event}")(**fields)

    def _on_session(self, id: str, time: float) -> None:
        self.sessions = {**self.sessions, id: time}

    def _on_finished(self, id: str) -> None:
        self.sessions[id] = ENDED

    def _on_model(self, kind: dict[str, Any], **fields: Any) -> None:
        record = ModelRecord(kind=Kind(**kind), **fields)
        self.models = {**self.models, record.id: record}

    def _on_saved(self, kind: dict[str, Any], **fields: Any) -> None:
        saved = Saved(kind=Kind(**kind), **fields)
        self.saved = {**self.saved, saved.path: saved}
        self.deleted.discard(self.folder_of(saved.run, saved.part, saved.name))

    def _on_deleted(self, path: str) -> None:
        if (saved := self.saved.get(path)) is not None:
            self.deleted.add(self.folder_of(saved.run, saved.part, saved.name))
        self.saved = {name: saved for name, saved in self.saved.items() if name != path}

    def _on_sampler(self, **fields: Any) -> None:
        record = SamplerRecord(**fields)
        self.samplers = {**self.samplers, record.id: record}

    # -- what happens ------------------------------------------------------------------------------------------------

    def session(self, id: str) -> None:
        self._write("session", id=id, time=time.time())

    def hear(self, id: str) -> None:
        """Says that the client of a session is there. A session that has ended stays so."""
        if self.sessions.get(id, ENDED) != ENDED:
            self.sessions[id] = time.time()

    def finish(self, id: str) -> None:
        """Says that the client of a session has ended."""
        self._write("finished", id=id)

    def model(self, record: ModelRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name not in ("here", "kind")}
        self._write("model", kind=dataclasses.asdict(record.kind), **fields)

    def save(self, saved: Saved) -> None:
        self._write("saved", **dataclasses.asdict(saved))

    def delete(self, path: str) -> None:
        """Says that what was saved is no longer to be had; `clear` removes its folder."""
        self.find(path)
        self._write("deleted", path=path)

    def clear(self) -> None:
        """Removes the folders of what was deleted. Called on the main thread: what is done there may be reading one."""
        with self._lock:
            for folder in self.deleted:
                shutil.rmtree(folder, ignore_errors=True)
            self.deleted = set()

    def keep_for(self, saved: Saved, seconds: int | None) -> None:
        """Keeps what was saved for so many seconds from now; None for ever."""
        self.save(dataclasses.replace(saved, expires=None if seconds is None else time.time() + seconds))

    def sampler(self, record: SamplerRecord) -> None:
        self._write("sampler", **dataclasses.asdict(record))

    def expire(self, now: float) -> None:
        """Removes what was saved for a time that is over. Where that cannot be written, it is tried again later: the
        server would end for it."""
        for saved in self.saved.values():
            if saved.expires is not None and saved.expires <= now:
                with contextlib.suppress(OSError):
                    self._write("deleted", path=saved.path)  # though a client may have deleted it just now

    # -- where things are --------------------------------------------------------------------------------------------

    def folder_of(self, run: str, part: str, name: str) -> pathlib.Path:
        """Returns the folder of what is saved under a name. Raises UserError for a name that may lead elsewhere."""
        check_name(name)
        if not _RUN.fullmatch(run) or part not in PARTS:
            path = f"{PREFIX}{run}/{part}/{name}"
            raise UserError("path", path, "is no path of this server", "give one that it gave")
        return self.folder / run / part / name

    def find(self, path: str) -> Saved:
        """Returns what was saved. Raises UserError."""
        if path not in self.saved:
            fix = "list what there is: tinker checkpoint list, or GET /v1/models"
            raise UserError("path", path, "is not saved on this server", fix)
        return self.saved[path]


def _append(path: pathlib.Path, line: str) -> None:
    """Writes a line at the end of a file, whole or not at all: half of one, where the disk is full, would take the next
    one with it. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        end, left = os.fstat(file.fileno()).st_size, memoryview(line.encode())
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def check_name(name: str) -> None:
    """Raises UserError for a name that is no name of a folder."""
    if not _NAME.fullmatch(name):
        raise UserError("name", name, "is no name", "give 1 to 255 letters, digits, _, . and -, not with a . first")
