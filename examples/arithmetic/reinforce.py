"""From a half-trained model to a better one by reinforcement learning, with GRPO and with PPO and a critic.

    make quickstart-ppo    or      python examples/arithmetic/reinforce.py [grpo] [ppo] [KEY=VALUE ...]

KEY=VALUE are config keys for `mrl ppo`, as in seed=1. Without names both run. The model that they start from is that of step 175 of
the run of config.yaml: exported from its checkpoint where that run is there, else made by its first 175 steps.
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
STEP = 175
CHECKPOINT = pathlib.Path(f"runs/arithmetic/checkpoints/step_{STEP:08d}")
EARLY = ["output_dir=runs/arithmetic-half", f"train.steps={STEP}", "optimizer.decay_steps=450", "train.eval_every=null"]
"""The first steps of config.yaml's run of 500, 50 of which are warm-up."""

MEANING = """
Each step's line below: reward, the share of this step's 256 sampled answers that are right; accuracy, the share of greedy answers to
the 1,000 held-out sums; entropy, how undecided the model is about a token, in nats; clip, the share of tokens where the update was
limited (0 where a rollout is trained on once); finished, the share of answers that ended by themselves; length, their tokens."""


def main(arguments: list[str]) -> dict[str, tuple[float, float, float]]:
    """Runs what is asked for. Returns exact match before and after, and the seconds it took, by algorithm."""
    names = [a for a in arguments if "=" not in a] or ["grpo", "ppo"]
    overrides = [a for a in arguments if "=" in a]
    if not (DATA / "train.jsonl").exists():
        make_data.make(DATA)
    if not (HALF / "hf").exists():
        print(f"\nA model for reinforcement learning to start from: that of step {STEP} of the supervised run.")
        if CHECKPOINT.exists():
            run(["convert", "export", str(CHECKPOINT), str(HALF / "hf")])
        else:
            run(["sft", relative("config.yaml"), *EARLY])
    return {name: reinforce(name, overrides) for name in names}


def reinforce(name: str, overrides: list[str]) -> tuple[float, float, float]:
    """One run of NAME.yaml; prints and returns exact match on the held-out problems before and after, and its seconds."""
    folder = pathlib.Path(f"runs/arithmetic-{name}")
    shutil.rmtree(folder, ignore_errors=True)
    print(MEANING)
    before, _ = evaluate.exact_match(HALF / "hf", DATA / "eval.jsonl")
    began_s = time.monotonic()
    run(["ppo", relative(f"{name}.yaml"), *overrides])
    seconds = time.monotonic() - began_s
    rows = read(folder / "metrics.jsonl")
    steps = [f"{row['eval/accuracy']:.1%} after {row['step']}" for row in rows if "eval/accuracy" in row]
    print(f"  on held-out problems: {', '.join(steps)} steps")
    after, _ = evaluate.exact_match(folder / "hf", DATA / "eval.jsonl")
    words = evaluate.in_words(after, make_data.EVAL_ROWS)
    print(f"{name}: exact match {before:.1%} before, {words} after, in {seconds:.0f} s")
    print(
        "  the share of held-out sums whose greedy answer is right, of the exported model, measured with transformers alone"
    )
    return before, after, seconds


def relative(config: str) -> str:
    """A config beside this file, as a user would name it."""
    return os.path.relpath(HERE / config)


def run(arguments: list[str]) -> None:
    """Runs mrl as a user would; its failure is ours."""
    print(f"\n$ mrl {shlex.join(arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "mrl", *arguments])
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
