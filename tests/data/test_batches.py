"""Order, batches, position and counters: pure functions of seed, epoch and rows; exact over a resume."""

import json
import threading

import datasets
import pytest
import torch

from mrl.data.batches import BatchSource, eval_batches, steps_for_epochs
from mrl.data.dataset import Example, SFTDataset
from mrl.data.stream import Report, count_usable, may_leave_out, row_order
from mrl.errors import CheckpointError, DataError
from tests.data.tiny_tokenizers import CHATML_MARKED, config, make_tokenizer, turns, write_jsonl

WORDS = ["fox", "dog", "the quick brown fox", "hello there", "lazy", "4", "What is 2 + 2?", "over the lazy dog"]


def rows(n=8):
    return [{"text": f"{WORDS[i % 8]} {i}"} for i in range(n)]


def make(path, *, size=3, seed=0, shuffle=True, prefetch=True, **keys):
    dataset = SFTDataset(config(path, **keys), make_tokenizer())
    return BatchSource(dataset, global_batch_size=size, seed=seed, shuffle=shuffle, prefetch=prefetch)


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", rows())


def same(a, b):
    fields = ("tokens", "labels", "loss_mask", "lengths")
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields) and a.denominators == b.denominators


def state_of(source):
    """What a checkpoint holds of it."""
    return json.loads(json.dumps(source.state_dict()))


def check_resume(resumed, state, batches, after):
    """A source goes on from a state through these batches to the state that comes after them."""
    resumed.load_state_dict(state)
    assert resumed.take_notes() == []
    assert all(same(resumed.next(), batch) for batch in batches)
    assert state_of(resumed) == after
    resumed.close()


def test_the_order_is_fixed_for_all_time():
    assert row_order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert row_order(0, 1, 8).tolist() != row_order(0, 0, 8).tolist() != row_order(1, 0, 8).tolist()
    assert sorted(row_order(-1, 3, 1000).tolist()) == list(range(1000))
    assert row_order(0, 1, 4, shuffle=False).tolist() == [0, 1, 2, 3]


def test_batches_are_full_and_go_on_over_the_end_of_an_epoch(path):
    source = make(path)
    seen = [i for _ in range(8) for i in (source.next(), source.rows)[1]]
    assert seen == [i for epoch in range(3) for i in row_order(0, epoch, 8).tolist()]
    assert (source.state_dict()["epoch"], source.state_dict()["position"]) == (3, 0)


def test_a_batch_holds_the_rows_tokens_and_its_denominators(path):
    source = make(path, shuffle=False)
    batch, tokenizer = source.next(), make_tokenizer()
    texts = [tokenizer.decode(t.tolist()) for t in batch.labels.split(batch.lengths.tolist())]
    assert [t[-6:] for t in texts] == [" 0</s>", " 1</s>", " 2</s>"]
    assert batch.denominators == {"tokens": float(batch.num_tokens), "sequences": 3.0}


@pytest.mark.parametrize(
    "steps, epochs, n, size", [(3, 1, 8, 3), (1, 0.1, 8, 3), (3, 0.1, 30, 1), (2, 2, 8, 8), (1, 1, 1, 64)]
)
def test_steps_for_epochs(steps, epochs, n, size):
    assert steps_for_epochs(epochs, n, size) == steps


@pytest.mark.parametrize(("kill_after", "prefetch"), [(0, True), (2, False), (3, True), (5, False)])
def test_trap_32_a_resumed_source_goes_on_exactly_over_the_epochs(path, kill_after, prefetch):
    whole = make(path, prefetch=prefetch)
    expected = [(whole.next(), whole.rows) for _ in range(9)]
    killed = make(path, prefetch=prefetch)
    for _ in range(kill_after):
        killed.next()
    state = state_of(killed)
    resumed = make(path, prefetch=not prefetch)
    resumed.next()  # loading forgets what was consumed or made ahead before
    resumed.load_state_dict(state)
    for batch, indices in expected[kill_after:]:
        assert same(resumed.next(), batch) and resumed.rows == indices
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_peek_changes_nothing(path, prefetch):
    peeked, plain = make(path, prefetch=prefetch), make(path, prefetch=prefetch)
    for _ in range(3):
        before = peeked.state_dict()
        peeked.prefetch()
        assert peeked.state_dict() == before
        assert same(peeked.next(), plain.next()) and peeked.rows == plain.rows
    assert peeked.state_dict() == plain.state_dict()
    peeked.prefetch()
    peeked.load_state_dict(before)  # what was peeked at is forgotten
    assert peeked.next() is not None and peeked.state_dict() == plain.state_dict()


