"""What the server remembers from one start to the next.

Queues and promises: order, turns, one promise a number, results that are kept for a while.
"""

import contextlib
import dataclasses
import errno
import io
import json
import threading
import time

import pytest

from mrl.errors import CheckpointError, UserError
from mrl.serve.ledger import ENDED, Ledger, ModelRecord, SamplerRecord, SavedRecord, read_state
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import FETCHED_S, KEPT_S, OVERDUE_S, FutureExpired, QueueFull, RequestQueue, Result

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


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def request_queue(clock):
    return RequestQueue(max_waiting=4, clock=clock)


def taken(request_queue):
    work = request_queue.next_work(0)
    return None if work is None else (work.queue, [waiting.operation for waiting in work.requests])


def test_a_models_operations_come_in_the_order_of_their_numbers(request_queue):
    request_queue.open("a", first=0)
    request_queue.put("a", 2, "third")
    assert taken(request_queue) is None, "those before it have not arrived"
    request_queue.put("a", 0, "first")
    request_queue.put("a", 1, "second")
    assert [taken(request_queue)[1] for _ in range(3)] == [["first"], ["second"], ["third"]]
    assert taken(request_queue) is None


def test_a_refused_number_is_not_waited_for(request_queue):
    """Whether it is the next one or a later one; a number that was done or waits is not refused."""
    request_queue.open("a", first=1)
    for number in (1, 3, 4):
        request_queue.refuse("a", number)
    request_queue.refuse("b", 1)
    request_queue.put("a", 5, "fifth")
    assert taken(request_queue) is None, "the second may come yet"
    request_queue.put("a", 4, "fourth after all")
    for number in (1, 2):
        request_queue.refuse("a", number)
    assert taken(request_queue) == ("a", ["fourth after all"])
    request_queue.refuse("a", 5)
    assert taken(request_queue) == ("a", ["fifth"]) and taken(request_queue) is None
    request_queue.put("a", 6, "sixth")
    request_queue.refuse("a", 7)
    request_queue.put("a", 8, "eighth")
    assert taken(request_queue) == ("a", ["sixth"]) and taken(request_queue) == ("a", ["eighth"])


def test_a_number_that_never_comes(request_queue, clock):
    """What waited for it fails, and what comes later is done; what waits for its turn alone is left."""
    for name in ("a", "b"):
        request_queue.open(name, first=1)
    waiting, ready = [request_queue.put("a", number, number) for number in (2, 4)], request_queue.put("b", 1, "b")
    clock.now = OVERDUE_S
    request_queue.fail_overdue()
    assert waiting[0].result is None, "it has not waited for long enough"
    clock.now += 1
    assert request_queue.fail_overdue() == {"a": 1}
    for future in waiting:
        said = json.loads(future.result.body)
        assert said["category"] == "user" and said["error"].startswith("seq_id: value 1 has not come")
    assert ready.result is None and taken(request_queue) == ("b", ["b"]) and taken(request_queue) is None
    request_queue.put("a", 5, "goes on")
    assert taken(request_queue) == ("a", ["goes on"])


def test_models_and_samples_take_turns(request_queue):
    for name in ("a", "b"):
        request_queue.open(name, first=1)
    for name, number in (("a", 1), ("a", 2), ("b", 1)):
        request_queue.put(name, number, f"{name}{number}")
    request_queue.put_batched("s", "key 1", "s1")
    request_queue.put_batched("s", "key 2", "s2")
    expected = [("a", ["a1"]), ("b", ["b1"]), ("s", ["s1", "s2"]), ("a", ["a2"])]
    assert [taken(request_queue) for _ in range(4)] == expected
    assert not request_queue.has("s"), "a queue of samples is there while some wait"


def test_one_number_is_done_once(request_queue, clock):
    request_queue.open("a", first=1)
    future = request_queue.put("a", 1, "once")
    assert request_queue.put("a", 1, "once") is future
    assert taken(request_queue) == ("a", ["once"]) and taken(request_queue) is None
    request_queue.finish(future, Result(b"done"))
    assert request_queue.put("a", 1, "once") is future and request_queue.find(future.id).result == Result(b"done")
    clock.now = KEPT_S + 1
    request_queue.put("a", 2, "twice")  # which forgets
    with pytest.raises(FutureExpired):
        request_queue.find(request_queue.put("a", 1, "once").id)
    assert taken(request_queue) == ("a", ["twice"]) and taken(request_queue) is None


def test_no_room(request_queue):
    request_queue.open("a", first=1)
    for number in (1, 2, 3, 4):
        request_queue.put("a", number, number)
    with pytest.raises(QueueFull):
        request_queue.put("a", 5, 5)
    request_queue.put_batched("s", 1, "samples have room of their own")
    request_queue.close()
    with pytest.raises(QueueFull):
        request_queue.put_batched("s", 2, "none")
    assert taken(request_queue) == ("a", [1]), "what waits is done"


def test_the_one_that_a_model_waits_for_has_room(request_queue):
    """Others' operations, or its own that came too early, keep no model from going on."""
    for name in ("a", "b"):
        request_queue.open(name, first=1)
    for number in (2, 3, 4, 5):
        request_queue.put("a", number, number)
    request_queue.put("b", 1, "of another")
    with pytest.raises(QueueFull):
        request_queue.put("b", 2, "more of another")
    request_queue.put("a", 1, 1)
    assert [taken(request_queue)[1] for _ in range(3)] == [[1], ["of another"], [2]]


