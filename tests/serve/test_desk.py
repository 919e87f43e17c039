"""Queues and promises: order, turns, one promise a number, results that are kept for a while."""

import json
import threading
import time

import pytest

from mrl.errors import UserError
from mrl.serve import desk as desk_module
from mrl.serve.desk import FETCHED_S, KEPT_S, LATE_S, UNFETCHED_S, Busy, Desk, Gone, Result


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def desk(clock):
    return Desk(most_waiting=4, clock=clock)


def taken(desk):
    turn = desk.take(0)
    return None if turn is None else (turn.queue, [waiting.operation for waiting in turn.waiting])


def test_a_models_operations_come_in_the_order_of_their_numbers(desk):
    desk.open("a", first=0)
    desk.put("a", 2, "third")
    assert taken(desk) is None, "those before it have not arrived"
    desk.put("a", 0, "first")
    desk.put("a", 1, "second")
    assert [taken(desk)[1] for _ in range(3)] == [["first"], ["second"], ["third"]] and taken(desk) is None


def test_a_refused_number_is_not_waited_for(desk):
    """Whether it is the next one or a later one; a number that was done or waits is not refused."""
    desk.open("a", first=1)
    for number in (1, 3, 4):
        desk.refuse("a", number)
    desk.refuse("b", 1)
    desk.put("a", 5, "fifth")
    assert taken(desk) is None, "the second may come yet"
    desk.put("a", 4, "fourth after all")
    for number in (1, 2):
        desk.refuse("a", number)
    assert taken(desk) == ("a", ["fourth after all"])
    desk.refuse("a", 5)
    assert taken(desk) == ("a", ["fifth"]) and taken(desk) is None
    desk.put("a", 6, "sixth")
    desk.refuse("a", 7)
    desk.put("a", 8, "eighth")
    assert taken(desk) == ("a", ["sixth"]) and taken(desk) == ("a", ["eighth"])


def test_a_number_that_never_comes(desk, clock):
    """What waited for it fails, and what comes later is done; what waits for its turn alone is left."""
    for name in ("a", "b"):
        desk.open(name, first=1)
    waiting, ready = [desk.put("a", number, number) for number in (2, 4)], desk.put("b", 1, "b")
    clock.now = LATE_S
    desk.give_up()
    assert waiting[0].result is None, "it has not waited for long enough"
    clock.now += 1
    assert desk.give_up() == {"a": 1}
    for promise in waiting:
        said = json.loads(promise.result.body)
        assert said["category"] == "user" and said["error"].startswith("seq_id: value 1 has not come")
    assert ready.result is None and taken(desk) == ("b", ["b"]) and taken(desk) is None
    desk.put("a", 5, "goes on")
    assert taken(desk) == ("a", ["goes on"])


def test_what_was_promised_is_known(desk):
    desk.open("a", first=1)
    promise = desk.put("a", 1, "x")
    assert desk.known("a", 1) is promise and desk.known("a", 2) is None


def test_models_and_samples_take_turns(desk):
    for name in ("a", "b"):
        desk.open(name, first=1)
    for name, number in (("a", 1), ("a", 2), ("b", 1)):
        desk.put(name, number, f"{name}{number}")
    desk.put_together("s", "key 1", "s1")
    desk.put_together("s", "key 2", "s2")
    assert [taken(desk) for _ in range(4)] == [("a", ["a1"]), ("b", ["b1"]), ("s", ["s1", "s2"]), ("a", ["a2"])]
    assert not desk.has("s"), "a queue of samples is there while some wait"


def test_one_number_is_done_once(desk, clock):
    desk.open("a", first=1)
    promise = desk.put("a", 1, "once")
    assert desk.put("a", 1, "once") is promise and taken(desk) == ("a", ["once"]) and taken(desk) is None
    desk.finish(promise, Result(b"done"))
    assert desk.put("a", 1, "once") is promise and desk.find(promise.id).result == Result(b"done")
    clock.now = KEPT_S + 1
    desk.put("a", 2, "twice")  # which forgets
    with pytest.raises(Gone):
        desk.find(desk.put("a", 1, "once").id)
    assert taken(desk) == ("a", ["twice"]) and taken(desk) is None


