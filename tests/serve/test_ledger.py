"""What the server remembers from one start to the next."""

import dataclasses
import errno
import io
import time

import pytest

from mrl.errors import UserError
from mrl.serve.ledger import ENDED, Ledger, ModelRecord, SamplerRecord, Saved
from mrl.serve.operations import Kind

RUN = "s1:train:0"


def saved(name, **fields):
    return Saved(RUN, "weights", name, Kind(4), "base", 1.0, 10, **fields)


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    made.session("s1")
    made.model(ModelRecord(RUN, "s1", Kind(4), "base", {"who": "tests"}, 1.0, here=True))
    made.save(saved("a"))
    made.sampler(SamplerRecord("s1:sample:0", "s1", "base", path=saved("a").path, saved=1.0))
    return made


def test_the_next_start_knows_all_but_what_the_ranks_have(ledger, tmp_path):
    again = Ledger(tmp_path)
    assert again.sessions == ledger.sessions and again.saved == ledger.saved and again.samplers == ledger.samplers
    [model] = again.models.values()
    assert (model.id, model.kind, model.metadata, model.here) == (RUN, Kind(4), {"who": "tests"}, False)


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
        again.hear(session)
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
    ledger.keep_for(saved("a"), 60)
    assert 50 < ledger.saved[saved("a").path].expires - time.time() < 70
    ledger.keep_for(saved("a"), None)
    assert ledger.saved[saved("a").path].expires is None


@pytest.mark.parametrize(
    ("run", "part", "name"),
    [(RUN, "weights", ".."), (RUN, "weights", "a/b"), (RUN, "elsewhere", "a"), ("../x", "weights", "a"), ("s1", "weights", "a")],
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


def test_a_session_that_has_ended_stays_so(ledger, tmp_path):
    ledger.finish("s1")
    assert Ledger(tmp_path).sessions == {"s1": ENDED}
