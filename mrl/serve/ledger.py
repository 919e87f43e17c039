"""Remembers what the server has promised: sessions, models, saves and samplers.

`ledger.jsonl` in the run's directory has a line for each event. It is written before the client is told, and the next
start reads it. A model's weights are in its checkpoints alone: later steps are gone with the server.
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
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal

from mrl.errors import ConfigError, UserError, first_line, quoted, show, unwritable
from mrl.serve.operations import ModelKind
from mrl.weights.json_file import parse_json

PREFIX = "tinker://"
LATEST = 2e11
"""Seconds since 1970, in the year 8307: a calendar has none that are much later."""
ENDED = 0.0
"""The time of the last heartbeat, for a session that has ended."""
Part = Literal["weights", "sampler_weights", "external_weights"]
PARTS: Collection[str] = typing.get_args(Part)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,100}:train:[0-9]{1,9}")


@dataclasses.dataclass
class ModelRecord:
    """A model of a client."""

    id: str
    session: str
    kind: ModelKind
    base: str
    metadata: dict[str, Any]
    asked_at: float
    here: bool = False  # whether the ranks have it


@dataclasses.dataclass(frozen=True)
class SavedRecord:
    """The checkpoint or weights saved under a name."""

    run: str  # the model's id
    part: Part
    name: str
    kind: ModelKind
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
    """The weights that a sampling client samples from: a snapshot on the ranks, a save, or the base.

    snapshot: its name. path: of a save that was made at the time `saved`.
    """

    id: str
    session: str
    base: str
    path: str | None = None
    saved: float | None = None
    snapshot: str | None = None


@dataclasses.dataclass(frozen=True)
class _SessionEvent:
    id: str
    time: float


@dataclasses.dataclass(frozen=True)
class _FinishedEvent:
    id: str


@dataclasses.dataclass(frozen=True)
class _DeletedEvent:
    path: str


_EVENTS: Mapping[str, type] = {
    "session": _SessionEvent,
    "finished": _FinishedEvent,
    "model": ModelRecord,
    "saved": SavedRecord,
    "deleted": _DeletedEvent,
    "sampler": SamplerRecord,
}
"""The record in a line of each event."""


class Ledger:
    """The records of one server. Every method may be called on any thread.

    An event replaces a mapping, so whoever iterates over one sees it as it was then.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.file = folder / "models", folder / "ledger.jsonl"
        self.suspended = folder / "suspended"
        self.sessions: dict[str, float] = {}  # id -> when it was last heard of
        self.models: dict[str, ModelRecord] = {}
        self.saved: dict[str, SavedRecord] = {}
        self.samplers: dict[str, SamplerRecord] = {}
        self.deleted: set[pathlib.Path] = set()  # folders that `clear` removes
        self.odd: list[str] = []  # notes on lines that were not read as they stand
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        for path, right in ((self.file, os.path.isfile), (self.folder, os.path.isdir)):
            if os.path.lexists(path) and not right(path):  # a link on storage that is not there today, too
                why = f"has another thing in the place of {path.name}, or a link that leads nowhere"
                raise ConfigError("output_dir", quoted(str(path.parent)), why, "move it away, or mend the link")
        try:
            text = self.file.read_text(encoding="utf-8", errors="replace") if self.file.exists() else ""
            if text and not text.endswith("\n"):  # a killed server left it: the next line must not join its last one
                with self.file.open("a", encoding="utf-8") as file:
                    file.write("\n")
        except OSError as error:
            raise unwritable(str(self.file.parent), self.file, error) from error
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line:
                    self._take(line, number)
            except (ValueError, UserError) as error:
                what = first_line(error) if type(error) in (ValueError, UserError) else "it is no JSON"
                self.odd.append(f"line {number} is passed over ({what})")
        self.sessions = {model.session: model.asked_at for model in self.models.values()} | self.sessions

    def _take(self, line: str, number: int) -> None:
        """Takes over the record of a line. Fields that a newer mrl has added are left out."""
        event = parse_json(line)
        name = event.pop("event", None) if isinstance(event, dict) else None
        if not isinstance(name, str) or name not in _EVENTS:
            raise ValueError(f"it has no event that this mrl knows: {show(name)}")
        record = _of_json(_EVENTS[name], event, name)
        unread = sorted(event.keys() - vars(record).keys())
        if "kind" in event:
            unread += [f"kind.{name}" for name in event["kind"] if name not in vars(record.kind)]
        if unread:
            self.odd.append(f"line {number} has fields of another mrl ({', '.join(unread)})")
        getattr(self, f"_on_{name}")(record)

    def skipped_lines(self) -> str:
        """Returns a line on those that were not read as they stand; "" if all were."""
        more = f", and {len(self.odd) - 3} more" if len(self.odd) > 3 else ""
        return f"{self.file.name}: {'; '.join(self.odd[:3])}{more}" if self.odd else ""

    def remove_partial(self) -> None:
        """Removes the unfinished files of a server that was killed."""
        left = [*self.folder.glob("*/weights/*/.tmp-step_*"), *self.folder.glob("*/weights/*/.trash-step_*")]
        if not self.odd:  # or the line of a save of such a name may be among them
            exports = (path for part in PARTS for path in self.folder.glob(f"*/{part}/*.partial"))
            left += [path for path in exports if f"{PREFIX}{'/'.join(path.parts[-3:])}" not in self.saved]
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # it has more in it
                folder.parent.rmdir()

    def _write(self, event: str, record: Any) -> None:
        fields = dataclasses.asdict(record)
        fields.pop("here", None)  # for this start alone
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _append(self.file, json.dumps({"event": event, **fields}) + "\n")
            getattr(self, f"_on_{event}")(record)

    def _on_session(self, session: _SessionEvent) -> None:
        self.sessions = {**self.sessions, session.id: session.time}

    def _on_finished(self, session: _FinishedEvent) -> None:
        self.sessions[session.id] = ENDED

    def _on_model(self, record: ModelRecord) -> None:
        self.models = {**self.models, record.id: dataclasses.replace(record, here=False)}

    def _on_saved(self, saved: SavedRecord) -> None:
        self.deleted.discard(self.folder_of(saved.run, saved.part, saved.name))
        self.saved = {**self.saved, saved.path: saved}

    def _on_deleted(self, deleted: _DeletedEvent) -> None:
        saved = self.saved.get(deleted.path)
        if saved is not None:
            self.deleted.add(self.folder_of(saved.run, saved.part, saved.name))
        self.saved = {path: saved for path, saved in self.saved.items() if path != deleted.path}

    def _on_sampler(self, record: SamplerRecord) -> None:
        self.samplers = {**self.samplers, record.id: record}

    # -- what happens ------------------------------------------------------------------------------------------------

    def session(self, id: str) -> None:
        self._write("session", _SessionEvent(id, time.time()))

    def record_heartbeat(self, id: str) -> None:
        """Records that the client of a session is there. A session that has ended stays so."""
        if self.sessions.get(id, ENDED) != ENDED:
            self.sessions[id] = time.time()

    def finish(self, id: str) -> None:
        """Records that the client of a session has ended."""
        self._write("finished", _FinishedEvent(id))

    def model(self, record: ModelRecord) -> None:
        self._write("model", record)

    def save(self, saved: SavedRecord) -> None:
        self._write("saved", saved)

    def delete(self, path: str) -> None:
        """Records that a save is no longer to be had; `clear` removes its folder."""
        self.find(path)
        self._write("deleted", _DeletedEvent(path))

    def clear(self) -> None:
        """Removes the folders of deleted saves. Called on the main thread, because its work may be reading one."""
        with self._lock:
            for folder in self.deleted:
                shutil.rmtree(folder, ignore_errors=True)
            self.deleted = set()

    def set_ttl(self, saved: SavedRecord, seconds: int | None) -> None:
        """Keeps a save for so many seconds from now; None is for ever."""
        self.save(dataclasses.replace(saved, expires=None if seconds is None else time.time() + seconds))

    def sampler(self, record: SamplerRecord) -> None:
        self._write("sampler", record)

    def expire(self, now: float) -> None:
        """Removes saves whose time is over. If that cannot be written, a later call tries again; the server goes on."""
        for saved in self.saved.values():
            if saved.expires is not None and saved.expires <= now:
                with contextlib.suppress(OSError):
                    self._write("deleted", _DeletedEvent(saved.path))  # though a client may have deleted it just now

    # -- where things are --------------------------------------------------------------------------------------------

    def folder_of(self, run: str, part: str, name: str) -> pathlib.Path:
        """Returns the folder of a save. Raises UserError for a name that may lead elsewhere."""
        check_name(name)
        if not _RUN.fullmatch(run) or part not in PARTS:
            path = f"{PREFIX}{run}/{part}/{name}"
            raise UserError("path", path, "is no path of this server", "give one that it gave")
        return self.folder / run / part / name

    def find(self, path: str) -> SavedRecord:
        """Returns the save under a path. Raises UserError."""
        if path not in self.saved:
            fix = "list what there is: tinker checkpoint list, or GET /v1/models"
            raise UserError("path", path, "is not saved on this server", fix)
        return self.saved[path]


def _of_json(shape: type, given: Any, name: str) -> Any:
    """Returns a record of a line's fields, without those that it does not know. Raises ValueError.

    name: of the field that holds the value, for messages.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {show(given)}")
    hints = typing.get_type_hints(shape)
    known = {name: given[name] for name in hints if name in given}
    for field_name, value in known.items():
        if dataclasses.is_dataclass(hints[field_name]):
            known[field_name] = _of_json(hints[field_name], value, field_name)
        elif not _fits(value, hints[field_name]):
            raise ValueError(f"{field_name} is {show(value)}")
    for field in dataclasses.fields(shape):
        if field.name not in known and dataclasses.MISSING is field.default is field.default_factory:
            raise ValueError(f"it has no {field.name}")
    return shape(**known)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value of JSON is of a field's type."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, each) for each in hint.__args__)
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return type(value) in (int, float) and 0 <= value <= LATEST  # they are times and factors
    return type(value) is (typing.get_origin(hint) or hint)


def _append(path: pathlib.Path, line: str) -> None:
    """Writes a line at the end of a file, whole or not at all. Raises OSError.

    Half a line, written to a full disk, would spoil the next one.
    """
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