def changed_row(path):
    write_jsonl(path, [*rows(4), {"text": "laZy 4"}, *rows()[5:]])


def longer(path):
    write_jsonl(path, rows(9))


@pytest.mark.parametrize(
    "change, keys, message",
    [
        (longer, {}, r"data.train: .*a.jsonl has rows 9 and had 8 when the checkpoint was saved.*put the data back"),
        (changed_row, {}, r"a.jsonl has hash crc32:\w+ and had crc32:\w+"),
        (None, {"seed": 1}, r"seed: is 1 and was 0 when the checkpoint was saved.*set it to 0"),
        (None, {"shuffle": False}, r"data.shuffle: is False and was True"),
    ],
)
def test_trap_32_an_old_position_in_changed_data_is_refused_by_name(path, change, keys, message):
    source = make(path)
    source.next()
    state = source.state_dict()
    if change:
        change(path)
    with pytest.raises(CheckpointError, match=message):
        make(path, **keys).load_state_dict(state)


def test_trap_32_for_parquet_saved_data_sets_and_folders(tmp_path):
    old = datasets.Dataset.from_list(rows())
    new = datasets.Dataset.from_list([*rows(7), {"text": "over the lazy dog x"}])
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    for name, write in (("a.parquet", datasets.Dataset.to_parquet), ("saved", datasets.Dataset.save_to_disk)):
        before, after = str(tmp_path / "old" / name), str(tmp_path / "new" / name)
        write(old, before), write(new, after)
        state = make(before).state_dict()
        make(before).load_state_dict(state)
        with pytest.raises(CheckpointError, match=r"has (size|hash) \S+ and had"):
            make(after).load_state_dict(state)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", rows())
    state = make(str(folder)).state_dict()
    write_jsonl(folder / "b.jsonl", rows())
    with pytest.raises(CheckpointError, match="has 2 files and had 1"):
        make(str(folder)).load_state_dict(state)


def test_moved_data_and_another_batch_size_go_on_at_the_same_row(path, tmp_path):
    source = make(path)
    source.next()
    moved = write_jsonl(tmp_path / "moved.jsonl", rows())
    resumed = make(moved, size=2)
    resumed.load_state_dict(source.state_dict())
    resumed.next()
    assert resumed.rows == row_order(0, 0, 8).tolist()[3:5]


# ------------------------------------------------------------------------------------------- rows that are left out


@pytest.fixture
def mixed(tmp_path):
    """Rows 1 and 6 are bad; rows 2 and 7 are longer than 12 tokens."""
    lines = [r for r in rows()]
    lines[1], lines[6] = '{"text": 5}', "{oops"
    lines[2], lines[7] = {"text": "hello " * 20}, {"text": "fox " * 30}
    return write_jsonl(tmp_path / "mixed.jsonl", lines)


def test_skip_and_drop_are_counted_noted_and_resumed(mixed):
    keys = {"on_bad_row": "skip", "truncation": "drop", "max_length": 12, "size": 2}
    source = make(mixed, shuffle=False, **keys)
    assert [(source.next(), source.rows)[1] for _ in range(3)] == [[0, 3], [4, 5], [0, 3]]
    assert source.counts == {"skipped": 3, "dropped": 3, "truncated": 0}
    notes = source.take_notes()
    assert notes[0] == f"skipped: {mixed}:2: text is 5; give a string"
    assert notes[1].startswith(f"dropped: {mixed}:3: the row has 24 tokens and data.max_length is 12")
    assert len(notes) == 6 and not source.take_notes()
    resumed = make(mixed, shuffle=False, **keys)
    resumed.load_state_dict(source.state_dict())
    assert resumed.counts == source.counts
    resumed.next(), source.next()
    assert resumed.counts == source.counts and resumed.rows == source.rows


