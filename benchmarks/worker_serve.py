"""The engine alone, as `mrl serve` builds it: steps on a batch of data, or samples of prompts, so many at once."""

from __future__ import annotations

import json
import pathlib

from measure import Meter, read_arguments


def main() -> None:
    from mrl.algorithms.sums import DENOMINATOR, SummedLoss
    from mrl.config.load import load_config
    from mrl.config.serve import ServeConfig
    from mrl.engine.registry import build_engine
    from mrl.engine.trained_state import UpdateSettings
    from mrl.serve import datums
    from mrl.serve.server import role_config

    spec, out = read_arguments()
    config = load_config(spec["config"], [], ServeConfig)
    engine = build_engine(role_config(config, config.model.path))
    engine.init_model()
    meter = Meter()
    if spec["what"] == "samples":
        samples(engine, config, spec, meter)
    else:
        body = pathlib.Path(spec["request"]).read_bytes()
        engine.set_loss_fn(SummedLoss("cross_entropy", {}), DENOMINATOR)
        update = UpdateSettings(spec["lr"], (0.9, 0.95), 1e-12, 0.0, 0.0)
        for _ in range(spec["steps"]):
            meter.mark()
            batch = datums.batch_of(datums.read_call(body), datums.Limits(spec["vocabulary"], config.serve.max_length))
            with engine.train_mode():
                found, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
            engine.unshard_data(found, batch)
            engine.optimizer_step(update)
            engine.optimizer_zero_grad()
            meter.step(loss)
    meter.write(out)


def samples(engine, config, spec, meter) -> None:
    """A rollout's requests: all of them at once, on a server's room."""
    from mrl.engine.base import GenerateRequest
    from mrl.engine.sampling import SamplingKey, SamplingParams

    prompts = json.loads(pathlib.Path(spec["prompts"]).read_text())
    for _ in range(spec["steps"]):
        meter.mark()
        for first in range(0, len(prompts), spec["at_once"]):
            requests = [
                GenerateRequest(
                    tokens=prompt,
                    max_new_tokens=spec["new_tokens"],
                    stop_tokens=(),
                    sampling=SamplingParams(),
                    key=SamplingKey(seed=0, prompt=first + i, sample=0),
                )  # fmt: skip
                for i, prompt in enumerate(prompts[first : first + spec["at_once"]])
            ]
            drawn = engine.generate(
                requests, cache_tokens=config.serve.cache_tokens, prefill_tokens=config.serve.prefill_tokens
            )
            assert all(len(one.tokens) == spec["new_tokens"] for one in drawn)
        meter.step()


if __name__ == "__main__":
    main()
