"""The FSDP engine with and without each of its options in one run, beside the Megatron engine on the same model.

    python benchmarks/fsdp.py
    python benchmarks/fsdp.py --only recompute --rounds 3
    python benchmarks/fsdp.py --small --steps 2 --warmup 1 --rounds 1      that it runs; its numbers say little

Subjects take turns, each time in fresh processes with one thread, as in sft.py. A row is compared with the first of its part,
and trains the same: losses agree within 1e-3, but for adapters, which are fewer parameters. An option that the installed mrl
does not have is named in the report, with what it says, and left out.
"""

from __future__ import annotations

import argparse
import datetime
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import workload
from machine import machine, versions
from sft import LR, Subject, take_turns

from mrl.config.load import from_dict
from mrl.errors import ConfigError

WORKER = "worker_engine.py"
LORA = {"rank": 8, "alpha": 16, "target_modules": "all-linear"}

# part -> rows: name, processes, keys of the config that are not those of all
OPTIONS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "one process": [
        ("FSDP", 1, {}),
        ("recompute full", 1, {"engine.recompute": "full"}),
        ("recompute full, every 2nd layer", 1, {"engine.recompute": "full", "engine.recompute_every": 2}),
        ("offload parameters", 1, {"engine.offload": ["parameters"]}),
        ("offload gradients", 1, {"engine.offload": ["gradients"]}),
        ("offload optimizer", 1, {"engine.offload": ["optimizer"]}),
        ("offload activations", 1, {"engine.offload": ["activations"]}),
        ("compile", 1, {"engine.fsdp.compile": True}),
        ("LoRA, all linear layers, rank 8", 1, {"model.lora": LORA}),
        ("bfloat16", 1, {"model.dtype": "bfloat16"}),
    ],
    "two processes": [
        ("FSDP over 2", 2, {}),
        ("weights stay gathered after forward", 2, {"engine.fsdp.reshard_after_forward": False}),
        ("weights gathered, gradients reduced once a step", 2, {"engine.fsdp.defer_sync": True}),
        ("two copies (replicate 2)", 2, {"engine.fsdp.replicate": 2}),
        ("Ulysses (cp 2)", 2, {"engine.parallel.cp": 2}),
        ("LoRA, all linear layers, rank 8", 2, {"model.lora": LORA}),
        ("megatron dp2", 2, {"engine.backend": "megatron"}),
        ("megatron tp2", 2, {"engine.backend": "megatron", "engine.parallel.tp": 2}),
        ("megatron cp2", 2, {"engine.backend": "megatron", "engine.parallel.cp": 2}),
    ],
    "four processes": [
        ("FSDP over 4", 4, {}),
        ("HSDP: 2 copies over 2 shards", 4, {"engine.fsdp.replicate": 2}),
        ("HSDP x Ulysses 2", 4, {"engine.fsdp.replicate": 2, "engine.parallel.cp": 2}),
    ],
    "large vocabulary": [
        ("full logits", 1, {"full_logits": True}),
        ("log-probs in chunks", 1, {}),
        ("full logits, with entropy", 1, {"full_logits": True, "entropy": "differentiable"}),
        ("log-probs and entropy in chunks", 1, {"entropy": "differentiable"}),
    ],
}
TITLES = {
    "one process": "Options on one process",
    "two processes": "Two processes, and the Megatron engine",
    "four processes": "Four processes",
    "large vocabulary": "A large vocabulary: log-probs in chunks against a loss on all logits at once",
}
OTHER_LOSSES = ("model.lora", "model.dtype", "entropy")
"""Keys with which a row does not train what the first of its part does."""
OF_THE_WORKER = ("full_logits", "entropy")
LARGE_VOCABULARY = 65536


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        make(folder, arguments)
        subjects, lacking = rows(folder, arguments.only)
        tokens = {part: [workload.ROW * workload.ROWS] * arguments.steps for part in OPTIONS}
        runs = take_turns(subjects, arguments, tokens, folder, None)
    text = report(runs, lacking, arguments)
    print("\n" + text)
    if arguments.result is not None:
        arguments.result.write_text(text, encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row")
    parser.add_argument("--only", default="", help="rows whose part or name contains this")
    parser.add_argument("--small", action="store_true", help="a model of 3.7 M parameters, not 20 M")
    parser.add_argument("--result", type=pathlib.Path, help="file for the report")
    return parser.parse_args()


def make(folder: pathlib.Path, arguments: argparse.Namespace) -> None:
    """`folder/model` and `folder/large/model`, of a large vocabulary, with the same packed rows."""
    sizes = workload.SMALL if arguments.small else workload.MODEL
    workload.make(folder, steps=arguments.steps)
    if arguments.small:
        shutil.rmtree(folder / "model")
        workload.make_model(folder / "model", 0, sizes=sizes, vocabulary=workload.VOCABULARY)
    large = folder / "large"
    large.mkdir()
    shutil.copy(folder / "packed.json", large)
    vocabulary = LARGE_VOCABULARY // 4 if arguments.small else LARGE_VOCABULARY
    workload.make_model(large / "model", 0, sizes=workload.SMALL, vocabulary=vocabulary)


def rows(folder: pathlib.Path, only: str) -> tuple[list[Subject], list[str]]:
    """The rows to run, and a line for each that this mrl has no key for."""
    subjects, lacking = [], []
    for part, options in OPTIONS.items():
        for name, nproc, changes in options:
            if only not in f"{part} {name}":
                continue
            keys = {key: value for key, value in changes.items() if key not in OF_THE_WORKER}
            spec = {"keys": keys, "more": {key: changes.get(key) for key in OF_THE_WORKER}}
            if part == "large vocabulary":
                spec["folder"] = str(folder / "large")
            try:
                from_dict(config_of(keys, "model"))
            except ConfigError as error:
                lacking.append(f"{part}, {name}: {error}")
                continue
            same = not any(key in changes for key in OTHER_LOSSES)
            subjects.append(Subject(f"{part}: {name}", part, WORKER, spec, nproc, same_losses=same))
    return subjects, lacking


def config_of(keys: dict[str, Any], model: str) -> dict[str, Any]:
    """Plain data of a config of `mrl sft` with these dotted keys. Its data section is never read."""
    config: dict[str, Any] = {"output_dir": "x"}
    for dotted, value in {
        "model.path": model, "model.dtype": "float32", "engine.backend": "fsdp", "engine.device": "auto",
        "engine.micro_batch.tokens": 2 * workload.ROW, "optimizer.lr": LR, "optimizer.schedule": "constant",
        "data.train": "x", "data.max_length": workload.ROW, "train.steps": 1, "train.global_batch_size": 64, **keys,
    }.items():  # fmt: skip
        *sections, name = dotted.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return config


def report(runs: dict[Subject, list[dict]], lacking: list[str], arguments: argparse.Namespace) -> str:
    small = " --small" if arguments.small else ""
    command = f"python benchmarks/fsdp.py --rounds {arguments.rounds} --steps {arguments.steps} --warmup {arguments.warmup}{small}"  # fmt: skip
    lines = [f"# The FSDP engine, {datetime.date.today()}", "", f"`{command}`", "", machine(), ""]
    lines.append(versions(sys.executable, ["torch", "transformers", "megatron-core"], "mrl"))
    for part, title in TITLES.items():
        chosen = {subject: of for subject, of in runs.items() if subject.part == part}
        if chosen:
            lines += ["", f"## {title}", "", *table(chosen, part)]
    if lacking:
        lines += ["", "## Not in this mrl", "", *(f"- {line}" for line in lacking)]
    return "\n".join(lines) + "\n"


def table(runs: dict[Subject, list[dict]], part: str) -> Iterable[str]:
    """A row for each subject, its rounds side by side; its tokens per CPU second against the first row's."""
    titles = ("", "processes", "tokens per CPU s, all ranks", "of the first", "wall s/step", "peak MB", "of the first")
    yield "| " + " | ".join((*titles, "MB of state between steps")) + " |"
    yield "|---|---|---|---|---|---|---|---|"
    first = next(iter(runs.values()))
    for subject, of in runs.items():
        cells = [
            rounds(of, "tokens_per_cpu_s", ",.0f"), ratio(of, first, "tokens_per_cpu_s"), rounds(of, "wall_s", ".2f"),
            rounds(of, "work_mb", ",.0f"), ratio(of, first, "work_mb"), rounds(of, "state_mb", ",.0f"),
        ]  # fmt: skip
        yield f"| {subject.name.removeprefix(part + ': ')} | {subject.nproc} | " + " | ".join(cells) + " |"


def rounds(of: list[dict], key: str, form: str) -> str:
    return " / ".join(format(run[key], form) for run in of)


def ratio(of: list[dict], first: list[dict], key: str) -> str:
    return f"{sum(run[key] for run in of) / sum(run[key] for run in first):.2f}"


if __name__ == "__main__":
    main()
