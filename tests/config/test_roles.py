"""What each role's engine is built from."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.algorithms.recipes import Recipe, configured_recipe
from mrl.commands.ppo import COMMAND
from mrl.config.load import from_dict
from mrl.config.ppo import AlgorithmConfig, PPOConfig
from mrl.config.roles import rewrite_role_error_keys, role_configs, roles_of
from mrl.errors import ConfigError, DataError, ModelError
from tests.config.test_load import PPO_BASE, merged

FOLDERS = {role: f"/models/{role}" for role in ("actor", "critic", "reference", "reward")}


def made(**sections: object) -> tuple[PPOConfig, dict]:
    config = from_dict(merged(PPO_BASE, sections), PPOConfig)
    return config, role_configs(config, FOLDERS, configured_recipe(config.algorithm))


def test_the_keys_of_the_algorithm_that_may_be_null_are_the_fields_of_a_recipe():
    """Each part of a recipe can be replaced from the config, and no null key goes nowhere."""
    own = {"mini_batch_size", "distill"}  # null is train.global_batch_size, and the sampled tokens' KL as their reward
    nullable = {f.name for f in dataclasses.fields(AlgorithmConfig) if f.default is None} - own
    assert nullable == {f.name for f in dataclasses.fields(Recipe)}


@pytest.mark.parametrize(
    ("sections", "roles"),
    [
        ({}, ("actor", "critic", "reference")),
        ({"algorithm": {"kl_in": "none"}}, ("actor", "critic")),
        ({"algorithm": {"name": "grpo"}}, ("actor", "reference")),
        ({"algorithm": {"name": "dapo"}}, ("actor",)),
        ({"algorithm": {"name": "dapo", "advantage": "gae"}}, ("actor", "critic")),
        ({"algorithm": {"name": "dapo"}, "reward": {"model": {"path": "judge"}}}, ("actor", "reward")),
    ],
)
def test_a_run_has_the_roles_that_its_algorithm_needs(sections, roles):
    config, configs = made(**sections)
    assert tuple(configs) == roles_of(config, configured_recipe(config.algorithm)) == roles


def test_what_is_null_is_the_actors():
    config, configs = made(
        seed=7,
        actor={"model": {"dtype": "float32", "init": "random", "trust_remote_code": True}, "engine": {"device": "cpu"}},
        reward={"model": {"path": "judge", "dtype": "bfloat16"}, "engine": {"backend": "fsdp"}},
        data={"packing": False},
        critic={"optimizer": {"lr": 1e-4}},
    )
    actor, critic, reference, reward = (configs[role] for role in ("actor", "critic", "reference", "reward"))
    assert [c.model.path for c in configs.values()] == [FOLDERS[role] for role in configs]
    assert critic.engine == reference.engine == actor.engine and actor.engine.device == "cpu"
    assert (critic.model.dtype, critic.model.init, critic.model.trust_remote_code) == ("float32", "random", True)
    assert (reward.engine.backend, reward.engine.device) == ("fsdp", "auto")
    assert (reward.model.dtype, reward.model.init) == ("bfloat16", "pretrained"), "a model of its own has weights"
    assert [c.head for c in configs.values()] == ["lm", "value", "lm", "value"]
    assert [c.optimizer for c in configs.values()] == [config.actor.optimizer, config.critic.optimizer, None, None]
    assert critic.optimizer.lr == 1e-4
    assert {c.seed for c in configs.values()} == {7} and {c.packing for c in configs.values()} == {False}


def test_adapters_are_of_the_role_that_names_them():
    """The actor's are nobody else's: not of a model of another path, and of a reference only as what is taken out."""
    judge = {"model": {"path": "judge"}}
    _, configs = made(actor={"model": {"lora": {"rank": 4}}}, critic=judge, reward=judge)
    assert {role: c.model.lora and c.model.lora.rank for role, c in configs.items()} == {
        "actor": 4, "critic": None, "reward": None
    }  # fmt: skip
    _, configs = made(actor={"model": {"lora": {"rank": 4}}}, critic={"model": {"path": "judge", "lora": {"rank": 2}}})
    assert configs["critic"].model.lora.rank == 2
    for reference in ({"update_every": 2}, {"engine": {}}, judge):
        _, configs = made(actor={"model": {"lora": {"rank": 4}}}, reference=reference)
        assert configs["reference"].model.lora is None


@pytest.mark.parametrize(
    ("micro_batch", "tokens"), [({}, 4096), ({"tokens": 1536}, 1536), ({"size": 2}, None), ({"tokens": 9000}, 9000)]
)
def test_micro_batches_of_each_role(micro_batch, tokens):
    _, configs = made(actor={"engine": {"micro_batch": micro_batch}}, critic={"engine": {}})
    assert [configs[role].engine.micro_batch.tokens for role in configs] == [tokens, 4096, tokens]


def test_the_longest_sequence_is_the_least_budget():
    _, configs = made(data={"max_prompt_length": 6000}, rollout={"max_new_tokens": 3000})
    assert {c.engine.micro_batch.tokens for c in configs.values()} == {9000}


def test_derived_values():
    config, _ = made(
        train={"global_batch_size": 24},
        rollout={"samples_per_prompt": 4},
        algorithm={"epochs": 2, "mini_batch_size": 8},
    )
    assert (config.prompts_per_iteration, config.steps_per_iteration, config.max_length) == (6, 6, 1536)
    assert COMMAND.rows_of_batch(config) == 6
    trained, held = ("algorithm.mini_batch_size", 8), ("train.global_batch_size", 24)
    assert [COMMAND.smallest_batch(config, role) for role in FOLDERS] == [trained, trained, held, held]
    assert made()[0].steps_per_iteration == 1


def test_what_an_engine_says_of_its_keys_is_said_of_the_roles():
    config, _ = made(critic={"engine": {}})
    with pytest.raises(ConfigError, match=r"^critic\.engine\.parallel: tp"), rewrite_role_error_keys(config, "critic"):
        raise ConfigError("engine.parallel", why="tp does not fit", fix="use 1")
    inherited = r"^reference\.engine: value null is the actor's engine, which does not fit: engine\.parallel: tp"
    with pytest.raises(ConfigError, match=inherited), rewrite_role_error_keys(config, "reference"):
        raise ConfigError("engine.parallel", why="tp does not fit", fix="use 1")
    with (
        pytest.raises(ModelError, match=r'^actor\.model\.path: value "x" is no folder; give one$'),
        rewrite_role_error_keys(config, "actor"),
    ):
        raise ModelError("model.path", "x", "is no folder", "give one")
    with pytest.raises(ConfigError, match=r"^train\.steps: value 3 is odd"), rewrite_role_error_keys(config, "actor"):
        raise ConfigError("train.steps", 3, "is odd", "give 4")
    with pytest.raises(DataError, match="^rows.jsonl:3: bad"), rewrite_role_error_keys(config, "actor"):
        raise DataError("rows.jsonl:3: bad; correct it")


def test_an_error_of_no_key_is_said_after_the_role():
    """An engine of another package may raise a text of its own; a model's file may be wrong."""
    config, _ = made()
    with (
        pytest.raises(ConfigError, match="^critic: engine.options.size: value 0 is no size; give 1$"),
        rewrite_role_error_keys(config, "critic"),
    ):
        raise ConfigError("engine.options.size: value 0 is no size; give 1")
    with (
        pytest.raises(ModelError, match="^reward.model.path: model.v2/x.json: is cut"),
        rewrite_role_error_keys(config, "reward"),
    ):
        raise ModelError("model.v2/x.json", why="is cut")
    with pytest.raises(ModelError, match="^reward.model: config.json: no"), rewrite_role_error_keys(config, "reward"):
        raise ModelError("config.json: no such family; use another")
