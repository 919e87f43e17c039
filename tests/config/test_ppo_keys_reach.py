"""Every config key of `mrl ppo` reaches what it configures: a row or more for each, of runs of the whole trainer.

Rows are as in test_keys_reach.py. A role's engine is given the role's own sections (`ROLE.model`, `ROLE.engine`,
`ROLE.optimizer`) whole; that engines read their keys is in test_keys_reach.py. A new key fails `test_every_key_has_a_row`
until it has a row, or IN_OTHER_TESTS names the tests that have it.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from mrl.algorithms.recipes import PARTS, RECIPES, actor_loss, check_algorithm, recipe
from mrl.config.keys import walk_keys
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.config.roles import ROLES, TRAINED, role_configs
from mrl.errors import ConfigError
from tests.config import looks, reach_ppo, test_keys_reach
from tests.config.reach import DEFAULT, Refusal, Row, Runs, of_section
from tests.config.reach_ppo import BASE, sampled, shown
from tests.config.refused import nested
from tests.trainers.tiny_runs import REPO

TWICE, THREE = {"train.steps": 2}, {"train.steps": 3}
EVAL = {"data.eval": "{inputs}/eval.jsonl"}
IN_ORDER = {"data.shuffle": False}
completions, prompts = sampled("completion"), sampled("prompt")
metric, noted = looks.metric, looks.noted
WRITTEN = {
    "console": "plain", "table": 1, "table_every": 1,
    "samples": {"every": 2, "keep": 1, "max_mb": 7, "tokens": False, "compress": True},
}  # fmt: skip

ROWS = [
    Row("seed", reach_ppo.same(prompts, "seed", 3), [(DEFAULT, False), (3, True)], what="order"),
    Row("seed", reach_ppo.same(completions, "seed"), [(DEFAULT, True), (4, False)], IN_ORDER, what="sampling"),
    Row("output_dir", looks.places, [("{run}/here", ["here"]), ("{run}/there", ["there"])]),
    Row("rollout.samples_per_prompt", sampled("sample"), [(2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])]),
    Row(
        "rollout.cache_tokens", noted("limits"),
        [(value, {"cache_tokens": given, "prefill_tokens": 9, "cuda_graphs": True}) for value, given in ((DEFAULT, 65536), ("auto", 65536), (99, 99))],
        {"rollout.prefill_tokens": 9, "rollout.cuda_graphs": True},
    ),
    Row(
        "rollout.cuda_graphs", metric("iteration"),
        [(True, Refusal("ConfigError", "rollout.cuda_graphs: value true is not for actor.engine.backend fsdp"))],
        {"actor.engine.backend": "fsdp"}, what="on fsdp",
    ),
    Row("rollout.environment", sampled("environment"), [(DEFAULT, [None] * 4), ("{inputs}/environment.py:Nod", [1.0] * 4)],
        {"rollout.max_new_tokens": 2}),
    Row("data.train", lambda run: set(map(str, prompts(run))) == {"9+9="},
        [("{inputs}/train.jsonl", False), ("{inputs}/other.jsonl", True)]),
    Row("data.eval", reach_ppo.metric_names("eval/b/"),
        [(DEFAULT, []), ({"a": "{inputs}/eval.jsonl", "b": "{inputs}/train.jsonl"}, ["eval/b/accuracy", "eval/b/response_length", "eval/b/reward"])]),
    Row("data.chat_template", reach_ppo.same(sampled("tokens"), "data.chat_template"), [(DEFAULT, True), ("{inputs}/plain.jinja", False)]),
    Row("data.shuffle", sampled("index"), [(False, [0, 0, 1, 1]), (True, [6, 6, 1, 1])]),
    Row("train.steps", metric("step"), [(1, [1]), (3, [1, 2, 3])]),
    Row("train.epochs", metric("step"), [(DEFAULT, [1, 2, 3, 4, 5]), (0.5, [1, 2, 3])], {"train.steps": DEFAULT}),
    Row("train.global_batch_size", lambda run: len(completions(run)), [(4, 4), (8, 8)]),
    Row("train.eval_every", looks.steps_with("eval/accuracy"), [(DEFAULT, [3]), (2, [0, 2, 3])], EVAL | THREE),
    Row("train.eval_samples", lambda run: len(sampled("row", series="eval")(run)), [(DEFAULT, 10), (2, 20)], EVAL),
    Row("train.eval_prompts", lambda run: len(sampled("row", series="eval")(run)), [(DEFAULT, 10), (3, 3)], EVAL),
    Row("train.offload_idle", lambda run: noted("to_host")(run) > 0, [(DEFAULT, False), ("never", False), ("always", True)]),
    Row("checkpoint.background", looks.is_in_metrics("perf/save_write_s"), [(DEFAULT, False), (True, True)],
        THREE | {"checkpoint.every": 1}),
    Row("checkpoint.resume", metric("step"),
        [(DEFAULT, [1, 2]), ("never", Refusal("ConfigError", "checkpoint.resume"))], TWICE, after={"train.steps": 1}),
    Row("checkpoint.remote", metric("step"), [(DEFAULT, [1, 2]), ("file://{run}/copy", [2])], TWICE,
        after={"output_dir": "{run}/earlier", "train.steps": 1, "checkpoint.remote": "file://{run}/copy"}),
    Row("log", looks.all_of(shown, reach_ppo.sample_files, reach_ppo.samples_have_tokens, reach_ppo.suffixes, noted("samples_mb")),
        [(DEFAULT, (3, ["step_1", "step_2", "step_3", "step_4"], True, [".jsonl"], 1024)), (WRITTEN, (4, ["step_3"], False, [".gz"], 7))],
        {"train.steps": 4}),
]  # fmt: skip


IN_OTHER_TESTS = {
    **of_section("algorithm", "name epochs mini_batch_size critic_warmup max_sampling_rounds", "trainers/rl/test_algorithms.py"),
    **of_section("algorithm.distill", "loss beta top_k", "trainers/rl/test_opd.py"),
    **of_section("rollout", "backend path", "trainers/rl/test_algorithms.py"),
    **of_section("rollout", "temperature top_k top_p min_p stop stop_tokens max_new_tokens", "rollout/test_rollouts.py"),
    **of_section("rollout", "max_turns max_turn_tokens environment_parts", "rollout/test_rollouts.py"),
    **of_section("rollout", "environment_timeout_s", "rollout/test_environment.py"),
    **of_section("rollout", "prefill_tokens cuda_graphs", "config/test_ppo_keys_reach.py"),
    **of_section("rollout.server", "urls weights_dir concurrency timeout_s sleep", "rollout/test_servers.py"),
    **of_section("rollout", "async_level", "trainers/rl/test_launched.py"),
    **of_section("rollout", "ranks", "trainers/rl/test_rollout_ranks.py"),
    **of_section("rollout.server", "handover bucket_mb", "rollout/test_links_of_servers.py"),
    **of_section("rollout.server", "lora", "trainers/rl/test_launched.py"),
    **of_section("rollout.server", "memory_fraction tp", "rollout/test_vllm_parts.py"),
    **of_section("rewards", "functions timeout_s workers concurrency on_error retries retry_wait_s", "rewards/test_scorer.py"),
    **of_section("reward", "model.path weight", "trainers/rl/test_algorithms.py"),
    **of_section("reference", "update_every", "trainers/rl/test_algorithms.py"),
    **of_section("reference", "others", "trainers/rl/test_opd.py"),
    **of_section("reference.server", "url name concurrency timeout_s key_variable", "trainers/test_teacher_server.py"),
    **of_section("data", "split columns system max_prompt_length truncation on_bad_row", "data/test_source_keys.py"),
    **of_section("data", "mix_by", "data/test_mixture.py"),
    **of_section("data", "teacher", "trainers/rl/test_opd.py"),
    **of_section("data", "packing", "config/test_roles.py"),
    **of_section("data", "turns", "data/test_dialogue.py"),
    **of_section("train", "guards", "trainers/rl/test_guards.py"),
    **of_section("checkpoint", "best best_is", "trainers/rl/test_algorithms.py"),
    **of_section("checkpoint", "every keep export_hf", "config/test_keys_reach.py"),  # what all trainers share
    **of_section("log", "console every wandb.project wandb.name tensorboard", "config/test_keys_reach.py"),
    **of_section("log.wandb", "mode", "test_metrics.py"),
    **of_section("log", "table table_every", "config/test_ppo_keys_reach.py"),
    **of_section("log.samples", "every keep max_mb tokens compress", "config/test_ppo_keys_reach.py"),
}  # fmt: skip
"""Key -> the file of tests where it is seen."""
PARTS_OF_RECIPES = {f"algorithm.{part}" for part in PARTS}
"""tests/algorithms/test_recipes.py gives each of them a value."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = reach_ppo.make(tmp_path_factory.mktemp("inputs"))
    return Runs(
        folder, tmp_path_factory.mktemp("runs"), base=BASE, backend_key="actor.engine.backend",
        function="tests.config.reach_ppo:case",
    )  # fmt: skip


