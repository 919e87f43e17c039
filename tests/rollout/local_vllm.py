"""vLLM inside the trainer's process: a program that test_vllm.py runs with the Python that has vLLM.

`python -m tests.rollout.local_vllm ACTOR OTHER TEMPERATURE`: the engine starts with OTHER's weights and gets ACTOR's.
"""

from __future__ import annotations

import sys

import torch

from mrl.config.ppo import ServerConfig
from mrl.engine.registry import build_engine
from mrl.engine.sampling import SamplingParams
from mrl.rollout.vllm_local import VLLMSampler
from tests.engine import tiny
from tests.engine.contract import loss_fn, train
from tests.rollout.real_vllm import MAX_LENGTH, engine_log_probs, requests


def main(actor: str, other: str, temperature: float) -> None:
    engine = build_engine(tiny.role(actor))
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    sampler = VLLMSampler(
        ServerConfig(),
        path=other,
        dtype="float32",
        temperature=temperature,
        max_length=MAX_LENGTH,
        world_size=1,
        gpu=False,
    )
    asked, seen = requests(SamplingParams(temperature)), []
    for _ in range(2):
        sampler.update_weights(engine.hf_weights())
        sampler.sleep()  # nothing to free on a CPU
        completions = sampler.sample(asked)
        ours = torch.tensor([x for c in completions for x in c.log_probs])
        torch.testing.assert_close(ours, torch.tensor(engine_log_probs(engine, asked, completions)), rtol=0, atol=1e-5)
        assert sampler.sample(asked) == completions
        seen.append(completions)
        train(engine, 1)
    assert seen[0] != seen[1]
    print("log-probs are those of the actor")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
