"""HF -> mcore -> HF gives the same files, byte for byte; and engines of every layout start from what lies between.

Not covered here: that the model computes the same logits (tests/convert/test_verify.py, tests/engine/test_parity_megatron.py).
"""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import save_file

from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.converters.families import FAMILIES
from mrl.converters.torch_dist import TorchDistReader
from mrl.engine import checkpoint
from tests.convert import kit
from tests.convert.cases import load_folder
from tests.engine import tiny
from tests.engine.harness import run_case

LAYOUTS = {
    1: [{}, {"backend": "fsdp"}],
    2: [{"parallel": {"tp": 2}}, {"parallel": {"pp": 2}}, {"backend": "fsdp"}],
    4: [{"parallel": {"tp": 4}}, {"parallel": {"tp": 2, "pp": 2}}],
}
MOE_LAYOUTS = {
    1: [{}, {"backend": "fsdp"}],
    2: [{"parallel": {"ep": 2}}, {"parallel": {"tp": 2, "ep": 2, "etp": 1}}, {"backend": "fsdp"}],
    4: [{"parallel": {"tp": 2, "ep": 2, "etp": 2}}, {"parallel": {"tp": 2, "pp": 2, "etp": 2}}],
}
# without what is refused: fsdp where it cannot carry the family, and shards of gpt_oss's experts
MEGATRON_ONLY = ("glm4_moe", "deepseek_v3", "gpt_oss")
NEW_LAYOUTS = {
    1: [{}],
    2: [{"parallel": {"tp": 2, "ep": 2, "etp": 1}}, {"parallel": {"pp": 2}}],
    4: [{"parallel": {"tp": 2, "pp": 2, "etp": 1}}],
}
SIZES = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


def layouts_of(family):
    if family in MEGATRON_ONLY:
        return NEW_LAYOUTS
    return LAYOUTS if family in ("llama", "qwen2") else MOE_LAYOUTS


def test_every_family_of_the_tables_is_here():
    assert {model_type for model_type, _ in tiny.FAMILIES.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_files_come_back_byte_for_byte(hf, tmp_path, family, tied, dtype):
    source = hf(family, tied=tied, dtype=dtype)
    kit.add_companions(source)
    done = import_hf(source, tmp_path / "mcore", file_bytes=10_000)
    assert done.tensors == len(load_folder(str(source)))
    assert len(list((tmp_path / "mcore/mcore").glob("*.distcp"))) > 2
    checkpoint.verify(str(tmp_path / "mcore"))
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = kit.files_of(source), kit.files_of(tmp_path / "back")
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mcore"]


def test_max_shard_size_and_a_single_file(hf, tmp_path):
    source = hf("qwen2")
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "one", max_shard_size="1GB")
    export_hf(tmp_path / "mcore", tmp_path / "many", max_shard_size="12KB")
    assert [p.name for p in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    assert kit.differences(source, tmp_path / "one") == kit.differences(source, tmp_path / "many") == []


def test_tensors_of_several_dtypes_keep_theirs(hf, tmp_path):
    """q, k and v become one tensor in mcore; where they differ in dtype it has one that holds all of them exactly."""
    from safetensors.torch import load_file, save_file

    source = kit.make_hf(tmp_path / "hf", "llama", dtype="bfloat16", shard="1GB")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] = weights["model.layers.1.self_attn.k_proj.weight"].float()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float16)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert kit.differences(source, tmp_path / "back") == []


def test_a_head_that_is_saved_though_it_is_tied(hf, tmp_path):
    from safetensors.torch import load_file, save_file

    source = kit.make_hf(tmp_path / "hf", "llama", tied=True, shard="1GB")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", False), ("qwen2", True), *((f, False) for f in ("qwen3_moe", "mixtral", "olmoe", *MEGATRON_ONLY))],
)
def test_every_layout_starts_from_an_import(hf, tmp_path, size, family, tied):
    source = hf(family, tied=tied)
    import_hf(source, tmp_path / "mcore", file_bytes=10_000)
    found = run_case(
        size,
        "tests.convert.cases:starts_from_import",
        hf=str(source),
        imported=str(tmp_path / "mcore"),
        layouts=layouts_of(family)[size],
    )
    assert found == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", True), ("qwen3_moe", False), ("qwen2_moe", False), *((family, False) for family in MEGATRON_ONLY)],
)
def test_checkpoints_of_every_layout_export(hf, tmp_path, size, family, tied):
    source = hf(family, tied=tied)
    layouts = layouts_of(family)[size]
    named = {f"layout{i}": layout for i, layout in enumerate(layouts)}
    run_case(size, "tests.convert.cases:save_checkpoints", hf=str(source), out=str(tmp_path), layouts=named)
    for name in named:
        export_hf(tmp_path / name, tmp_path / f"hf-{name}", model=str(source))
        saved, written = torch.load(tmp_path / name / "weights.pt"), load_folder(str(tmp_path / f"hf-{name}"))
        assert saved.keys() == written.keys()
        assert [n for n in saved if not torch.equal(saved[n], written[n])] == [], named[name]
        assert kit.differences(source, tmp_path / f"hf-{name}") == []


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_an_import_holds_what_the_engine_itself_saves(hf, tmp_path, family):
    """Keys, of tensors and of the objects that megatron asks for when it loads."""
    source = hf(family)
    tensors, objects = run_case(1, "tests.convert.cases:stored_keys", hf=str(source), out=str(tmp_path / "saved"))
    import_hf(source, tmp_path / "mcore")
    reader = TorchDistReader(tmp_path / "mcore/mcore")
    assert sorted(reader.tensors) == tensors
    assert sorted(reader.objects) == objects


def test_what_is_left_out_is_named(hf, tmp_path):
    """Buffers that follow from config.json, which older versions of transformers saved."""
    source, name = tmp_path / "hf", "model.layers.0.self_attn.rotary_emb.inv_freq"
    shutil.copytree(hf("llama", shard="1GB"), source)
    held = load_folder(str(source))
    save_file(held | {name: torch.ones(4)}, source / "model.safetensors", {"format": "pt"})
    assert import_hf(source, tmp_path / "mcore").notes == [f"{name}: not stored, as it follows from the rest"]
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert load_folder(str(tmp_path / "back")).keys() == held.keys()
    assert import_hf(hf("llama", shard="1GB"), tmp_path / "plain").notes == []


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_value_model_comes_back_with_its_own_config(tmp_path, tied):
    source = pathlib.Path(tiny.make_model(str(tmp_path / "hf"), "qwen2", head="value", tied=tied))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"id2label": {"0": "good"}, "label2id": {"good": 0}}))
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = kit.files_of(source), kit.files_of(tmp_path / "back")
    assert before == after
