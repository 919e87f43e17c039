"""Which modules get adapters, what they start from, and the folder: against peft on the same models."""

from __future__ import annotations

import copy
import json
import math

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.config.schema import LoraConfig
from mrl.engine.lora.folder import adapters, read_adapter, write_adapter
from mrl.engine.lora.selection import injection, shapes_of_folder
from mrl.engine.lora.shapes import AdapterShape, deinterleave, initial_a, interleave, join_experts
from mrl.errors import ConfigError, ModelError
from tests.engine import lora as cases

SELECTIONS = {
    "all-linear": ({"target_modules": "all-linear"}, "all-linear"),
    "list": ({"target_modules": ["q_proj", "o_proj"]}, ("q_proj", "o_proj")),
    "expression": ({"target_modules": r".*layers\.1\.self_attn\.o_proj"}, r".*layers\.1\.self_attn\.o_proj"),
    "experts": (
        {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        ("o_proj", "experts.gate_up_proj", "experts.down_proj"),
    ),
}


@pytest.mark.parametrize(
    ("family", "selection"),
    [
        ("llama", "list"), ("llama", "expression"), ("qwen3_moe", "all-linear"), ("qwen3_moe", "experts"),
        *(pytest.param(family, "all-linear", marks=pytest.mark.nightly) for family in ("deepseek_v3", "qwen3_5_moe")),
        pytest.param("gpt_oss", "experts", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_selection_means_what_it_means_in_peft(folder, tmp_path, family, selection):
    """Names, shapes and logits: peft's own injection with the same selection, given our values, and the folder that we write."""
    given, ours = copy.deepcopy(SELECTIONS[selection])
    lora = LoraConfig(rank=3, alpha=5.0, target_modules=ours)
    config = peft.LoraConfig(r=3, lora_alpha=5.0, task_type="CAUSAL_LM", **given)
    base = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32, attn_implementation="eager")
    model = peft.get_peft_model(base, config)
    named = peft.get_peft_model_state_dict(model)
    expected = {name: tuple(tensor.shape) for name, tensor in named.items()}
    shapes = adapters(folder(family), lora, "lm").values()
    assert {s.a_name: s.a_shape for s in shapes} | {s.b_name: s.b_shape for s in shapes} == expected
    tensors = cases.random_adapter(folder(family), lora)
    peft.set_peft_model_state_dict(model, tensors)
    write_adapter(tmp_path, lora, folder(family), tensors.items())
    loaded = cases.peft_model(folder(family), str(tmp_path))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_experts_and_routers_can_be_excluded(folder):
    """all-linear takes in both, and peft's own exclude_modules would not know them."""
    everything = adapters(folder("qwen3_moe"), LoraConfig(), "lm")
    assert {name.rpartition(".")[2] for name in everything} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj",
    }  # fmt: skip
    without = adapters(folder("qwen3_moe"), LoraConfig(exclude_modules=("experts", "mlp.gate", "k_proj")), "lm")
    assert {name.rpartition(".")[2] for name in without} == {"q_proj", "v_proj", "o_proj"}
    by_expression = adapters(folder("qwen3_moe"), LoraConfig(exclude_modules=r".*\.mlp\..*"), "lm")
    assert {name.rpartition(".")[2] for name in by_expression} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_what_peft_draws_is_drawn_from_no_run(folder):
    """Else the dropout of a process's first run would be other than that of a later one, which finds the answer kept."""
    injection.cache_clear()
    before = torch.get_rng_state()
    adapters(folder("llama"), LoraConfig(rank=3), "lm")
    assert torch.equal(torch.get_rng_state(), before)


def test_scales(folder):
    def scale(**fields):
        return next(iter(adapters(folder("llama"), LoraConfig(**fields), "lm").values())).scale

    assert scale(rank=4, alpha=6.0) == 1.5
    assert scale(rank=4, alpha=6.0, rslora=True) == 3.0
    fused = adapters(folder("qwen3_moe"), LoraConfig(rank=4, alpha=6.0), "lm")
    assert {shape.scale for shape in fused.values()} == {1.5}, "twice the rank and twice the alpha for gate and up"


def test_a_starts_as_in_peft_and_follows_from_seed_and_name(folder):
    shapes = list(adapters(folder("llama"), LoraConfig(rank=8), "lm").values())
    first, second = initial_a(shapes[0], 0), initial_a(shapes[1], 0)
    assert torch.equal(first, initial_a(shapes[0], 0))
    assert not torch.equal(first, initial_a(shapes[0], 1)) and not torch.equal(first, second)
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    theirs = torch.cat([p.detach().flatten() for n, p in model.named_parameters() if "lora_A" in n and "q_proj" in n])
    ours = torch.cat([initial_a(s, 0).flatten() for s in shapes if "q_proj" in s.name])
    bound = 1 / math.sqrt(32)
    for values in (theirs, ours):
        assert values.abs().max() <= bound and values.abs().max() > 0.95 * bound
        assert abs(values.std() - bound / math.sqrt(3)) < 0.05 * bound


@pytest.mark.parametrize(
    ("family", "lora", "key", "says"),
    [
        ("llama", {"target_modules": "q_proj"}, "", "q_proj not found"),
        ("llama", {"target_modules": "(["}, "", "unterminated character set"),
        ("llama", {"target_modules": ("q_proj", "zzz")}, ".target_modules", '"zzz" matches no module'),
        ("llama", {"target_modules": ("lm_head",)}, ".target_modules", "takes in lm_head"),
        ("llama", {"target_modules": ("embed_tokens",)}, ".target_modules", "takes in model.embed_tokens"),
        ("llama", {"exclude_modules": ("nope",)}, ".exclude_modules", '"nope" matches no module'),
        ("qwen3_moe", {"dropout": 0.1}, "", "does not work with lora_dropout"),
        ("qwen3_moe", {"target_modules": ("gate_proj", "down_proj")}, "", "without also targeting up_proj"),
    ],
)
def test_mistakes(folder, family, lora, key, says):
    with pytest.raises(ConfigError) as caught:
        adapters(folder(family), LoraConfig(**lora), "lm")
    message = str(caught.value)
    assert message.startswith(f"model.lora{key}: ") and says in message and "\n" not in message, message


def test_a_folder_is_whole_or_no_folder(folder, tmp_path):
    """Without adapter_config.json, which is written last, nothing takes it for an adapter."""
    lora = LoraConfig(rank=2, target_modules=("q_proj",))
    tensors = cases.random_adapter(folder("llama"), lora)
    write_adapter(tmp_path, lora, folder("llama"), tensors.items())
    about, found = read_adapter(tmp_path)
    assert about["r"] == 2 and about["base_model_name_or_path"] == folder("llama")
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], tensors[n]) for n in tensors)
    assert found.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()

    def ends():
        yield from list(tensors.items())[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_adapter(tmp_path / "new", lora, folder("llama"), ends())
    with pytest.raises(ModelError, match="has no adapter_config.json"):
        read_adapter(tmp_path / "new")
    (tmp_path / "adapter_config.json").write_text(json.dumps(about)[:-5])
    with pytest.raises(ModelError, match="not readable as JSON"):
        read_adapter(tmp_path)


KEPT, CHANGED = (True, "gaussian", "mica"), ("pissa", "olora")


@pytest.mark.parametrize("init", [*KEPT, *CHANGED])
def test_an_adapter_whose_base_was_changed_is_refused(folder, tmp_path, init):
    """B A of some inits is right over weights that peft took it out of, and those are nowhere: its own injection shows which."""
    base = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    )
    after = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().named_parameters()}
    changed = any(not torch.equal(p, after[name]) for name, p in before.items())
    assert changed == (init in CHANGED)
    model.save_pretrained(tmp_path)
    if not changed:
        assert len(shapes_of_folder(str(tmp_path), folder("llama"))[0]) == 4
        return
    with pytest.raises(ModelError) as caught:
        shapes_of_folder(str(tmp_path), folder("llama"))
    assert f"init_lora_weights '{init}' changed the base" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora makes more of it"),
        ({"lora_bias": True}, "lora_bias makes more of it"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"target_modules": ["nothing"]}, "does not fit the model in"),
        ({"init_lora_weights": "eva"}, None),
    ],
)
def test_what_is_no_plain_adapter(folder, tmp_path, fields, says):
    lora = LoraConfig(rank=2, target_modules=("q_proj",))
    write_adapter(tmp_path, lora, folder("llama"), cases.random_adapter(folder("llama"), lora).items())
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(about | fields))
    if says is None:
        assert len(shapes_of_folder(str(tmp_path), folder("llama"))[0]) == 2
        return
    with pytest.raises(ModelError) as caught:
        shapes_of_folder(str(tmp_path), folder("llama"))
    assert says in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_tensors_of_experts_are_split_and_joined_to_the_bit():
    shape = AdapterShape("experts", "experts", in_features=5, out_features=6, rank=2, scale=1.0, experts=3)
    a, b = torch.randn(shape.a_shape), torch.randn(shape.b_shape)
    a_ERI, b_EOR = shape.split(a, "A"), shape.split(b, "B")
    assert a_ERI.shape == (3, 2, 5) and b_EOR.shape == (3, 6, 2)
    assert torch.equal(a_ERI[1], a[2:4]), "rows of expert 0 first, then those of expert 1"
    assert torch.equal(b_EOR[1], b[:, 1::3]), "column r of expert e is r * E + e"
    assert torch.equal(join_experts(a_ERI, "A"), a) and torch.equal(join_experts(b_EOR, "B"), b)
    parts = interleave(b_EOR, 2)
    assert torch.equal(parts[:, ::2], b_EOR[:, :3]) and torch.equal(parts[:, 1::2], b_EOR[:, 3:])
    assert torch.equal(deinterleave(parts, 2), b_EOR)
