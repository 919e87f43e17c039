"""The command line of gpu.py, and what of it is refused before anything runs."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

from command_line import at_least, folder, found_device, report, seconds
from gpu_subjects import NUMBERS, REFERENCE, ROWS


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options, with `parts`, which run, and `rowless`, which were asked for and have no row in --subjects."""
    parser = argparse.ArgumentParser(
        description="One GPU: what mrl does on it, beside transformers and torch (README.md)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="models of two narrow layers")
    parts = ", ".join(ROWS)
    parser.add_argument("--only", nargs="+", default=[""], help=f"parts whose name contains one of these: {parts}")
    parser.add_argument("--subjects", nargs="+", default=[], help="names of rows of a part's table, and no others")
    parser.add_argument("--new-tokens", type=at_least(1), default=256, help="of a sequence in decoding")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each subject")
    parser.add_argument("--steps", type=at_least(1), default=12, help="of a run")
    parser.add_argument("--warmup", type=at_least(0), default=4, help="of which so many are not counted in training")
    parser.add_argument(
        "--limit",
        type=seconds,
        help="seconds of a subject's run (in a hand-over: of a path), which then counts as failed",
    )
    parser.add_argument(
        "--folder", type=folder, help="for models, checkpoints and handed-over files meanwhile; it needs 40 GB"
    )
    parser.add_argument(
        "--vllm-venv", type=pathlib.Path, help="of the hand-over's server; default: .venv-vllm, or this environment"
    )
    parser.add_argument("--result", type=report, help="file for the report; NAME in it is the GPU's")
    arguments = parser.parse_args(given)
    for only in arguments.only:
        if not any(only in part for part in ROWS):
            parser.error(f"--only {only}: the parts are {parts}")
    choose_parts(parser, arguments)
    refuse_steps(parser, arguments)
    found_device(parser, arguments.device)
    return arguments


def choose_parts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    asked = [part for part in ROWS if any(only in part for only in arguments.only)]
    chosen = set(arguments.subjects)
    names = {subject.name for rows in ROWS.values() for subject in rows}
    if unknown := chosen - names:
        parser.error(f"--subjects: {min(unknown)!r} is none of {'; '.join(sorted(names))}")
    arguments.rowless = [
        part for part in asked if chosen and ROWS[part] and not chosen & {subject.name for subject in ROWS[part]}
    ]
    arguments.parts = [part for part in asked if part not in arguments.rowless]
    if not arguments.parts:
        parser.error(f"--subjects: none of them is a row of {', '.join(asked)}")
    compared = chosen & {subject.name for subject in NUMBERS}
    if "numbers" in arguments.parts and compared and REFERENCE.name not in compared:
        parser.error(
            f"--subjects: the part numbers compares {min(compared)!r} with {REFERENCE.name!r}; add that, or leave the "
            "part out with --only"
        )


def refuse_steps(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses runs of which no step would count."""
    for part in arguments.parts:
        warmup = f"--warmup {arguments.warmup}" if part.startswith("training") else "the first"
        least = {"numbers": 1, "checkpoint": 1, "handover": 1, "decoding": 2, "ppo": 2}.get(part, arguments.warmup + 1)
        if arguments.steps < least:
            parser.error(f"--steps {arguments.steps}: {part} needs {least} or more, as {warmup} of them does not count")
