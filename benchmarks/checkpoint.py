"""How long a checkpoint holds training up, and how long until it is whole: at once, in the background, `cp`, `torch.save`.

    python benchmarks/checkpoint.py [--size 250M] [--rounds 2] [--saves 2] [--folder /tmp] [--device auto] [--append FILE]

Paired: in each round each backend's engine runs in a fresh process, and within it the four ways take turns, into the same
folder, with the same bytes. See README.md.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import workload
from command_line import at_least, folder, found_device
from command_line import report as written
from handover import SIZES
from machine import machine, versions
from measure import Failed, end_on_sigterm, run_worker, said

BACKENDS = ("megatron", "fsdp")
ROW = 64  # tokens of a step's one row: what is measured is the state, not the step

Rounds = list[dict[str, dict[str, Any]]]


def main() -> None:
    options = read_options()
    end_on_sigterm()
    place = pathlib.Path(tempfile.mkdtemp(prefix="mrl_benchmark_", dir=options.folder))
    rounds: Rounds = [{} for _ in range(options.rounds)]
    failed: dict[str, str] = {}
    try:
        sizes, vocabulary = SIZES[options.size]
        workload.make_model(place / "model", 0, sizes=sizes, vocabulary=vocabulary, end_drawn=False)
        spec = {
            "folder": str(place), "out": str(place / "checkpoints"), "device": options.device, "saves": options.saves,
            "row": ROW, "rows": 1, "micro_tokens": ROW, "vocabulary": vocabulary,
        }  # fmt: skip
        for number in range(options.rounds):
            for backend in BACKENDS[:: -1 if number % 2 else 1]:
                if backend not in failed:
                    one_turn(backend, spec, options, place, rounds[number], failed)
    finally:
        shutil.rmtree(place, ignore_errors=True)  # what stays is no reason to lose the report
    text = report(rounds, failed, options)
    print("\n" + text)
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def one_turn(
    backend: str, spec: dict[str, Any], options: argparse.Namespace, place: pathlib.Path, turns: dict[str, dict[str, Any]],
    failed: dict[str, str],
) -> None:  # fmt: skip
    """Adds to `turns` what a backend's process measured, or to `failed` what it said."""
    load = os.getloadavg()[0]
    spec = spec | {"subject": {"backend": backend, "dtype": options.dtype}}
    try:
        [found] = run_worker(sys.executable, "worker_checkpoint.py", spec, nproc=1, folder=place)
    except Failed as error:
        print(error, file=sys.stderr)
        failed[backend] = said(error)
        shutil.rmtree(spec["out"], ignore_errors=True)  # the next one needs the room
        return
    turns[backend] = found["more"] | {"peak_mb": found["peak_mb"], "load": load}
    for way, of in found["more"]["turns"].items():
        print(f"{backend}, {way}: {of}", file=sys.stderr, flush=True)


def read_options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="250M", help="parameters of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="turns of each backend, in a process of its own")
    parser.add_argument("--saves", type=at_least(1), default=2, help="turns of each way in a process")
    parser.add_argument("--folder", type=folder, help="where checkpoints go; default: the folder for temporary files")
    parser.add_argument("--append", type=written, help="file that the report is added to")
    options = parser.parse_args(given)
    options.device = found_device(parser, options.device)
    return options


def report(rounds: Rounds, failed: dict[str, str], options: argparse.Namespace) -> str:
    arguments = f"--size {options.size} --dtype {options.dtype} --rounds {options.rounds} --saves {options.saves}"
    loads = ", ".join(f"{of['load']:.1f}" for found in rounds for of in found.values())
    lines = [
        f"# Checkpoints, {time.strftime('%Y-%m-%d')}", "", f"`python benchmarks/checkpoint.py {arguments}`", "", machine(),
        f"; load before each process: {loads}", "", versions(sys.executable, ["torch", "megatron-core"], "mrl"), "",
    ]  # fmt: skip
    lines[4:6] = [lines[4] + lines[5]]
    for backend in BACKENDS:
        of = [found[backend] for found in rounds if backend in found]
        if backend in failed:
            lines += [f"{backend}, round {len(of) + 1}: failed: {failed[backend]}", ""]
        if not of:
            continue
        gigabytes = of[0]["bytes"] / 1e9
        lines += [
            f"## {backend}, {gigabytes:.2f} GB ({options.size} parameters of {options.dtype} with AdamW's state), {options.device}", "",
            "| | training stands still, s | until it is whole, s | / cp, fsync |", "|---|---|---|---|",
        ]  # fmt: skip
        for way in of[0]["turns"]:
            whole = [statistics.median(found["turns"][way]["whole"]) for found in of]
            held = [statistics.median(found["turns"][way]["held"]) for found in of]
            copies = [statistics.median(found["turns"]["cp, fsync"]["whole"]) for found in of]
            ratio = statistics.median(a / b for a, b in zip(whole, copies, strict=True))
            still = side(held) if way in ("at once", "background") else ""
            lines.append(f"| {way} | {still} | {side(whole)} | {ratio:.2f} |")
        plain, during = ([found[key] for found in of] for key in ("step", "step_during"))
        lines += [
            "", f"A step of {ROW} tokens takes {side(plain)} s, and {side(during)} s while a checkpoint is written.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def side(values: list[float]) -> str:
    return " / ".join(format(value, ".2f") for value in values)


if __name__ == "__main__":
    main()
