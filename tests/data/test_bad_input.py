"""Wrong data files, rows and options: one line each, with file and line (or the key) and what would work."""

import gzip
import json
import os

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


def messages(*given, **more):
    return {"messages": list(given), **more}


USER = {"role": "user", "content": "hello"}

# The second row (line 2) is bad; the first one is good and sets the format.
BAD_ROWS = [
    ("not JSON", "{oops", "is not a JSON object (Expecting property name", 'each line must be one object, as {"messages": [...]}'),
    ("cut off", '{"messages": [{"role": "us', "(it ends inside a text: a quote is missing, or it is cut off)", "each line must be one object"),
    ("cut off after a value", '{"messages": [{"role": "user"', "(it is cut off: it ends inside a value)", "each line must be one object"),
    ("two objects", '{"a": 1} {"b": 2}', "(it ends before character 10, and more follows)", "each line must be one object"),
    ("a JSON null", "null", "the line is null", "each line must be one object"),
    ("a JSON number", "5", "the line is a number", "each line must be one object"),
    ("5,000 digits", '{"messages": ' + "9" * 5000 + "}", "more than 4300 digits", "as text"),
    ("2,000 levels", '{"messages": ' + "[" * 2000 + "]" * 2000 + "}", "more than 100 others", "flatter"),
    ("150 levels in a field that is not read", json.dumps(GOOD)[:-1] + ', "more": ' + "[" * 150 + "]" * 150 + "}", "more than 100 others", "flatter"),
    ("another format", {"text": "x"}, "messages is missing or null, and the format messages needs it; the row has text", "rename with data.columns"),
    ("messages empty", {"messages": []}, "messages is an empty list", "give a list of at least one"),
    ("a message a string", messages("hello"), "messages[0] is 'hello'", "give an object with role and content"),
    ("no role", messages({"content": "x"}), "messages[0].role is missing or null", "give system, user, assistant or tool"),
    ("older calls", messages({"role": "user", "content": "x"}, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}),
     "messages[1] has function_call (OpenAI's older form)", "write tool_calls"),
    ("ShareGPT", messages({"from": "human", "value": "x"}), "messages[0] has from and value (ShareGPT)", "write them as role"),
    ("role gpt", messages(USER, {"role": "gpt", "content": "x"}), "messages[1].role is 'gpt'", "write assistant"),
    ("role humna", messages({"role": "humna", "content": "x"}), "messages[0].role is 'humna'", "did you mean user?"),
    ("role a letter short", messages(USER, {"role": "assitant", "content": "x"}), "messages[1].role is 'assitant'", "did you mean assistant?"),
    ("role asistant", messages(USER, {"role": "Asistant", "content": "x"}), "messages[1].role is 'Asistant'", "did you mean assistant?"),
    ("no content", messages(USER, {"role": "assistant"}), "messages[1].content is missing or null", "give a string"),
    ("content a number", messages(USER, {"role": "assistant", "content": 4}), "messages[1].content is 4", "give a string"),
    ("empty answer", messages(USER, {"role": "assistant", "content": ""}), "messages[1].content is empty", "give the text to train on"),
    ("parts", messages({"role": "user", "content": [{"type": "text", "text": "x"}] * 2}), "messages[0].content is a list of parts", "join its text parts"),
    ("no assistant turn", messages(USER), "has nothing to train on: the conversation has no assistant turn", "set data.loss_on to all"),
    ("assistant first", messages({"role": "assistant", "content": "x"}, USER), "messages[0] is an assistant turn", "begin with a user turn"),
    ("half a character", '{"messages": [{"role": "user", "content": "a\\ud800"}]}', "messages[0].content has half of a UTF-16 pair at character 1", "write the text as UTF-8"),
    ("refused by the template", messages(USER, USER, {"role": "assistant", "content": "x"}), "the chat template cannot render the conversation (TemplateError: roles must alternate)", "put the turns in the order it wants"),
    ("too long", {"messages": turns("hello " * 600, "fox")}, "tokens and data.max_length is 512", "raise data.max_length, or set data.truncation to right, left or drop"),
]  # fmt: skip

STRICT = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if loop.previtem and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    1,
)

