"""Several sources: what is mixed, in which order, what a resume goes on with, and what is said of wrong ones."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch

from mrl.config.load import from_dict
from mrl.config.schema import DataConfig
from mrl.config.sources import SFTShare, SFTSource, eval_of, train_of
from mrl.data.batches import BatchSource, eval_batches
from mrl.data.dataset import SFTDataset
from mrl.data.mixture import eval_rows, train_rows
from mrl.data.stream import Report, usable_of_mixture
from mrl.errors import CheckpointError, ConfigError, DataError
from tests.config.test_load import BASE
from tests.data.test_batches import check_resume, make, rows, same, state_of
from tests.data.tiny_tokenizers import make_tokenizer, turns, write_jsonl

SIZES = {"a": 7, "b": 11, "c": 5}


@pytest.fixture
def files(tmp_path):
    """One file each, whose rows are of different lengths."""
    words = {"a": "fox ", "b": "the quick brown fox ", "c": "4 "}
    return {
        name: write_jsonl(
            tmp_path / f"{name}.jsonl", [{"text": f"{words[name] * (1 + i % 3)}{i}"} for i in range(size)]
        )
        for name, size in SIZES.items()
    }


def listed(files, **of_source) -> list[dict]:
    """Sources as YAML has them. of_source: a=dict(weight=..) and so on; others are left out."""
    return [{"path": files[name], **keys} for name, keys in of_source.items()]


def source(entries, *, size=4, seed=0, prefetch=False, shuffle=True, **keys) -> BatchSource:
    data = DataConfig(
        train=train_of(SFTShare)(entries, "data.train"), **{"max_length": 512, "shuffle": shuffle, **keys}
    )
    dataset = train_rows(data, lambda one: SFTDataset(one, make_tokenizer()))
    return BatchSource(dataset, global_batch_size=size, seed=seed, shuffle=shuffle, prefetch=prefetch)


def taken(made: BatchSource, batches: int) -> list[tuple[str, int]]:
    """(source, row) of what the next batches hold, in order."""
    found = []
    for _ in range(batches):
        made.next()
        places = [made.dataset.find(row) for row in made.rows]
        found += [(made.dataset.shares[number].title, row) for number, row in places]
    return found


def test_the_order_and_state_of_one_path_are_what_they_were(tmp_path):
    """Of version 0.2, before there were mixtures: batches, counts and state of a run with rows left out."""
    path = write_jsonl(tmp_path / "a.jsonl", rows(11) + [{"text": ""}] + rows(3))
    made = make(path, size=4, seed=7, on_bad_row="skip", max_length=6, truncation="drop")
    digest = hashlib.sha256()
    for _ in range(9):
        b = made.next()
        fields = [getattr(b, name).tolist() for name in ("tokens", "labels", "loss_mask", "lengths")]
        digest.update(repr((*fields, dict(b.denominators), made.rows)).encode())
    assert digest.hexdigest()[:32] == "ec81d03780f42fd1a35df377ddddcd6a"
    state = made.state_dict()
    del state["data"][0]["name"]
    assert state == {
        "version": 1, "epoch": 3, "position": 9, "skipped": 3, "dropped": 15, "truncated": 0, "seed": 7, "shuffle": True,
        "data": [{"rows": 15, "size": 346, "hash": "crc32:7be80e25"}],
    }  # fmt: skip


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 1, 1), (0.9, 0.05, 0.05), (3, 1, 7)])
def test_no_source_is_ever_a_row_ahead_of_its_share(files, weights):
    order = taken(source(listed(files, **{n: {"weight": w} for n, w in zip("abc", weights, strict=True)})), 100)
    shares = {name: weight / sum(weights) for name, weight in zip("abc", weights, strict=True)}
    for count in range(1, 401):
        given = {name: sum(one == name for one, _ in order[:count]) for name in "abc"}
        assert all(given[name] - share * count < 1 for name, share in shares.items()), (count, given)
    for name in "abc":  # each source goes through all its rows before it begins anew, in another order
        mine = [row for one, row in order if one == name]
        first, second = mine[: SIZES[name]], mine[SIZES[name] : 2 * SIZES[name]]
        assert sorted(first) == list(range(SIZES[name])) and (len(second) < SIZES[name] or first != second)


def test_the_mixture_is_fixed_for_all_time_and_each_seed_has_its_own(files):
    entries = listed(files, a={"weight": 0.5}, b={"weight": 0.3}, c={"weight": 0.2})
    order = taken(source(entries), 5)
    assert "".join(name for name, _ in order) == "abcabacaba" * 2
    assert taken(source(entries, seed=1), 5) != order and taken(source(entries), 5) == order


def test_without_weights_an_epoch_is_every_row_once(files):
    order = taken(source(listed(files, a={}, b={}, c={}), size=23), 3)
    for epoch in (order[:23], order[23:46], order[46:]):
        assert sorted(epoch) == [(name, row) for name, size in SIZES.items() for row in range(size)]


def test_shares_of_tokens(files):
    made = source(listed(files, a={"weight": 1}, b={"weight": 1}), size=1, mix_by="tokens")
    given, longest = {"a": 0, "b": 0}, 0
    for _ in range(300):
        batch = made.next()
        name = made.dataset.shares[made.dataset.find(made.rows[0])[0]].title
        given[name] += batch.num_tokens + 1
        longest = max(longest, batch.num_tokens + 1)
        assert abs(given["a"] - given["b"]) <= longest
    assert given == {name: made.metrics[f"data/{name}/tokens"] for name in "ab"}
    assert made.metrics["data/a/rows"] > 1.5 * made.metrics["data/b/rows"]
    assert made.metrics["data/a/epochs"] == pytest.approx(made.metrics["data/a/rows"] / 7)


def test_rows_tokens_and_passes_of_a_source_with_rows_left_out(files, tmp_path):
    """Six rows of each: of `bad`, whose every other row is skipped, those are a pass of eight and three more."""
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "fox " * (1 + i) if i % 2 == 0 else ""} for i in range(8)])
    entries = [{"path": bad, "weight": 1}, *listed(files, c={"weight": 1})]
    made = source(entries, size=3, shuffle=False, on_bad_row="skip")
    tokens = {"bad": 0, "c": 0}
    for _ in range(4):
        lengths = made.next().lengths.tolist()
        for row, length in zip(made.rows, lengths, strict=True):
            tokens[made.dataset.shares[made.dataset.find(row)[0]].title] += length + 1
    expected = {"bad/rows": 6, "bad/epochs": 1 + 3 / 8, "c/rows": 6, "c/epochs": 1 + 1 / 5}
    expected |= {f"{name}/tokens": count for name, count in tokens.items()}
    assert made.metrics == pytest.approx({f"data/{name}": value for name, value in expected.items()})


def test_a_source_ends_with_its_epochs_and_the_others_go_on(files):
    order = taken(source(listed(files, a={"weight": 4, "epochs": 1.5}, b={"weight": 1})), 10)
    mine = [i for i, (name, _) in enumerate(order) if name == "a"]
    assert len(mine) == 10 and mine[-1] < 13 and order[13:] == [one for one in order[13:] if one[0] == "b"]
    made = source(listed(files, a={"epochs": 2}, b={"epochs": 1}), size=5)
    assert len(taken(made, 5)) == 25
    with pytest.raises(DataError, match=r"^data.train: every source has given the passes over its rows that its epoch"):
        made.next()


def test_rows_within_the_epochs_are_counted_where_some_are_left_out(files, tmp_path):
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "fox"}, {"text": ""}, {"text": "dog"}, {"text": ""}] * 2)
    entries = [{"path": bad, "epochs": 1.5}, *listed(files, c={})]
    made = source(entries, size=1, on_bad_row="skip")
    (usable, most), (others, no_bound) = usable_of_mixture(made.dataset, 0)
    order = taken(made, 100)
    assert (usable, most) == (4, sum(name == "bad" for name, _ in order)) and (others, no_bound) == (5, None)
    assert made.counts["skipped"] == 12 - most
    nothing = write_jsonl(tmp_path / "none.jsonl", [{"text": "fox"}, {"text": ""}])
    with pytest.raises(DataError, match=r"^data.train: .*none.jsonl: none of its 2 rows can be used; skipped: "):
        entries = [{"path": nothing, "columns": {"text": "x"}}, *listed(files, c={})]
        source(entries, on_bad_row="skip", format="text").next()


@pytest.mark.parametrize(("mix_by", "prefetch"), [("rows", True), ("tokens", False)])
def test_a_resumed_mixture_goes_on_exactly(files, mix_by, prefetch):
    entries = listed(files, a={"weight": 0.3, "epochs": 2}, b={"weight": 0.5}, c={"weight": 0.2})
    make_one = lambda: source(entries, mix_by=mix_by, prefetch=prefetch)  # noqa: E731
    live = make_one()
    batches, states = [], [state_of(live)]
    for _ in range(12):
        batches.append(live.next())
        states.append(state_of(live))
    live.close()
    for start in range(12):
        check_resume(make_one(), states[start], batches[start : start + 3], states[min(start + 3, 12)])


def test_sources_and_weights_may_change_on_a_resume_and_that_is_said(files):
    before = source(listed(files, a={"weight": 0.5}, b={"weight": 0.5}))
    first = taken(before, 5)
    state = before.state_dict()
    half = {"weight": 0.5}
    for changed, says in (
        ({"a": half, "b": half, "c": {"weight": 1}}, "c is new and begins with its first row"),
        ({"b": half}, "a is no longer there, of which 10 rows were used"),
        ({"a": {"weight": 0.9}, "b": half}, "weight of a was 0.5 and is 0.9"),
        ({"a": {**half, "epochs": 3}, "b": half}, "epochs of a was null and is 3.0"),
    ):
        after = source(listed(files, **changed))
        after.load_state_dict(copy.deepcopy(state))
        assert after.take_notes() == [f"data.train: {says}: shares count from here"]
        order = taken(after, 20)
        weights = {share.title: share.weight for share in after.dataset.shares}
        for count in range(1, 20):  # at once, without catching up
            given = {name: sum(one == name for one, _ in order[:count]) for name in weights}
            assert all(given[n] - w / sum(weights.values()) * count < 1 for n, w in weights.items())
        rows_of_b = [row for name, row in first + order if name == "b"]
        assert sorted(rows_of_b[:11]) == list(range(11))  # where it was
    by_tokens = source(listed(files, b={"weight": 0.5}, a={"weight": 0.5}), mix_by="tokens")
    by_tokens.load_state_dict(state)  # another order of the list is no change
    assert by_tokens.take_notes() == ["data.train: data.mix_by was rows and is tokens: shares count from here"]


def test_naming_the_format_that_auto_has_found_is_no_change(files):
    """Nor is leaving it out again; another one is."""
    auto, named, other = ({"b": {"format": name}} for name in ("auto", "text", "messages"))
    for before, after in ((auto, named), (named, auto)):
        live, resumed = (source(listed(files, a={}, **own)) for own in (before, after))
        live.next()
        resumed.load_state_dict(state_of(live))
        assert resumed.take_notes() == [] and same(resumed.next(), live.next())
    with pytest.raises(CheckpointError, match='source b, format: is "messages" and was "auto"'):
        source(listed(files, a={}, **other)).load_state_dict(source(listed(files, a={}, **auto)).state_dict())


def test_a_resume_with_other_rows_is_refused(files, tmp_path):
    made = source(listed(files, a={}, b={}))
    made.next()
    state = made.state_dict()
    write_jsonl(files["a"], [{"text": "other"}] * 7)
    for changed, keys, says in (
        ({"a": {}, "b": {}}, {}, "data.train, source a: "),
        ({"b": {"loss_on": "all"}}, {}, 'data.train, source b, loss_on: is "all" and was "assistant" when the'),
        ({"b": {}}, {"seed": 1}, "seed: is 1 and was 0"),
        ({"b": {}}, {"shuffle": False}, "data.shuffle: is False and was True"),
    ):
        with pytest.raises(CheckpointError) as found:
            source(listed(files, **changed), **keys).load_state_dict(state)
        assert str(found.value).startswith(says), found.value
    one = make(files["b"])
    for to, of, says in (
        (one, state, "data.train: is one path and was a list of sources when"),
        (made, one.state_dict(), "data.train: is a list of sources and was one path when"),
    ):
        with pytest.raises(CheckpointError, match=says):
            to.load_state_dict(of)


def test_every_source_is_read_in_its_own_way(tmp_path):
    talk, question = turns("hello", "dog"), {"question": "fox", "answer": "lazy"}
    paths = {
        "talks": write_jsonl(tmp_path / "talks.jsonl", [{"messages": talk}]),
        "pairs": write_jsonl(tmp_path / "pairs.jsonl", [question]),
    }
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    own = {
        "talks": {"system": "You are", "loss_on": ["user", "assistant"], "format": "messages"},
        "pairs": {"columns": {"question": "prompt", "answer": "completion"}, "chat_template": str(template)},
    }
    made = source([{"path": paths[n], "name": n, **keys} for n, keys in own.items()], size=2)
    made.next()
    for number, (name, keys) in enumerate(own.items()):
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()}
        alone = SFTDataset(DataConfig(train=paths[name], max_length=512, **plain), make_tokenizer())
        assert made.dataset.load(number) == alone.load(0)
        assert made.dataset.where(number) == alone.where(0)
    data = DataConfig(
        train=paths["talks"], max_length=512,
        eval=eval_of(SFTSource)({n: {"path": paths[n], **keys} for n, keys in own.items()}, "data.eval"),
    )  # fmt: skip
    sets = eval_rows(data, lambda one: SFTDataset(one, make_tokenizer(), part="eval"))
    for number, (name, dataset) in enumerate(sets.items()):
        (batch,) = eval_batches(dataset, 4, Report())
        assert name == list(own)[number] and torch.equal(batch.labels[-1:], torch.tensor(dataset.load(0).ids[-1:]))
        assert dataset.load(0) == made.dataset.load(number)


WRONG = {
    "number": (3, "data.train: value 3 is a whole number; give text, or a list of sources"),
    "mapping": ({"path": "a"}, "data.train: value {\"path\": \"a\"} is a mapping; give text, or a list of sources, as in"),
    "empty": ([], "data.train: value [] names no source"),
    "entry": ([3], "data.train[0]: value 3 is a whole number; give a mapping with any of the keys"),
    "no path": ([{"name": "a"}], "data.train[0].path: is missing and has no default; give text"),
    "unknown key": ([{"path": "a", "wieght": 1}], "data.train[0].wieght: value 1 is given to an unknown key; did you mean"),
    "one weight": ([{"path": "a", "weight": 1}, {"path": "b"}], "data.train[1].weight: is missing, and another source has"),
    "one name": (["x/a.jsonl", "y/a.jsonl"], 'data.train[1].name: value "a" is taken; give each source a name of its own'),
    "no name": (["*"], "data.train[0].name: is missing, and none can be made of path '*'; give one"),
    "bad name": ([{"path": "a", "name": "a/b"}], 'data.train[0].name: value "a/b" is no name for metrics; give letters'),
    "no roles": ([{"path": "a", "loss_on": []}], "data.train[0].loss_on: value [] names no role"),
}  # fmt: skip
WRONG_EVAL = {
    "number": (3, "data.eval: value 3 names no source; give text, a mapping of names to"),
    "list": (["a"], 'data.eval: value ["a"] names no source; give text, a mapping of names to sources'),
    "empty": ({}, "data.eval: value {} names no source"),
    "name": ({"a b": "x"}, 'data.eval: value "a b" is no name for metrics'),
    "entry": ({"a": None}, "data.eval.a.path: is missing and has no default"),
}  # fmt: skip


@pytest.mark.parametrize(
    "key, value, says",
    [("train", *wrong) for wrong in WRONG.values()] + [("eval", *wrong) for wrong in WRONG_EVAL.values()],
    ids=[*(f"train {name}" for name in WRONG), *(f"eval {name}" for name in WRONG_EVAL)],
)
def test_wrong_sources_are_one_line(key, value, says):
    with pytest.raises(ConfigError) as found:
        from_dict({**BASE, "data": {**BASE["data"], key: value}})
    assert str(found.value).startswith(says), found.value


def test_shares_of_nothing_are_refused():
    """Of one path; and of tokens by no weights, which once were numbers of rows."""
    for train, why in {
        "a.jsonl": "is not used where data.train is one path; give",
        ("a.jsonl", "b.jsonl"): "shares out by weights, and no source of data.train has one; give a weight",
    }.items():
        with pytest.raises(ConfigError, match=f'^data.mix_by: value "tokens" {why}'):
            from_dict({**BASE, "data": {**BASE["data"], "train": train, "mix_by": "tokens"}})


def test_a_share_of_no_row_is_refused(files):
    with pytest.raises(DataError, match="^data.train, source c, epochs: is 0.1, which of its 5 rows is none; give"):
        source(listed(files, a={}, c={"epochs": 0.1}))


def test_what_is_wrong_with_a_source_is_said_of_its_key(files):
    with pytest.raises(
        DataError, match=r"^data.train\[1\]: data.split: 'train', but data.train .* is files, which have"
    ):
        source(listed(files, a={}, c={"split": "train"}))
