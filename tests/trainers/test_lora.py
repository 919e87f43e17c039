"""`mrl sft` and `mrl ppo` with adapters: what they leave, resuming, the reference policy, wrong configs."""

from __future__ import annotations

import functools
import json
import math
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl import metrics
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
from tests.tiers import nightly_but, slow_but
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.test_sft import hf_loss, rows_of

BACKENDS = {"fsdp": 1, "fsdp dp2": 2, "megatron tp2": 2}
LAYOUTS = ["fsdp", pytest.param("fsdp dp2", marks=pytest.mark.nightly), "megatron tp2"]
STOPPED = nightly_but(["megatron tp2"], BACKENDS)
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def rl_inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl_inputs")
    tiny_policies.make_inputs(folder)
    return folder


def sft_config(inputs, output, layout, *, lora=None, **changes):
    backend = layout.split()[0]
    changes.setdefault("checkpoint", {"every": 3})
    engine = {"backend": backend} | ({"parallel": {"tp": 2}} if "tp2" in layout else {})
    made = tiny_runs.make_config(inputs, output, engine=engine, **changes)
    made["model"]["lora"] = {**LORA, **(lora or {})}
    return made


def sft(config, layout, **details):
    return run_case(BACKENDS[layout], "tests.trainers.cases:train", config=config, **details)


