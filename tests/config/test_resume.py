"""Which keys may differ between a checkpoint's config and the run that resumes it."""

from __future__ import annotations

import re

import pytest

from mrl.config.dpo import ROWS, DPOConfig
from mrl.config.keys import walk_keys
from mrl.config.load import from_dict, to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.resume import ABSENT, Change, changed_keys, check_resume, may_change, path_keys
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError
from tests.config.test_load import PPO_BASE, base, merged


def plain(**sections: object) -> dict:
    return to_dict(from_dict(base(**sections)))


def test_nothing_changed():
    assert changed_keys(plain(), plain()) == {}
    assert check_resume(plain(), plain()) == []


def test_changed_keys_are_dotted_and_a_value_that_is_a_mapping_is_one_key():
    old, new = plain(), plain(data={"columns": {"q": "prompt"}}, engine={"parallel": {"tp": 2}})
    assert changed_keys(old, new, whole=["data.columns"]) == {
        "engine.parallel.tp": (1, 2),
        "data.columns": ({}, {"q": "prompt"}),
    }
    assert changed_keys({"a": {"b": 1}}, {"a": {}, "c": 2}) == {"a.b": (1, ABSENT), "c": (ABSENT, 2)}


def test_layout_output_and_length_may_change():
    new = plain(
        output_dir="elsewhere", engine={"parallel": {"tp": 2}, "micro_batch": {"size": 1}, "offload": ["optimizer"],
        "megatron": {"overlap_grad_reduce": True}},
        log={"console": "plain"}, checkpoint={"every": 5}, train={"steps": 20},
        data={"eval": "rows", "train": "moved"}, model={"path": "moved"},
    )  # fmt: skip
    notes = [str(change) for change in check_resume(plain(train={"steps": 10}), new)]
    assert len(notes) == 11
    assert 'output_dir: "run" at the save, "elsewhere" now' in notes
    assert "train.steps: 10 at the save, 20 now (a schedule that decays follows the new length)" in notes


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_after_a_row_that_was_too_long_the_limit_may_rise_and_rows_may_be_dropped(command):
    """Of what was read under `error` no row was longer, so a run with the new values had the same batches so far."""
    make, limit = (plain, "max_length") if command == "sft" else (plain_ppo, "max_prompt_length")
    old = make(data={limit: 64})
    for data, changes in (
        ({limit: 65}, 1),
        ({limit: 64, "truncation": "drop"}, 1),
        ({limit: 65, "truncation": "left"}, 2),
    ):
        assert len(check_resume(old, make(data=data))) == changes
    [change] = check_resume(old, make(data={limit: 64, "truncation": "drop"}))
    assert str(change).startswith('data.truncation: "error" at the save, "drop" now')
    for saved, data, key in (
        ({limit: 64}, {limit: 63}, limit),
        ({limit: 64}, {limit: 63, "truncation": "drop"}, limit),
        ({limit: 64, "truncation": "drop"}, {limit: 65, "truncation": "drop"}, limit),
        ({limit: 64, "truncation": "drop"}, {limit: 64, "truncation": "left"}, "truncation"),
        ({limit: 64, "truncation": "left"}, {limit: 64}, "truncation"),
    ):
        with pytest.raises(ConfigError, match=f"^data.{key}: value .* that the checkpoint was saved with"):
            check_resume(make(data=saved), make(data=data))
    for saved in (
        None,
        {limit: None, "truncation": "error"},
        {"truncation": "error"},
    ):  # of a config.yaml that somebody edited
        with pytest.raises(ConfigError, match="^data"):
            check_resume(old | {"data": saved}, old)
    older = make(data={limit: 64})
    del older["data"]["truncation"]
    assert len(check_resume(older, make(data={limit: 65}))) == 1


def test_the_limit_of_kto_stays_as_it_cuts_pairs_of_rows():
    def of(name: str, limit: int) -> dict:
        return to_dict(from_dict(base(data={"max_length": limit}, loss={"name": name}), DPOConfig))

    assert len(check_resume(of("dpo", 64), of("dpo", 65))) == 1
    with pytest.raises(ConfigError, match="^data.max_length: value 65 is not the 64"):
        check_resume(of("kto", 64), of("kto", 65))


def test_a_new_signature_is_no_change_and_another_query_elsewhere_is_one():
    def of(signature: str, page: str) -> dict:
        data = {"train": f"https://host/a.jsonl?{signature}", "stream": True, "system": f"See https://host/docs?{page}"}
        return plain(data=data, train={"steps": 1, "epochs": None})

    assert check_resume(of("signature=a,b", "page=1"), of("signature=a,c", "page=1")) == []
    with pytest.raises(ConfigError, match=r"^data.system: .*page=2"):
        check_resume(of("signature=a,b", "page=1"), of("signature=a,b", "page=2"))