# (first row, second row, what is wrong, what would work)
OTHER_FORMATS = [
    ({"prompt": "a", "completion": "b"}, {"prompt": 5, "completion": "b"}, "prompt is 5", "give a string"),
    ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}, "completion is empty", "remove the row"),
    ({"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": "b"}, "prompt is a list and completion 'b'", "two strings or two message lists"),
    ({"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [USER]}, "the completion has no assistant turn", "add one"),
    ({"instruction": "a", "output": "b"}, {"instruction": "", "output": "b"}, "instruction is empty", "give the text"),
    ({"instruction": "a", "output": "b"}, {"instruction": "a", "output": "b", "input": 5}, "input is 5", "give a string"),
    ({"text": "a"}, {"text": ["a"]}, "text is a list", "give a string"),
    ({"text": "a"}, {"text": ""}, "text is empty", "remove the row"),
    ({"input_ids": [5, 6]}, {"input_ids": []}, "input_ids is an empty list", "give a list of integers"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6.5]}, "input_ids[1] is 6.5", "give a list of integers"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 99999]}, "input_ids[1] is 99999, but the tokenizer has", "the model's own tokenizer"),
    ({"input_ids": [5, 6]}, {"input_ids": [5]}, "none of its 1 tokens trains", "remove the row"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "loss_mask": [1, 0]}, "none of its 2 tokens trains (the first never does)", "remove the row"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [-100, -100]}, "has nothing to train on", "remove the row"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [6, 7]}, "labels[0] is 6 and input_ids[0] is 5; labels are not shifted here", "-100 where it does not train"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "labels": [6]}, "labels has 1 entries and input_ids 2", "give one per token"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask has 1 entries and input_ids 2", "give one per token"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "loss_mask": [0, 2]}, "loss_mask[1] is 2", "give 1 where a token trains"),
    ({"input_ids": [5, 6]}, {"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]}, "has labels and loss_mask", "keep the one"),
]  # fmt: skip


def check(path, wrong, works, *, template=STRICT, place=":2: ", **keys):
    """`load(1)` and `next()` stop with one line that names the place, what is wrong and what would work."""
    dataset = SFTDataset(config(path, **keys), make_tokenizer(template))
    with pytest.raises(DataError) as error:
        dataset.load(1)
    message = str(error.value)
    assert message.startswith(f"{path}{place}") and wrong in message and works in message, message
    assert "\n" not in message and len(message) < 600
    with pytest.raises(DataError) as again:
        BatchSource(dataset, global_batch_size=2, seed=0).next()
    assert str(again.value) == message
    return dataset


@pytest.mark.parametrize("name, row, wrong, works", BAD_ROWS, ids=[r[0] for r in BAD_ROWS])
def test_bad_messages(tmp_path, name, row, wrong, works):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, row])
    check(path, wrong, works)
    if name == "too long":
        return  # it can be read: data.truncation decides, not data.on_bad_row
    skipping = SFTDataset(config(path, on_bad_row="skip"), make_tokenizer(STRICT))
    assert isinstance(skipping.load(0), Example) and skipping.load(1).outcome == "skipped"


@pytest.mark.parametrize("first, row, wrong, works", OTHER_FORMATS, ids=[r[2][:40] for r in OTHER_FORMATS])
def test_bad_rows_of_other_formats(tmp_path, first, row, wrong, works):
    path = write_jsonl(tmp_path / "a.jsonl", [first, row])
    check(path, wrong, works)


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
    check(path, "text is empty", "remove the row", place=":2: " if kind == "jsonl.gz" else ":row 1: ")


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    check(path, "is not UTF-8 (byte 10 of the line)", "save the file as UTF-8")


def test_a_prompt_that_merges_with_its_completion(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "the quick ", "completion": "brown fox"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    check(
        path,
        "the prompt's last tokens change when the completion follows",
        "begin the completion with the space",
        template=None,
    )


@pytest.mark.parametrize("policy", ["right", "left"])
def test_truncation_that_leaves_nothing_to_train(tmp_path, policy):
    long = {"right": turns("hello " * 50, "fox"), "left": turns("hello", "fox", "hello " * 50)}[policy]
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, {"messages": long}])
    check(path, f"truncation {policy} to 20 of ", "set data.truncation to drop", truncation=policy, max_length=20)