@pytest.mark.parametrize("policy, kept", [("right", slice(0, 12)), ("left", slice(-12, None))])
def test_truncation_cuts_the_end_it_names_and_is_counted(mixed, policy, kept):
    source = make(mixed, shuffle=False, on_bad_row="skip", truncation=policy, max_length=12, size=6)
    dataset, tokenizer = source.dataset, make_tokenizer()
    whole = [*tokenizer("hello " * 20)["input_ids"], tokenizer.eos_token_id]
    cut = dataset.load(2)
    assert isinstance(cut, Example) and cut.truncated and cut.ids == whole[kept]
    assert source.next().max_length == 11 and source.counts["truncated"] == 2


def test_a_row_of_exactly_max_length_is_whole(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5] * 6}])
    assert not make(path, max_length=6).dataset.load(0).truncated
    with pytest.raises(DataError, match="a.jsonl:1: the row has 6 tokens and data.max_length is 5"):
        make(path, max_length=5, on_bad_row="skip").dataset.load(0)


def test_stop_stops_at_the_batch_that_holds_the_row_not_one_before(mixed):
    source = make(mixed, shuffle=False, truncation="right", max_length=12, size=1)
    source.next()
    with pytest.raises(DataError, match=r"mixed.jsonl:2: text is 5; give a string"):
        source.next()


def test_when_no_row_can_be_used_it_says_so_instead_of_looking_forever(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": 1}, {"text": 2}])
    source = make(path, on_bad_row="skip")
    for used in (source.next, lambda: list(eval_batches(source.dataset, 2))):
        with pytest.raises(
            DataError, match=r"data.train: .*a.jsonl: none of its 2 rows can be used; skipped: .*a.jsonl:"
        ):
            used()


def test_eval_batches_give_every_usable_row_once_in_order(mixed):
    dataset, report = make(mixed, on_bad_row="skip", truncation="right", max_length=12).dataset, Report()
    batches = list(eval_batches(dataset, 4, report))
    assert [b.num_sequences for b in batches] == [4, 2]
    assert (report.skipped, report.dropped, report.truncated) == (2, 0, 2) and len(report.notes) == 2
    assert batches[0].denominators["sequences"] == 4.0


@pytest.mark.parametrize(
    "weights, sizes",
    [((1, 1, 1, 1, 0), [2, 3]), ((0, 0, 1, 0, 1), [3, 2]), ((1, 1, 0, 0, 0), [5]), ((1, 1, 1, 1, 1), [2, 2, 1])],
)
def test_rows_of_weight_0_are_in_a_batch_with_others(tmp_path, weights, sizes):
    """Of themselves they make none, as there is nothing to divide by; a shuffled run has them among others."""
    rows = [{"text": "the lazy dog", "weight": weight} for weight in weights]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [batch.num_sequences for batch in eval_batches(make(path).dataset, 2)] == sizes


def test_eval_while_the_thread_works_changes_nothing(tmp_path):
    conversations = [{"messages": turns("hello", w, "fox", w)} for w in WORDS]
    path = write_jsonl(tmp_path / "chat.jsonl", conversations)
    tokenizer = make_tokenizer(CHATML_MARKED)
    source = BatchSource(SFTDataset(config(path), tokenizer), global_batch_size=8, seed=0)
    held_out = SFTDataset(config(path), tokenizer)
    expected = next(eval_batches(held_out, 8))
    for _ in range(20):
        source.next()
        assert same(next(eval_batches(held_out, 8)), expected)
    source.close()
    assert not any(t.name.startswith("mrl-data") and t in source._thread._threads for t in threading.enumerate())


def test_usable_rows_are_counted_without_touching_the_counts_of_the_run(tmp_path):
    long, bad = {"text": "fox " * 40}, {"words": "fox"}
    path = write_jsonl(tmp_path / "a.jsonl", [*rows(4), long, bad, long])
    source = make(path, max_length=32, truncation="drop", on_bad_row="skip", format="text")
    assert count_usable(source.dataset) == (4, {"skipped": 1, "dropped": 2, "truncated": 0})
    assert set(source.counts.values()) == {0}
    with pytest.raises(DataError, match="none of its 7 rows"):
        count_usable(make(path, max_length=2, truncation="drop", on_bad_row="skip", format="text").dataset)
    assert not may_leave_out(config(path)) and not may_leave_out(config(path, truncation="right"))
    assert may_leave_out(config(path, truncation="drop")) and may_leave_out(config(path, on_bad_row="skip"))
