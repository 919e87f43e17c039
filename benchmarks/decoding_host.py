"""The host's own work of a decoding step of many sequences: all that `generate` does but for the model's operations.

    python benchmarks/decoding_host.py --sequences 1024

Steps are planned and read as on a GPU, one step late. "ending": a 150th of the sequences ends in each step, so no two
steps are alike. Tokens are random and layers are missing. Times are of the thread, medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from mrl.engine.generation import SampledTokens, Schedule, Step, complete
from mrl.engine.requests import GenerateRequest
from mrl.engine.sampling import SamplingKey, SamplingParams
from mrl.ops.devices import CPU
from mrl.ops.kv_cache import CachedStep, KVCache

PROMPT, FEW, MANY = 100, 4, 28  # tokens; the difference of two runs is of steps without prompts


class Clock:
    """Sums the thread's milliseconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    def run(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        out = function(*args)
        self.parts[part] += 1e3 * (time.thread_time() - start)
        return out


def generation(sequences: int, new: int, ending: bool) -> dict[str, float]:
    """Returns milliseconds by part of a generation of `new` tokens of each sequence."""
    clock, random, sampling = Clock(), torch.Generator().manual_seed(0), SamplingParams()
    requests = [
        GenerateRequest(
            [3 + i % 9] * PROMPT, new, (1, 2) if ending else (), sampling, SamplingKey(0, 0, i // 16, i % 16)
        )
        for i in range(sequences)
    ]
    schedule = Schedule(
        [*enumerate(requests)], cache_tokens=sequences * (PROMPT + MANY), prefill_tokens=4096, late=True
    )
    cache, take = KVCache(schedule.rows, schedule.length), schedule.take

    def tensors(step: Step) -> None:
        cached = CachedStep(cache, tuple(step.lengths), tuple(step.cached), CPU)
        if cached.decoding == len(step.lengths):
            _ = cached.positions, cached.decode_mask(None, torch.float32)

    def launch(step: Step, before: torch.Tensor | None) -> SampledTokens:
        clock.run("moves", cache.arrange, step.copies, step.shape)
        clock.run("tokens", step.token_ids, CPU, before)
        clock.run("positions and mask", tensors, step)
        clock.run("noise keys", step.sampling, CPU)
        result = torch.ones(3, len(step.sampled), dtype=torch.float64)
        result[0] = torch.randint(1, 301, result[0].shape, generator=random)
        sampled = SampledTokens([result], [lambda: result])
        read = sampled.read
        sampled.read = lambda: clock.run("read", read)  # type: ignore[method-assign]
        return sampled

    plan, planned = schedule.next, lambda: clock.run("plan", plan)
    schedule.next = planned  # type: ignore[method-assign]
    schedule.take = lambda *args: clock.run("take", take, *args)  # type: ignore[method-assign]
    complete(schedule, launch, any_has_work=bool, keep=lambda gone: None, progress=lambda done: None)
    return clock.parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for ending in (False, True):
        runs = []
        for _ in range(arguments.rounds):
            few, many = (generation(arguments.sequences, new, ending) for new in (FEW, MANY))
            runs.append({part: (ms - few[part]) / (MANY - FEW) for part, ms in many.items()})
        each = ", ".join(f"{part} {statistics.median(run[part] for run in runs):.2f}" for part in runs[0])
        whole = statistics.median(sum(run.values()) for run in runs)
        name = f"{arguments.sequences} sequences{', ending' * ending}"
        print(f"{name}: {whole:.2f} ms a step ({each})")


if __name__ == "__main__":
    main()
