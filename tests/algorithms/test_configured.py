"""Configs of `mrl ppo` that fit their algorithm; those that do not are in tests/bad_input/ppo_cases.py."""

from __future__ import annotations

import pytest

from mrl.algorithms.configured import PARTS, check_algorithm, configured_recipe
from mrl.algorithms.recipes import RECIPES, Recipe
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.config.ppo_checks import check_schedules, written_metrics
from mrl.errors import ConfigError
from mrl.metric_names import is_metric
from tests.config.test_load import PPO_BASE, merged


def config_of(**sections: object) -> PPOConfig:
    return from_dict(merged(PPO_BASE, sections), PPOConfig)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_reaches_the_recipe(part):
    """A value that is not the recipe's, with what it needs to be read."""
    needs = {
        "gamma": {"advantage": "returns"}, "lam": {"advantage": "gae"}, "value_clip": {"advantage": "gae"},
        "kl_gain": {"kl_target": 1.0}, "correction_level": {"correction": "mask"}, "correction_cap": {"correction": "mask"},
        "correction_floor": {"correction": "mask"},
    }.get(part, {})  # fmt: skip
    others = {
        "advantage": "rloo", "objective": "policy_gradient", "ratio": "sequence", "aggregation": "fixed_length",
        "kl_in": "reward", "kl_estimator": "k2", "correction": "truncate", "correction_level": "sequence", "dual_clip": 3.0,
    }  # fmt: skip
    default = getattr(RECIPES["grpo"], part)
    value = others.get(part, not default if isinstance(default, bool) else 0.5)
    made = configured_recipe(config_of(algorithm={"name": "grpo", **needs, part: value}).algorithm)
    assert getattr(made, part) == value != default
    changed = {name for name in PARTS if getattr(made, name) != getattr(RECIPES["grpo"], name)}
    assert changed == {part, *needs}
    assert isinstance(made, Recipe)


@pytest.mark.parametrize(
    "sections",
    [
        {"critic": {"optimizer": {"lr": 1e-4}, "engine": {"backend": "fsdp"}}, "algorithm": {"critic_warmup": 2}},
        {"algorithm": {"name": "dapo", "kl_in": "loss", "kl_coef": 0.1}, "reference": {"update_every": 4}},
        {"algorithm": {"name": "dapo", "max_sampling_rounds": 3}},
        {"algorithm": {"name": "remax"}, "rollout": {"samples_per_prompt": 1}},
        {"algorithm": {"name": "reinforce_pp"}, "rollout": {"samples_per_prompt": 1}},
        {"rewards": None, "reward": {"model": {"path": "judge"}, "weight": 2.0}},
        {"rewards": None, "rollout": {"environment": "env.py:Env", "max_turns": 3}},
        {"rollout": {"backend": "vllm", "server": {"urls": ["http://a:8000"], "timeout_s": 5}}},
    ],
)
def test_keys_that_something_reads_are_accepted(sections):
    check_algorithm(config_of(**sections))


def test_the_best_checkpoint_is_by_a_metric_that_is_written():
    everything = {
        "data": {"eval": "e"}, "reward": {"model": {"path": "judge"}},
        "algorithm": {"correction": "mask", "dynamic_sampling": True},
    }  # fmt: skip
    names = written_metrics(config_of(**everything))
    assert {"eval/accuracy", "reward/mean", "reward/gsm8k/mean", "reward/model/std", "actor/kl", "critic/loss"} <= {
        *names
    }
    for name in names:
        assert is_metric(name)
        check_algorithm(config_of(**everything, checkpoint={"best": name}))
    for absent in ("step", "perf/update_s", "eval/loss", "reward/<label>/mean", "train/tokens"):
        assert absent not in names


@pytest.mark.parametrize(
    ("best", "without"),
    [
        ("critic/loss", "a critic"),
        ("actor/kl", "a reference"),
        ("actor/importance_weight", "algorithm.correction"),
        ("rollout/prompts_rejected", "algorithm.dynamic_sampling"),
    ],
)
def test_metrics_that_only_other_algorithms_write(best, without):
    with pytest.raises(ConfigError, match=f"^checkpoint.best: value .* is not measured without {without}; "):
        check_algorithm(config_of(algorithm={"name": "dr_grpo"}, checkpoint={"best": best}))


def test_schedules_of_a_length_that_is_known_later():
    """Where train.epochs sets the steps the trainer counts them; the actor's are those after the critic's warm-up."""
    config = config_of(algorithm={"critic_warmup": 4}, actor={"optimizer": {"warmup_steps": 6}})
    check_schedules(config, 10, "the 10 steps of 2 epochs")
    with pytest.raises(ConfigError, match="^actor.optimizer.warmup_steps: value 6 is above the 5 steps that .* leaves"):
        check_schedules(config, 9, "the 9 steps of 2 epochs")
    with pytest.raises(ConfigError, match=r"^algorithm\.critic_warmup: value 4 leaves the actor none of the 4 steps"):
        check_schedules(config, 4, "the 4 steps of 1 epoch")
