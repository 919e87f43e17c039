"""Makes two sources of rows beside the sums of make_data.py, each with a form of its own, and held-out rows of each.

FOLDER/three.jsonl, three-eval.jsonl         sums of three numbers: {"question": "12+3+45=", "answer": "60"}
FOLDER/counting.jsonl, counting-eval.jsonl   six numbers in order, as a text: {"text": "97 98 99 100 101 102"}

python examples/arithmetic/sources.py runs/arithmetic-data
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

LARGEST, LENGTH = 99, 6
THREE, COUNTING, EVAL_ROWS = 20_000, 994, 300
"""Rows of each source, held-out ones included, of which there are EVAL_ROWS."""


def three(count: int, rng: random.Random) -> list[dict[str, str]]:
    """So many different sums of three numbers."""
    size = LARGEST + 1
    drawn = [(n // size**2, n // size % size, n % size) for n in rng.sample(range(size**3), count)]
    return [{"question": f"{a}+{b}+{c}=", "answer": str(a + b + c)} for a, b, c in drawn]


def counting(count: int, rng: random.Random) -> list[dict[str, str]]:
    """So many different runs of consecutive numbers."""
    return [{"text": " ".join(map(str, range(first, first + LENGTH)))} for first in rng.sample(range(count), count)]


def make(folder: str | pathlib.Path, seed: int = 0) -> None:
    """Writes the four files."""
    rng, folder = random.Random(seed), pathlib.Path(folder)
    for name, rows in (("three", three(THREE, rng)), ("counting", counting(COUNTING, rng))):
        for file, part in ((f"{name}-eval", rows[:EVAL_ROWS]), (name, rows[EVAL_ROWS:])):
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
            print(f"{folder / file}.jsonl: {len(part):,} rows")


if __name__ == "__main__":
    make(sys.argv[1] if len(sys.argv) > 1 else "runs/arithmetic-data")