def test_no_room(desk):
    desk.open("a", first=1)
    for number in (1, 2, 3, 4):
        desk.put("a", number, number)
    with pytest.raises(Busy):
        desk.put("a", 5, 5)
    desk.put_together("s", 1, "samples have room of their own")
    desk.close("the end")
    with pytest.raises(Busy):
        desk.put_together("s", 2, "none")
    assert taken(desk) == ("a", [1]), "what waits is done"


def test_the_one_that_a_model_waits_for_has_room(desk):
    """Others' operations, or its own that came too early, keep no model from going on."""
    for name in ("a", "b"):
        desk.open(name, first=1)
    for number in (2, 3, 4, 5):
        desk.put("a", number, number)
    desk.put("b", 1, "of another")
    with pytest.raises(Busy):
        desk.put("b", 2, "more of another")
    desk.put("a", 1, 1)
    assert [taken(desk)[1] for _ in range(3)] == [[1], ["of another"], [2]]


def test_bytes_that_wait_at_once(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "MOST_WAITING_BYTES", 10)
    desk.open("a", first=1)
    for number, size in ((1, 9), (2, 1)):
        desk.put("a", number, number, size=size)
    with pytest.raises(Busy):
        desk.put("a", 3, 3, size=1)
    desk.put("a", 3, 3, size=0)
    assert taken(desk) == ("a", [1])
    desk.put("a", 4, 4, size=9)


def test_results_that_nobody_fetches(desk, clock, monkeypatch):
    """Nothing more is taken where there are too many, until some are fetched or nobody is likely to come for them."""
    monkeypatch.setattr(desk_module, "MOST_UNFETCHED", 20)
    monkeypatch.setattr(desk_module, "MOST_BYTES", 10)
    desk.open("a", first=1)
    promises = [desk.put("a", number, number) for number in (1, 2, 3)]
    while desk.take(0) is not None:
        pass
    for promise in promises[:2]:
        desk.finish(promise, Result(b"0123456789"))
    desk.put("a", 4, 4)
    desk.finish(promises[2], Result(b"0"))
    for ask in (lambda: desk.put("a", 5, 5), lambda: desk.put_together("s", 1, 1), lambda: desk.check_room(1)):
        with pytest.raises(Busy):
            ask()
    for _ in range(2):  # one that is fetched twice
        desk.fetched(promises[1])
    desk.put("a", 5, 5)
    promise = desk.put("a", 6, 6)
    desk.finish(promise, Result(b"0123456789"))
    clock.now = FETCHED_S  # until then one that was fetched may be asked for again, where its answer was lost
    with pytest.raises(Busy):
        desk.put("a", 7, 7)
    assert desk.find(promises[1].id) is promises[1]
    clock.now = UNFETCHED_S + 1
    desk.put("a", 7, 7)
    for one in (promises[0], promises[1]):
        with pytest.raises(Gone):
            desk.find(one.id)
    again = Desk(most_waiting=4, clock=clock)
    monkeypatch.setattr(desk_module, "MOST_UNFETCHED", 0)
    again.restore(desk.state())
    with pytest.raises(Busy):
        again.put("a", 9, 9)


def test_room_for_all_or_none(desk):
    """What is sent together and does not fit is sent again as a whole: a part of it would be done twice."""
    desk.check_room(4)
    desk.put_together("s", 1, "x")
    with pytest.raises(Busy):
        desk.check_room(4)
    desk.check_room(3)
    with pytest.raises(UserError, match="prompt: is 5 prompts; send at most 4 at a time"):
        desk.check_room(5)


def test_an_ended_queue_fails_what_waits(desk):
    desk.open("a", first=1)
    promise = desk.put("a", 3, "waits")
    desk.drop("a", UserError("model_id", "a", "was unloaded", "create another"))
    said = json.loads(promise.result.body)
    assert said == {"error": 'model_id: value "a" was unloaded; create another', "category": "user"}
    assert not desk.has("a")
    with pytest.raises(KeyError):
        desk.put("a", 4, "more")


