"""Makes preference rows of a model's own mistakes: the right answer is chosen, its greedy one, where it is wrong, rejected.

python examples/arithmetic/preferences.py runs/arithmetic-half/hf runs/arithmetic-data/train.jsonl runs/arithmetic-data/pairs.jsonl
"""

from __future__ import annotations

import json
import pathlib
import sys

import evaluate

AT_ONCE = 500


def make(folder: str, problems: str, pairs: str) -> None:
    """Asks the model of `folder` all `problems` and writes `pairs`, a row for each that it answers wrong."""
    model, tokenizer = evaluate.load(folder)
    rows = [json.loads(line)["messages"] for line in pathlib.Path(problems).read_text(encoding="utf-8").splitlines()]
    lines = []
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        given = evaluate.answers(model, tokenizer, [row[0]["content"] for row in part])
        for (question, right), answer in zip(part, given, strict=True):
            if answer != right["content"]:
                wrong = {"role": "assistant", "content": answer}
                lines.append(json.dumps({"prompt": [question], "chosen": [right], "rejected": [wrong]}) + "\n")
    pathlib.Path(pairs).write_text("".join(lines), encoding="utf-8")
    print(f"{pairs}: {len(lines):,} pairs, of {len(rows):,} problems")


if __name__ == "__main__":
    make(*sys.argv[1:4])
