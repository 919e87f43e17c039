"""`mrl sft` and `mrl ppo` with adapters: what they leave, resuming, the reference policy, wrong configs."""

from __future__ import annotations

import json
import math
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.config.command import record
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.config.schema import LoraConfig, ModelConfig
from mrl.convert.exporting import export_hf
from mrl.errors import ModelError
from mrl.launch import preflight
from mrl.launch.preflight import read_model_config
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.tiers import nightly_but
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.tiny_policies import engine, train
from tests.trainers.test_sft import hf_loss

CASE, WORLD = "tests.trainers.cases:train", 2
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def rl_inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl_inputs")
    tiny_policies.make_inputs(folder)
    return folder


def sft_config(inputs, output, **lora):
    return tiny_runs.make_config(
        inputs, output, engine={"backend": "megatron", "parallel": {"tp": 2}}, checkpoint={"every": 3},
        data={"eval": f"{inputs}/eval.jsonl"}, model={"lora": {**LORA, "dropout": 0.1, **lora}},
    )  # fmt: skip


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A run that nothing happened to; one that a signal stopped had the same metrics."""
    place = tmp_path_factory.mktemp("lora-runs")
    tiny_runs.assert_goes_on_to_the_bit(CASE, lambda output: sft_config(inputs, output), place, step=5, world=WORLD)
    return place / "whole"


@pytest.mark.slow
def test_peft_loads_what_a_run_leaves(inputs, whole):
    """Beside the adapter lie tokenizer and chat template, and its loss on data.eval is the run's."""
    files = {file.name for file in (whole / "hf").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert not files & {"config.json", "model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, whole / "hf")
    about = json.loads((whole / "hf" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(inputs / "model")
    expected, _ = hf_loss(inputs, tiny_runs.read_rows(inputs / "eval.jsonl"), model)
    rows = tiny_runs.steps(whole)
    assert math.isclose(rows[-1]["eval/loss"], expected, rel_tol=1e-5)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


def test_a_stopped_run_goes_on_bitwise(whole):
    ours, theirs = adapter(whole.with_name("stopped") / "hf"), adapter(whole / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_export_is_no_other_run(inputs, whole, tmp_path):
    """A run that is complete with another export makes the one that is asked for, merged; it is the adapter's model."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert run_case(WORLD, CASE, config=sft_config(inputs, run, export="merged"))[:2] == ("done", "")
    with torch.no_grad():
        ids = torch.arange(3, 20)[None]
        merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
        by_peft = peft.PeftModel.from_pretrained(base, whole / "hf")(ids).logits
    assert (merged - by_peft).abs().max() < 1e-5


def test_an_adapter_is_a_model_to_start_from_of_mrl_ppo_alone(whole, tmp_path):
    adapter = whole / "hf"
    for key in ("model", "reference.model"):  # of mrl dpo
        with pytest.raises(ModelError, match="is an adapter and no model; .*mrl convert export"):
            read_model_config(ModelConfig(path=str(adapter)), key)
    assert read_model_config(ModelConfig(path=str(adapter)), "actor.model", merges=True)["model_type"] == "qwen3"
    for base in ("/nowhere/base", None):
        other = tmp_path / str(base).rpartition("/")[2]
        shutil.copytree(adapter, other)
        about = json.loads((other / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
        (other / "adapter_config.json").write_text(json.dumps(about))
        says = r"^reward.model.path: .*is an adapter over .*, which is no model here; .*--model BASE"
        with pytest.raises(ModelError, match=says):
            read_model_config(ModelConfig(path=str(other)), "reward.model", merges=True)


# -- mrl ppo -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_as_actor_and_reward_model_are_their_merged_models(rl_inputs, tmp_path):
    """Bit for bit the run on folders of `mrl convert export`; a second start finds what was merged, and its checkpoint."""
    runs, lora = {}, LoraConfig(rank=2, alpha=4.0)
    for role, base, head in (("actor", "model", "lm"), ("reward", "scorer", "value")):
        tiny.make_adapter(str(tmp_path / role), str(rl_inputs / base), lora, head=head)
        export_hf(tmp_path / role, tmp_path / f"{role}-merged")
    for way in ("", "-merged"):
        paths = {role: {"model": {"path": str(tmp_path / f"{role}{way}")}} for role in ("actor", "reward")}
        runs[way] = tmp_path / f"run{way}"
        train(tiny_policies.make_config(rl_inputs, runs[way], **paths), WORLD)
    assert len(list((runs[""] / "merged").iterdir())) == 2
    tiny_policies.assert_close_metrics(*(tiny_policies.metrics_of(run) for run in runs.values()), bound=0.0)
    ours, right = (tiny_policies.weights_of(run / "hf") for run in runs.values())
    assert ours.keys() == right.keys() and all(torch.equal(ours[name], right[name]) for name in right)
    paths = {role: {"model": {"path": str(tmp_path / role)}} for role in ("actor", "reward")}
    train(tiny_policies.make_config(rl_inputs, runs[""], train={"steps": 4}, **paths), WORLD)
    assert len(list((runs[""] / "merged").iterdir())) == 2


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_adapter_as_actor_passes_the_checks_before_a_run(rl_inputs, tmp_path, lora):
    """The reference has the actor's path; adapters that train lie over the merged model, of the base's shapes."""
    tiny.make_adapter(str(tmp_path / "actor"), str(rl_inputs / "model"), LoraConfig(rank=2, alpha=4.0))
    changes = {"actor": {"model": {"path": str(tmp_path / "actor"), "lora": lora}}}
    changes["algorithm"] = {"kl_in": "loss", "kl_coef": 0.1}
    config = from_dict(tiny_policies.make_config(rl_inputs, tmp_path / "run", "grpo", **changes), PPOConfig)
    parts = preflight.check_files(record("ppo"), config)
    assert {part.role for part in parts} == {"actor", "reference"}
    preflight.check_layout(record("ppo"), config, parts, 1, here=True)


@pytest.mark.slow
@pytest.mark.parametrize("lora", nightly_but([{"rank": 2}], [None, {"rank": 2}]))
def test_what_a_run_on_an_adapter_leaves_is_over_the_merged_model(rl_inputs, tmp_path, lora):
    tiny.make_adapter(str(tmp_path / "actor"), str(rl_inputs / "model"), LoraConfig(rank=2, alpha=4.0))
    run, actor = tmp_path / "run", {"model": {"path": str(tmp_path / "actor"), "lora": lora}}
    train(tiny_policies.make_config(rl_inputs, run, "grpo", actor=actor, train={"steps": 2}))
    [merged] = (run / "merged").iterdir()
    export_hf(run, tmp_path / "again")
    if lora:
        about = json.loads((run / "hf" / "adapter_config.json").read_text())
        assert about["base_model_name_or_path"] == str(merged)
        export_hf(run / "hf", tmp_path / "by-peft")
        ours, theirs = (tiny_policies.weights_of(tmp_path / name) for name in ("again", "by-peft"))
    else:
        ours, theirs = (tiny_policies.weights_of(folder) for folder in (tmp_path / "again", run / "hf"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_adapter_over_an_adapter_is_refused(rl_inputs, tmp_path):
    tiny.make_adapter(str(tmp_path / "one"), str(rl_inputs / "model"), LoraConfig(rank=2, alpha=4.0))
    config = tmp_path / "one" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "one")}))
    with pytest.raises(ModelError, match="which is no model here"):
        read_model_config(ModelConfig(path=str(tmp_path / "one")), "actor.model", merges=True)


def rl_config(rl_inputs, output, **changes):
    changes = tiny_policies.merge({"algorithm": {"kl_in": "loss", "kl_coef": 0.1}}, changes)
    return tiny_policies.merge(
        tiny_policies.make_config(rl_inputs, output, "grpo", actor={"model": {"lora": dict(LORA)}}), changes
    )


@pytest.mark.slow
def test_the_reference_is_the_actor_without_adapters(rl_inputs, tmp_path):
    """No second model is held; the KL of the first rollout is exactly 0 (a guard), and not after a step."""
    config = rl_config(rl_inputs, tmp_path / "run", train={"steps": 4}, actor={"engine": engine("megatron", tp=2)})
    train(config, WORLD)
    rows = tiny_policies.metrics_of(tmp_path / "run")
    kls = [row["actor/sequence_kl"] for row in rows if "actor/sequence_kl" in row]
    assert kls[0] == 0.0 and kls[1] != 0.0
    assert (tmp_path / "run" / "hf" / "adapter_model.safetensors").is_file()
    plain = tiny_policies.merge(config, {"output_dir": str(tmp_path / "plain"), "actor": {"model": {"lora": None}}})
    case = "tests.trainers.rl.cases:held_by_role"
    trained = sum(t.numel() for t in adapter(tmp_path / "run" / "hf").values())
    for world in (1, WORLD):
        layout = {"actor": {"engine": {"parallel": {"tp": world}}}}
        of_lora, of_plain = (run_case(world, case, config=tiny_policies.merge(c, layout)) for c in (config, plain))
        assert set(of_lora) == {"actor"} and set(of_plain) == {"actor", "reference"}
        added = of_lora["actor"] - of_plain["actor"]
        assert added == trained if world == 1 else trained / 2 < added < trained, "the adapters, or a rank's part"


@pytest.mark.parametrize(
    "reference", nightly_but([{"update_every": 2}], [{"update_every": 2}, {"engine": engine(size=2)}])
)
def test_a_reference_of_its_own_is_a_second_copy(rl_inputs, tmp_path, reference):
    """An updated one takes the actor's merged weights."""
    config = rl_config(rl_inputs, tmp_path / "run", reference=reference, train={"steps": 4})
    train(config)
    kls = [row["actor/sequence_kl"] for row in tiny_policies.metrics_of(tmp_path / "run") if "actor/sequence_kl" in row]
    assert abs(kls[0]) < 1e-5 and (abs(kls[1]) < 1e-4) == ("update_every" in reference), kls


@pytest.mark.slow
def test_ppo_goes_on_bitwise_with_adapters_of_actor_and_critic(rl_inputs, tmp_path):
    changes = {
        "actor": {"model": {"lora": dict(LORA)}}, "critic": {"model": {"lora": {"rank": 2}}}, "train": {"steps": 4},
        "checkpoint": {"every": 1, "keep": None}, "algorithm": {"kl_in": "reward", "kl_coef": 0.1},
    }  # fmt: skip
    whole, stopped = (
        tiny_policies.make_config(rl_inputs, tmp_path / name, "ppo", **changes) for name in ("whole", "run")
    )
    train(whole, WORLD)
    train(stopped, WORLD, ended="stopped", happening="forwards_are_counted", stop_after=2)
    train(stopped, WORLD)
    assert tiny_policies.metrics_of(tmp_path / "run") == tiny_policies.metrics_of(tmp_path / "whole")
    ours, theirs = adapter(tmp_path / "run" / "hf"), adapter(tmp_path / "whole" / "hf")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = tmp_path / "run" / "checkpoints" / "step_00000004"
    assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["actor", "critic"]
