"""Cases of rollouts; run in worlds (tests/engine/harness.py) by test_layouts.py, in layouts of both engines."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from mrl.config.schema import RoleConfig
from mrl.data.prompts import Prompt
from mrl.engine.generation import Schedule
from mrl.engine.registry import build_engine
from mrl.errors import RewardError
from mrl.mcore_models.decoder import Decoder
from mrl.rollout.base import Trajectory, trajectories_to_batch
from mrl.rollout.native import EngineSampler
from mrl.rollout.recorded import RecordedRollouts
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.samples import write_samples
from mrl.rollout.stops import end_tokens
from tests.data.tiny_tokenizers import make_tokenizer
from tests.rollout import environments
from tests.trainers.cases import before

ROWS = [{"prompt": "hello"}, {"prompt": "the quick brown fox jumps", "last": "x"}, {"prompt": "4"}, {"prompt": "hello"}]
STOP = ("e", "th", " a", "é")  # texts that a model of random weights comes upon


def make(config: RoleConfig, folder: str, **keys):
    """(engine, tokenizer, rollouts) of the native sampler, with end tokens that a random model comes upon too."""
    engine, tokenizer = build_engine(config), make_tokenizer()
    engine.init_model()
    sampler = EngineSampler(functools.partial(engine.generate, cache_tokens=400, prefill_tokens=32), tokenizer)
    settings = environments.config(temperature=0.8, stop_tokens=tuple(range(10, 40)), **{"max_new_tokens": 24, **keys})
    ends = end_tokens(folder, tokenizer)
    rollouts = Rollouts(sampler, tokenizer, settings, seed=7, end_tokens=ends, on_main=engine.on_main)
    assert rollouts.exact
    return engine, tokenizer, rollouts


def plain(trajectories: list[Trajectory]) -> list[dict]:
    return [dataclasses.asdict(t) for t in trajectories]


def samples(
    config: RoleConfig, folder: str, environment: str | None = None, stop: tuple[str, ...] = (), room: int = 24
) -> list[dict]:
    """Trajectories of two samples of each prompt, whose log-probs are those of the trainer at the temperature (trap 19)."""
    engine, tokenizer, rollouts = make(
        config, folder, environment=environment, stop=stop, max_turns=3, max_new_tokens=room
    )
    prompts = environments.make_prompts(ROWS, tokenizer)
    trajectories = rollouts.sample(prompts, step=4, samples=2)
    check_against_trainer(engine, trajectories)
    if environment is None:
        check_ends(tokenizer, trajectories, {*range(10, 40), *end_tokens(folder, tokenizer)}, stop)
    greedy = rollouts.sample(prompts, step=4, samples=1, greedy=True)
    assert (
        greedy
        == rollouts.sample(prompts, step=9, samples=1, greedy=True)
        != rollouts.sample(prompts, step=9, samples=1)
    )
    if environment is not None:
        assert (rollouts._environments is not None) == engine.is_main
        the_same_with_kept_sequences(engine, tokenizer, rollouts, prompts)
    rollouts.close()
    return plain(trajectories)


def the_same_with_kept_sequences(engine, tokenizer, rollouts: Rollouts, prompts: list[Prompt]) -> None:
    """What is kept of conversations over their turns, in parts or all together, changes what is computed and not what is sampled;
    and with it two rollouts are equal to the bit. Weights are laid out once for all turns and parts."""
    fed, made, laid_out = [], [], []
    limits = {"cache_tokens": 400, "prefill_tokens": 32}
    with (
        before(Schedule, "take", lambda schedule, step, *_: fed.append(sum(map(len, step.new)))),
        before(Decoder, "__init__", lambda decoder, chunk: laid_out.append(id(chunk))),
    ):
        for kept_tokens, parts in ((0, 1), (400, 1), (400, 2), (400, 2), (150, 2)):
            fed.clear()
            laid_out.clear()
            rollouts._sampler = EngineSampler(
                functools.partial(engine.generate, **limits), tokenizer, kept_tokens=kept_tokens
            )
            rollouts._config = dataclasses.replace(rollouts._config, environment_parts=parts)
            trajectories = rollouts.sample(prompts, step=4, samples=2)
            assert len(laid_out) == len(set(laid_out)), parts
            everywhere = torch.tensor(sum(fed))
            torch.distributed.all_reduce(everywhere)
            made.append((trajectories, int(everywhere)))
    (plain, most), _, (once, _), (twice, _), _ = made
    assert once == twice and all(tokens < most for _, tokens in made[1:]), [tokens for _, tokens in made]
    for trajectories, _ in made[1:]:
        for t, expected in zip(trajectories, plain, strict=True):
            assert dataclasses.replace(t, log_probs=expected.log_probs) == expected
            assert max(abs(a - b) for a, b in zip(t.log_probs, expected.log_probs, strict=True)) < 1e-5


def check_against_trainer(engine, trajectories: list[Trajectory]) -> None:
    """Traps 19 and 21: what the sampler says of a token, the trainer says at that place of the batch."""
    batch = trajectories_to_batch(trajectories)
    with engine.eval_mode():
        mine = engine.shard_data(batch)
        predictions, _ = engine.forward_backward_step(mine, {"temperature": 0.8}, forward_only=True)
        scored = engine.unshard_data({"log_probs": predictions["log_probs"]}, batch)["log_probs"].cpu()
    sampled = batch.loss_mask.bool()
    difference = (scored - batch.token_fields["rollout_log_probs"])[sampled]
    assert difference.abs().max() < 1e-5 and sampled.sum() == sum(t.response_length for t in trajectories)
    assert torch.equal(
        batch.labels[sampled],
        torch.tensor([x for t in trajectories for x, m in zip(t.tokens, t.mask, strict=True) if m]),
    )


def check_ends(tokenizer, trajectories: list[Trajectory], ids: set[int], stop: tuple[str, ...]) -> None:
    """A turn is finished where its last token ends it, by its id or by completing a stop text, and nowhere before."""
    for t in trajectories:
        new = t.tokens[len(t.prompt.tokens) :]

        def ends(n, new=new):
            text = tokenizer.decode(new[:n], clean_up_tokenization_spaces=False)
            return new[n - 1] in ids or any(s in text for s in stop)

        assert [ends(n) for n in range(1, len(new) + 1)] == [False] * (len(new) - 1) + [t.finished]
        assert t.finished or len(new) == 24
    assert any(t.finished for t in trajectories)


def replays(config: RoleConfig, folder: str, path: str, environment: str) -> None:
    """The main process saves a rollout, and every rank replays it."""
    engine, tokenizer, rollouts = make(config, folder, environment=environment, max_turns=3, max_new_tokens=60)
    prompts = environments.make_prompts(ROWS, tokenizer)
    trajectories = rollouts.sample(prompts, step=4, samples=2)
    assert max(t.turns for t in trajectories) > 1
    rewards = [float(i) for i in range(len(trajectories))]
    engine.on_main(lambda: write_samples(path, 4, trajectories, rewards=rewards))
    settings = environments.config(path=path, environment=environment)
    recorded = RecordedRollouts(settings, on_main=engine.on_main)
    assert recorded.sample(prompts, step=4, samples=2) == trajectories and not recorded.exact
    rollouts.close()


def faults_reach_every_rank(config: RoleConfig, folder: str, environment: str) -> None:
    engine, tokenizer, rollouts = make(config, folder, environment=environment)
    prompts = environments.make_prompts([{"prompt": "hello", "answer": "raise"}], tokenizer)
    with pytest.raises(RewardError, match="row train.jsonl:1: step raised ValueError: no such fox"):
        rollouts.sample(prompts, step=0, samples=2)
    assert engine.on_main(lambda: 5) == 5
