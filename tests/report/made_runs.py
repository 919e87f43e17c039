"""Runs for the tests: directories as `mrl sft` and `mrl ppo` leave them, with numbers that are easily told apart.

metrics.jsonl is written by the trainer's own MetricsLog; a real run in a browser makes docs/images/report.png (browser.py).
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from mrl.metrics import MetricsLog

HEADER = """\
# Written by mrl: the resolved config of this run. `mrl {command}` takes this file.
# versions: mrl 0.1.0, python 3.11.7, torch {torch}, megatron-core 0.16.1, transformers 5.23.0, transformer-engine absent
# git: 0123abc, clean
# command: mrl {command} {name}.yaml
# length: {steps} steps
"""

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><!-- {{DATA}} "
    "\u0000\u0007\u001b[31m \u202egnp.exe\u202c \U0001f600 \u05e9\u05dc\u05d5\u05dd \u2028\ud83d end & &lt;b&gt;"
)


def sft_row(step: int) -> dict[str, float]:
    return {
        "train/loss": 3.0 / step, "train/grad_norm": 1.0 + step % 3, "train/lr": 0.001 * step,
        "train/tokens": 100.0 * step, "perf/step_s": 0.5, "perf/tokens_per_s": 200.0 + step, "perf/memory_gb": 1.5,
        **({"eval/loss": 2.0 / step} if step % 5 == 0 else {}),
    }  # fmt: skip


def rl_row(step: int) -> dict[str, float]:
    return {
        "iteration": (step + 1) // 2, "reward/mean": 0.1 * step, "reward/std": 0.4, "reward/good/mean": 0.2 * step,
        "reward/good/std": 0.3, "reward/short/mean": -0.1 * step, "reward/short/std": 0.2, "actor/kl": 0.01 * step,
        "actor/entropy": 2.0 - 0.1 * step, "actor/clip_fraction": 0.05, "rollout/response_length": 20.0 + step,
        "rollout/logprob_gap": 1e-6, "train/loss": 1e-9, "actor/loss": 1e-9, "train/lr": 0.001, "train/grad_norm": 1.0,
        "train/tokens": 64.0 * step, "perf/step_s": 1.0, "perf/rollout_s": 0.4, "perf/reward_s": 0.1,
        "perf/log_probs_s": 0.2, "perf/update_s": 0.3, "perf/tokens_per_s": 100.0, "perf/memory_gb": 2.0,
    }  # fmt: skip


def make_run(
    folder: pathlib.Path, rows: Iterable[tuple[int, Mapping[str, float]]], *, total: int = 20, lr: float = 0.001,
    torch: str = "2.13.0", command: str = "sft", model: str = "nowhere/model",
) -> pathlib.Path:  # fmt: skip
    """A run's directory, whose name is in its command line."""
    folder.mkdir(parents=True, exist_ok=True)
    header = HEADER.format(command=command, torch=torch, steps=total, name=folder.name)
    body = f"output_dir: {folder}\nmodel: {{path: {model}}}\noptimizer: {{lr: {lr}, betas: [0.9, 0.95]}}\n"
    (folder / "config.yaml").write_text(header + body + f"train: {{steps: {total}}}\n")
    log = MetricsLog(folder / "metrics.jsonl")
    for step, row in rows:
        log.write(step, row)
    log.close()
    return folder


def make_sft(folder: pathlib.Path, steps: int = 20, **keys: Any) -> pathlib.Path:
    return make_run(folder, [(step, sft_row(step)) for step in range(1, steps + 1)], **keys)


def sample(index: int, number: int, **changes: Any) -> dict[str, Any]:
    """A line of samples/, as docs/samples.md describes it: two tokens of prompt, three of the policy."""
    reward = (index + number) % 4 / 4
    return {
        "step": 1, "row": f"rows.jsonl:{index + 1}", "index": index, "sample": number, "reward": reward,
        "rewards": {"good": reward, "short": 0.0}, "environment": None,
        "prompt": [{"role": "user", "content": f"question {index}"}], "completion": f"answer {number}", "finished": True,
        "turns": 1, "response_length": 3, "advantage": reward - 0.5, "tokens": [5, 6, 7, 8, 9], "mask": [0, 0, 1, 1, 1],
        "log_probs": [0.0, 0.0, -0.1, -2.0, -7.123456], "conversation": None, "cut_by": None,
    } | changes  # fmt: skip


def write_samples(run: pathlib.Path, name: str, rows: Iterable[Any]) -> pathlib.Path:
    path = run / "samples" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_rl(folder: pathlib.Path, steps: int = 12, files: Iterable[int] = (1, 3, 5), **keys: Any) -> pathlib.Path:
    rows = [(0, {"eval/accuracy": 0.25, "perf/eval_s": 2.0})] + [(step, rl_row(step)) for step in range(1, steps + 1)]
    run = make_run(folder, rows, total=steps, command="ppo", **keys)
    for step in files:
        write_samples(run, f"step_{step:08d}.jsonl", [sample(i, n, step=step) for i in range(3) for n in range(4)])
    write_samples(run, "eval_00000000.jsonl", [sample(i, 0, step=0) for i in range(5)])
    return run
