"""Supervised fine-tuning side by side: mrl's engines, a plain transformers + torch loop, TRL's SFTTrainer.

    python benchmarks/sft.py                                             mrl and the plain loop
    python benchmarks/sft.py --trl-venv DIR --make-trl-venv              and TRL, in a venv made in DIR
    python benchmarks/sft.py --trl-venv DIR --result benchmarks/results/my-machine.md

Subjects take turns (A B C A B C ...), each time in fresh processes with one thread. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import measure
import workload
from machine import machine, peer_python, versions

PACKED_TOKENS = workload.ROW * workload.ROWS
LR = 1e-3
LOSS_TOLERANCE = 1e-3
"""Relative difference of losses, at every step, above which two subjects did not train the same thing."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured: a worker and its settings. part: subjects of a part see the same batches."""

    name: str
    part: str
    script: str
    spec: dict[str, Any] = field(default_factory=dict)
    nproc: int = 1
    peer: bool = False
    same_losses: bool = True


PLAIN, TRL_FP32, ENGINE_CHATS, COMMAND = "plain loop", "TRL, padded, fp32", "mrl, engine", "mrl, `mrl sft`"
PACKED_SUBJECTS = [
    Subject(PLAIN, "packed", "worker_plain.py"),
    Subject("plain loop, AdamW(fused=True)", "packed", "worker_plain.py", {"fused": True}),
    Subject("mrl megatron", "packed", "worker_mrl.py", {"data": "packed"}),
    Subject("mrl FSDP", "packed", "worker_mrl.py", {"data": "packed", "backend": "fsdp"}),
    Subject("plain loop, DDP over 2", "packed", "worker_plain.py", nproc=2),
    Subject("mrl megatron dp2", "packed", "worker_mrl.py", {"data": "packed"}, nproc=2),
    Subject("mrl megatron tp2", "packed", "worker_mrl.py", {"data": "packed", "tp": 2}, nproc=2),
]
FP32 = {"bf16": False, "gradient_checkpointing": False}
CHAT_SUBJECTS = [
    Subject(TRL_FP32, "chats", "worker_trl.py", {"arguments": FP32}, peer=True),
    Subject(ENGINE_CHATS, "chats", "worker_mrl.py", {"data": "chats"}),
    Subject(COMMAND, "chats", "worker_mrl.py", {"data": "command"}),
    Subject(f"{TRL_FP32}, over 2", "chats", "worker_trl.py", {"arguments": FP32}, nproc=2, peer=True),
    Subject(f"{ENGINE_CHATS}, dp2", "chats", "worker_mrl.py", {"data": "chats"}, nproc=2),
    Subject("TRL, padded, its defaults", "chats", "worker_trl.py", {"arguments": {}}, peer=True, same_losses=False),
]


def main() -> None:
    arguments = parse()
    peer = None
    if arguments.trl_venv is not None:
        peer = peer_python(arguments.trl_venv.absolute(), make=arguments.make_trl_venv)
    subjects = [s for s in PACKED_SUBJECTS + CHAT_SUBJECTS if arguments.only in f"{s.part} {s.name}"]
    subjects = [s for s in subjects if peer is not None or not s.peer]
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        workload.make(folder, steps=arguments.steps)
        chat_tokens = json.loads((folder / "lengths.json").read_text(encoding="utf-8"))
        n = workload.CHATS_PER_STEP
        tokens = {
            "packed": [PACKED_TOKENS] * arguments.steps,
            "chats": [sum(chat_tokens[i * n : (i + 1) * n]) for i in range(arguments.steps)],
        }
        runs = take_turns(subjects, arguments, tokens, folder, peer)
    text = report(runs, arguments, peer)
    print("\n" + text)
    if arguments.result is not None:
        arguments.result.write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=11, help="optimizer steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each subject")
    parser.add_argument("--only", default="", help="subjects whose part or name contains this")
    parser.add_argument("--trl-venv", type=pathlib.Path, help="folder of the venv that TRL is in; without it TRL is left out")  # fmt: skip
    parser.add_argument("--make-trl-venv", action="store_true", help="make that venv first, where it is not there")
    parser.add_argument("--result", type=pathlib.Path, help="file for the report")
    return parser.parse_args()