@pytest.mark.parametrize(
    ("command", "sections", "key"),
    [
        ("sft", {"model": {"dtype": "float32"}}, "model.dtype"),
        ("sft", {"engine": {"megatron": {"bucket_size": 9, "moe_input_jitter_eps": 0.5}}}, "engine.megatron.moe_input_jitter_eps"),
        ("ppo", {"actor": {"model": {"dtype": "float32"}}}, "actor.model.dtype"),
        ("ppo", {"reward": {"model": {"path": "judge"}}}, "reward.model.path"),
        ("ppo", {"rewards": {"functions": [{"name": "math"}]}}, r"rewards.functions\[0\].name"),
        ("ppo", {"algorithm": {"name": "grop"}}, "algorithm.name"),
    ],
)  # fmt: skip
def test_what_breaks_the_run_is_refused(command, sections, key):
    make = plain if command == "sft" else plain_ppo
    says = f"^{key}: value .* is not the .* that the checkpoint was saved with"
    with pytest.raises(ConfigError, match=says) as error:
        check_resume(make(), make(**sections))
    assert "\n" not in str(error.value)
    assert "with another output_dir than run" in str(error.value) and "never" not in str(error.value)


def test_every_breaking_key_is_named():
    with pytest.raises(ConfigError, match="seed: value 1 .*; optimizer.lr was 1e-05 and is 1.0; "):
        check_resume(plain(), plain(seed=1, optimizer={"lr": 1.0}))


SAME = {
    SFTConfig: "model.init model.dtype model.lora.rank engine.backend engine.moe.aux_loss optimizer.lr optimizer.betas "
    "optimizer.schedule optimizer.warmup_steps optimizer.clip_grad data.split data.packing data.max_length data.shuffle "
    "train.global_batch_size seed",
    PPOConfig: "actor.model.dtype critic.model.lora.rank reference.engine.backend actor.engine.backend rollout.stop actor.optimizer.lr "
    "critic.optimizer.lr reference.update_every reward.weight rewards.functions rollout.temperature rollout.samples_per_prompt rollout.max_turns "
    "algorithm.name algorithm.lam algorithm.epochs algorithm.mini_batch_size algorithm.kl_coef data.system data.max_prompt_length "
    "train.global_batch_size seed",
}


@pytest.mark.parametrize("root", [SFTConfig, PPOConfig])
def test_what_a_key_says_of_a_change_holds_of_all_below_it(root):
    """What may change in one role may in all of them, and what the run compares lies in each role's model and in the rows."""
    allowed, paths = may_change(root), [key.path for key in walk_keys(root)]
    roles = ("actor.", "critic.", "reference.", "reward.") if root is PPOConfig else ("", "teacher.")
    assert set(path_keys(root)) == {*(f"{role}model.path" for role in roles), "data.train"} < set(allowed)
    assert {f"{role}engine.parallel" for role in roles} | {"log", "checkpoint", "output_dir"} < set(allowed)
    for path in SAME[root].split():
        assert path in paths and not path.startswith(allowed), path


# ----------------------------------------------------------------------------------------------------------------- mrl ppo


def plain_ppo(**sections: object) -> dict:
    return to_dict(from_dict(merged(PPO_BASE, sections), PPOConfig))


def test_ppo_layouts_of_every_role_and_what_moved_may_change():
    engine = {
        "parallel": {"tp": 2},
        "micro_batch": {"size": 1},
        "device": "cpu",
        "recompute": "none",
        "offload": ["parameters"],
    }
    new = plain_ppo(
        actor={"model": {"path": "moved"}, "engine": engine}, critic={"model": {"path": "critic"}, "engine": engine},
        reference={"model": {"path": "moved too"}, "engine": engine}, data={"train": "moved", "eval": "rows"}, output_dir="else",
        train={"steps": 20, "offload_idle": "never", "eval_prompts": 3, "eval_samples": 4, "guards": False}, log={"table": 0},
        checkpoint={"best": "eval/accuracy"}, rollout={"cache_tokens": 10**6, "prefill_tokens": 9},
        rewards={"workers": 1, "timeout_s": 30, "concurrency": 2, "on_error": "zero"}, algorithm={"max_sampling_rounds": 20},
    )  # fmt: skip
    notes = [str(change) for change in check_resume(plain_ppo(), new)]
    assert "train.steps: null at the save, 20 now (a schedule that decays follows the new length)" in notes
    for role in ("actor", "critic", "reference"):
        assert f"{role}.engine.parallel.tp: 1 at the save, 2 now" in notes
    assert 'critic.model.path: "m" at the save, "critic" now' in notes
    assert "rewards.workers: 4 at the save, 1 now" in notes
    parts = [plain_ppo(rollout={"environment": "e.py:E", "environment_parts": count}) for count in (2, 4)]
    assert check_resume(*parts) == [Change("rollout.environment_parts", 2, 4)]


