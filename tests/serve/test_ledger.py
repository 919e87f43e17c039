"""What the server remembers from one start to the next."""

import dataclasses
import errno
import io
import json
import math
import re
import time

import pytest

from mrl.errors import CheckpointError, ConfigError, UserError
from mrl.serve.ledger import ENDED, Ledger, ModelRecord, SamplerRecord, SavedRecord
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import RequestQueue
from mrl.serve.suspended import move_aside, read_state

RUN = "s1:train:0"


def saved(name, **fields):
    return SavedRecord(RUN, "weights", name, ModelKind(4), "base", 1.0, 10, **fields)


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    made.session("s1")
    made.model(ModelRecord(RUN, "s1", ModelKind(4), "base", {"who": "tests"}, 1.0, here=True))
    made.save(saved("a"))
    made.sampler(SamplerRecord("s1:sample:0", "s1", "base", path=saved("a").path, saved=1.0))
    return made


def test_the_next_start_knows_all_but_what_the_ranks_have(ledger, tmp_path):
    again = Ledger(tmp_path)
    assert again.sessions == ledger.sessions and again.saved == ledger.saved and again.samplers == ledger.samplers
    [model] = again.models.values()
    assert (model.id, model.kind, model.metadata, model.here) == (RUN, ModelKind(4), {"who": "tests"}, False)


def test_a_line_that_broke_off_takes_no_other_with_it(ledger, tmp_path):
    whole = ledger.file.read_text()
    ledger.file.write_text(whole[:-20])  # of a server that was killed while it wrote
    Ledger(tmp_path).save(saved("b"))
    again = Ledger(tmp_path)
    assert again.saved.keys() == {saved("a").path, saved("b").path} and not again.samplers


def test_what_is_saved_for_a_time_is_removed_after_it(ledger):
    for name, expires in (("soon", 5.0), ("later", 50.0)):
        ledger.save(saved(name, expires=expires))
        ledger.folder_of(RUN, "weights", name).mkdir(parents=True)
    ledger.expire(10.0)
    assert len(list((ledger.folder / RUN / "weights").iterdir())) == 2, "somebody may be reading it"
    ledger.clear()
    assert ledger.saved.keys() == {saved("a").path, saved("later").path}
    assert [path.name for path in (ledger.folder / RUN / "weights").iterdir()] == ["later"]


def test_what_cannot_be_removed_now_is_removed_later(ledger, monkeypatch):
    """A full disk, or a client that has deleted it just now, does not end the server."""
    ledger.save(saved("soon", expires=5.0))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("mrl.serve.ledger._append", full)
        ledger.expire(10.0)
    assert saved("soon").path in ledger.saved
    before = ledger.saved
    ledger.delete(saved("soon").path)
    ledger.saved = before
    ledger.expire(10.0)
    assert saved("soon").path not in ledger.saved


def test_a_client_that_comes_back_is_heard(ledger, tmp_path):
    """The next start knows when it was made; one that has ended stays so."""
    ledger.session("s2")
    ledger.finish("s2")
    again = Ledger(tmp_path)
    before = again.sessions["s1"]
    for session in ("s1", "s2", "s3"):
        again.record_heartbeat(session)
    assert again.sessions["s1"] > before and again.sessions["s2"] == ENDED and "s3" not in again.sessions


def test_whoever_goes_through_a_mapping_is_not_disturbed(ledger):
    for _ in ledger.saved.values():
        ledger.save(saved("new"))
    for _ in ledger.sessions.items():
        ledger.session("s2")
    for model in ledger.models.values():
        ledger.model(dataclasses.replace(model, id="s1:train:1"))
    assert ledger.models.keys() == {RUN, "s1:train:1"}


def test_what_is_kept_from_now_on(ledger):
    ledger.set_ttl(saved("a"), 60)
    assert 50 < ledger.saved[saved("a").path].expires - time.time() < 70
    ledger.set_ttl(saved("a"), None)
    assert ledger.saved[saved("a").path].expires is None


@pytest.mark.parametrize(
    ("run", "part", "name"),
    [
        *((RUN, "weights", name) for name in ("..", "../x", "a/b", ".hidden", "", "x" * 256, "a\nb", "é")),
        (RUN, "elsewhere", "a"), ("../x", "weights", "a"), ("s1", "weights", "a"),
    ],
)  # fmt: skip
def test_paths_stay_below_the_folder(ledger, run, part, name):
    with pytest.raises(UserError):
        ledger.folder_of(run, part, name)


