"""Seconds until `mrl --help` has printed, beside `python -c 'import click'`, in turns.

python benchmarks/startup.py [--rounds 15] [--result FILE]
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "`python -c 'import click'`": [sys.executable, "-c", "import click"],
    "`mrl --help`": [str(pathlib.Path(sys.executable).with_name("mrl")), "--help"],
}


def measure(command: list[str]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--result", type=pathlib.Path, help="file that the table is appended to")
    arguments = parser.parse_args()
    for command in COMMANDS.values():
        measure(command)  # fills the file cache
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.rounds):
        for name, command in COMMANDS.items():
            seen[name].append(measure(command))
    lines = [
        f"## Start of the command line, {datetime.date.today()}", "",
        f"`python benchmarks/startup.py --rounds {arguments.rounds}`: medians of runs in turns. Goal: within 0.15 s.", "",
        "| | wall s | CPU s |", "|---|---|---|",
    ]  # fmt: skip
    medians = {name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seen.items()}
    lines += [f"| {name} | {wall:.3f} | {cpu:.3f} |" for name, (wall, cpu) in medians.items()]
    first, second = medians.values()
    lines.append(f"| difference | {second[0] - first[0]:.3f} | {second[1] - first[1]:.3f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.result is not None:
        with arguments.result.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
