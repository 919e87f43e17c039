"""From a half-trained model to a better one by reinforcement learning, with GRPO and with PPO and a critic.

    python examples/arithmetic/reinforce.py [grpo] [ppo] [KEY=VALUE ...]

KEY=VALUE are config keys for `mrl ppo`, as in seed=1. Without names both run. The model that they start from is made first: the
supervised run of config.yaml, stopped early.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import evaluate
import make_data

from mrl.metrics import read

HERE = pathlib.Path(__file__).parent
DATA, HALF = pathlib.Path("runs/arithmetic-data"), pathlib.Path("runs/arithmetic-half")
EARLY = ["output_dir=runs/arithmetic-half", "train.steps=175", "optimizer.schedule=constant", "train.eval_every=null"]
SHOWN = ["log.console=none"]


def main(arguments: list[str]) -> dict[str, tuple[float, float, float]]:
    """Runs what is asked for. Returns exact match before and after, and the seconds it took, by algorithm."""
    names = [a for a in arguments if "=" not in a] or ["grpo", "ppo"]
    overrides = [a for a in arguments if "=" in a]
    if not (DATA / "train.jsonl").exists():
        make_data.make(DATA)
    if not (HALF / "hf").exists():
        print("\nA model for reinforcement learning to start from: the supervised run, stopped early.")
        mrl("sft", "config.yaml", [*EARLY, *SHOWN])
    return {name: reinforce(name, overrides) for name in names}


def reinforce(name: str, overrides: list[str]) -> tuple[float, float, float]:
    """One run of NAME.yaml; prints and returns exact match on the held-out problems before and after, and its seconds."""
    run = pathlib.Path(f"runs/arithmetic-{name}")
    shutil.rmtree(run, ignore_errors=True)
    before, _ = evaluate.exact_match(HALF / "hf", DATA / "eval.jsonl")
    began_s = time.monotonic()
    mrl("ppo", f"{name}.yaml", [*overrides, *SHOWN])
    seconds = time.monotonic() - began_s
    rows = read(run / "metrics.jsonl")
    steps = [f"{row['eval/accuracy']:.1%} after {row['step']}" for row in rows if "eval/accuracy" in row]
    print(f"  on held-out problems: {', '.join(steps)} steps")
    after, _ = evaluate.exact_match(run / "hf", DATA / "eval.jsonl")
    print(f"{name}: exact match {before:.1%} before, {after:.1%} after, in {seconds:.0f} s")
    return before, after, seconds


def mrl(command: str, config: str, overrides: list[str]) -> None:
    """Runs mrl as a user would; its failure is ours."""
    path = os.path.relpath(HERE / config)
    print(f"\n$ mrl {command} {shlex.join([path, *overrides])}", flush=True)
    done = subprocess.run([sys.executable, "-m", "mrl", command, path, *overrides])
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