def test_columns_that_do_not_fit_a_row(tmp_path):
    columns = {"q": "prompt", "a": "completion"}
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, {"q": "x"}])
    check(path, "has no field 'a', which data.columns renames to 'completion'", "it has q", columns=columns)
    path = write_jsonl(tmp_path / "b.jsonl", [{"q": "x", "a": "y"}, {"q": "x", "a": "y", "prompt": "z"}])
    check(path, "has a field 'prompt' already", "as {prompt: prompt_unused}", columns=columns)


def text_file(content):
    return lambda p: p.write_text(content)


def damaged_parquet(path):
    pq.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 2000 + content[2004:])


# (what is at PATH, its suffix, config keys, what the message begins with after PATH's key, what is in it)
WHOLE = [
    ("nothing there", None, "/a.jsonl", {}, "data.train: PATH: there is no such file or folder", "a folder or glob of them"),
    ("empty file", text_file(""), ".jsonl", {}, "data.train: PATH: the data set is empty", "at least one row is needed"),
    ("suffix", text_file("a,b"), ".csv", {}, "data.train: PATH: the suffix is not known", ".jsonl.zst, "),
    ("empty folder", lambda p: p.mkdir(), "", {}, "data.train: PATH: the folder holds no data file", "give a glob, as PATH/**/*.jsonl"),
    ("glob", None, "/*.jsonl", {}, "data.train: PATH: no file matches", "a glob looks like"),
    ("JSON array", text_file('[\n{"text": "a"}\n]'), ".json", {}, "PATH:1: the file is one JSON array", "jq -c '.[]'"),
    ("pretty-printed", text_file('{\n  "text": "a"\n}'), ".json", {}, "PATH:1: a JSON object is spread over several lines", "jq -c ."),
    ("gz damaged", lambda p: p.write_bytes(gzip.compress(b"{}" * 99)[:-9]), ".jsonl.gz", {}, "PATH: cannot be decompressed", "copy it again"),
    ("gz that is JSON", text_file("{}"), ".jsonl.gz", {}, "PATH: is JSON that is not compressed", "name it without .gz"),
    ("zst that is JSON", text_file("{}"), ".jsonl.zst", {}, "PATH: is JSON that is not compressed", "name it without .zst"),
    ("zst that is none", text_file("x"), ".jsonl.zst", {}, "PATH: cannot be decompressed", "copy it again"),
    ("gzip", lambda p: p.write_bytes(gzip.compress(b"{}")), ".jsonl", {}, "PATH:1: the file is gzip", "name it .jsonl.gz"),
    ("Parquet", lambda p: pq.write_table(pa.table({"text": ["a"]}), p), ".jsonl", {}, "PATH:1: the file is Parquet", "name it .parquet"),
    ("FIFO", os.mkfifo, ".jsonl", {}, "data.train: PATH: is a FIFO and no file", "can be read again"),
    ("folder with a FIFO", lambda p: (p.mkdir(), os.mkfifo(p / "a.jsonl")), "", {}, "data.train: PATH/a.jsonl: is a FIFO", "remove it"),
    ("dead link", lambda p: p.symlink_to("gone.jsonl"), ".jsonl", {}, "data.train: PATH: is a link to gone.jsonl, which is not there", "a folder or glob of them"),
    ("link to itself", lambda p: p.symlink_to(p), ".jsonl", {}, "data.train: PATH: is a link to PATH, which is not there", "a folder or glob of them"),
    ("null", lambda p: pq.write_table(pa.table({"prompt": ["a"], "completion": [None]}), p), ".parquet", {}, "PATH:row 0: the fields prompt fit no format", "completion is missing or null"),
    ("parquet that is none", text_file("{}"), ".parquet", {}, "PATH: cannot be read as Parquet", "write it again"),
    ("parquet damaged", damaged_parquet, ".parquet", {}, "PATH: cannot be read as Parquet", "write it again"),
    ("fits no format", text_file('{"a": 1}'), ".jsonl", {}, "PATH:1: the fields a fit no format", "rename fields with data.columns"),
    ("long names", text_file(json.dumps({"a" * 5000: "1", "b" * 5000: "2"})), ".jsonl", {}, "PATH:1: the fields aaa", "aaa...aaa"),
    ("pairs", text_file('{"prompt": "1", "chosen": "2", "rejected": "3"}'), ".jsonl", {}, "PATH:1: the fields prompt, chosen, rejected fit no format", "reads with --as dpo or --as rm"),
    ("conversations", text_file('{"conversations": []}'), ".jsonl", {}, "PATH:1: the fields conversations fit no format", "{conversations: messages}"),
    ("fits two formats", text_file('{"text": "a", "messages": []}'), ".jsonl", {}, "PATH:1: the fields text, messages fit the formats messages and text", "set data.format"),
    ("no row readable", text_file("{x\n5\n"), ".jsonl", {"on_bad_row": "skip"}, "data.train: PATH: none of its 2 rows can be read", "check the first"),
    ("split of files", text_file('{"text": "a"}'), ".jsonl", {"split": "train"}, "data.split: 'train', but data.train (PATH) is files", "remove data.split"),
    ("last without turns", text_file('{"text": "a"}'), ".jsonl", {"loss_on": "last"}, "data.loss_on: 'last', but text rows have no turns", "set assistant or all"),
    ("two columns to one", text_file('{"text": "a"}'), ".jsonl", {"columns": {"a": "text", "b": "text"}}, "data.columns: renames a and b both to 'text'", "its own name"),
    ("hub id", None, None, {"train": "nobody/nothing"}, "data.train: nobody/nothing: is no file or folder here, and datasets cannot load it", "as openai/gsm8k:main"),
    ("damaged saved data", lambda p: (p.mkdir(), text_file("{")(p / "state.json"), text_file("{")(p / "dataset_info.json")), "", {},
     "data.train: PATH: the saved data set cannot be loaded", "save it again"),
    ("saved without splits", lambda p: datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(p), "", {"split": "train"}, "data.split: 'train', but PATH holds a data set without splits", "remove data.split"),
    ("no such split", lambda p: datasets.DatasetDict({"fit": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(p), "", {}, "data.train: PATH: has no split train; it has fit", "set data.split to one of them"),
]  # fmt: skip


@pytest.mark.parametrize("name, make, suffix, keys, begins, works", WHOLE, ids=[w[0] for w in WHOLE])
def test_data_that_cannot_be_used_at_all(tmp_path, monkeypatch, name, make, suffix, keys, begins, works):
    def offline(*args):
        raise ConnectionError("cannot reach\nthe hub")

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


def test_messages_with_the_template_turned_off_are_told_to_leave_that_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    tokenizer = make_tokenizer()
    use_chat_template(tokenizer, "none")
    with pytest.raises(DataError, match=r"data.chat_template: none took it away, .* leave none out, "):
        SFTDataset(config(path, chat_template="none"), tokenizer)


def test_a_fault_of_the_template_is_not_the_rows_to_skip(tmp_path):
    long = {"messages": turns("hello", "<think>\nhm\n</think>\n\n4", "hello", "fox")}
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, long])
    check(
        path,
        "the chat template rewrites turns",
        "{% generation %}",
        template=STRIPS_REASONING,
        on_bad_row="skip",
    )


