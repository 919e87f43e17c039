"""Reading rows by index: every kind of file and folder gives the same rows, in bounded memory, never stale."""

import errno
import fcntl
import gzip
import json
import logging
import os
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mrl.data.files
from mrl.config.schema import DataConfig
from mrl.data.dataset import SFTDataset
from mrl.data.files import open_file
from mrl.data.rows import open_rows
from mrl.errors import DataError
from tests.data.tiny_tokenizers import config, make_tokenizer, turns, write_jsonl

ROWS = [{"text": f"row {i} é"} for i in range(7)]


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def read(path, split=None, part="train"):
    rows = open_rows(str(path), split=split, part=part)
    return [rows[i] for i in range(len(rows))], [rows.where(i) for i in range(len(rows))]


def write(folder, kind):
    """The rows in a file or folder of one kind; returns what to open and where its row 2 is."""
    text = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS).encode()
    path = folder / f"a.{kind}"
    match kind:
        case "jsonl" | "json":
            path.write_bytes(text)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(text[:30]) + gzip.compress(text[30:]))  # two members
        case "jsonl.zst":
            path.write_bytes(zstd(text[:30]) + zstd(text[30:]))  # two frames
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
            return path, f"{path}:row 2"
        case "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(path)
            return path, f"{path}:row 2"
        case "splits":
            splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
            datasets.DatasetDict(splits).save_to_disk(path)
            return path, f"{path}[train]:row 2"
    return path, f"{path}:3"


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "saved", "splits"])
def test_every_kind_gives_the_same_rows_in_any_order(tmp_path, kind):
    path, where = write(tmp_path, kind)
    found, places = read(path)
    assert found == ROWS and places[2] == where
    rows = open_rows(str(path), split=None, part="train")
    assert [rows[i] for i in (6, 0, 3)] == [ROWS[6], ROWS[0], ROWS[3]]