def test_results_of_too_many_bytes_are_waited_for(request_queue, clock, monkeypatch):
    monkeypatch.setattr("mrl.serve.request_queue.MAX_RESULT_BYTES", 9)
    request_queue.finish(request_queue.put_batched("s", 1, "x"), Result(b"x" * 10))
    with pytest.raises(QueueFull):
        request_queue.put_batched("s", 2, "x")
    clock.now = KEPT_S + 1
    assert request_queue.put_batched("s", 2, "x").result is None


def test_room_for_all_or_none(request_queue):
    """What is sent together and does not fit is sent again as a whole: a part of it would be done twice."""
    request_queue.check_room(4)
    request_queue.put_batched("s", 1, "x")
    with pytest.raises(QueueFull):
        request_queue.check_room(4)
    request_queue.check_room(3)
    with pytest.raises(UserError, match="prompt: is 5 prompts; send at most 4 at a time"):
        request_queue.check_room(5)


def test_an_ended_queue_fails_what_waits(request_queue):
    request_queue.open("a", first=1)
    future = request_queue.put("a", 3, "waits")
    request_queue.drop("a", UserError("model_id", "a", "was unloaded", "create another"))
    said = json.loads(future.result.body)
    assert said == {"error": 'model_id: value "a" was unloaded; create another', "category": "user"}
    assert not request_queue.has("a")
    with pytest.raises(KeyError):
        request_queue.put("a", 4, "more")


def test_whoever_waits_is_told(request_queue):
    request_queue.open("a", first=1)
    future, callbacks = request_queue.put("a", 1, "x"), []
    request_queue.add_callback(future, lambda: callbacks.append("at once"))
    assert not callbacks
    threading.Timer(0.05, lambda: request_queue.put("a", 2, "y")).start()
    assert taken(request_queue) == ("a", ["x"])
    assert request_queue.next_work(10).requests[0].operation == "y", "it waits for what comes"
    request_queue.finish(future, Result(b""))
    request_queue.add_callback(future, lambda: callbacks.append("later"))
    assert callbacks == ["at once", "later"]


def test_what_is_put_back_comes_before_what_came_meanwhile(request_queue):
    request_queue.put_batched("s", "key 1", "s1")
    work = request_queue.next_work(0)
    request_queue.put_batched("s", "key 2", "s2")
    request_queue.put_back("s", work.requests)
    assert taken(request_queue) == ("s", ["s1", "s2"])


def test_what_is_drawn_takes_room_until_it_is_finished(request_queue):
    """Else each turn would make room for as many again, and what is under way had no bound."""
    promises = [request_queue.put_batched("s", number, number) for number in range(4)]
    work = request_queue.next_work(0)
    with pytest.raises(QueueFull):
        request_queue.put_batched("s", "more", "more")
    request_queue.put_back("s", work.requests)
    with pytest.raises(QueueFull):
        request_queue.put_batched("s", "more", "more")
    request_queue.finish(promises[0], Result(b""))
    assert request_queue.put_batched("s", "more", "more").result is None


def test_what_is_given_back_fails_and_the_next_call_comes_after_it(request_queue):
    request_queue.open("a", first=1)
    left = [request_queue.put("a", number, number) for number in (1, 2)]
    assert request_queue.fail_waiting("the server was ended") == [1, 2]
    assert all(b"the server was ended" in future.result.body for future in left)
    assert request_queue.next_work(0) is None
    after = request_queue.put("a", 3, "after")
    assert [waiting.future for waiting in request_queue.next_work(0).requests] == [after]


def test_the_next_start_goes_on_at_the_same_numbers(request_queue, clock):
    """With the results that may yet be asked for; no promise of another start is taken for one of its own."""
    request_queue.open("a", first=0)
    promises = [request_queue.put("a", number, number) for number in (0, 1)]
    for future in promises:
        taken(request_queue)
        request_queue.finish(future, Result(future.id.encode(), "x/y"))
    again = RequestQueue(max_waiting=4, clock=clock)
    again.restore(json.loads(json.dumps(request_queue.state())))
    assert again.put("a", 1, 1).result == promises[1].result
    later = again.put("a", 2, "next")
    assert taken(again) == ("a", ["next"]) and later.id not in {promise.id for promise in promises}
    again.drop("a", UserError("gone"))
    again.open("b", first=1)
    again.put("b", 1, "of another")
    assert taken(again) == ("b", ["of another"])


def test_how_long_results_are_kept(request_queue, clock):
    """KEPT_S from when they were there, FETCHED_S from when one was fetched; what has none yet is not forgotten."""
    request_queue.open("a", first=1)
    waits = request_queue.put("a", 9, "waits")
    kept, fetched = request_queue.put("a", 1, "kept"), request_queue.put("a", 2, "fetched")
    clock.now = 2 * KEPT_S
    for future in (kept, fetched):
        request_queue.finish(future, Result(b"x"))
    fetched.fetched_at = clock.now
    for seconds, left in ((FETCHED_S, [waits, kept, fetched]), (KEPT_S, [waits, kept]), (KEPT_S + 20, [waits])):
        clock.now = 2 * KEPT_S + seconds
        request_queue.put_batched("s", seconds, "which forgets")
        found = []
        for future in (waits, kept, fetched):
            with contextlib.suppress(FutureExpired):
                found.append(request_queue.find(future.id))
        assert found == left