def test_what_is_saved_anew_is_not_removed_with_what_was_deleted(ledger, tmp_path):
    folder = ledger.folder_of(RUN, "weights", "a")
    folder.mkdir(parents=True)
    ledger.delete(saved("a").path)
    ledger.save(saved("a"))
    ledger.clear()
    assert folder.exists()
    ledger.delete(saved("a").path)
    Ledger(tmp_path).clear()
    assert not folder.exists(), "what a killed server had not removed yet, the next one removes"


def test_a_line_that_a_full_disk_cut_is_taken_back(ledger, tmp_path, monkeypatch):
    real, before = io.FileIO.write, ledger.file.read_bytes()

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() > len(before):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, data[:5])

    with monkeypatch.context() as full:
        full.setattr("pathlib.Path.open", lambda path, mode, **_: Full(path, mode))
        with pytest.raises(OSError, match="No space left"):
            ledger.save(saved("b"))
    assert ledger.file.read_bytes() == before and saved("b").path not in ledger.saved
    ledger.save(saved("c"))
    assert Ledger(tmp_path).saved.keys() == {saved("a").path, saved("c").path}


def odd_of(ledger, tmp_path, *lines):
    """The ledger of the next start, whose file has these lines, too."""
    with ledger.file.open("ab") as file:
        file.write(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return Ledger(tmp_path)


ODD = {
    "no JSON": b"{nope\n", "no text": b"\xff\xfe\x00\n", "zeros of a crash": b"\0" * 300 + b"\n", "deep": b"[" * 100_000 + b"\n",
    "a list": [], "a number": 5, "a text": "x", "null": None, "no event": {"id": "x"}, "an event of no name": {"event": None},
    "an event that is a list": {"event": ["saved"]}, "an event of another mrl": {"event": "audited", "who": "x"},
    "a method": {"event": "_class__"}, "a session without its time": {"event": "session", "id": "s9"},
    "a time in words": {"event": "session", "id": "s9", "time": "noon"}, "a time of no calendar": {"event": "session", "id": "s9", "time": 1e300},
    "a time that is no number": b'{"event": "session", "id": "s9", "time": NaN}\n', "an id that is a list": {"event": "finished", "id": []},
    "a model of no kind": {"event": "model", "id": "s9:train:0", "session": "s9", "base": "b", "metadata": {}, "asked_at": 1.0},
    "a kind in words": {"event": "model", "id": "s9:train:0", "session": "s9", "kind": "big", "base": "b", "metadata": {}, "asked_at": 1.0},
    "a save that leads elsewhere": {"event": "saved", **dataclasses.asdict(dataclasses.replace(saved("z"), run="../../x"))},
    "a save of another part": {"event": "saved", **dataclasses.asdict(dataclasses.replace(saved("z"), part="logits"))},
    "bytes that are true": {"event": "saved", **dataclasses.asdict(dataclasses.replace(saved("z"), bytes=True))},
    "a sampler of no base": {"event": "sampler", "id": "x", "session": "s1"}, "a path that is a number": {"event": "deleted", "path": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_line_is_passed_over_and_said(ledger, tmp_path, name):
    """All others are read, before it and after it, and it changes nothing."""
    again = odd_of(ledger, tmp_path, ODD[name], {"event": "session", "id": "s2", "time": 5.0})
    assert again.saved == ledger.saved and again.samplers == ledger.samplers and again.models.keys() == {RUN}
    assert again.sessions == {**ledger.sessions, "s2": 5.0} and not again.deleted
    assert re.fullmatch(r"ledger.jsonl: line 5 is passed over \([^()]+\)", again.skipped_lines())


def test_what_a_newer_mrl_added_is_left_out_and_said(ledger, tmp_path):
    """The save is had all the same."""
    more = {"event": "saved", **dataclasses.asdict(saved("b")), "digest": "x", "color": 1}
    more["kind"] |= {"dora": True}
    again = odd_of(ledger, tmp_path, more)
    assert again.saved.keys() == {saved("a").path, saved("b").path} and again.saved[saved("b").path].kind == ModelKind(
        4
    )
    assert again.skipped_lines() == "ledger.jsonl: line 5 has fields of another mrl (color, digest, kind.dora)"
    assert not ledger.skipped_lines()
    many = odd_of(ledger, tmp_path, *[[]] * 5).skipped_lines()
    assert many.startswith("ledger.jsonl: line 5 has fields") and many.endswith(", and 3 more")


def test_models_whose_session_is_not_known(ledger, tmp_path):
    """They may be taken for gone, as those of a client that is silent."""
    lines = ledger.file.read_text().splitlines(keepends=True)
    ledger.file.write_text("".join(line for line in lines if '"event": "session"' not in line))
    assert Ledger(tmp_path).sessions == {"s1": 1.0}


@pytest.mark.parametrize("name", ["ledger.jsonl", "models"])
@pytest.mark.parametrize("how", ["another kind", "a link that leads nowhere"])
def test_another_thing_in_a_place_is_refused(tmp_path, name, how):
    """A link that is there today leads to what there is."""
    if how == "another kind":
        (tmp_path / name).write_text("") if name == "models" else (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "scratch")
    with pytest.raises(ConfigError, match=f"has another thing in the place of {name}, or a link that leads nowhere"):
        Ledger(tmp_path)


def test_links_are_followed(ledger, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "models").mkdir()
    for name in ("ledger.jsonl", "models"):
        (home / name).symlink_to(tmp_path / name)
    again = Ledger(home)
    again.save(saved("b"))
    assert Ledger(tmp_path).saved == again.saved and again.saved.keys() == {saved("a").path, saved("b").path}


def test_what_a_killed_save_left_is_removed(ledger, tmp_path):
    """And no save, whatever it is called."""
    whole = ledger.folder_of(RUN, "weights", "a") / "step_00000002"
    odd = ledger.folder_of(RUN, "sampler_weights", "b.partial")
    ledger.save(SavedRecord(RUN, "sampler_weights", "b.partial", ModelKind(4), "base", 1.0, 10))
    left = [
        ledger.folder_of(RUN, "weights", "a") / ".tmp-step_00000003", ledger.folder_of(RUN, "weights", "c") / ".tmp-step_00000003",
        ledger.folder_of(RUN, "weights", "a") / ".trash-step_00000001", ledger.folder_of(RUN, "external_weights", "d.partial"),
    ]  # fmt: skip
    for folder in (whole, odd, *left):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    again = odd_of(ledger, tmp_path, {"event": "x"})
    again.remove_partial()
    assert left[-1].exists(), "an odd line may be that of a save"
    Ledger(tmp_path).file.write_text("\n".join(ledger.file.read_text().splitlines()[:-1]) + "\n")
    Ledger(tmp_path).remove_partial()
    assert whole.exists() and odd.exists() and not any(folder.exists() for folder in left)
    assert not left[1].parent.exists()


def state_of(folder, **changed):
    request_queue = RequestQueue(max_waiting=5)
    request_queue.open(RUN, first=1)
    state = {"layout": {"a": 1}, "desk": request_queue.state(), "lost": {RUN: [[1, "why"]]}} | changed
    folder.mkdir()
    (folder / "desk.json").write_text(json.dumps({k: v for k, v in state.items() if v != "GONE"}))
    return folder


@pytest.mark.parametrize("changed", [
    {"layout": "GONE"}, {"layout": []}, {"layout": 5}, {"desk": "GONE"}, {"desk": []}, {"desk": {"numbers": {}}}, {"lost": [5]}, {"lost": {"a": 5}},
    {"desk": {"numbers": {RUN: math.inf}, "results": []}}, {"lost": {RUN: [[math.inf, "why"]]}},
    {"desk": {"numbers": {RUN: "x"}, "results": []}}, {"desk": {"numbers": [], "results": []}}, {"desk": {"numbers": {}, "results": [{"id": 1}]}},
    {"desk": {"numbers": {}, "results": [{"id": "x", "model": RUN, "queue": RUN, "number": 1, "media_type": "t", "body": "?"}]}},
])  # fmt: skip
def test_a_state_that_no_server_wrote_is_damaged(tmp_path, changed):
    assert read_state(state_of(tmp_path / "whole"))["lost"] == {RUN: {1: "why"}}
    with pytest.raises(CheckpointError, match="suspended: is damaged"):
        read_state(state_of(tmp_path / "suspended", **changed))


def test_what_is_damaged_is_put_aside(tmp_path):
    """Nothing is removed: a folder, a file, or a link that leads nowhere."""
    folder = tmp_path / "suspended"
    for make in (folder.mkdir, lambda: folder.write_text("[" * 10**5), lambda: folder.symlink_to("/nowhere")):
        make()
        with pytest.raises(CheckpointError, match="is damaged"):
            read_state(folder)
        move_aside(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"suspended.damaged-{i}" for i in (1, 2, 3)]