def test_whoever_waits_is_told(desk):
    desk.open("a", first=1)
    promise, told = desk.put("a", 1, "x"), []
    desk.tell(promise, lambda: told.append("at once"))
    assert not told
    threading.Timer(0.05, lambda: desk.put("a", 2, "y")).start()
    assert taken(desk) == ("a", ["x"])
    assert desk.take(10).waiting[0].operation == "y", "it waits for what comes"
    desk.finish(promise, Result(b""))
    desk.tell(promise, lambda: told.append("later"))
    assert told == ["at once", "later"]


def test_what_is_put_back_comes_before_what_came_meanwhile(desk):
    desk.put_together("s", "key 1", "s1")
    turn = desk.take(0)
    desk.put_together("s", "key 2", "s2")
    desk.put_back("s", turn.waiting)
    assert taken(desk) == ("s", ["s1", "s2"])


def test_what_comes_soon_after_joins_in(desk, monkeypatch):
    """Nobody else waits for it meanwhile, and it is waited for where something has just come or was just done."""
    desk.most_waiting = 9
    monkeypatch.setattr(desk_module, "GATHER_S", 0.5)
    monkeypatch.setattr(desk_module, "GATHER_MOST_S", 30.0)

    def taken_with_a_late_one(number):
        late = threading.Timer(0.1, lambda: desk.put_together("s", number, number))
        late.start()
        found = desk.take(0)
        late.join()
        return found

    desk.put_together("s", 1, 1)
    turn = taken_with_a_late_one(2)
    assert [one.operation for one in turn.waiting] == [1, 2]
    desk.put_back("s", turn.waiting)
    assert [one.operation for one in taken_with_a_late_one(3).waiting] == [1, 2], "nothing has come or was done"
    assert taken(desk) == ("s", [3])
    desk.put_back("s", turn.waiting, more=True)
    assert [one.operation for one in taken_with_a_late_one(4).waiting] == [1, 2, 4]
    desk.open("a", first=1)
    desk.put("a", 1, "x")
    desk.put_together("s", 5, 5)
    assert [taken_with_a_late_one(6).queue, taken(desk)] == ["a", ("s", [5, 6])], "the model's turn does not wait"
    desk.put("a", 2, "y")
    desk.put_together("s", 7, 7)
    began = time.monotonic()
    assert taken(desk)[0] == "a" and time.monotonic() - began < 0.4


def test_a_stream_of_newcomers_does_not_hold_a_turn_up(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "GATHER_S", 0.5)
    monkeypatch.setattr(desk_module, "GATHER_MOST_S", 0.2)
    desk.put_together("s", 0, 0)
    began = time.monotonic()
    assert taken(desk)[1] == [0] and time.monotonic() - began < 0.45


def test_what_is_drawn_takes_room_until_it_is_finished(desk):
    """Else each turn would make room for as many again, and what is under way had no bound."""
    promises = [desk.put_together("s", number, number) for number in range(4)]
    turn = desk.take(0)
    with pytest.raises(Busy):
        desk.put_together("s", "more", "more")
    desk.put_back("s", turn.waiting)
    with pytest.raises(Busy):
        desk.put_together("s", "more", "more")
    desk.finish(promises[0], Result(b""))
    assert desk.put_together("s", "more", "more").result is None


def test_what_waits_for_long_is_not_forgotten(desk, clock):
    desk.open("a", first=1)
    promise = desk.put("a", 2, "waits")
    clock.now = 2 * KEPT_S
    desk.put("a", 3, "more")
    assert desk.find(promise.id) is promise and desk.put("a", 2, "waits") is promise


