"""Data files and rows that cannot be trained on, each met before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.bad_input.mistakes import Case, Workspace, chat

GOOD = chat("1+1=", "2")


def row(bad: Any) -> Callable[[Workspace], None]:
    """An edit that makes line 3 of rows.jsonl `bad`."""
    return lambda workspace: workspace.write_rows([GOOD, GOOD, bad, GOOD])


def rows(*all_of_them: Any) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write_rows(all_of_them)


def file(name: str, content: str | bytes) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write(name, content)


CASES = [
    # Files.
    Case("no eval file", "data.eval", ("does not exist",), ("data.eval=nowhere.jsonl",)),
    Case("empty", "data.train", ("rows.jsonl", "is empty"), edit=rows()),
    Case("not parquet", "rows.parquet", ("Parquet", "write it again"), ("data.train=rows.parquet",), file("rows.parquet", b"PAR1 it is not")),
    Case("not gzip", "rows.jsonl.gz", ("decompressed", "copy it again"), ("data.train=rows.jsonl.gz",), file("rows.jsonl.gz", b"\x1f\x8b\x08 cut")),
    Case("binary", "rows.jsonl:1", ("is not",), edit=file("rows.jsonl", b"\x00\x01\xff\n")),
    Case("suffix", "data.train", ("suffix", ".parquet"), ("data.train=rows.tsv",), file("rows.tsv", "a\tb\n")),
    Case("not jinja", "data.chat_template", ("line 1",), ("data.chat_template=chat.jinja",), file("chat.jinja", "{% for %}")),
    Case("empty template", "data.chat_template", ("is empty",), ("data.chat_template=chat.jinja",), file("chat.jinja", "")),
    # Streamed.
    Case("streamed, no rows", "data.train", ("rows.jsonl: has no rows",), ("data.stream=true",), file("rows.jsonl", "\n")),
    Case("streamed, not gzip", "rows.jsonl.gz:1", ("cannot be decompressed", "write it again"), ("data.train=rows.jsonl.gz", "data.stream=true"), file("rows.jsonl.gz", b"\x1f\x8b\x08 cut")),
    Case("streamed, not parquet", "rows.parquet:row 0", ("cannot be read as Parquet",), ("data.train=rows.parquet", "data.stream=true"), file("rows.parquet", b"PAR1 it is not")),
    Case("streamed, bad row", "rows.jsonl:3", ("messages is '1+1='",), ("data.stream=true",), row({"messages": "1+1="})),
    Case("streamed, an array", "rows.jsonl:1", ("one JSON array", "jq"), ("data.stream=true",), rows("[", json.dumps(GOOD), "]")),
    Case("streamed, nobody there", "data.train", ("http://127.0.0.1:9/a.jsonl cannot be read", "check the address"), ("data.train=http://127.0.0.1:9/a.jsonl", "data.stream=true")),
    Case("streamed, no file system", "data.train", ("nosuch://a.jsonl is of no file system",), ("data.train=nosuch://a.jsonl", "data.stream=true")),
    # Lines.
    Case("broken first line", "rows.jsonl:1", ("is not a JSON object",), edit=rows("{'text': 1}", GOOD)),
    Case("broken eval line", "eval.jsonl:1", ("spread over several lines", "jq"), ("data.eval=eval.jsonl",), file("eval.jsonl", "{\n")),
    Case("bad eval row", "eval.jsonl:2", ("nothing to train on",), ("data.eval=eval.jsonl",), lambda w: w.write_rows([GOOD, {"messages": GOOD["messages"][:1]}], "eval.jsonl")),
    Case("cut line", "rows.jsonl:4", ("is not a JSON object",), edit=rows(GOOD, GOOD, GOOD, '{"messages": [{"role": "us')),
    Case("a list", "rows.jsonl:3", ("object",), edit=row([1, 2])),
    # Formats.
    Case("no format", "rows.jsonl:1", ("fit no format", "data.columns"), edit=rows({"question": "1", "answer": "2"})),
    Case("two formats", "rows.jsonl:1", ("text", "data.format"), edit=rows({**GOOD, "text": "x"})),
    Case("mixed formats", "rows.jsonl:3", ("no field 'messages'",), edit=row({"text": "1+1=2"})),
    Case("another format", "rows.jsonl:", ("no field 'text'",), ("data.format=text",)),
    Case("renamed to one", "data.columns", ("both to",), ("data.columns={a: text, b: text}",)),
    Case("renamed from nothing", "rows.jsonl:1", ("no field 'chat'",), ("data.columns={chat: messages}",)),
    # Rows.
    Case("text for messages", "rows.jsonl:3", ("messages is '1+1='",), edit=row({"messages": "1+1="})),
    Case("number for content", "rows.jsonl:3", ("messages[1].content is 2", "give a string"), edit=row(chat("1+1=", 2))),
    Case("unknown role", "rows.jsonl:3", ("role is 'gpt'", "assistant"), edit=row({"messages": [{"role": "gpt", "content": "2"}]})),
    Case("no role", "rows.jsonl:3", ("messages[0].role",), edit=row({"messages": [{"content": "2"}]})),
    Case("no answer", "rows.jsonl:3", ("nothing to train on", "data.loss_on"), edit=row({"messages": GOOD["messages"][:1]})),
    Case("number of 5,000 digits", "rows.jsonl:3", ("more than 4300 digits", "as text"), edit=row('{"text": ' + "9" * 5000 + "}")),
    Case("row of 2,000 levels", "rows.jsonl:3", ("more than 100 others", "flatter"), edit=row('{"text": ' + "[" * 2000 + "]" * 2000 + "}")),
    Case("field of 150 levels", "rows.jsonl:3", ("more than 100 others",), edit=row(json.dumps(GOOD)[:-1] + ', "more": ' + "[" * 150 + "]" * 150 + "}")),
    Case("fields of 10,000 characters", "rows.jsonl:1", ("aaa...aaa", "fit no format", "data.columns"), edit=rows({"a" * 5000: "1", "b" * 5000: "2"})),
    Case("a batch of a million", "train.global_batch_size", ("each of the 4 rows of data.train 250000 times", "give 4"), ("train.global_batch_size=1000000", "data.train='*.jsonl'")),
    Case("long row", "rows.jsonl:3", ("data.max_length is 64", "data.truncation"), edit=row(chat("1+" * 50 + "1=", "51"))),
    Case("token id", "rows.jsonl:2", ("99999", "own tokenizer"), edit=rows({"input_ids": [1, 2]}, {"input_ids": [1, 99999]}, {"input_ids": [1, 2]}, {"input_ids": [1, 2]})),
    Case("mask length", "rows.jsonl:1", ("loss_mask has 1",), edit=rows(*[{"input_ids": [1, 2], "loss_mask": [1]}] * 4)),
    Case("nothing but bad rows", "data.train", ("none of its 4 rows",), ("data.on_bad_row=skip",), rows(*[{"messages": []}] * 4)),
]  # fmt: skip
