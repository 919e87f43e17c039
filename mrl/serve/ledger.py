"""Remembers what the server has promised: sessions, models, saves and samplers.

`ledger.jsonl` in the run's directory has a line for each event. It is written before the client is told, and the next
start reads it. A model's weights are in its checkpoints alone: later steps are gone with the server,
except what a start leaves for the next in `suspended/`.
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
from collections.abc import Collection
from typing import Any, Literal, get_args

from mrl.config.load import to_dict
from mrl.config.resume import changed_keys
from mrl.config.serve import ServeConfig
from mrl.engine.collective import all_ranks
from mrl.errors import CheckpointError, ConfigError, ModelError, UserError, first_line, show, unwritable
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import RequestQueue
from mrl.weights.json_file import read_json
from mrl.words import shorten_list

PREFIX = "tinker://"
ENDED = 0.0
"""The time of the last heartbeat, for a session that has ended."""
Part = Literal["weights", "sampler_weights", "external_weights"]
PARTS: Collection[str] = get_args(Part)
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
        self.odd: list[int] = []  # numbers of lines that cannot be read
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
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
                    self._apply(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, UserError):
                self.odd.append(number)
        self.sessions = {model.session: model.asked_at for model in self.models.values()} | self.sessions

    def skipped_lines(self) -> str:
        """Returns a line on those that cannot be read; "" if all can."""
        numbers = shorten_list(self.odd, 10)
        return f"{self.file.name}: lines that cannot be read are passed over: {numbers}" if self.odd else ""

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

    def _write(self, event: str, **fields: Any) -> None:
        """Records an event: in the file, then here."""
        line = json.dumps({"event": event, **fields})
        with self._lock:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _append(self.file, line + "\n")
            self._apply(json.loads(line))

    def _apply(self, fields: dict[str, Any]) -> None:
        """Takes over the event of a line."""
        event = fields.pop("event")
        if "kind" in fields:
            fields["kind"] = ModelKind(**fields["kind"])
        if event == "session":
            self.sessions = {**self.sessions, fields["id"]: fields["time"]}
        elif event == "finished":
            self.sessions[fields["id"]] = ENDED
        elif event == "model":
            self.models = {**self.models, fields["id"]: ModelRecord(**fields)}
        elif event == "sampler":
            self.samplers = {**self.samplers, fields["id"]: SamplerRecord(**fields)}
        elif event == "saved":
            saved = SavedRecord(**fields)
            self.deleted.discard(self.folder_of(saved))
            self.saved = {**self.saved, saved.path: saved}
        elif event == "deleted":
            gone = self.saved.get(fields["path"])
            if gone is not None:
                self.deleted.add(self.folder_of(gone))
            self.saved = {path: saved for path, saved in self.saved.items() if path != fields["path"]}
        else:
            raise ValueError(f"an unknown event {event}")

    # -- what happens ------------------------------------------------------------------------------------------------

    def session(self, id: str) -> None:
        self._write("session", id=id, time=time.time())

    def record_heartbeat(self, id: str) -> None:
        """Records that the client of a session is there. A session that has ended stays so."""
        if self.sessions.get(id, ENDED) != ENDED:
            self.sessions[id] = time.time()

    def finish(self, id: str) -> None:
        """Records that the client of a session has ended."""
        self._write("finished", id=id)

    def model(self, record: ModelRecord) -> None:
        fields = dataclasses.asdict(record)
        del fields["here"]  # for this start alone
        self._write("model", **fields)

    def save(self, saved: SavedRecord) -> None:
        self._write("saved", **dataclasses.asdict(saved))

    def delete(self, path: str) -> None:
        """Records that a save is no longer to be had; `clear` removes its folder."""
        self.find(path)
        self._write("deleted", path=path)

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
        self._write("sampler", **dataclasses.asdict(record))

    def expire(self, now: float) -> None:
        """Removes saves whose time is over. If that cannot be written, a later call tries again; the server goes on."""
        for saved in self.saved.values():
            if saved.expires is not None and saved.expires <= now:
                with contextlib.suppress(OSError):
                    self._write("deleted", path=saved.path)  # though a client may have deleted it just now

    # -- where things are --------------------------------------------------------------------------------------------

    def folder_of(self, saved: SavedRecord) -> pathlib.Path:
        """Returns the folder of a save."""
        return self.folder_at(saved.run, saved.part, saved.name)

    def folder_at(self, run: str, part: str, name: str) -> pathlib.Path:
        """Returns the folder of a save to come. Raises UserError for a name that may lead elsewhere."""
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


def layout_of(config: ServeConfig) -> dict[str, Any]:
    """Returns what must be equal for one start to read another's suspended state: config keys, and processes."""
    engine = config.engine
    keys = {"backend": engine.backend, "parallel": to_dict(engine.parallel), "fsdp": to_dict(engine.fsdp)}
    return {"engine": keys, "model": to_dict(config.model), "processes": all_ranks().size}


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the main rank wrote. Raises CheckpointError if `suspend` did not write that."""
    try:
        state = read_json(folder / "desk.json")
        RequestQueue(max_waiting=1).restore(state["desk"])
        lost = {model: dict(passes) for model, passes in state["lost"].items()}
        return {"layout": state["layout"], "desk": state["desk"], "lost": lost}
    except (ModelError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"is damaged ({type(error).__name__}: {first_line(error)})"
        raise CheckpointError(folder, why=why) from error


def refuse_other_layout(config: ServeConfig) -> None:
    """Raises ConfigError if suspended models do not fit this start, or the ledger is no file."""
    folder = Ledger(pathlib.Path(config.output_dir)).suspended
    try:
        before = read_state(folder)["layout"]
    except CheckpointError:
        return  # there is none, or it will be put aside
    changed = changed_keys(before, layout_of(config))
    if changed:
        differ = ", ".join(f"{key}={show(was)}, now {show(now)}" for key, (was, now) in changed.items())
        fix = f"start it as it was to go on with them, or remove {folder.name}/ there to go on with what was saved"
        raise ConfigError("output_dir", config.output_dir, f"has models that were suspended with {differ}", fix)