SHARED = ("output_dir", "train.steps", "data.shuffle", "data.chat_template", "train.eval_prompts")
"""Keys whose code `mrl sft` shares, or that stand beside another of the kind: the nights see them here."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=pytest.mark.nightly if row.key in SHARED else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_key_reaches_what_it_configures(runs: Runs, row: Row):
    runs.check(row, "megatron")


ROLE_KEYS = {
    key.path
    for key in walk_keys(PPOConfig)
    if key.path.startswith(tuple(f"{role}.{part}." for role in ROLES for part in ("model", "engine", "optimizer")))
}
OF_ROLES = {
    "output_dir": "x", "actor.model.path": "m", "algorithm.name": "ppo", "data.train": "d", "train.steps": 4,
    "train.global_batch_size": 64, "reward.model.path": "r", "rewards": {"functions": [{"name": "gsm8k"}]},
}  # fmt: skip


def test_each_roles_engine_is_built_from_its_own_sections_whole():
    """But a model's path, which is a folder by then. What null is and whose adapters are whose: tests/config/test_roles.py."""
    own = {f"{role}.engine.micro_batch.size": number for number, role in enumerate(ROLES, 2)}
    own |= {f"{role}.engine.parallel.tp": number for number, role in enumerate(ROLES, 2)}
    own |= {f"{role}.optimizer.lr": number / 1e3 for number, role in enumerate(TRAINED, 2)}
    config = from_dict(nested(OF_ROLES | own | {"actor.model.mtp": {"loss_weight": 0.3}}), PPOConfig)
    made = role_configs(config, {role: f"/{role}" for role in ROLES}, check_algorithm(config))
    assert made["actor"].model == dataclasses.replace(config.actor.model, path="/actor")
    for role in ROLES:
        section = getattr(config, role)
        assert made[role].engine == section.engine and made[role].model.path == f"/{role}"
        assert made[role].optimizer == (section.optimizer if role in TRAINED else None)
        assert made[role].mtp == (config.actor.model.mtp if role == "actor" else None)


