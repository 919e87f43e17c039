"""vLLM inside the trainer: what test_vllm_local.py runs with the Python that has vLLM, once for each rank.

`python -m tests.rollout.local_vllm TASK.json`: runs `mrl ppo`'s trainer on each config of the task, one after the other,
around a real engine whose calls are written down, and leaves them in OUT/rank_N.json.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import torch

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import BaseEngine
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.engine.megatron.engine import MegatronEngine
from mrl.errors import UserError
from mrl.rollout import vllm_local
from mrl.trainers import ppo

TASK = json.loads(pathlib.Path(sys.argv[1]).read_text()) if __name__ == "__main__" else {}
RANK = int(os.environ.get("RANK", "0"))  # no launcher says it to a run of one process
CALLS = ("sleep", "wake_up", "collective_rpc", "generate")


def process_state() -> dict[str, Any]:
    """What belongs to the trainer, and vLLM might change."""
    return {
        "environment": dict(os.environ),
        "torch's generator": torch.get_rng_state().tolist(),
        "Python's generator": random.getstate(),
        "numpy's generator": str(numpy.random.get_state()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "matmul": torch.get_float32_matmul_precision(),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "cores": os.sched_getaffinity(0),
        "folder": os.getcwd(),
    }


class Recorder:
    """Writes down, in their order, the calls of the engine and what roles do around them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[list[int]] = []  # of each request of this process's engine

    def around(self, owner: Any, name: str, event: Callable[..., str | None]) -> Any:
        original = getattr(owner, name)

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if (said := event(this, *args, **kwargs)) is not None:
                self.events.append(said)
            return original(this, *args, **kwargs)

        return mock.patch.object(owner, name, call)

    def of_engine(self, name: str, args: Any, kwargs: Any) -> str:
        if name == "generate":
            self.tokens += [prompt["prompt_token_ids"] for prompt in args[0]]
            return "generate"
        return f"{name} {kwargs['tags'][0]}" if name == "wake_up" else name


def unchanged(name: str) -> Any:
    """A method of the sampler leaves the process as it was."""
    original = getattr(vllm_local.VLLMSampler, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before = process_state()
        try:
            made = original(*args, **kwargs)
        finally:
            after = process_state()
            changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
            assert not changed, f"{name} changed {changed}"
        if name == "sample":
            assert original(*args, **kwargs) == made, "other completions the second time"
        return made

    return mock.patch.object(vllm_local.VLLMSampler, name, call)


def _moved(_: Any, where: str, model: bool = True, optimizer: bool = True, gradients: bool | None = None) -> str | None:
    """Of a role that moves as a whole."""
    return f"roles to {where}" if (model, optimizer, gradients) == (True, True, None) else None


def run(config: dict[str, Any], broken_on: int | None) -> dict[str, Any]:
    """One run. broken_on: the rank whose engine fails to load the first weights after step 1."""
    import vllm

    recorder, ended = Recorder(), "done"
    patches = [
        recorder.around(vllm.LLM, name, lambda _, *a, n=name, **k: recorder.of_engine(n, a, k)) for name in CALLS
    ]
    patches += [recorder.around(cls, "init_model", lambda *_: "a role builds") for cls in (FSDPEngine, MegatronEngine)]
    patches += [recorder.around(BaseEngine, "to", _moved)]
    patches += [unchanged(name) for name in ("__init__", "update_weights", "sample", "sleep", "wake", "close")]
    if broken_on == RANK:
        original, calls = vllm_local._reload, []

        def reload(worker: Any, weights: Any) -> None:
            calls.append(next(weights))
            if len(calls) == 3:
                raise RuntimeError("a load that fails\nin the middle")
            original(worker, iter([calls[-1], *weights]))

        patches.append(mock.patch.object(vllm_local, "_reload", reload))
    for patch in patches:
        patch.start()
    try:
        ppo.run(from_dict(config, PPOConfig), "mrl ppo")
    except UserError as error:
        ended = str(error)
    finally:
        mock.patch.stopall()
    return {"events": recorder.events, "prompts": recorder.tokens, "ended": ended}


def main() -> None:
    found = [run(each["config"], each.get("broken_on")) for each in TASK["runs"]]
    out = pathlib.Path(TASK["out"]) / f"rank_{RANK}.json"
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
