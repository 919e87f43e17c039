"""`mrl ppo` as a user starts it, in this process; an iteration ends where the line of its last step is written."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import psutil
from measure import HERE, PhaseMeter, leave_world, read_arguments


def config_of(spec: dict) -> dict:
    folder = pathlib.Path(spec["folder"])
    mini_batch_size = spec["sequences"] // spec["steps_per_iteration"]
    return {
        "output_dir": str(folder / "run"),
        "actor": {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "engine": {"device": "cpu"},
            "optimizer": {"lr": spec["lr"], "schedule": "constant", "weight_decay": 0.0, "betas": [0.9, 0.95]},
        },
        "algorithm": {"name": "grpo", "mini_batch_size": mini_batch_size}
        | ({"kl_in": "loss", "kl_coef": spec["kl"]} if spec["kl"] else {"kl_in": "none"}),
        "rollout": {"samples_per_prompt": spec["samples"], "max_new_tokens": spec["new_tokens"]},
        "rewards": {"functions": [{"function": f"{HERE / 'reward.py'}:even"}], "workers": 1},
        "data": {"train": str(folder / "prompts.jsonl"), "shuffle": False},
        "train": {"steps": spec["iterations"] * spec["steps_per_iteration"], "global_batch_size": spec["sequences"]},
        "checkpoint": {"resume": "never", "export_hf": False},
        "log": {"console": "plain"},
    }


def children_mb() -> float:
    """Resident MB of the processes that this one has started: those that call the reward."""
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 2**20


def hook(meter: PhaseMeter, spec: dict) -> None:
    """Times the phases of an iteration where they are called."""
    from mrl import metrics
    from mrl.rollout.rollouts import Rollouts
    from mrl.trainers import ppo
    from mrl.trainers.rl import experience

    Rollouts.sample = meter.within("generation", Rollouts.sample)
    experience.forward = meter.within("log-probs", experience.forward)
    ppo.one_step = meter.within("update", ppo.one_step)
    write, row = metrics.MetricsLog.write, {}

    def measured(self, step, found):
        write(self, step, found)
        row.update(found)
        if step % spec["steps_per_iteration"] == 0:
            meter.children_mb = children_mb()
            meter.metrics.append({"length": row["rollout/response_length"], "reward": row["reward/mean"]})
            meter.step()

    metrics.MetricsLog.write = measured


class WithChildren(PhaseMeter):
    """Counts the memory of reward processes, too."""

    children_mb = 0.0

    def result(self) -> dict:
        found = super().result()
        return found | {"peak_mb": found["peak_mb"] + self.children_mb}


def main() -> None:
    from mrl.cli import main as mrl

    spec, out = read_arguments()
    leave_world()
    meter = WithChildren()
    hook(meter, spec)
    folder = pathlib.Path(spec["folder"])
    shutil.rmtree(folder / "run", ignore_errors=True)  # of the round before
    path = folder / "run.yaml"
    path.write_text(json.dumps(config_of(spec)), encoding="utf-8")  # JSON is YAML
    sys.argv = ["mrl", "ppo", str(path), "--nproc", "1"]
    if code := mrl(standalone_mode=False):
        raise SystemExit(code)
    meter.write(out)


if __name__ == "__main__":
    main()