GSM8K, STOP = {"name": "gsm8k"}, [f"stop {i}" for i in range(20)]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"rewards": {"functions": [GSM8K | {"weight": 2}]}}, "rewards.functions[0].weight: value 2.0 is not the 1.0 that"),
        ({"rewards": {"functions": [GSM8K, {"name": "math"}]}}, 'rewards.functions: value [{"name": "gsm8k"'),
        ({"rollout": {"stop": [*STOP[:19], "x"]}}, 'rollout.stop[19]: value "x" is not the "stop 19" that'),
    ],
)  # fmt: skip
def test_ppo_of_lists_and_mappings_what_differs_is_named(sections, says):
    saved = {"rewards": {"functions": [GSM8K]}, "rollout": {"stop": STOP}}
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}.* the checkpoint was saved with; "):
        check_resume(plain_ppo(**saved), plain_ppo(**merged(saved, sections)))
    changed = Change("data.columns", {"a": "x", "b": "y"}, {"a": "x", "b": "z"})
    assert str(changed) == 'data.columns.b: "y" at the save, "z" now'


def test_ppo_what_a_role_takes_from_the_actor_is_the_same_written_out():
    """Null and the actor's own values make the same run, whichever of them was saved."""
    engine, path = {"parallel": {"tp": 2}}, {"path": "m", "dtype": "bfloat16"}
    short = plain_ppo(actor={"engine": engine})
    long = plain_ppo(
        actor={"engine": engine}, critic={"engine": engine, "model": path}, reference={"engine": engine, "model": path}
    )  # fmt: skip
    assert check_resume(short, long) == check_resume(long, short) == check_resume(short, short) == []
    short = plain_ppo(actor={"engine": engine}, reward={"model": {"path": "judge"}})
    long = plain_ppo(
        actor={"engine": engine}, reward={"engine": engine, "model": {"path": "judge", "dtype": "bfloat16"}}
    )
    assert check_resume(short, long) == check_resume(long, short) == []


@pytest.mark.parametrize(
    ("short", "long", "other"),
    [
        ({"name": "dpo"}, {"name": "dpo", "beta": 0.1, "label_smoothing": 0.0}, {"name": "dpo", "beta": 0.2}),
        ({"name": "simpo"}, {"name": "simpo", "beta": 2.0, "gamma": 1.0}, {"name": "simpo", "beta": 0.1}),
    ],
)
def test_what_a_loss_is_without_its_keys_is_the_same_written_out(short, long, other):
    data = {"output_dir": "out", "model": {"path": "m"}, "data": {"train": "rows"}, "train": {"global_batch_size": 8}}
    by_loss = [to_dict(from_dict(data | {"loss": loss}, DPOConfig)) for loss in (short, long, other)]
    assert check_resume(by_loss[0], by_loss[1]) == check_resume(by_loss[1], by_loss[0]) == []
    default = ROWS[short["name"]]["beta"]
    with pytest.raises(
        ConfigError, match=rf"^loss.beta: value {other['beta']} is not the {default} that the checkpoint"
    ):
        check_resume(by_loss[0], by_loss[2])


def test_ppo_what_a_recipe_has_is_the_same_written_out():
    size = plain_ppo()["train"]["global_batch_size"]
    long = plain_ppo(algorithm={"clip_low": 0.2, "mini_batch_size": size})
    assert check_resume(plain_ppo(), long) == check_resume(long, plain_ppo()) == []
    with pytest.raises(ConfigError, match=r"^algorithm.clip_low: value 0.1 is not the 0.2 that"):
        check_resume(plain_ppo(), plain_ppo(algorithm={"clip_low": 0.1}))


def test_a_section_or_key_that_an_older_version_did_not_have_counts_as_its_default():
    old = plain_ppo()
    del old["reference"], old["critic"]["engine"], old["log"]["table"]
    assert check_resume(old, plain_ppo()) == []
    with pytest.raises(ConfigError, match="reference.update_every"):
        check_resume(old, plain_ppo(reference={"update_every": 5}))


def test_the_directory_of_another_command_is_refused():
    with pytest.raises(
        ConfigError, match='output_dir: value "run" is given to `mrl ppo`, .* is of `mrl sft`; give another'
    ):
        check_resume(plain(), plain_ppo())
    with pytest.raises(ConfigError, match="given to `mrl sft`"):
        check_resume(plain_ppo(), plain())
