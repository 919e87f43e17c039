"""Each algorithm's name gives the parts its paper has; each part can be replaced; nothing is read by nobody.

Configs of `mrl ppo` that fit their algorithm; those that do not are in tests/bad_input/ppo_cases.py.
"""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given

from mrl.algorithms import recipes
from mrl.algorithms.advantages import AdvantageInputs
from mrl.algorithms.recipes import PARTS, RECIPES, Recipe, check_algorithm, configured_recipe
from mrl.config.load import from_dict
from mrl.config.ppo import ALGORITHMS, PPOConfig
from mrl.config.ppo_checks import check_schedules, written_metrics
from mrl.errors import ConfigError
from mrl.metric_names import is_metric
from tests.algorithms.sequences import close, examples, flat, ragged
from tests.config.test_load import PPO_BASE, merged
from tests.trainers.tiny_runs import REPO


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_is_whole(name):
    made = recipes.recipe(name)
    assert all(value is not None for value in dataclasses.asdict(made).values())
    assert made.needs_critic == (name == "ppo") and made.needs_greedy_answer == (name == "remax")
    assert made.needs_groups == (name not in ("ppo", "remax", "reinforce_pp", "opd"))
    assert (made.kl_coef > 0) == made.needs_reference
    actor = recipes.actor_loss(made, max_response_length=100)
    assert (actor.kl_coef > 0) == (made.kl_in == "loss")
    assert actor.denominator == recipes.critic_loss(made, max_response_length=100).denominator
    assert recipes.kl_controller(made).coef == made.kl_coef


def test_what_the_papers_say():
    parts = lambda name, *keys: tuple(getattr(recipes.recipe(name), key) for key in keys)  # noqa: E731
    assert parts("grpo", "kl_in", "kl_estimator", "aggregation") == ("loss", "k3", "sequence_mean")
    assert parts("dapo", "clip_low", "clip_high", "aggregation", "kl_in") == (0.2, 0.28, "token_mean", "none")
    assert parts("gspo", "ratio", "clip_low", "clip_high", "aggregation") == ("sequence", 3e-4, 4e-4, "sequence_mean")
    assert parts("remax", "gamma", "kl_coef") == (0.99, 0.05) and parts("rloo", "kl_coef") == (0.05,)
    assert parts("reinforce_pp_baseline", "kl_in", "kl_estimator", "kl_coef") == ("loss", "k2", 1e-5)
    assert parts("cispo", "clip_low", "clip_high") == (1.0, 4.0)  # weights from 0 to 5
    assert parts("opd", "advantage", "gamma", "kl_in") == ("returns", 0.0, "reward")
    assert parts("opd", "kl_estimator", "kl_coef") == ("k1", 1.0)
    assert parts("reinforce_pp", "advantage", "gamma", "whiten") == ("returns", 1.0, True)
    assert {made.dual_clip for made in recipes.RECIPES.values()} == {0.0}
    assert parts("dr_grpo", "advantage", "aggregation") == ("group_mean", "fixed_length")
    assert recipes.overlong_cache(recipes.recipe("dapo"), max_response_length=20480) == 4096
    assert recipes.overlong_cache(recipes.recipe("grpo"), max_response_length=20480) == 0


def test_the_docs_name_a_source_for_every_number():
    """docs/algorithms.md: each number of each recipe stands in a line with a source, and is the one in the code."""
    text = (REPO / "docs" / "algorithms.md").read_text()
    lines = re.findall(r"^\| (?:`(\w+)`|others) \| (`[^|]*\d) \| ([^|]{9,}) \|$", text, re.MULTILINE)
    stated: dict[str, dict[str, float]] = {}
    for name, defaults, _ in lines:
        stated.setdefault(name, {}).update({k: float(v) for k, v in re.findall(r"`(\w+)` ([\d.e-]+)", defaults)})
    for name, made in recipes.RECIPES.items():
        numbers = {k: v for k, v in dataclasses.asdict(made).items() if isinstance(v, float)}
        assert {k: stated.get(name, {}).get(k, stated[""].get(k)) for k in numbers} == numbers, name