def test_a_folder_and_a_glob_give_the_files_in_order_and_other_files_are_left_alone(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ROWS[3:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    (tmp_path / "README.md").write_text("about")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        found, places = read(path)
        assert found == ROWS and places[3] == f"{tmp_path}/b.jsonl:1"


def test_many_files_hold_few_handles(tmp_path, monkeypatch):
    monkeypatch.setattr("mrl.data.rows.OPEN_FILES", 3)
    for i in range(20):
        write_jsonl(tmp_path / f"{i:02}.jsonl", [{"text": str(i)}])
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    rows = open_rows(str(tmp_path), split=None, part="train")
    assert [rows[i]["text"] for i in range(20)] == [str(i) for i in range(20)]
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest.mark.parametrize(
    "content, rows, lines",
    [
        (b'{"a": 1}\n{"a": 2}\n', [1, 2], [1, 2]),
        (b'{"a": 1}\n{"a": 2}', [1, 2], [1, 2]),
        (b'\n\n{"a": 1}\r\n\r\n \n{"a": 2}\n\n', [1, 2], [3, 6]),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', [1, 2], [1, 2]),
    ],
)
def test_line_index(tmp_path, content, rows, lines):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    file = open_file(str(path))
    assert [file[i]["a"] for i in range(len(file))] == rows
    assert [file.where(i) for i in range(len(file))] == [f"{path}:{line}" for line in lines]


def test_rows_take_a_few_bytes_each(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_bytes(b'{"text": "the quick brown fox jumps over the lazy dog"}\n' * 100_000)
    tracemalloc.start()
    rows = open_rows(str(path), split=None, part="train")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 100_000 and rows.where(99_999) == f"{path}:100000"
    assert rows[99_999]["text"].endswith("lazy dog")
    assert peak < 6 << 20  # an offset and a line each; the rows as objects take over 30 MB


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def of_tools(name, arguments, properties):
    """A row whose template arguments, calls and schemas have other fields than those of other rows."""
    user, answer = turns("a", "b")
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "messages": [user, {"role": "assistant", "content": "", "tool_calls": [call(name, **arguments)]}, user, answer],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"loud": [name, None, 1.5]},
        "label": 1,
    }


JSON_ROWS = [
    of_tools("weather", {"city": "Paris é"}, {"city": {"type": "string"}}),
    of_tools("add", {"a": 2, "b": [1, [2]], "c": None, "d": {}}, {"a": {"type": "number"}, "b": {"type": "array"}}),
    {"messages": turns("c", "d"), "label": 0},
]
PRINTS_ALL = (
    "{{ tools | tojson if tools else '' }}{{ loud | tojson if loud else '' }}{% for m in messages %}<|im_start|>"
    "{{ m | tojson }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def json_sources(folder):
    """The same rows of JSON in every kind of file and folder: what data.train is, and whether it is streamed."""
    made = datasets.Dataset.from_list(JSON_ROWS, on_mixed_types="use_json")
    made = made.cast_column("label", datasets.ClassLabel(names=["bad", "good"]))
    assert made.features["messages"] == datasets.List(datasets.Json()), "the type that the test is of"
    (folder / "parts").mkdir()
    made.to_parquet(folder / "a.parquet")
    made.to_parquet(folder / "parts" / "train-0.parquet")
    made.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": made}).save_to_disk(folder / "splits")
    write_jsonl(folder / "a.jsonl", JSON_ROWS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    files = [folder / name for name in ("a.jsonl", "a.jsonl.gz", "a.parquet", "parts")]
    of_datasets = [folder / "saved", folder / "splits", "someone/rows"]
    return [*((f, False) for f in [*files, *of_datasets]), *((f, True) for f in [*files, "someone/rows"])]


def test_columns_of_json_are_the_same_tokens_from_every_source(tmp_path, monkeypatch):
    sources = json_sources(tmp_path)
    hub_in(tmp_path / "parts", monkeypatch)
    found = []
    for path, stream in sources:
        config = DataConfig(train=str(path), max_length=999, format="messages", stream=stream, shuffle_buffer=0)
        dataset = SFTDataset(config, make_tokenizer(PRINTS_ALL))
        indices = list(dataset._rows.head())
        found.append(([dataset._rows[i] for i in indices], [dataset.load(i).ids for i in indices]))
        dataset.close()
    rows, ids = found[0]
    assert len(found) == 12 and rows == JSON_ROWS and len({len(row) for row in ids}) == 3
    assert all(other == (rows, ids) for other in found)


def test_text_in_a_column_of_json_that_is_none_is_a_bad_row(tmp_path):
    texts = pa.array(['{"a": 1}', "{'a': 1}", None]).cast(pa.json_())
    pq.write_table(pa.table({"text": ["a", "b", "c"], "more": pa.array(texts)}), tmp_path / "a.parquet")
    for stream in (False, True):
        keys = {"stream": True, "shuffle_buffer": 0} if stream else {}
        dataset = SFTDataset(config(tmp_path / "a.parquet", **keys), make_tokenizer())
        indices = list(dataset._rows.head())
        assert [dataset._rows[indices[i]].get("more") for i in (0, 2)] == [{"a": 1}, None]
        with pytest.raises(DataError, match=r"a.parquet:row 1: a value of type JSON is \"{'a': 1}\" \(Expecting"):
            dataset.load(indices[1])


def test_a_row_of_parquet_has_no_null_fields(tmp_path):
    rows = [{"messages": turns("a", "b")}, {"messages": [{"role": "user", "content": "c", "tool_calls": "x"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == rows


def test_parquet_with_a_dictionary_per_row_group(tmp_path):
    tables = [pa.table({"text": pa.array(t).dictionary_encode()}) for t in (["a", "b"], ["c", "a"])]
    with pq.ParquetWriter(tmp_path / "a.parquet", tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    assert [r["text"] for r in read(tmp_path / "a.parquet")[0]] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_changed_file_gets_a_new_index_and_a_new_copy(tmp_path, kind, monkeypatch):
    path, _ = write(tmp_path, kind)
    first = open_rows(str(path), split=None, part="train").fingerprint()
    monkeypatch.setattr("tests.data.test_rows.ROWS", [{"text": "new"}])
    write(tmp_path, kind)
    assert read(path)[0] == [{"text": "new"}]
    assert open_rows(str(path), split=None, part="train").fingerprint() != first


def test_a_copy_is_made_once(tmp_path, monkeypatch):
    path, _ = write(tmp_path, "jsonl.gz")
    read(path)
    monkeypatch.setattr(mrl.data.files, "_decompress", lambda *_: pytest.fail("decompressed again"))
    assert read(path)[0] == ROWS


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_cache_without_locks_is_warned_about_and_used(tmp_path, monkeypatch, caplog, number):
    """And no file stands for a lock there: it would outlive a process that is killed."""

    def unsupported(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    path, _ = write(tmp_path, "jsonl.gz")
    with caplog.at_level(logging.WARNING):
        assert read(path)[0] == ROWS
    assert "no lock in" in caplog.text and os.strerror(number) in caplog.text
    path.rename(tmp_path / "b.jsonl.gz")

    def decompress(path, target):
        """While it writes, a container with the same process id does all of it."""
        with gzip.open(path) as packed, open(target, "wb") as out:
            monkeypatch.setattr(mrl.data.files, "_decompress", decompress_alone)
            assert read(path)[0] == ROWS
            out.write(packed.read())

    decompress_alone = mrl.data.files._decompress
    monkeypatch.setattr(mrl.data.files, "_decompress", decompress)
    assert read(tmp_path / "b.jsonl.gz")[0] == ROWS


def test_a_file_that_changes_under_its_index_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    dataset = SFTDataset(config(path), make_tokenizer())
    dataset.load(0)
    write_jsonl(path, ROWS[1:])
    with pytest.raises(DataError, match=r"a.jsonl:2: the file changed while it was in use"):
        dataset.load(1)


def test_splits(tmp_path):
    path, _ = write(tmp_path, "splits")
    assert len(read(path, split="test")[0]) == 2
    assert len(read(path, part="eval")[0]) == 2  # test is the default of evaluation
    assert len(read(path, split="train", part="eval")[0]) == 7  # as `mrl eval` reads it
    data = config(path, eval=str(path), split="train")  # in training it is of the training rows
    assert len(SFTDataset(data, make_tokenizer(), part="eval")) == 2


def hub_in(folder, monkeypatch):
    """A hub whose every id is the files in `folder`; returns what was asked of it."""
    asked, real = [], datasets.load_dataset_builder

    def load_dataset_builder(*args):
        asked.append(args)
        return real(str(folder))

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    return asked


def test_a_hub_id_goes_to_datasets_with_its_configuration(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    asked = hub_in(tmp_path / "hub", monkeypatch)
    for split in ("train", "test"):
        write_jsonl(tmp_path / "hub" / f"{split}.jsonl", ROWS)
    assert read("openai/gsm8k:main")[1][0] == "openai/gsm8k:main[train]:row 0"
    assert len(read("ag_news", part="eval")[0]) == 7
    assert asked == [("openai/gsm8k", "main"), ("ag_news", None)]
