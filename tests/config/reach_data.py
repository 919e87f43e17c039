"""The rows of test_keys_reach.py for the keys of `data`, which no engine knows of."""

from __future__ import annotations

import dataclasses

from tests.config import looks
from tests.config.reach import DEFAULT, Refusal, Row

MEGATRON = ("megatron",)
HARDLY = {"optimizer.lr": 1e-30}  # what is exported or evaluated is the model that the run began with
SUMS, SIX, HUNDREDS = ({"data.train": f"{{inputs}}/{name}.jsonl"} for name in ("sums", "six", "hundreds"))
IN_ORDER = {"data.shuffle": False}
UNEVEN = {"data.train": "{inputs}/uneven.jsonl", "data.max_length": 20} | IN_ORDER


def on_one_backend(*rows: Row) -> list[Row]:
    """Rows of keys that no engine knows of."""
    return [dataclasses.replace(row, on=MEGATRON) for row in rows]


DATA = on_one_backend(
    Row(
        "data.train", looks.sorted_rows,
        [(SUMS["data.train"], [0, 1, 2, 3]), (HUNDREDS["data.train"], [100, 101, 102, 103])],
    ),
    Row(
        "data.train", looks.sorted_rows,
        [([SUMS["data.train"]], [0, 1, 2, 3]), ([SUMS["data.train"], HUNDREDS["data.train"]], [0, 1, 100, 101])],
        IN_ORDER, what="sources",
    ),
    Row(
        "data.mix_by", looks.lengths, [(DEFAULT, [[4, 16, 25, 25]]), ("tokens", [[4, 11, 16, 25]])],
        IN_ORDER | {"data.train": [{"path": f"{{inputs}}/{name}.jsonl", "weight": 1} for name in ("uneven", "turns")]},
    ),
    Row(
        "data.eval", looks.all_of(looks.eval_loss_is_train_loss, looks.evaluated_rows),
        [
            (DEFAULT, (None, [])), (SUMS["data.train"], (True, [0, 1, 2, 3])),
            (HUNDREDS["data.train"], (False, [100, 101, 102, 103])), ("{inputs}/saved", (False, [300, 301, 302, 303])),
            ({"a": SUMS["data.train"], "b": {"path": "{inputs}/saved"}}, (False, [0, 1, 2, 3, 300, 301, 302, 303])),
        ],
        HARDLY,
    ),
    Row(
        "data.split", looks.sorted_rows, [(DEFAULT, [0, 1, 2, 3]), ("more", [200, 201, 202, 203])],
        {"data.train": "{inputs}/saved"},
    ),
    Row(
        "data.format", looks.trained_text,
        [
            (DEFAULT, Refusal("DataError", "set data.format")), ("messages", "11<|im_end|>"),
            ("prompt_completion", "22<|im_end|>"), ("alpaca", "33<|im_end|>"), ("text", "4<|im_end|>"),
            ("tokenized", "55"),
        ],
        {"data.train": "{inputs}/forms.jsonl"},
    ),
    Row(
        "data.columns", looks.trained_text,
        [
            (DEFAULT, Refusal("DataError", "fit no format")),
            ({"question": "prompt", "answer": "completion"}, "2<|im_end|>"),
            ({"question": "completion", "answer": "prompt"}, "1+1=<|im_end|>"),
        ],
        {"data.train": "{inputs}/columns.jsonl"},
    ),
    Row(
        "data.turns", looks.trained_text,
        [(DEFAULT, "11+22<|im_end|>"), ({"user": "=", "assistant": "+"}, "22<|im_end|>")],
        {"data.train": "{inputs}/marked.jsonl"},
    ),
    Row(
        "data.chat_template", looks.first_text,
        [
            (DEFAULT, "<|im_start|>user\n0=<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"),
            ("{inputs}/plain.jinja", "0=0<|im_end|>"),
        ],
        IN_ORDER,
    ),
    Row(
        "data.loss_on", looks.trained_text,
        [
            (DEFAULT, "1<|im_end|>2<|im_end|>"), ("last", "2<|im_end|>"),
            ("all", "user\n1=<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
                    "<|im_start|>user\n2=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"),
            (["user", "system"], "1=<|im_end|>2=<|im_end|>"), (["assistant", "tool", "developer", "function", "ipython"],
                "1<|im_end|>2<|im_end|>"), ([], Refusal("ConfigError", "data.loss_on: value [] names no role")),
        ],
        {"data.train": "{inputs}/turns.jsonl"},
    ),
    Row(
        "data.system", looks.first_text,
        [
            (DEFAULT, "<|im_start|>user\n0=<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"),
            ("1+1", "<|im_start|>system\n1+1<|im_end|>\n<|im_start|>user\n0=<|im_end|>\n<|im_start|>assistant\n0<|im_end|>\n"),
        ],
        IN_ORDER,
    ),
    Row(
        "data.max_length", looks.lengths, [(DEFAULT, [[4, 8, 11, 16]]), (10, [[4, 8, 9, 9]])],
        UNEVEN | {"data.truncation": "right"},
    ),
    Row(
        "data.truncation", looks.all_of(looks.ends, looks.left_out),
        [
            (DEFAULT, Refusal("DataError", "uneven.jsonl:1: the row has 17 tokens")),
            ("right", ([(3, 12), (3, 7), (3, 12), (3, 11)], "truncated: 2")),
            ("left", ([(10, 19), (3, 7), (5, 14), (3, 11)], "truncated: 2")),
            ("drop", ([(3, 7), (3, 11), (3, 7), (3, 11)], "dropped: 4")),
        ],
        UNEVEN | {"data.max_length": 10},
    ),
    Row(
        "data.shuffle", looks.epochs,
        [
            (DEFAULT, {"as in the file": False, "the same again": False}),
            (False, {"as in the file": True, "the same again": True}),
        ],
        SIX | {"train.global_batch_size": 6, "train.steps": 2},
    ),
    Row(
        "data.stream", looks.rows, [(DEFAULT, [0, 2, 1, 5]), (True, [2, 1, 5, 3])], SIX,
    ),
    Row(
        "data.shuffle_buffer", looks.rows, [(DEFAULT, [2, 1, 5, 3]), (0, [0, 1, 2, 3]), (2, [1, 0, 3, 2])],
        SIX | {"data.stream": True},
    ),
    Row(
        "data.on_bad_row", looks.all_of(looks.rows, looks.left_out),
        [(DEFAULT, Refusal("DataError", "bad.jsonl:2: ")), ("skip", ([0, 2, 3, 4], "skipped: 1"))],
        IN_ORDER | {"data.train": "{inputs}/bad.jsonl"},
    ),
)  # fmt: skip