def take_turns(
    subjects: list[Subject], arguments: argparse.Namespace, tokens: dict[str, list[int]], folder: pathlib.Path, peer: str | None
) -> dict[Subject, list[dict]]:  # fmt: skip
    """Every subject once a round. Runs that should train alike are compared loss by loss."""
    common = {
        "folder": str(folder), "steps": arguments.steps, "lr": LR, "batch_size": workload.CHATS_PER_STEP, "micro_tokens": 4096,
    }  # fmt: skip
    runs: dict[str, list[dict]] = {subject.name: [] for subject in subjects}
    expected: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        for subject in subjects:
            ranks = measure.run_worker(
                peer if subject.peer else sys.executable, subject.script, common | subject.spec, nproc=subject.nproc, folder=folder
            )  # fmt: skip
            run = measure.summary(ranks, tokens_per_step=tokens[subject.part], warmup=arguments.warmup)
            runs[subject.name].append(run)
            print(f"round {number + 1}: {subject.name}: {run['cpu_s']:.2f} CPU s a step and rank", file=sys.stderr)
            if subject.same_losses:
                compare(subject, run["losses"], expected.setdefault(subject.part, run["losses"]))
    return {subject: runs[subject.name] for subject in subjects}


def compare(subject: Subject, losses: list[float], expected: list[float]) -> None:
    """TRL rounds the losses that it logs, and so this is far from the tests' tolerance."""
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    if worst > LOSS_TOLERANCE:
        raise SystemExit(f"{subject.name}: losses differ by {worst:.1e} from the first subject of its part")


def report(runs: dict[Subject, list[dict]], arguments: argparse.Namespace, peer: str | None) -> str:
    command = (
        f"python benchmarks/sft.py --rounds {arguments.rounds} --steps {arguments.steps} --warmup {arguments.warmup}"
    )
    lines = [
        f"# SFT, {datetime.date.today()}", "", f"`{command}`{', with TRL' if peer else ''}", "", machine(), "",
        versions(sys.executable, ["torch", "transformers", "megatron-core"], "mrl and the plain loop"),
    ]  # fmt: skip
    if peer:
        lines.append(versions(peer, ["torch", "transformers", "trl", "accelerate"], "TRL"))
    titles = {
        "packed": f"Same packed batches: {workload.ROWS} rows x {workload.ROW} tokens a step",
        "chats": f"Uneven chats: {workload.CHATS_PER_STEP} a step, {workload.SHORTEST} to {workload.LONGEST} tokens; real tokens counted",
    }
    for part, title in titles.items():
        chosen = {subject: of for subject, of in runs.items() if subject.part == part}
        if chosen:
            lines += ["", f"## {title}", "", *table(chosen)]
    return "\n".join([*lines, "", *goals({s.name: of for s, of in runs.items()})]) + "\n"


def table(runs: dict[Subject, list[dict]]) -> Iterable[str]:
    """A row for each subject, its rounds side by side."""
    yield "| | processes | CPU s/step per rank | wall s/step | tokens per CPU s, all ranks | tokens/s | peak MB per process |"
    yield "|---|---|---|---|---|---|---|"
    for subject, of in runs.items():
        columns = [("cpu_s", ".2f"), ("wall_s", ".2f"), ("tokens_per_cpu_s", ",.0f"), ("tokens_per_s", ",.0f"), ("peak_mb", ",.0f")]  # fmt: skip
        cells = [" / ".join(format(run[key], form) for run in of) for key, form in columns]
        yield f"| {subject.name} | {subject.nproc} | " + " | ".join(cells) + " |"


def goals(runs: dict[str, list[dict]]) -> Iterable[str]:
    """The ratios that have a goal, from the means of the rounds."""

    def ratio(a: str, b: str, key: str) -> float:
        return statistics.mean(run[key] for run in runs[a]) / statistics.mean(run[key] for run in runs[b])

    rows = [
        ("mrl megatron", PLAIN, "tokens_per_cpu_s", "at least 0.95"),
        ("mrl megatron", "plain loop, AdamW(fused=True)", "tokens_per_cpu_s", "-"),
        ("mrl megatron dp2", "plain loop, DDP over 2", "tokens_per_cpu_s", "at least 0.95"),
        ("mrl megatron tp2", PLAIN, "tokens_per_cpu_s", "-"),
        ("mrl FSDP", PLAIN, "tokens_per_cpu_s", "-"),
        ("mrl megatron", PLAIN, "peak_mb", "at most 1.1"),
        ("mrl megatron dp2", "plain loop, DDP over 2", "peak_mb", "at most 1.1"),
        (ENGINE_CHATS, TRL_FP32, "tokens_per_cpu_s", "at least 1.4"),
        (COMMAND, TRL_FP32, "tokens_per_cpu_s", "at least 1.4"),
        (f"{ENGINE_CHATS}, dp2", f"{TRL_FP32}, over 2", "tokens_per_cpu_s", "at least 1.4"),
    ]
    names = {"tokens_per_cpu_s": "tokens per CPU second", "peak_mb": "peak memory"}
    rows = [row for row in rows if row[0] in runs and row[1] in runs]
    if rows:
        yield from ("## Ratios", "", "| | ratio | goal |", "|---|---|---|")
    for a, b, key, goal in rows:
        yield f"| {names[key]}: {a} / {b} | {ratio(a, b, key):.2f} | {goal} |"


if __name__ == "__main__":
    main()