def test_parts_reach_the_losses():
    made = recipes.recipe(
        "ppo",
        {"correction": "mask", "correction_level": "sequence", "correction_cap": 3.0, "correction_floor": 0.5}
        | {"value_clip": 0.3, "dual_clip": 4.0, "aggregation": "fixed_length", "kl_target": 6.0, "kl_gain": 0.2},
    )
    actor, critic = (f(made, max_response_length=77) for f in (recipes.actor_loss, recipes.critic_loss))
    assert dataclasses.astuple(actor.correction) == ("mask", "sequence", 3.0, 0.5)
    assert dataclasses.astuple(actor.clip) == (0.2, 0.2, 4.0)
    assert actor.fixed_length == critic.fixed_length == 77 and critic.value_clip == 0.3
    controller = recipes.kl_controller(made)
    assert controller.update(6.6) == pytest.approx(0.02 * (1 + 0.2 * 0.1))


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("grop", {}, r"algorithm.name: value .grop. is not known; use one of ppo, grpo"),
        ("ppo", {"advantage": "gea"}, "algorithm.advantage: value .gea. is not known; use one of gae"),
        ("ppo", {"correction": "both"}, 'algorithm.correction: value "both" .*use one of none, truncate, mask'),
        ("grpo", {"lam": 0.9}, "algorithm.lam: value 0.9 would not be read by .*goes with algorithm.advantage: gae"),
        ("dapo", {"kl_coef": 0.1}, "it goes with algorithm.kl_in: reward or loss"),
        ("cispo", {"dual_clip": 3.0}, "it goes with algorithm.objective: clip"),
        ("ppo", {"correction_cap": 3.0}, "it goes with algorithm.correction: truncate or mask"),
        ("ppo", {"correction": "truncate", "correction_floor": 0.1}, "it goes with algorithm.correction: mask"),
        ("ppo", {"kl_cap": 10.0}, "goes with algorithm.kl_in: reward or loss and algorithm.kl_estimator: k3; leave it"),
        ("rloo", {"gamma": 0.9}, "it goes with algorithm.advantage: gae, returns or remax; leave it out"),
        ("ppo", {"kl_gain": 0.2}, "it goes with algorithm.kl_target above 0; leave it out"),
        ("dapo", {"kl_in": "loss"}, 'algorithm.kl_in: value "loss" has no coefficient in dapo; set algorithm.kl_coef'),
    ],
)
def test_what_cannot_be_meant_is_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipes.recipe(name, overrides)


# -- whole algorithms -----------------------------------------------------------------------------------------------------


def whiten_oracle(rows, masks):
    trained = [x for row, mask in zip(rows, masks, strict=True) for x, m in zip(row, mask, strict=True) if m]
    mean = sum(trained) / len(trained)
    std = math.sqrt(sum((x - mean) ** 2 for x in trained) / len(trained) + 1e-8)
    return [[(x - mean) / std * m for x, m in zip(*pair, strict=True)] for pair in zip(rows, masks, strict=True)]


@examples
@given(ragged())
def test_reinforce_pp_baseline(case):
    """Hu 2025: minus the group's mean, over the mean and standard deviation of the global batch."""
    numbers = [case.rng.randrange(2) for _ in case.masks]
    rewards = [[r * m for r, m in zip(*pair, strict=True)] for pair in zip(case.rows(-1, 1), case.masks, strict=True)]
    scores = [sum(row) for row in rewards]
    of_group = {g: [s for s, h in zip(scores, numbers, strict=True) if g == h] for g in numbers}
    above = [s - sum(of_group[g]) / len(of_group[g]) for s, g in zip(scores, numbers, strict=True)]
    rollout = AdvantageInputs(
        rewards_T=flat(rewards), mask_T=case.mask_T, lengths_S=case.lengths_S, groups_S=torch.tensor(numbers)
    )
    got, _ = recipes.advantages(recipes.recipe("reinforce_pp_baseline"), rollout)
    assert close(got, whiten_oracle(case.spread(above), case.masks), 1e-7)


def test_the_names_that_config_lists_are_those_of_the_recipes():
    assert tuple(recipes.RECIPES) == ALGORITHMS


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
