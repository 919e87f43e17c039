"""What the server remembers from one start to the next."""

import dataclasses
import errno
import io
import json
import time

import pytest

from mrl.errors import CheckpointError, UserError
from mrl.serve.ledger import ENDED, Ledger, ModelRecord, SamplerRecord, SavedRecord, read_state
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import RequestQueue

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
        ledger.folder_at(RUN, "weights", name).mkdir(parents=True)
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
        ledger.folder_at(run, part, name)


def test_what_is_saved_anew_is_not_removed_with_what_was_deleted(ledger, tmp_path):
    folder = ledger.folder_at(RUN, "weights", "a")
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


SAVE = {"event": "saved", **dataclasses.asdict(saved("z"))}
ODD = {
    "no JSON": b"{nope\n", "zeros of a crash": b"\0" * 300 + b"\n", "a list": [], "no event": {"id": "x"},
    "an event of another mrl": {"event": "audited"}, "no time": {"event": "session", "id": "s9"},
    "a save that leads elsewhere": SAVE | {"run": "../../x"}, "a field of another mrl": SAVE | {"digest": "x"},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_line_that_cannot_be_read_is_passed_over_and_said(ledger, tmp_path, name):
    """All others are read, before it and after it, and it changes nothing."""
    again = odd_of(ledger, tmp_path, ODD[name], {"event": "session", "id": "s2", "time": 5.0})
    assert again.saved == ledger.saved and again.samplers == ledger.samplers and again.models.keys() == {RUN}
    assert again.sessions == {**ledger.sessions, "s2": 5.0} and not again.deleted
    assert again.skipped_lines().endswith("passed over: 5") and not ledger.skipped_lines()


def test_models_whose_session_is_not_known(ledger, tmp_path):
    """They may be taken for gone, as those of a client that is silent."""
    lines = ledger.file.read_text().splitlines(keepends=True)
    ledger.file.write_text("".join(line for line in lines if '"event": "session"' not in line))
    assert Ledger(tmp_path).sessions == {"s1": 1.0}


def test_what_a_killed_save_left_is_removed(ledger, tmp_path):
    """And no save, whatever it is called."""
    whole = ledger.folder_at(RUN, "weights", "a") / "step_00000002"
    odd = ledger.folder_at(RUN, "sampler_weights", "b.partial")
    ledger.save(SavedRecord(RUN, "sampler_weights", "b.partial", ModelKind(4), "base", 1.0, 10))
    left = [
        ledger.folder_at(RUN, "weights", "a") / ".tmp-step_00000003", ledger.folder_at(RUN, "weights", "c") / ".tmp-step_00000003",
        ledger.folder_at(RUN, "weights", "a") / ".trash-step_00000001", ledger.folder_at(RUN, "external_weights", "d.partial"),
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


@pytest.mark.parametrize(
    "changed", [{"layout": "GONE"}, {"desk": []}, {"desk": {"numbers": {RUN: "x"}, "results": []}}]
)
def test_a_state_that_no_server_wrote_is_damaged(tmp_path, changed):
    assert read_state(state_of(tmp_path / "whole"))["lost"] == {RUN: {1: "why"}}
    with pytest.raises(CheckpointError, match="suspended: is damaged"):
        read_state(state_of(tmp_path / "suspended", **changed))
