"""Makes preference rows of GSM8K's short problems: the worked answer is chosen, a wrong one rejected.

    python examples/gsm8k/pairs.py GSM8K_ROWS.jsonl runs/gsm8k-pairs

Every second rejected answer is the chosen one with another number as its result (`number`), the others are the worked
answer to another problem of the same length (`problem`). train.jsonl has both; number.jsonl and problem.jsonl have
held-out pairs of each, of the same problems.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
import sys

TRAIN, HELD_OUT = 256, 40
"""Problems, the shortest of those whose last calculation gives the answer."""
CALCULATION = r"<<.*?>>"


def read(path: str) -> list[dict[str, str]]:
    """Problems whose last calculation gives the answer, the shortest first: question, worked answer, result."""
    found = []
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        worked, result = row["answer"].split("\n#### ")
        calculations = re.findall(r"=(\d+)>>", worked)
        if calculations and calculations[-1] == result != "0":
            found.append({"question": row["question"], "worked": row["answer"], "result": result})
    return sorted(found, key=lambda row: len(row["question"]) + len(row["worked"]))


def with_another_result(worked: str, result: str, rng: random.Random) -> str:
    """The worked answer with another number near the right one, wherever it stands from the last calculation on."""
    number = int(result)
    near = [number + step for step in (-10, -2, -1, 1, 2, 10) if number + step > 0] + [2 * number]
    place = worked.rindex(">>")
    wrong = str(rng.choice([other for other in near if other != number]))
    return worked[:place] + re.sub(rf"(?<![\d.,]){result}(?![\d,]|\.\d)", wrong, worked[place:])


def pairs(rows: list[dict[str, str]], kind: str, rng: random.Random) -> list[dict[str, str]]:
    made = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        wrong = with_another_result(row["worked"], row["result"], rng) if kind == "number" else other["worked"]
        chosen, rejected = (re.sub(CALCULATION, "", answer) for answer in (row["worked"], wrong))
        made.append({"prompt": row["question"], "chosen": chosen, "rejected": rejected})
    return made


def main(source: str, out: pathlib.Path, seed: int = 0) -> None:
    rng = random.Random(seed)
    rows = read(source)[: TRAIN + HELD_OUT]
    held_out = sorted(rng.sample(range(len(rows)), HELD_OUT))
    kept, train = [rows[i] for i in held_out], [row for i, row in enumerate(rows) if i not in set(held_out)]
    both = [*pairs(train[::2], "number", rng), *pairs(train[1::2], "problem", rng)]
    out.mkdir(parents=True, exist_ok=True)
    for name, made in (("train", both), *((kind, pairs(kept, kind, rng)) for kind in ("number", "problem"))):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(made)} pairs")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
