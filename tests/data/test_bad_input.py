"""Wrong data files, rows and options: one line each, with file and line (or the key) and what would work."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.data.batches import BatchSource
from mrl.data.dataset import Example, SFTDataset
from mrl.data.tokenizer import use_chat_template
from mrl.errors import DataError
from tests.data.tiny_tokenizers import CHATML, STRIPS_REASONING, config, make_tokenizer, turns, write_jsonl

GOOD = {"messages": turns("hello", "fox")}
USER = {"role": "user", "content": "hello"}


def messages(*given, **more):
    return {"messages": list(given), **more}


# name -> the second row (line 2), and what is said of it; the first row is good and sets the format
BAD_ROWS = {
    "not JSON": ("{oops", "is not a JSON object (Expecting property name"),
    "cut off": ('{"messages": [{"role": "us', "is not a JSON object (Invalid control character"),
    "a JSON number": ("5", "is no JSON object but 5"),
    "deep": ('{"messages": ' + "[" * 99999 + "]" * 99999 + "}", "is not a JSON object (maximum recursion depth"),
    "another format": ({"text": "x"}, "messages is missing or null, and the format messages needs it; the row has text"),
    "messages empty": ({"messages": []}, "messages is an empty list; give a list of at least one"),
    "a message a string": (messages("hello"), "messages[0] is 'hello'; give an object with role and content"),
    "no role": (messages({"content": "x"}), "messages[0] has no role"),
    "no content": (messages(USER, {"role": "assistant"}), "messages[1].content is missing or null; give a string"),
    "empty answer": (messages(USER, {"role": "assistant", "content": ""}), "messages[1].content is empty"),
    "parts": (messages({"role": "user", "content": [{"type": "text", "text": "x"}] * 2}), "messages[0].content is a list of parts"),
    "no assistant turn": (messages(USER, {"role": "gpt", "content": "x"}), "has nothing to train on: no turn of assistant with a weight above 0 (roles: user, gpt)"),
    "assistant first": (messages({"role": "assistant", "content": "x"}, USER), "messages[0] is an assistant turn"),
    "half a character": ('{"messages": [{"role": "user", "content": "a\\ud800"}]}', "messages[0].content has half of a UTF-16 pair at character 1"),
    "refused by the template": (messages(USER, USER, {"role": "assistant", "content": "x"}), "the chat template cannot render the conversation (TemplateError: roles must alternate)"),
    "too long": ({"messages": turns("hello " * 600, "fox")}, "tokens and data.max_length is 512; raise data.max_length, or set data.truncation to"),
}  # fmt: skip

STRICT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)

PAIR, ALPACA, TEXT, IDS = (
    {"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}, {"text": "a"}, {"input_ids": [5, 6]},
)  # fmt: skip
# first row, second row, what is said of it
OTHER_FORMATS = [
    (PAIR, {"prompt": [USER], "completion": "b"}, "prompt is a list; give a string"),
    (PAIR, {"prompt": "a", "completion": ""}, "completion is empty"),
    (PAIR, {"prompt": [USER], "completion": [USER]}, "has nothing to train on: no turn of assistant"),
    (ALPACA, {"instruction": "", "output": "b"}, "instruction is empty"),
    (ALPACA, {"instruction": "a", "output": "b", "input": 5}, "input is 5; give a string"),
    (TEXT, {"text": ["a"]}, "text is a list; give a string"),
    (TEXT, {"text": ""}, "text is empty"),
    (IDS, {"input_ids": []}, "input_ids is an empty list; give a list of integers"),
    (IDS, {"input_ids": [5, 6.5]}, "input_ids[1] is 6.5; give a list of integers"),
    (IDS, {"input_ids": [5, 99999]}, "input_ids[1] is 99999, but the tokenizer has"),
    (IDS, {"input_ids": [5, 6], "loss_mask": [1, 0]}, "has nothing to train on: of its 2 tokens 2 are kept and none trains"),
    (IDS, {"input_ids": [5, 6], "labels": [6, 7]}, "labels[0] is 6 and input_ids[0] is 5; labels are not shifted here"),
    (IDS, {"input_ids": [5, 6], "labels": [6]}, "labels has 1 entries and input_ids 2; give one per token"),
    (IDS, {"input_ids": [5, 6], "loss_mask": [0, 2]}, "loss_mask[1] is 2; give 1 where a token trains"),
    (IDS, {"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]}, "has labels and loss_mask; keep the one"),
    (IDS, {"input_ids": [5, 6], "attention_mask": [1, 0]}, "attention_mask[1] is 0; remove padding"),
]  # fmt: skip


def check(path, says, *, template=STRICT, place=":2: ", **keys):
    """`load(1)` and `next()` stop with one line that names the place, what is wrong and what would work."""
    dataset = SFTDataset(config(path, **keys), make_tokenizer(template))
    with pytest.raises(DataError) as error:
        dataset.load(1)
    message = str(error.value)
    assert message.startswith(f"{path}{place}") and says in message and "\n" not in message and len(message) < 600
    with pytest.raises(DataError) as again:
        BatchSource(dataset, global_batch_size=2, seed=0).next()
    assert str(again.value) == message


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_messages(tmp_path, name):
    row, says = BAD_ROWS[name]
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, row])
    check(path, says)
    if name == "too long":
        return  # it can be read: data.truncation decides, not data.on_bad_row
    skipping = SFTDataset(config(path, on_bad_row="skip"), make_tokenizer(STRICT))
    assert isinstance(skipping.load(0), Example) and skipping.load(1).outcome == "skipped"


@pytest.mark.parametrize("first, row, says", OTHER_FORMATS, ids=[says[:40] for _, _, says in OTHER_FORMATS])
def test_bad_rows_of_other_formats(tmp_path, first, row, says):
    check(write_jsonl(tmp_path / "a.jsonl", [first, row]), says)


@pytest.mark.parametrize("kind", ["parquet", "saved", "jsonl.gz"])
def test_bad_rows_elsewhere_are_named_too(tmp_path, kind):
    rows, path = [{"text": "a"}, {"text": ""}], tmp_path / f"a.{kind}"
    match kind:
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case "saved":
            datasets.Dataset.from_list(rows).save_to_disk(path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": ""}\n'))
    check(path, "text is empty", place=":2: " if kind == "jsonl.gz" else ":row 1: ")


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    check(path, "is not a JSON object ('utf-8' codec can't decode byte 0xff in position 10")


def test_a_prompt_that_merges_with_its_completion(tmp_path):
    rows = [PAIR, {"prompt": "the quick ", "completion": "brown fox"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    check(path, "the prompt's last tokens change when the completion follows", template=None)


@pytest.mark.parametrize("policy", ["right", "left"])
def test_truncation_that_leaves_nothing_to_train(tmp_path, policy):
    long = {"right": turns("hello " * 50, "fox"), "left": turns("hello", "fox", "hello " * 50)}[policy]
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, {"messages": long}])
    check(path, "tokens 20 are kept and none trains", truncation=policy, max_length=20)


def test_columns_that_do_not_fit_a_row(tmp_path):
    columns = {"q": "prompt", "a": "completion"}
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, {"q": "x"}])
    check(path, "has no field 'a', which data.columns renames to 'completion'; it has q", columns=columns)
    path = write_jsonl(tmp_path / "b.jsonl", [{"q": "x", "a": "y"}, {"q": "x", "a": "y", "prompt": "z"}])
    check(path, "has a field 'prompt' already", columns=columns)


def text_file(content):
    return lambda p: p.write_text(content)


def damaged_parquet(path):
    pq.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])


def saved(**splits):
    return lambda p: datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in splits.items()}).save_to_disk(p)


# (what is at PATH, its suffix, config keys, what the message begins with after PATH's key, what is in it)
WHOLE = {
    "nothing there": (None, "/a.jsonl", {}, "data.train: PATH: there is no such file or folder", "a folder or glob of them"),
    "empty file": (text_file(""), ".jsonl", {}, "data.train: PATH: the data set is empty", "at least one row is needed"),
    "suffix": (text_file("a,b"), ".csv", {}, "data.train: PATH: the suffix is not known", ".jsonl.zst, "),
    "empty folder": (lambda p: p.mkdir(), "", {}, "data.train: PATH: there is no data file", "give a glob, as PATH/**/*.jsonl"),
    "glob": (None, "/*.jsonl", {}, "data.train: PATH: there is no data file", "a glob looks like"),
    "JSON array": (text_file('[\n{"text": "a"}\n]'), ".json", {}, "PATH:1: the file is JSON that is spread over several", "jq -c '.[]'"),
    "pretty-printed": (text_file('{\n  "text": "a"\n}'), ".json", {}, "PATH:1: the file is JSON that is spread", "jq -c ."),
    "gz damaged": (lambda p: p.write_bytes(gzip.compress(b"{}" * 99)[:-9]), ".jsonl.gz", {}, "PATH: cannot be converted", "write it again"),
    "zst that is none": (text_file("x"), ".jsonl.zst", {}, "PATH: cannot be converted", "write it again"),
    "null": (lambda p: pq.write_table(pa.table({"prompt": ["a"], "completion": [None]}), p), ".parquet", {}, "PATH:row 0: the fields prompt fit no format", "rename"),
    "parquet damaged": (damaged_parquet, ".parquet", {}, "PATH: cannot be converted", "write it again"),
    "fits no format": (text_file('{"a": 1}'), ".jsonl", {}, "PATH:1: the fields a fit no format", "rename fields with data.columns"),
    "long names": (text_file(json.dumps({"a" * 5000: "1", "b" * 5000: "2"})), ".jsonl", {}, "PATH:1: the fields aaa", "aaa...aaa"),
    "fits two formats": (text_file('{"text": "a", "messages": []}'), ".jsonl", {}, "PATH:1: the fields text, messages fit the formats messages and text", "set data.format"),
    "no row readable": (text_file("{x\n5\n"), ".jsonl", {"on_bad_row": "skip"}, "data.train: PATH: none of its 2 rows can be read", "check the first"),
    "split of files": (text_file('{"text": "a"}'), ".jsonl", {"split": "train"}, "data.split: 'train', but data.train (PATH) is files", "remove data.split"),
    "last without turns": (text_file('{"text": "a"}'), ".jsonl", {"loss_on": "last"}, "data.loss_on: 'last', but text rows have no turns", "set assistant or all"),
    "two columns to one": (text_file('{"text": "a"}'), ".jsonl", {"columns": {"a": "text", "b": "text"}}, "data.columns: renames a and b both to 'text'", "its own name"),
    "hub id": (None, None, {"train": "nobody/nothing"}, "data.train: nobody/nothing: is no file or folder here, and datasets cannot load it", "as openai/gsm8k:main"),
    "saved without splits": (lambda p: datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(p), "", {"split": "train"}, "data.split: 'train', but PATH holds a data set without splits", "remove data.split"),
    "no such split": (saved(fit=[{"text": "a"}]), "", {}, "data.train: PATH: has no split train; it has fit", "set data.split to one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_data_that_cannot_be_used_at_all(tmp_path, monkeypatch, name):
    def offline(*args):
        raise ConnectionError("cannot reach\nthe hub")

    make, suffix, keys, begins, works = WHOLE[name]
    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    path = tmp_path / f"it{suffix or ''}"
    if make:
        make(path)
    with pytest.raises(DataError) as error:
        SFTDataset(config(**{"train": path, **keys}), make_tokenizer())
    message = str(error.value)
    assert message.startswith(begins.replace("PATH", str(path))), message
    assert works.replace("PATH", str(path)) in message and "\n" not in message


def test_messages_without_a_chat_template_are_one_error_at_the_start(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(DataError, match="data.train: .*a.jsonl: the tokenizer has no chat template.*data.chat_templ"):
        SFTDataset(config(path, on_bad_row="skip"), make_tokenizer(None))
    tokenizer = make_tokenizer()
    use_chat_template(tokenizer, "none")
    with pytest.raises(DataError, match=r"data.chat_template: none took it away, .* leave none out, "):
        SFTDataset(config(path, chat_template="none"), tokenizer)


def test_a_fault_of_the_template_is_not_the_rows_to_skip(tmp_path):
    long = {"messages": turns("hello", "<think>\nhm\n</think>\n\n4", "hello", "fox")}
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, long])
    check(path, "the chat template rewrites turns", template=STRIPS_REASONING, on_bad_row="skip")


def test_an_evaluation_split_that_does_not_exist(tmp_path):
    path = str(tmp_path / "d")
    saved(train=[{"text": "a"}])(path)
    with pytest.raises(DataError, match=r"data.eval: .* has no split test or validation; it has train; save the one"):
        SFTDataset(config(path, eval=path), make_tokenizer(), part="eval")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(DataError, match=r"a.jsonl.gz: cannot be converted into .*set HF_DATASETS_CACHE to another"):
        SFTDataset(config(tmp_path / "a.jsonl.gz"), make_tokenizer())


def test_a_token_that_the_model_does_not_have(tmp_path):
    """Under tensor parallelism it would have a zero embedding and train nothing, in silence."""
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    ids = SFTDataset(config(path), make_tokenizer()).load(0).ids
    assert SFTDataset(config(path), make_tokenizer(), vocab_size=max(ids) + 1).load(0).ids == ids
    with pytest.raises(DataError, match=f"a.jsonl:1: the tokenizer gives token {max(ids)}, .* vocab_size {max(ids)};"):
        SFTDataset(config(path), make_tokenizer(), vocab_size=max(ids)).load(0)
