"""Prints what an update takes on GPUs of published models, one rank each, as tensors without memory tell it; and of some
what it takes with transformer-engine's modules. Or counts the operations of steps.

python -m tests.cuda
python -m tests.cuda counts [WORD ...]             figures of the rows whose names have all these words, beside their ceilings
python -m tests.cuda counts [WORD ...] --lines 20  and the lines of code that dispatch most, of a model of two layers
python -m tests.cuda counts [WORD ...] --lower     and their ceilings are lowered to them
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from typing import Any

from tests.cuda import count_cases
from tests.cuda.cases import CORNERS, HEADER, OF_EACH_FAMILY, as_shown, row
from tests.cuda.te_cases import UNDER_BOTH
from tests.cuda.worker import Worker


def memory() -> None:
    print(HEADER)
    with Worker() as worker:
        for case in map(as_shown, (*OF_EACH_FAMILY, *CORNERS)):
            print(row(case, worker.call("tests.cuda.run:run", case)), flush=True)
    with Worker(te=True) as worker:
        for case in UNDER_BOTH:
            under_te = dataclasses.replace(as_shown(case), spec="te")
            print(row(under_te, worker.call("tests.cuda.te_update:update", under_te, (9, 0)).result), flush=True)


def counts(arguments: argparse.Namespace) -> int:
    """Returns how many figures are above their ceilings."""
    file = count_cases.read()
    if file["versions"] != count_cases.installed():
        raise SystemExit(f"the ceilings are of {file['versions']}, and here are {count_cases.installed()}")
    chosen = [r for name, r in count_cases.ROWS.items() if {*arguments.words} <= {*name.split()}]
    if not chosen:
        raise SystemExit(f"no row has all of these words: {' '.join(arguments.words)}")
    high = []
    with contextlib.ExitStack() as stack:
        workers: dict[bool, Any] = {}
        for each in chosen:
            if each.te not in workers:
                workers[each.te] = stack.enter_context(Worker(te=each.te))
            one, two = (
                workers[each.te].call("tests.cuda.counts:count", each, layers, lines=bool(arguments.lines))
                for layers in (1, 2)
            )
            found, ceilings = count_cases.figures(each, one, two), file["ceilings"].get(str(each), {})
            print(f"{each}", flush=True)
            for name, n in found.items():
                print(f"    {n:8g} {name}" + (f" (ceiling {ceilings.get(name)})" if ceilings.get(name) != n else ""))
            for part, lines in two.lines.items() if arguments.lines else ():
                print(f"  {part}", *(f"    {n:8} {line}" for line, n in lines.most_common(arguments.lines)), sep="\n")
            high += count_cases.above(each, found, ceilings)
            if arguments.lower:
                count_cases.lower(each, found)
    print(*high, sep="\n")
    return len(high)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.cuda")
    commands = parser.add_subparsers(dest="command")
    of_counts = commands.add_parser("counts")
    of_counts.add_argument("words", nargs="*", metavar="WORD")
    of_counts.add_argument("--lines", type=int, default=0)
    of_counts.add_argument("--lower", action="store_true")
    parsed = parser.parse_args()
    if parsed.command == "counts":
        raise SystemExit(1 if counts(parsed) else 0)
    memory()
