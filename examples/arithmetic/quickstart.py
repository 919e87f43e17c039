"""The first runs: makes data, measures an untrained model, trains it at TP2, and measures it again; then a model from the middle
of that training learns from its own attempts, by GRPO.

    make quickstart        or      python examples/arithmetic/quickstart.py [--sft-only] [KEY=VALUE ...]

KEY=VALUE are config keys for `mrl sft`, as in engine.parallel.tp=1.
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
import reinforce

HERE = pathlib.Path(__file__).parent
MRL = pathlib.Path(sys.executable).with_name("mrl")  # beside the Python that runs this, as in .venv/bin
CONFIG = os.path.relpath(HERE / "config.yaml")
DATA, RUN = pathlib.Path("runs/arithmetic-data"), pathlib.Path("runs/arithmetic")

FINE_TUNING = """
Each step's line below: loss, the mean negative log-likelihood of the answers' tokens in nats, before the step; eval, the same on the
held-out sums; norm, of the gradient; lr, the learning rate; tok/s, tokens a second; seconds of the step; eta, what is left."""

NEXT = """
What to try next:
  {mrl} sft {config} output_dir=runs/pp2 engine.parallel.tp=1 engine.parallel.pp=2
      the same run with its layers on two processes: runs/pp2/metrics.jsonl has the same losses, to all but
      the last digits at first; at this learning rate the difference of rounding grows after some fifty steps
  {mrl} sft {config} train.steps=600
      goes on from the last checkpoint of this run; the learning rate follows the schedule of 600 steps
  {mrl} sft {config} output_dir=runs/killed
      kill it in the middle, by Ctrl-C or `kill -9`, after step 175, and give the same command again: it goes on
      from its checkpoint, and the metrics are those of a run that was not killed
  make quickstart-ppo
      the same by PPO: the actor on Megatron with tensor parallel, the critic on FSDP beside it; two to four minutes
  {mrl} ppo examples/arithmetic/ppo.yaml output_dir=runs/pp2-ppo actor.engine.parallel='{{pp: 2}}' critic.engine=null
      actor and critic with their layers on two processes; the folder's samples/ holds what the model wrote
  {mrl} config ppo
      every key of reinforcement learning, as `config sft` has those of supervised fine-tuning
  examples/gsm8k/README.md
      a real model on real data"""


def main() -> None:
    began_s = time.monotonic()
    make_data.make(DATA)
    shutil.rmtree(RUN, ignore_errors=True)
    print(f"A model with random weights answers {make_data.EVAL_ROWS:,} sums that no training row has:")
    before = report(DATA / "model")
    print(FINE_TUNING)
    arguments = [a for a in sys.argv[1:] if a != "--sft-only"]
    train(arguments)
    print("\nThe trained model, loaded from runs/arithmetic/hf with transformers:")
    after = report(RUN / "hf")
    print(f"\nexact match: {before:.1%} before, {in_words(after)} after, in {time.monotonic() - began_s:.0f} s")
    print("  the share of these sums whose greedy answer is right; +- is two standard errors of the measurement")
    if "--sft-only" not in sys.argv:
        shutil.rmtree(reinforce.HALF, ignore_errors=True)
        reinforce.main(["grpo"])
    print(NEXT.format(config=CONFIG, mrl=os.path.relpath(MRL) if MRL.exists() else sys.executable + " -m mrl"))


def in_words(score: float) -> str:
    return evaluate.in_words(score, make_data.EVAL_ROWS)


def report(folder: pathlib.Path) -> float:
    """Prints three answers of a model and returns its exact match."""
    score, table = evaluate.exact_match(folder, DATA / "eval.jsonl")
    for question, right, given in table[:3]:
        print(f"  {question}{given.replace(chr(10), ' ')}  ({'right' if given == right else 'it is ' + right})")
    return score


def train(overrides: list[str]) -> None:
    """Runs `mrl sft` as a user would; its failure is ours."""
    print(f"\n$ mrl sft {shlex.join([CONFIG, *overrides])}", flush=True)
    done = subprocess.run([sys.executable, "-m", "mrl", "sft", CONFIG, *overrides])
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
