"""Every config key of `mrl ppo` reaches what it configures: a row or more for each, of runs of the whole trainer.

Rows are as in test_keys_reach.py. What a role's engine is built from (`ROLE.model`, `ROLE.engine`, `ROLE.optimizer`) is walked
from the schema: each key reaches the RoleConfig of its role and no other; that engines read theirs is in test_keys_reach.py.
A new key fails `test_every_key_has_a_row` until it has a row. What cannot run in one process here names the tests that have it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from mrl.algorithms.configured import check_algorithm
from mrl.config.keys import walk_keys
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.config.roles import ROLES, TRAINED, role_configs
from mrl.errors import ConfigError
from tests.config import looks, reach_ppo
from tests.config.reach import DEFAULT, Refusal, Row, Runs
from tests.config.reach_ppo import BASE, named_is_the_best, same, sampled, shown
from tests.config.refused import nested
from tests.trainers.tiny_runs import REPO

TWICE, THREE = {"train.steps": 2}, {"train.steps": 3}
AGAIN = {"algorithm.epochs": 2, "train.steps": 2}  # the second step is made off policy
MOVED = AGAIN | {"train.global_batch_size": 8, "algorithm.epochs": 4, "train.steps": 4}  # and far from it
OPD = {
    "algorithm.name": "opd",
    "reference.model.path": "{inputs}/teacher",
    "train.guards": False,
    "data.shuffle": False,
}
OVER_DISTRIBUTIONS = OPD | {"algorithm.distill.top_k": 3}
SECOND = {"second": {"model": {"path": "{inputs}/plain"}}}  # the student's own weights
PPO = {"algorithm.name": "ppo", "critic.optimizer.lr": 1e-2, "critic.optimizer.schedule": "constant"}
EVAL = {"data.eval": "{inputs}/eval.jsonl"}
IN_ORDER = {"data.shuffle": False}
LONG = {"data.max_prompt_length": 14}
UNGUARDED = {"train.guards": False}
ENVIRONMENT = {"rollout.environment": "{inputs}/environment.py:Nod"}
JUDGE = {"reward.model.path": "{inputs}/judge"}
FIRST_RUN = {"output_dir": "{run}/earlier", "seed": 5, "rollout.backend": DEFAULT, "rollout.path": DEFAULT}
ALL_ONE = {"rewards": {"functions": [{"name": "length", "maximum": 99}], "workers": 1}}
BEST = {"checkpoint.best": "reward/digits/mean", "train.steps": 6, "checkpoint.keep": 1}

advantages, completions, prompts = sampled("advantage"), sampled("completion"), sampled("prompt")
metric, noted = looks.metric, looks.noted
divergence = metric("actor/divergence")
loss, kl_coef, iteration = metric("actor/loss"), metric("actor/kl_coef"), metric("iteration")


def prompt_tokens(run: Any) -> list[list[int]]:
    """What the policy was given, of each sample."""
    pairs = zip(sampled("tokens")(run), sampled("mask")(run), strict=True)
    return [tokens[: mask.index(1)] for tokens, mask in pairs]


def moves(key: str, value: Any, look: Any, given: Any = None, what: str = "") -> Row:
    """A key with which something is seen that is not seen without."""
    return Row(key, same(look, key), [(DEFAULT, True), (value, False)], given or {}, what=what)


def rewards(*functions: dict[str, Any], **pool: Any) -> dict[str, Any]:
    return {"functions": list(functions), "workers": 1, **pool}


def more(name: str, **pool: Any) -> dict[str, Any]:
    return rewards({"function": f"{{inputs}}/more.py:{name}"}, **pool)


ALGORITHM = [
    Row("algorithm.name", same(advantages, "algorithm.name", "grpo"), [("grpo", True), ("rloo", False)]),
    Row("algorithm.epochs", iteration, [(DEFAULT, [1, 2]), (2, [1, 1])], TWICE),
    Row("algorithm.mini_batch_size", iteration, [(DEFAULT, [1, 2]), (2, [1, 1])], TWICE),
    Row("algorithm.critic_warmup", looks.steps_with("actor/loss"), [(DEFAULT, [1, 2]), (1, [2])], PPO | TWICE),
    moves("algorithm.advantage", "group_mean", advantages),
    moves("algorithm.objective", "policy_gradient", loss),
    moves("algorithm.ratio", "sequence", metric("actor/ratio"), AGAIN),
    moves("algorithm.aggregation", "fixed_length", loss, AGAIN),
    moves("algorithm.whiten", True, advantages),
    moves("algorithm.gamma", 0.5, advantages, PPO),
    moves("algorithm.lam", 0.5, metric("actor/loss"), PPO | {"algorithm.kl_coef": 0.0} | AGAIN),
    moves("algorithm.clip_low", 0.0, metric("actor/clip_fraction"), MOVED),
    moves("algorithm.clip_high", 0.0, metric("actor/clip_fraction"), MOVED),
    moves("algorithm.dual_clip", 1.0001, loss, MOVED | {"actor.optimizer.lr": 0.1}),
    moves("algorithm.value_clip", 1e-9, metric("critic/clip_fraction"), PPO | AGAIN),
    Row("algorithm.kl_in", looks.steps_with("actor/kl_coef"), [(DEFAULT, [1]), ("none", [])]),
    moves("algorithm.kl_in", "reward", loss, AGAIN | {"algorithm.kl_coef": 0.5}, "reward"),
    Row("algorithm.distill.loss", same(divergence, "algorithm.distill.loss", "reverse_kl"),
        [(DEFAULT, True), ("forward_kl", False), ("jsd", False)], OVER_DISTRIBUTIONS),
    Row("algorithm.distill.beta", same(divergence, "algorithm.distill.beta", 0.5), [(DEFAULT, True), (0.1, False)],
        OVER_DISTRIBUTIONS | {"algorithm.distill.loss": "jsd"}),
    Row("algorithm.distill.top_k", looks.is_in_metrics("actor/teacher_tail"), [(3, True), (None, False)], OPD),
    moves("algorithm.kl_estimator", "k1", loss, AGAIN),
    moves("algorithm.kl_cap", 1e-9, loss, AGAIN),
    Row("algorithm.kl_coef", kl_coef, [(DEFAULT, [0.04]), (0.5, [0.5])]),
    moves("algorithm.kl_target", 0.5, kl_coef, TWICE),
    moves("algorithm.kl_gain", 0.7, kl_coef, TWICE | {"algorithm.kl_target": 0.5}),
    moves("algorithm.entropy_coef", 0.1, metric("train/grad_norm")),
    Row(
        "algorithm.correction", looks.steps_with("actor/importance_weight"),
        [(DEFAULT, []), ("truncate", [1]), ("mask", [1])],
    ),
    moves("algorithm.correction_level", "sequence", metric("actor/importance_weight"), {"algorithm.correction": "truncate"}),
    moves("algorithm.correction_cap", 0.5, metric("actor/importance_weight"), {"algorithm.correction": "truncate"}),
    moves("algorithm.correction_floor", 1.5, metric("actor/importance_limited"), {"algorithm.correction": "mask"}),
    Row(
        "algorithm.dynamic_sampling", iteration, [(DEFAULT, [1]), (True, Refusal("TrainingError", "one reward for all"))], ALL_ONE,
    ),
    Row(
        "algorithm.max_sampling_rounds", iteration,
        [(DEFAULT, Refusal("TrainingError", ": 10 rounds")), (2, Refusal("TrainingError", ": 2 rounds"))],
        ALL_ONE | {"algorithm.dynamic_sampling": True},
    ),
    moves("algorithm.overlong_fraction", 1.0, advantages),
]  # fmt: skip

ROLLOUT = [
    Row("seed", same(prompts, "seed", 3), [(DEFAULT, False), (3, True)], what="order"),
    moves("seed", 4, completions, IN_ORDER, "sampling"),
    Row(
        "rollout.backend", lambda run: completions(run) == sampled("completion", where="../earlier")(run),
        [(DEFAULT, Refusal("ConfigError", "rollout.path: ")), ("recorded", True)],
        IN_ORDER | {"rollout.path": "{run}/earlier/samples"}, after=FIRST_RUN,
    ),
    Row(
        "rollout.path", lambda run: completions(run) == sampled("completion", where="../earlier")(run),
        [(DEFAULT, Refusal("ConfigError", "rollout.path: ")), ("{run}/earlier/samples", True)],
        IN_ORDER | {"rollout.backend": "recorded"}, after=FIRST_RUN,
    ),
    Row("rollout.samples_per_prompt", sampled("sample"), [(2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])]),
    Row("rollout.max_new_tokens", lambda run: max(sampled("response_length")(run)), [(6, 6), (3, 3)]),
    moves("rollout.temperature", 0.2, completions),
    *(
        Row(f"rollout.{key}", reach_ppo.samples_of_a_prompt_are_equal, [(DEFAULT, False), (value, True)], UNGUARDED)
        for key, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0))
    ),
    moves("rollout.stop", list("0123456789"), sampled("response_length")),
    moves("rollout.stop_tokens", list(range(6, 16)), sampled("response_length")),
    Row("rollout.cache_tokens", lambda run: noted("limits")(run)["cache_tokens"], [(DEFAULT, 65536), ("auto", 65536), (99, 99)]),
    Row("rollout.prefill_tokens", lambda run: noted("limits")(run)["prefill_tokens"], [(DEFAULT, 4096), (9, 9)]),
    Row(
        "rollout.cuda_graphs", lambda run: noted("limits")(run).get("cuda_graphs"), [(DEFAULT, None), (True, True)],
    ),
    Row(
        "rollout.cuda_graphs", iteration,
        [(True, Refusal("ConfigError", "rollout.cuda_graphs: value true is not for actor.engine.backend fsdp"))],
        {"actor.engine.backend": "fsdp"}, what="on fsdp",
    ),
    Row("rollout.environment", sampled("environment"), [(DEFAULT, [None] * 4), (ENVIRONMENT["rollout.environment"], [1.0] * 4)],
        {"rollout.max_turns": DEFAULT, "rollout.max_new_tokens": 2}),
    Row("rollout.max_turns", lambda run: max(sampled("turns")(run)), [(1, 1), (2, 2)],
        ENVIRONMENT | {"rollout.max_new_tokens": 30, "rollout.stop_tokens": list(range(6, 16))}),
    Row("rollout.environment_parts", noted("generated"), [(DEFAULT, 2), (1, 1), (9, 4)], ENVIRONMENT | {"rollout.max_turns": 1}),
    Row("rollout.max_turn_tokens", lambda run: max(sampled("response_length")(run)), [(DEFAULT, 6), (3, 3)],
        ENVIRONMENT | {"rollout.max_turns": 1}),
    Row(
        "rollout.environment_timeout_s", iteration, [(DEFAULT, [1]), (0.2, Refusal("RewardError", "0.2 s"))],
        {"rollout.environment": "{inputs}/environment.py:Sleepy", "rollout.max_turns": 1, "rollout.max_new_tokens": 2},
    ),
]  # fmt: skip

REWARDS = [
    Row("rewards.functions", reach_ppo.metric_names("reward/fewer"),
        [(rewards({"name": "length", "maximum": 3}), []), (more("fewer"), ["reward/fewer/mean", "reward/fewer/std"])]),
    Row("rewards.timeout_s", iteration,
        [(more("slow"), [1]), (more("slow", timeout_s=0.3), Refusal("RewardError", "0.3"))]),
    Row("rewards.workers", noted("scorers"), [(more("fewer"), 1), (more("fewer", workers=2), 2)]),
    Row("rewards.retries", metric("reward/faults"),
        [(more("busy", on_error="zero"), [2.0]), (more("busy", on_error="zero", retries=1, retry_wait_s=0.01), [0.0])]),
    Row("rewards.retry_wait_s", lambda run: run.metrics[-1]["perf/reward_s"] > 0.7,
        [(more("busy", on_error="zero", retries=1, retry_wait_s=0.01), False), (more("busy", on_error="zero", retries=1, retry_wait_s=1.5), True)]),
    Row("rewards.on_error", metric("reward/faults"),
        [(more("broken"), Refusal("RewardError", "always")), (more("broken", on_error="zero"), [4.0])]),
    Row("reward.model.path", reach_ppo.metric_names("reward/model"),
        [(DEFAULT, []), (JUDGE["reward.model.path"], ["reward/model/mean", "reward/model/std"])]),
    moves("reward.weight", 2.0, metric("reward/mean"), JUDGE),
    Row("reference.others", reach_ppo.metric_names("actor/sequence_kl/"),
        [(SECOND, ["actor/sequence_kl/second"])], OPD | {"data.teacher": "second"}),
    Row("reference.others", reach_ppo.metric_names("actor/sequence_kl/"), [(DEFAULT, [])], OPD, what="none"),
    Row("reference.update_every", lambda run: run.metrics[-1]["actor/sequence_kl"] == 0, [(DEFAULT, False), (1, True)], THREE),
]  # fmt: skip
REWARDS = [dataclasses.replace(r, key="rewards", what=r.key) if r.key.startswith("rewards.") else r for r in REWARDS]
"""`rewards` is given whole, and its keys tell rows apart."""

DATA = [
    Row("data.train", lambda run: set(map(str, prompts(run))) == {"9+9="},
        [("{inputs}/train.jsonl", False), ("{inputs}/other.jsonl", True)]),
    Row("data.train", sampled("index"), [(["{inputs}/train.jsonl"], [0, 0, 1, 1]), (["{inputs}/train.jsonl", "{inputs}/other.jsonl"], [0, 0, 10, 10])],
        IN_ORDER, what="sources"),
    Row("data.mix_by", sampled("index"), [(DEFAULT, [0, 0, 10, 10, 1, 1]), ("tokens", [0, 0, 10, 10, 11, 11])],
        IN_ORDER | {"data.train": [{"path": f"{{inputs}}/{name}.jsonl", "weight": 1} for name in ("train", "other")],
                    "train.global_batch_size": 6}),
    Row("data.eval", looks.steps_with("eval/accuracy"), [(DEFAULT, []), (EVAL["data.eval"], [1])]),
    Row("data.eval", reach_ppo.metric_names("eval/b/"),
        [({"a": "{inputs}/eval.jsonl", "b": "{inputs}/train.jsonl"}, ["eval/b/accuracy", "eval/b/response_length", "eval/b/reward"])],
        what="sets"),
    Row("data.split", sampled("prompt"), [(DEFAULT, ["10+30+1=", "10+30+1=", "11+37+1+1=", "11+37+1+1="]), ("more", ["15+25=", "15+25=", "16+32+1=", "16+32+1="])],
        IN_ORDER | {"data.train": "{inputs}/saved"}),
    Row("data.columns", lambda run: len(set(map(str, prompts(run)))),
        [(DEFAULT, Refusal("DataError", "data.columns")), ({"question": "prompt"}, 2)], {"data.train": "{inputs}/renamed.jsonl"}),
    moves("data.chat_template", "{inputs}/plain.jinja", sampled("tokens")),
    Row("data.teacher", lambda run: run.metrics[0]["actor/kl"] == 0, [(DEFAULT, False), ("second", True)],
        OPD | {"reference.others": SECOND}),
    moves("data.system", "1+1=2", sampled("tokens"), {"data.max_prompt_length": 40}),
    Row("data.max_prompt_length", iteration,
        [(24, [1]), (8, Refusal("DataError", "data.max_prompt_length is 8"))]),
    Row(
        "data.truncation", looks.all_of(lambda run: max(map(len, prompt_tokens(run))), looks.left_out),
        [
            (DEFAULT, Refusal("DataError", "data.max_prompt_length is 14")), ("left", (14, "truncated: 2")),
            ("drop", (14, "dropped: 4")),
        ],
        LONG | IN_ORDER,
    ),
    Row("data.shuffle", sampled("index"), [(False, [0, 0, 1, 1]), (True, [6, 6, 1, 1])]),
    Row("data.on_bad_row", looks.left_out,
        [(DEFAULT, Refusal("DataError", "bad.jsonl:2: ")), ("skip", "skipped: 1")],
        IN_ORDER | {"data.train": "{inputs}/bad.jsonl"}),
]  # fmt: skip

TRAIN = [
    Row("train.steps", metric("step"), [(1, [1]), (3, [1, 2, 3])]),
    Row("train.epochs", metric("step"), [(DEFAULT, [1, 2, 3, 4, 5]), (0.5, [1, 2, 3])], {"train.steps": DEFAULT}),
    Row("train.global_batch_size", lambda run: len(completions(run)), [(4, 4), (8, 8)]),
    Row("train.eval_every", looks.steps_with("eval/accuracy"), [(DEFAULT, [3]), (2, [0, 2, 3])], EVAL | THREE),
    Row("train.eval_samples", lambda run: len(sampled("row", series="eval")(run)), [(DEFAULT, 10), (2, 20)], EVAL),
    Row("train.eval_prompts", lambda run: len(sampled("row", series="eval")(run)), [(DEFAULT, 10), (3, 3)], EVAL),
    Row("train.offload_idle", lambda run: noted("to_host")(run) > 0, [(DEFAULT, False), ("never", False), ("always", True)]),
    Row("train.guards", metric("step"), [(DEFAULT, Refusal("TrainingError", "dropout")), (False, [1])],
        {"actor.model.path": "{inputs}/dropout"}),
]  # fmt: skip

ELSEWHERE = {"output_dir": "{run}/earlier"}
CHECKPOINT = [
    Row("checkpoint.every", looks.checkpoints(), [(DEFAULT, [3]), (1, [1, 2, 3]), (2, [2, 3])],
        THREE | {"checkpoint.keep": None}),
    Row("checkpoint.keep", looks.checkpoints(), [(DEFAULT, [2, 3]), (1, [3])], THREE | {"checkpoint.every": 1}),
    Row("checkpoint.resume", metric("step"),
        [(DEFAULT, [1, 2]), ("never", Refusal("ConfigError", "checkpoint.resume"))], TWICE, after={"train.steps": 1}),
    Row("checkpoint.remote", looks.checkpoints("../copy"), [(DEFAULT, []), ("file://{run}/copy", [1])], PPO),
    Row("checkpoint.remote", metric("step"), [(DEFAULT, [1, 2]), ("file://{run}/copy", [2])], PPO | TWICE,
        after=ELSEWHERE | {"train.steps": 1, "checkpoint.remote": "file://{run}/copy"}, what="resume from it"),
    Row("checkpoint.background", looks.is_in_metrics("perf/save_write_s"), [(DEFAULT, False), (True, True)],
        THREE | {"checkpoint.every": 1}),
    Row("checkpoint.export_hf", looks.loads_in_transformers, [(True, True), (False, False)]),
    Row("checkpoint.best", named_is_the_best("reward/digits/mean", 1), [(BEST["checkpoint.best"], True)], BEST),
    Row("checkpoint.best", reach_ppo.best, [(DEFAULT, (None, [6]))], BEST, what="none"),
    Row("checkpoint.best_is", named_is_the_best("reward/digits/mean", -1), [(DEFAULT, False), ("lowest", True)], BEST),
    Row("output_dir", looks.places, [("{run}/here", ["here"]), ("{run}/there", ["there"])]),
]  # fmt: skip

LOG = [
    Row("log.console", looks.printed, [("rich", "bar"), ("plain", "lines"), ("none", "nothing")], terminal=True),
    Row("log.table", shown, [(DEFAULT, 3), (0, 0), (1, 1)]),
    Row("log.table_every", shown, [(DEFAULT, 3), (1, 6)], TWICE),
    Row("log.samples.every", reach_ppo.sample_files, [(DEFAULT, ["step_1", "step_2", "step_3"]), (2, ["step_1", "step_3"]), (None, [])], THREE),
    Row("log.samples.keep", reach_ppo.sample_files, [(1, ["step_3"]), (2, ["step_2", "step_3"])], THREE),
    Row("log.samples.max_mb", noted("samples_mb"), [(DEFAULT, 1024), (7, 7)]),
    Row("log.samples.tokens", lambda run: "tokens" in reach_ppo.sample_keys(run), [(DEFAULT, True), (False, False)]),
    Row("log.samples.compress", reach_ppo.suffixes, [(DEFAULT, [".jsonl"]), (True, [".gz"])]),
]  # fmt: skip

ROWS = [*ALGORITHM, *ROLLOUT, *REWARDS, *DATA, *TRAIN, *CHECKPOINT, *LOG]

IN_OTHER_TESTS = {
    **{f"rollout.server.{name}": "tests/rollout/test_servers.py" for name in (
        "urls", "weights_dir", "bucket_mb", "concurrency", "timeout_s", "sleep")},
    "rollout.async_level": "tests/trainers/rl/test_launched.py",
    "rollout.ranks": "tests/trainers/rl/test_rollout_ranks.py",
    "rollout.server.handover": "tests/rollout/test_links_of_servers.py",
    "rollout.server.lora": "tests/rollout/test_adapters.py",
    **{f"rollout.server.{name}": "tests/rollout/test_vllm_parts.py" for name in ("memory_fraction", "tp")},
    "rewards.concurrency": "tests/rewards/test_pool.py",
    **{f"log.{name}": "tests/config/test_keys_reach.py" for name in (
        "every", "wandb.project", "wandb.name", "wandb.mode", "tensorboard")},
    "data.packing": "tests/config/test_roles.py",
    "data.turns": "tests/data/test_dialogue.py",
    **{f"reference.server.{name}": "tests/trainers/test_teacher_server.py" for name in (
        "url", "name", "concurrency", "timeout_s", "key_variable")},
}  # fmt: skip
"""Key -> the file of tests where it is seen: servers, which no run here has, what runs at a time, and what all trainers share."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = reach_ppo.make(tmp_path_factory.mktemp("inputs"))
    return Runs(
        folder, tmp_path_factory.mktemp("runs"), base=BASE, backend_key="actor.engine.backend",
        function="tests.config.reach_ppo:case",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_key_reaches_what_it_configures(runs: Runs, row: Row):
    runs.check(row, "megatron")


ROLE_KEYS = [
    key
    for key in walk_keys(PPOConfig)
    if key.path.startswith(tuple(f"{role}.{part}." for role in ROLES for part in ("model", "engine", "optimizer")))
]
OTHER_VALUES = {
    "path": "other", "init": "random", "dtype": "float32", "trust_remote_code": True, "backend": "fsdp", "recompute": "full",
    "offload": ["parameters"], "options": {}, "tokens": 5000, "size": 3, "sp": True, "schedule": "linear", "betas": [0.5, 0.5], "device": "cpu",
    "min_lr": 1e-9, "eps": 1e-6, "reshard_after_forward": False, "defer_sync": True, "compile": True, "grouped_mm": True, "dropout": 0.1, "target_modules": ["q_proj"],
    "exclude_modules": ["q_proj"], "rslora": True, "export": "merged",
    "recompute_modules": ["core_attn"], "layer_spec": "local", "attention": "fused", "megatron": {"bucket_size": 9}, "batch_invariant": True,
    "detach": False, "name": "muon", "momentum": 0.5, "use_nesterov": False, "scale_mode": "shape_scaling",
}  # fmt: skip
"""Key's last name -> a value that is not its default; of numbers, one more."""


@pytest.mark.parametrize("key", ROLE_KEYS, ids=lambda key: key.path)
def test_a_roles_key_reaches_what_its_engine_is_built_from(key):
    """Every other role has what it had, but for those that have the actor's engine or model for their own."""
    role, *path = key.path.split(".")
    name = path[-1]
    value = OTHER_VALUES[name] if name in OTHER_VALUES else (key.default or 0) + 1
    given = {
        "output_dir": "x", "actor.model.path": "m", "algorithm.name": "ppo", "data.train": "d", "train.steps": 4,
        "train.global_batch_size": 64, "reward.model.path": "r", "rewards": {"functions": [{"name": "gsm8k"}]},
        "train.guards": False,  # which an actor's dropout of adapters does not go with
    }  # fmt: skip
    if "fsdp" in path or name == "recompute_every":
        given |= {f"{role}.engine.backend": "fsdp"} | (
            {f"{role}.engine.recompute": "full"} if "fsdp" not in path else {}
        )
    if "muon" in path:
        given |= {f"{role}.optimizer.name": "muon"}
    if name == "batch_invariant":
        given |= {f"{role}.engine.micro_batch": {"size": 1}}
    if name == "recompute_modules":
        given |= {f"{role}.engine.recompute": "selective"}
    of_training = ("recompute", "recompute_every", "recompute_modules", "reshard_after_forward", "aux_loss", "z_loss")
    if role not in TRAINED and name in of_training:
        refused = f"{role}.engine.recompute" if name.startswith("recompute") else key.path  # what the others go with
        with pytest.raises(ConfigError, match=f"^{refused}: value .* is for training"):
            made(given | {key.path: value})
        return
    if (
        name == "options"
    ):  # mrl's engines have none; that another package's gets them, tests/engine/test_registry.py sees
        with pytest.raises(
            ConfigError,
            match=f"^{key.path}.a: value 1 is for an option that backend {given.get(f'{role}.engine.backend', 'megatron')}",
        ):
            made(given | {key.path: {"a": 1}})
        return
    before, after = made(given), made(given | {key.path: value})
    held = after[role]
    for part in path:
        held = getattr(held, part)
    expected = tuple(value) if isinstance(value, list) else value
    assert held == (f"/{role}" if name == "path" else expected)
    assert {other: config.mtp for other, config in after.items() if config.mtp is not None} == (
        {"actor": after["actor"].model.mtp} if "mtp" in path else {}
    )
    assert name == "path" or before[role] != after[role]
    if role != "actor":
        assert all(before[other] == after[other] for other in ROLES if other != role)


def made(keys):
    config = from_dict(nested(keys), PPOConfig)
    return role_configs(config, {role: f"/{role}" for role in ROLES}, check_algorithm(config))


def test_every_key_has_a_row():
    have = {row.key for row in ROWS} | set(IN_OTHER_TESTS) | {key.path for key in ROLE_KEYS}
    have |= {f"rewards.{name}" for row in ROWS if row.key == "rewards" for name in [row.what.split(".")[1]]}
    assert {key.path for key in walk_keys(PPOConfig)} - {"rewards"} <= have
    assert not [path for path in have - {"rewards"} if path not in {key.path for key in walk_keys(PPOConfig)}]


def test_what_other_tests_see_is_in_them():
    for key, file in IN_OTHER_TESTS.items():
        name = key.rpartition(".")[2]
        assert name in pathlib.Path(REPO, file).read_text(), f"{file} has no {name}"