def ppo(config, layout="fsdp", **details):
    return run_case(BACKENDS[layout], "tests.trainers.rl.cases:train", config=config, **details)


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A run that nothing happened to, by layout."""

    @functools.cache
    def of(layout):
        run = tmp_path_factory.mktemp("whole") / "run"
        config = sft_config(inputs, run, layout, lora={"dropout": 0.1}, data={"eval": f"{inputs}/eval.jsonl"})
        assert sft(config, layout)[:2] == ("done", "")
        return run

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peft_loads_what_a_run_leaves(inputs, whole, layout):
    """Beside the adapter lie tokenizer and chat template, and its loss on data.eval is the run's."""
    run = whole(layout)
    files = {file.name for file in (run / "hf").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert not files & {"config.json", "model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, run / "hf")
    about = json.loads((run / "hf" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(inputs / "model")
    expected, _ = hf_loss(inputs, rows_of(inputs / "eval.jsonl"), model)
    rows = metrics.read(run / "metrics.jsonl")
    assert math.isclose(rows[-1]["eval/loss"], expected, rel_tol=1e-5)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]


@pytest.mark.parametrize("layout", STOPPED)
def test_a_stopped_run_goes_on_bitwise(inputs, whole, tmp_path, layout):
    config = sft_config(inputs, tmp_path / "run", layout, lora={"dropout": 0.1}, data={"eval": f"{inputs}/eval.jsonl"})
    kind, message, _ = sft(config, layout, happening="signals", step=5)
    assert kind == "stopped", message
    assert sft(config, layout)[:2] == ("done", "")
    assert tiny_runs.steps(tmp_path / "run") == tiny_runs.steps(whole(layout))
    ours, theirs = adapter(tmp_path / "run" / "hf"), adapter(whole(layout) / "hf")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_export_is_no_other_run(inputs, whole, tmp_path):
    """A run that is complete with another export makes the one that is asked for, merged; it is the adapter's model."""
    run = tmp_path / "run"
    shutil.copytree(whole("fsdp"), run)
    changes = {"lora": {"dropout": 0.1, "export": "merged"}, "data": {"eval": f"{inputs}/eval.jsonl"}}
    assert sft(sft_config(inputs, run, "fsdp", **changes), "fsdp")[:2] == ("done", "")
    with torch.no_grad():
        ids = torch.arange(3, 20)[None]
        merged = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
        by_peft = peft.PeftModel.from_pretrained(base, whole("fsdp") / "hf")(ids).logits
    assert (merged - by_peft).abs().max() < 1e-5


def test_an_adapter_is_a_model_to_start_from_of_mrl_ppo_alone(whole, tmp_path):
    adapter = whole("fsdp") / "hf"
    for key in ("model", "reference.model"):  # of mrl dpo
        with pytest.raises(ModelError, match="is an adapter and no model; .*mrl convert export"):
            read_model_config(ModelConfig(path=str(adapter)), key)
    assert read_model_config(ModelConfig(path=str(adapter)), "actor.model", merges=True)["model_type"] == "qwen3"
    for base in ("/nowhere/base", None):
        other = tmp_path / str(base).rpartition("/")[2]
        shutil.copytree(adapter, other)
        about = json.loads((other / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
        (other / "adapter_config.json").write_text(json.dumps(about))
        with pytest.raises(
            ModelError, match=r"^reward.model.path: .*is an adapter over .*, which is not here; .*--model BASE"
        ):
            read_model_config(ModelConfig(path=str(other)), "reward.model", merges=True)


# -- mrl ppo -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "fsdp dp2"])
def test_adapters_as_actor_and_reward_model_are_their_merged_models(rl_inputs, tmp_path, layout):
    """Bit for bit the run on folders of `mrl convert export`; a second start finds what was merged, and its checkpoint."""
    runs = {}
    lora = LoraConfig(rank=2, alpha=4.0)
    for role, base, head in (("actor", "model", "lm"), ("reward", "scorer", "value")):
        tiny.make_adapter(str(tmp_path / role), str(rl_inputs / base), lora, head=head)
        export_hf(tmp_path / role, tmp_path / f"{role}-merged")
    for way in ("", "-merged"):
        paths = {role: {"model": {"path": str(tmp_path / f"{role}{way}")}} for role in ("actor", "reward")}
        runs[way] = tmp_path / f"run{way}"
        config = tiny_policies.make_config(rl_inputs, runs[way], **paths)
        kind, message, _ = ppo(config, layout)
        assert kind == "done", message
    assert len(list((runs[""] / "merged").iterdir())) == 2
    tiny_policies.assert_close_metrics(*(tiny_policies.metrics_of(run) for run in runs.values()), bound=0.0)
    ours, right = (tiny_policies.weights_of(run / "hf") for run in runs.values())
    assert ours.keys() == right.keys() and all(torch.equal(ours[name], right[name]) for name in right)
    config = tiny_policies.make_config(
        rl_inputs,
        runs[""],
        actor={"model": {"path": str(tmp_path / "actor")}},
        reward={"model": {"path": str(tmp_path / "reward")}},
        train={"steps": 4},
    )
    kind, message, said = ppo(config, layout)
    assert kind == "done" and len(list((runs[""] / "merged").iterdir())) == 2, message


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


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_what_a_run_on_an_adapter_leaves_is_over_the_merged_model(rl_inputs, tmp_path, lora):
    tiny.make_adapter(str(tmp_path / "actor"), str(rl_inputs / "model"), LoraConfig(rank=2, alpha=4.0))
    run, actor = tmp_path / "run", {"model": {"path": str(tmp_path / "actor"), "lora": lora}}
    kind, message, _ = ppo(tiny_policies.make_config(rl_inputs, run, "grpo", actor=actor, train={"steps": 2}))
    assert kind == "done", message
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
    about = json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "one")}
    config.write_text(json.dumps(about))
    with pytest.raises(ModelError, match="which is an adapter itself"):
        export_hf(tmp_path / "one", tmp_path / "out")
    with pytest.raises(ModelError, match="which is an adapter itself"):
        read_model_config(ModelConfig(path=str(tmp_path / "one")), "actor.model", merges=True)


def rl_config(rl_inputs, output, **changes):
    changes = tiny_policies.merge({"algorithm": {"kl_in": "loss", "kl_coef": 0.1}}, changes)
    return tiny_policies.merge(
        tiny_policies.make_config(rl_inputs, output, "grpo", actor={"model": {"lora": dict(LORA)}}), changes
    )


ENGINES = {"fsdp": tiny_policies.engine(), "megatron tp2": tiny_policies.engine("megatron", tp=2)}


@pytest.mark.parametrize("layout", slow_but(["megatron tp2"], ENGINES))
def test_the_reference_is_the_actor_without_adapters(rl_inputs, tmp_path, layout):
    """No second model is held; the KL of the first rollout is exactly 0 (a guard), and not after a step."""
    config = rl_config(rl_inputs, tmp_path / "run", train={"steps": 4}, actor={"engine": ENGINES[layout]})
    kind, message, said = ppo(config, layout)
    assert (kind, message) == ("done", ""), message
    rows = tiny_policies.metrics_of(tmp_path / "run")
    kls = [row["actor/sequence_kl"] for row in rows if "actor/sequence_kl" in row]
    assert kls[0] == 0.0 and kls[1] != 0.0
    assert "second copy" not in said
    assert (tmp_path / "run" / "hf" / "adapter_model.safetensors").is_file()
    plain = tiny_policies.merge(config, {"output_dir": str(tmp_path / "plain"), "actor": {"model": {"lora": None}}})
    case = "tests.trainers.lora_cases:held"
    of_lora, of_plain = (run_case(BACKENDS[layout], case, config=c) for c in (config, plain))
    assert set(of_lora) == {"actor"} and set(of_plain) == {"actor", "reference"}
    trained = sum(t.numel() for t in adapter(tmp_path / "run" / "hf").values())
    added = of_lora["actor"] - of_plain["actor"]
    assert added == trained if BACKENDS[layout] == 1 else trained / 2 < added < trained, (
        "the adapters, or a rank's part"
    )


@pytest.mark.parametrize(
    ("reference", "key"),
    [
        ({"update_every": 2}, "reference.update_every"),
        ({"engine": tiny_policies.engine(size=2)}, "reference.engine"),
    ],
)
def test_a_reference_of_its_own_is_a_second_copy(rl_inputs, tmp_path, reference, key):
    """An updated one takes the actor's merged weights."""
    config = rl_config(rl_inputs, tmp_path / "run", reference=reference, train={"steps": 4})
    kind, message, said = ppo(config)
    assert (kind, message) == ("done", ""), message
    assert f"reference: is a second copy of the model, since {key} is set" in said
    kls = [row["actor/sequence_kl"] for row in tiny_policies.metrics_of(tmp_path / "run") if "actor/sequence_kl" in row]
    assert abs(kls[0]) < 1e-5 and (abs(kls[1]) < 1e-4) == ("update_every" in reference), kls


@pytest.mark.nightly
def test_both_references_give_the_same_run(rl_inputs, tmp_path):
    """A second copy of the base, by its path, and the base under the adapters: the same numbers."""
    for name, reference in (("base", {}), ("copy", {"model": {"path": str(rl_inputs / "model")}})):
        config = rl_config(rl_inputs, tmp_path / name, reference=reference, train={"steps": 4})
        assert ppo(config)[:2] == ("done", "")
    assert tiny_policies.metrics_of(tmp_path / "base") == tiny_policies.metrics_of(tmp_path / "copy")


@pytest.mark.slow
def test_ppo_goes_on_bitwise_with_adapters_of_actor_and_critic(rl_inputs, tmp_path):
    changes = {
        "actor": {"model": {"lora": dict(LORA)}}, "critic": {"model": {"lora": {"rank": 2}}}, "train": {"steps": 6},
        "checkpoint": {"every": 1, "keep": None}, "algorithm": {"kl_in": "reward", "kl_coef": 0.1},
    }  # fmt: skip
    whole = tiny_policies.make_config(rl_inputs, tmp_path / "whole", "ppo", **changes)
    assert ppo(whole, "fsdp dp2")[:2] == ("done", "")
    config = whole | {"output_dir": str(tmp_path / "run")}
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "hf")
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000003\n")
    assert ppo(config, "fsdp dp2")[:2] == ("done", "")
    assert tiny_policies.metrics_of(tmp_path / "run") == tiny_policies.metrics_of(tmp_path / "whole")
    ours, theirs = adapter(tmp_path / "run" / "hf"), adapter(tmp_path / "whole" / "hf")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    saved = tmp_path / "run" / "checkpoints" / "step_00000006"
    assert sorted(path.name for path in saved.iterdir() if path.is_dir()) == ["actor", "critic"]
