"""Makes preference rows for a reward model: of each sum the right answer is chosen, and a wrong one near it rejected.

python examples/arithmetic/comparisons.py runs/arithmetic-data/train.jsonl runs/arithmetic-data/comparisons.jsonl
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

NEAR = (-100, -10, -9, -2, -1, 1, 2, 9, 10, 100)
"""How far a wrong answer is from the right one: a digit or a carry is wrong."""


def make(problems: str | pathlib.Path, comparisons: str | pathlib.Path, seed: int = 0) -> None:
    """Writes `comparisons`, a row for each of the `problems`."""
    rng, lines = random.Random(seed), []
    for line in pathlib.Path(problems).read_text(encoding="utf-8").splitlines():
        question, right = json.loads(line)["messages"]
        answer = int(right["content"])
        wrong = answer + rng.choice([step for step in NEAR if answer + step >= 0])
        rejected = {"role": "assistant", "content": str(wrong)}
        lines.append(json.dumps({"prompt": [question], "chosen": [right], "rejected": [rejected]}) + "\n")
    pathlib.Path(comparisons).write_text("".join(lines), encoding="utf-8")
    print(f"{comparisons}: {len(lines):,} pairs")


if __name__ == "__main__":
    make(*sys.argv[1:3])