def test_no_evaluation_rows_named(tmp_path):
    with pytest.raises(DataError, match="data.eval: is null; name the rows to evaluate on"):
        SFTDataset(config(tmp_path), make_tokenizer(), part="eval")


def test_an_evaluation_split_that_does_not_exist(tmp_path):
    saved = str(tmp_path / "d")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(saved)
    with pytest.raises(DataError, match=r"data.eval: .* has no split test or validation; it has train: save the split"):
        SFTDataset(config(saved, eval=saved), make_tokenizer(), part="eval")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(DataError, match=r"a.jsonl.gz: its copy cannot be written .*set HF_DATASETS_CACHE to a folder"):
        SFTDataset(config(tmp_path / "a.jsonl.gz"), make_tokenizer())


def test_a_token_that_the_model_does_not_have(tmp_path):
    """Under tensor parallelism it would have a zero embedding and train nothing, in silence."""
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD])
    ids = SFTDataset(config(path), make_tokenizer()).load(0).ids
    assert SFTDataset(config(path), make_tokenizer(), vocab_size=max(ids) + 1).load(0).ids == ids
    with pytest.raises(DataError, match=f"a.jsonl:1: the tokenizer gives token {max(ids)}, .* vocab_size {max(ids)};"):
        SFTDataset(config(path), make_tokenizer(), vocab_size=max(ids)).load(0)
