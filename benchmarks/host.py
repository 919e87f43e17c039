"""The host's time of a training step and of a decoding step, beside transformers: arithmetic is small, layers are many.

    python benchmarks/host.py
    python benchmarks/host.py --only dense --rounds 3

Models have a width of 16 and the layers of gpu.py's. Subjects take turns on a CPU, each in a fresh process with one thread.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import gpu_subjects
import measure
import workload
from machine import machine, versions

VOCABULARY = 512
_NARROW = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16
}  # fmt: skip
MODELS = {
    "dense, 20 layers": gpu_subjects.DENSE | _NARROW,
    "experts, 12 layers": gpu_subjects.MOE | _NARROW | {"moe_intermediate_size": 16},
}
PLAIN = "transformers"
SUBJECTS = {
    PLAIN: {"kind": "plain", "dtype": "bfloat16"},
    "mrl megatron, local layers": gpu_subjects.mrl(layer_spec="local"),
    "mrl fsdp": gpu_subjects.mrl("fsdp"),
}
STEPS = {  # what worker_gpu.py is asked for: four micro-batches of 64 tokens, and eight sequences
    "training": {"rows": 16, "row": 16, "micro_tokens": 64},
    "decoding": {"rows": 8, "row": 16, "micro_tokens": 64, "at_once": [8], "prompt": 16, "new_tokens": 16},
}
Seconds = dict[tuple[str, str, str], list[float]]  # of a step: model, what, subject -> one a round


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        found = take_turns(pathlib.Path(name), arguments)
    text = "\n".join([*head(arguments), *table(found)]) + "\n"
    print(text)
    if arguments.append is not None:
        with arguments.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="training steps, or generations, of a run")
    parser.add_argument("--warmup", type=int, default=2, help="of which so many are not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each subject")
    parser.add_argument("--only", default="", help="rows whose model or step contains this")
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is appended to")
    return parser.parse_args()


def take_turns(folder: pathlib.Path, arguments: argparse.Namespace) -> Seconds:
    """Returns CPU seconds of a training step, or of a generated token of all sequences."""
    found: Seconds = {}
    for model, sizes in MODELS.items():
        place = folder / model.split(",")[0]
        chosen = [what for what in STEPS if arguments.only in f"{model} {what}"]
        if chosen:
            workload.make_model(place / "model", 0, sizes=sizes, vocabulary=VOCABULARY, end_drawn=False)
        for what in chosen:
            for _ in range(arguments.rounds):
                for subject, settings in SUBJECTS.items():
                    spec = {"what": what, "folder": str(place), "device": "cpu", "vocabulary": VOCABULARY}
                    spec |= {"steps": arguments.steps, "subject": settings} | STEPS[what]
                    found.setdefault((model, what, subject), []).append(seconds(spec, arguments.warmup, place))
    return found


def seconds(spec: dict[str, Any], warmup: int, folder: pathlib.Path) -> float:
    [rank] = measure.run_worker(sys.executable, "worker_gpu.py", spec, nproc=1, folder=folder)
    return statistics.median(rank["cpu"][warmup:]) / spec.get("new_tokens", 1)


def head(arguments: argparse.Namespace) -> list[str]:
    command = (
        f"python benchmarks/host.py --rounds {arguments.rounds} --steps {arguments.steps} --warmup {arguments.warmup}"
    )
    command += f' --only "{arguments.only}"' if arguments.only else ""
    load = os.getloadavg()[2]
    return [
        f"## Host of a step, {datetime.date.today()}", "",
        f"`{command}`: CPU milliseconds, medians of rounds; ratios to transformers are medians of the rounds' own.", "",
        f"{machine()}. Load of the last 15 minutes: {load:.1f}.", "",
        versions(sys.executable, ["torch", "transformers", "megatron-core"], "all"), "",
    ]  # fmt: skip


def table(found: Seconds) -> Iterable[str]:
    yield from ("| model | step | | CPU ms | of transformers |", "|---|---|---|---|---|")
    for (model, what, subject), runs in found.items():
        ratio = statistics.median(a / b for a, b in zip(runs, found[model, what, PLAIN], strict=True))
        yield f"| {model} | {what} | {subject} | {1e3 * statistics.median(runs):.1f} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