@pytest.mark.parametrize(
    "key, value", [("fsdp.reshard_after_forward", False), ("moe.aux_loss", 0.1), ("moe.z_loss", 0.1)]
)
@pytest.mark.parametrize("role", [role for role in ROLES if role not in TRAINED])
def test_keys_of_training_are_refused_of_roles_that_never_train(role, key, value):
    backend = {f"{role}.engine.backend": "fsdp"} if key.startswith("fsdp") else {}
    with pytest.raises(ConfigError, match=f"^{role}.engine.{key}: value .* is for training"):
        check_algorithm(from_dict(nested(OF_ROLES | backend | {f"{role}.engine.{key}": value}), PPOConfig))


@pytest.mark.parametrize(
    "parts",
    [
        {"objective": "policy_gradient", "ratio": "sequence", "aggregation": "token_mean", "kl_estimator": "k2", "kl_coef": 0.5, "entropy_coef": 0.1},
        {"kl_cap": 7.0, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0},
    ],
)  # fmt: skip
def test_a_recipe_reaches_the_actors_loss(parts):
    """Of what tests/algorithms/test_recipes.py and the trainer's own tests do not give another value."""
    assert all(value != getattr(RECIPES["grpo"], name) for name, value in parts.items())
    made = recipe("grpo", parts)
    loss = actor_loss(made, max_response_length=77)
    assert (loss.clip.low, loss.clip.high, loss.clip.dual) == (made.clip_low, made.clip_high, made.dual_clip)
    for name in ("objective", "ratio", "aggregation", "kl_estimator", "kl_cap", "kl_coef", "entropy_coef"):
        assert getattr(loss, name) == getattr(made, name), name


def test_every_key_has_a_row():
    have = {row.key for row in ROWS} | IN_OTHER_TESTS.keys() | PARTS_OF_RECIPES | ROLE_KEYS
    assert have - {"log"} == {key.path for key in walk_keys(PPOConfig)}


def test_what_other_tests_see_is_in_them():
    for key, file in (*IN_OTHER_TESTS.items(), *test_keys_reach.IN_OTHER_TESTS.items()):
        if key.startswith("teacher.engine."):
            continue
        files = [path for path in (REPO / file, (REPO / file).with_name("conftest.py")) if path.exists()]
        lines = [line for path in files for line in path.read_text().splitlines()]
        text = "\n".join(line for line in lines if not line.startswith(("import ", "from ")))
        name = re.escape(key.rpartition(".")[2])
        given = rf"[\"']{name}[\"']\s*:|\b{name}=(?!=)|\{{[^\n]*\b{name}: |[\"'.]{name}[\"'=]"
        assert re.search(given, text), f"{file} gives {key} no value"
