"""Files that are held out by their names do not train beside others, and rows do not train and evaluate unsaid."""

import fsspec
import pytest

from mrl.config.schema import DataConfig
from mrl.config.sources import SFTShare, SFTSource, eval_of, train_of
from mrl.data.dataset import SFTDataset
from mrl.data.mixture import eval_rows, notes_of_rows, train_rows
from mrl.data.rows import open_rows
from mrl.errors import DataError
from tests.data import tiny_tokenizers
from tests.data.test_rows import hub_in

HELD_OUT = (
    "gsm_test", "test-00000-of-00001", "gsm.test.v2", "a-val_1", "Validation", "x_VALID", "dev", "my dev", "evals",
    "a.eval", "evaluation2", "testing", "test1", "testset", "gsm_held_out", "heldout-1", "hold-out", "a(test)",
    "testData", "GSMTest", "GSM8KTest", "heldOut",
)  # fmt: skip
TRAINS = ("latest", "contest", "evaluated", "invalid", "device", "validity", "attest_1", "developer", "gsm_train", "é1")


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        tiny_tokenizers.write_jsonl(folder / name, [{"text": name}])
    return str(folder)


def opened(train, part="train", **keys):
    """The rows of data.train or data.eval, as a run opens them."""
    if part == "eval":
        own = {"train": "none", "eval": eval_of(SFTSource)(train, "data.eval")}
    else:
        own = {"train": train_of(SFTShare)(train, "data.train")}
    data = DataConfig(max_length=64, **own, **keys)
    made = {"train": train_rows, "eval": eval_rows}[part]
    return made(data, lambda one: SFTDataset(one, tiny_tokenizers.make_tokenizer(), part=part))


@pytest.mark.parametrize("stream", [False, True])
def test_a_word_between_separators_says_that_a_file_is_held_out(tmp_path, stream):
    for number, name in enumerate(HELD_OUT):
        folder = write(tmp_path / str(number), f"{name}.jsonl", "gsm_train.jsonl")
        with pytest.raises(DataError, match="^data.train: .* stands for several splits") as refused:
            opened(folder, stream=stream)
        assert "gsm_train.jsonl" in str(refused.value) and f"{name}.jsonl" in str(refused.value)
    opened(write(tmp_path / "others", *(f"{name}.jsonl" for name in TRAINS)), stream=stream)


def several(tmp_path, monkeypatch):
    """What names gsm_train beside gsm_test, of every kind, with what it is refused as; "" where it is taken."""
    folder = write(tmp_path / "d", "gsm_train.jsonl", "gsm_test.jsonl", "more/train/a.jsonl", "more/test/a.jsonl")
    write(tmp_path / "shards", "test-0.jsonl", "test-1.jsonl")
    write(tmp_path / "test" / "own", "a.jsonl", "b.jsonl")
    write(tmp_path / "alone", "test.jsonl")
    write(tmp_path / "hub", "gsm-heldout.jsonl", "a.jsonl")  # `datasets` takes both for the split train
    hub_in(tmp_path / "hub", monkeypatch)
    memory = fsspec.filesystem("memory")
    for name in ("gsm_train", "gsm_test"):
        memory.pipe(f"/splits/{name}.jsonl", b'{"text": "a"}')
    train, test, both = f"{folder}/gsm_train.jsonl", f"{folder}/gsm_test.jsonl", "gsm_test.jsonl"
    return [
        (folder, both), (f"{folder}/*.jsonl", both), (train, ""), (test, ""), (f"{folder}/*_t[re]*", both),
        (f"{folder}/*test*", ""), (f"{folder}/more/*/a.jsonl", "more/train/a.jsonl"), (f"{folder}/**/test/*.jsonl", ""),
        (str(tmp_path / "shards"), ""), (str(tmp_path / "test" / "own"), ""), (str(tmp_path / "alone"), ""),
        ("someone/rows", "gsm-heldout.jsonl"), ("memory://splits", both), ("memory://splits/*test*", ""),
        ("memory://splits/gsm_test.jsonl", ""), ([train, test], ""),
        ([train, str(tmp_path / "alone")], "test.jsonl"), ([f"{folder}/*train*", f"{folder}/*test*"], ""),
        ([train, f"{tmp_path}/shards"], "test-0.jsonl"), ([train, f"{tmp_path}/test"], "no data file"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_whatever_names_several_files_names_one_split(tmp_path, monkeypatch, stream):
    tried = 0
    for train, why in several(tmp_path, monkeypatch):
        if "://" in str(train) and not stream:
            continue
        tried += 1
        if isinstance(train, list):
            train = [{"path": path, "name": f"of{i}", "weight": 1} for i, path in enumerate(train)]
        try:
            opened(train, stream=stream)
            said = ""
        except DataError as error:
            said = str(error)
        assert bool(said) == bool(why) and why in said, (train, said)
        assert "\n" not in said
    assert tried == (20 if stream else 17)


def test_words_of_one_meaning_are_one_split(tmp_path):
    folder = write(tmp_path / "d", "a_val.jsonl", "b_validation.jsonl", "valid.jsonl")
    for path in (folder, f"{folder}/*val*"):
        assert len(open_rows(path, split=None, part="eval")) == 3
    write(tmp_path / "d", "dev.jsonl")
    with pytest.raises(DataError, match="several splits"):
        opened(folder, "eval")


def test_rows_to_evaluate_on_are_of_one_split_too(tmp_path):
    folder = write(tmp_path / "d", "a_val.jsonl", "a_test.jsonl")
    for path in (folder, f"{folder}/*"):
        with pytest.raises(DataError, match=r"^data.eval: .* several splits"):
            opened(path, "eval")
    assert len(opened({"val": f"{folder}/*val*", "test": f"{folder}/a_test.jsonl"}, "eval")) == 2
    with pytest.raises(DataError, match=r"^data.eval: .* several splits"):
        open_rows(folder, split=None, part="eval")  # as `mrl eval` and `mrl generate` read them


def test_a_file_that_trains_and_evaluates_is_said_or_refused(tmp_path):
    folder = write(tmp_path / "d", "a.jsonl", "b.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(f"{folder}/a.jsonl")
    a, b = f"{folder}/a.jsonl", f"{folder}/b.jsonl"
    more = {"path": b, "name": "more"}

    def said(train, held_out, **keys):
        return notes_of_rows(opened(train, **keys), opened(held_out, "eval"))

    assert said(a, b) == said([a, more], write(tmp_path / "e", "c.jsonl")) == []
    for train, held_out, stream, key in [
        (a, a, False, "data.eval"), (a, a, True, "data.eval"), (a, str(link), False, "data.eval"),
        ([b, {"path": a, "name": "more"}], {"x": b, "y": f"{folder}/../d/a.jsonl"}, False, "data.eval.x"),
    ]:  # fmt: skip
        lines = said(train, held_out, stream=stream)
        assert len(lines) == (2 if isinstance(train, list) else 1)
        assert lines[0].startswith(f"{key}: ") and lines[0].endswith("the evaluation is of rows that train")
    for train, held_out, stream in [
        (folder, a, False), (folder, a, True), (f"{folder}/*", b, False), (a, folder, False), (folder, folder, False),
        (a, f"{folder}/*.jsonl", False), ([b, {"path": folder, "name": "more"}], a, False), (b, {"x": a, "y": folder}, False),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=r"^data.eval(.y)?: .*/[ab].jsonl is in data.train(\[\d\])? too, and .*/d"):
            said(train, held_out, stream=stream)