def test_results_that_were_fetched_go_first_where_there_are_many(desk, clock, monkeypatch):
    monkeypatch.setattr("mrl.serve.desk.MOST_BYTES", 25)
    desk.open("a", first=1)
    promises = [desk.put("a", number, number) for number in (1, 2, 3, 4)]
    while desk.take(0) is not None:
        pass
    for promise in promises:
        desk.finish(promise, Result(b"0123456789"))
    for at, promise in ((0.0, promises[2]), (1.0, promises[1]), (200.0, promises[3])):
        clock.now = at
        desk.fetched(promise)
    desk.put("a", 5, "which forgets")
    with pytest.raises(Gone):
        desk.find(promises[2].id)
    with pytest.raises(Gone):
        desk.find(promises[1].id)
    assert desk.find(promises[0].id) is promises[0], "it was not fetched"
    assert desk.find(promises[3].id) is promises[3], "its answer may have been lost just now"


def test_whoever_no_longer_waits_is_forgotten(desk):
    desk.open("a", first=1)
    promise = desk.put("a", 1, "x")

    def told():
        raise AssertionError("it no longer waits")

    desk.tell(promise, told)
    desk.tell_no_more(promise, told)
    desk.finish(promise, Result(b""))
    desk.tell_no_more(promise, told)


def test_what_is_given_back_fails_and_the_next_call_comes_after_it(desk):
    desk.open("a", first=1)
    left = [desk.put("a", number, number) for number in (1, 2)]
    assert desk.give_back("the server was ended") == [1, 2]
    assert all(b"the server was ended" in promise.result.body for promise in left)
    assert desk.take(0) is None
    after = desk.put("a", 3, "after")
    assert [waiting.promise for waiting in desk.take(0).waiting] == [after]


@pytest.mark.parametrize(("most", "kept"), [(20, (False, False)), (19, (False, False)), (30, (True, True)), (29, (False, True)), (10, (False, False))])  # fmt: skip
def test_no_more_is_forgotten_than_has_to_be(desk, clock, monkeypatch, most, kept):
    """Three results of ten bytes, the last of which nobody has fetched."""
    monkeypatch.setattr("mrl.serve.desk.MOST_BYTES", most)
    desk.open("a", first=1)
    promises = [desk.put("a", number, number) for number in (1, 2, 3)]
    while desk.take(0) is not None:
        pass
    for promise in promises:
        desk.finish(promise, Result(b"0123456789"))
    for promise in promises[:2]:
        clock.now += 1.0
        desk.fetched(promise)
    clock.now = 500.0
    desk.put("a", 4, "which forgets")
    expected = (*kept, True) if most != 20 else (False, True, True)
    for promise, is_kept in zip(promises, expected, strict=True):
        if is_kept:
            assert desk.find(promise.id) is promise
        else:
            with pytest.raises(Gone):
                desk.find(promise.id)


def test_what_is_sent_together_again_is_done_once(desk):
    desk.open("a", first=1)
    promise = desk.put_together("s", "key", "x")
    assert desk.put_together("s", "key", "x") is promise and taken(desk) == ("s", ["x"]) and taken(desk) is None


def test_the_next_start_goes_on_at_the_same_numbers(desk, clock):
    """With the results that may yet be asked for; no promise of another start is taken for one of its own."""
    desk.open("a", first=0)
    promises = [desk.put("a", number, number) for number in (0, 1)]
    for promise in promises:
        taken(desk)
        desk.finish(promise, Result(promise.id.encode(), "x/y"))
    again = Desk(most_waiting=4, clock=clock)
    again.restore(json.loads(json.dumps(desk.state())))
    assert again.put("a", 1, 1).result == promises[1].result
    later = again.put("a", 2, "next")
    assert taken(again) == ("a", ["next"]) and later.id not in {promise.id for promise in promises}
    again.drop("a", UserError("gone"))
    again.open("b", first=1)
    again.put("b", 1, "of another")
    assert taken(again) == ("b", ["of another"])


def test_a_result_is_kept_from_when_it_was_there(desk, clock):
    """However long it was on its way."""
    desk.open("a", first=1)
    promise = desk.put("a", 1, "x")
    taken(desk)
    clock.now = KEPT_S
    desk.finish(promise, Result(b"x"))
    clock.now += 20
    desk.put("a", 2, "which forgets")
    assert desk.find(promise.id) is promise
