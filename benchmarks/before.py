"""This tree and an earlier one side by side: what a change of the code costs.

    git worktree add ../before f14e05d
    python benchmarks/before.py ../before                      every row of mrl of sft.py, and rl.py's
    python benchmarks/before.py ../before --only rl --rounds 4

Both are run by this interpreter, whose packages must suit both, each with its own workers on the same data, in turns
(A B, B A, ...), in fresh processes with one thread.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import sys
import tempfile
from typing import Any

import measure
import rl
import sft
import workload
from machine import machine, versions

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    arguments = parse()
    trees = {"before": arguments.tree.resolve(), "now": HERE.parent}
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        for title, run in {**of_sft(folder, arguments), **of_rl(folder, arguments)}.items():
            if not re.search(arguments.only, title):
                continue
            seconds: dict[str, list[float]] = {tree: [] for tree in trees}
            for number in range(arguments.rounds):
                for tree in [*trees][:: 1 if number % 2 == 0 else -1]:
                    os.environ["PYTHONPATH"] = str(trees[tree])
                    seconds[tree].append(run(trees[tree] / "benchmarks"))
            print(f"{title}: {seconds}", file=sys.stderr)
            found[title] = seconds
    print("\n".join([machine(), "", versions(sys.executable, ["torch", "megatron-core"], "mrl"), "", *table(found)]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=pathlib.Path, help="folder of the earlier tree")
    parser.add_argument("--steps", type=int, default=11, help="optimizer steps, or iterations, of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each tree")
    parser.add_argument("--only", default="", help="rows in whose name this regular expression is found")
    return parser.parse_args()


def of_sft(folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Name -> a run of a tree's workers: CPU seconds of a step on a rank."""
    workload.make(folder, steps=arguments.steps)
    common = {"folder": str(folder), "steps": arguments.steps, "lr": sft.LR, "batch_size": workload.CHATS_PER_STEP}
    subjects = [s for s in sft.PACKED_SUBJECTS + sft.CHAT_SUBJECTS if s.script == "worker_mrl.py"]

    def run(subject: sft.Subject, benchmarks: pathlib.Path) -> float:
        spec = common | {"micro_tokens": 4096} | subject.spec
        script = str(benchmarks / subject.script)
        ranks = measure.run_worker(sys.executable, script, spec, nproc=subject.nproc, folder=folder)
        return statistics.mean(statistics.median(rank["cpu"][arguments.warmup :]) for rank in ranks)

    return {f"sft: {s.name}": lambda benchmarks, s=s: run(s, benchmarks) for s in subjects}


def of_rl(folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Name -> a run of a tree's worker: CPU seconds of an iteration."""

    def run(setting: rl.Setting, benchmarks: pathlib.Path) -> float:
        place = folder / setting.title.replace(" ", "_").replace(",", "")
        if not place.exists():
            place.mkdir()
            workload.make_rl(place, size=setting.size, iterations=arguments.steps)
        spec = {
            "folder": str(place), "iterations": arguments.steps, "steps_per_iteration": setting.steps_per_iteration,
            "kl": setting.kl, "lr": rl.LR, "sequences": rl.SEQUENCES, "samples": workload.SAMPLES_PER_PROMPT,
            "new_tokens": workload.NEW_TOKENS,
        }  # fmt: skip
        [rank] = measure.run_worker(sys.executable, str(benchmarks / "worker_rl_mrl.py"), spec, nproc=1, folder=place)
        return statistics.median(rank["cpu"][arguments.warmup :])

    return {f"rl: {s.title}": lambda benchmarks, s=s: run(s, benchmarks) for s in rl.SETTINGS}


def table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """A row for each: the medians over rounds, their ratio, and how far rounds of one tree are apart."""
    lines = ["| CPU s a step | before | now | now / before | spread of rounds |", "|---|---|---|---|---|"]
    for title, seconds in found.items():
        before, now = (statistics.median(seconds[tree]) for tree in ("before", "now"))
        spread = max((max(of) - min(of)) / statistics.median(of) for of in seconds.values())
        lines.append(f"| {title} | {before:.3f} | {now:.3f} | {now / before:.3f} | {spread:.1%} |")
    return lines


if __name__ == "__main__":
    main()
