"""HF -> mcore -> HF gives the same files, byte for byte; and engines of every layout start from what lies between.

The same round trip through the shards of every rank, of every family, tied and not, in fp32 and bf16, in every layout, is in
tests/weights/test_round_trip.py; what engines compute beyond logits in tests/engine/test_parity_megatron.py.
"""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.engine import atomic_checkpoint
from mrl.engine.torch_dist.reader import TorchDistReader
from mrl.weights.families import FAMILIES
from tests.convert import hf_folders
from tests.convert.cases import load_folder
from tests.engine import tiny
from tests.engine.harness import run_case

TP2, PP2 = {"tp": 2}, {"pp": 2}
# by number of processes
LAYOUTS = {1: [{}], 2: [TP2, PP2 | {"vpp": 2}], 4: [{"tp": 4}]}
LAYOUTS_OF_EXPERTS = {1: [{}], 2: [TP2 | {"ep": 2, "etp": 1}, PP2 | {"vpp": 2}]}
DENSE = ("llama", "llama3", "mistral", "qwen2", "qwen3", "qwen3_5")
AT_TP1, ELSEWHERE = 5e-6, 2e-5
"""Largest difference of fp32 logits from Hugging Face's, on one process and in other layouts: sums in another order."""
FIELDS = {"qwen3_moe": {"mlp_only_layers": [1, 2]}}  # dense layers among sparse ones, here too
# family, tied, dtype
STARTS = [(family, False, "float32") for family in tiny.FAMILIES] + [
    ("llama", True, "float32"), ("qwen3_moe", True, "float32"), ("qwen2", True, "bfloat16"), ("deepseek_v3", False, "bfloat16"),
]  # fmt: skip
EXPORTS = [
    ("qwen2", True),
    *((family, False) for family in ("qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3", "gpt_oss")),
]


def with_layouts(models: list[tuple], sizes: tuple[int, ...]) -> list:
    """(*model, processes, layouts) for each number of processes. A dense family and one with experts are in `make test`,
    a latent one, one with stacks and one with delta nets in CI, all others in the night."""
    found = []
    for model in models:
        marks = []
        if model[0] not in ("llama", "qwen3_moe"):
            marks = [pytest.mark.slow if model[0] in ("deepseek_v3", "gpt_oss", "qwen3_5") else pytest.mark.nightly]
        for size in (*sizes, 4) if model[0] == "llama" else sizes:  # 4: above the key heads
            degrees = (LAYOUTS if model[0] in DENSE else LAYOUTS_OF_EXPERTS)[size]
            found.append(
                pytest.param(
                    *model,
                    size,
                    degrees,
                    marks=[*marks, *[pytest.mark.nightly] * (size == 4)],
                    id="-".join(map(str, (*model, size))),
                )
            )
    return found


VARIANTS = [(tied, dtype) for tied in (False, True) for dtype in ("float32", "bfloat16")]
ONE_EACH = [(family, *VARIANTS[i % 4]) for i, family in enumerate(tiny.FAMILIES)]


def test_every_family_of_the_tables_is_here():
    assert {model_type for model_type, _ in tiny.FAMILIES.values()} == set(FAMILIES)


@pytest.mark.parametrize(("family", "tied", "dtype"), ONE_EACH)
def test_the_files_come_back_byte_for_byte(hf, tmp_path, family, tied, dtype):
    source = hf(family, tied=tied, dtype=dtype)
    hf_folders.add_companions(source)
    done = import_hf(source, tmp_path / "mcore", file_bytes=10_000)
    assert done.tensors == len(load_folder(str(source)))
    assert len(list((tmp_path / "mcore/mcore").glob("*.distcp"))) > 2
    atomic_checkpoint.verify(str(tmp_path / "mcore"))
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = hf_folders.files_of(source), hf_folders.files_of(tmp_path / "back")
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "mcore"]


def test_tensors_of_several_dtypes_keep_theirs(hf, tmp_path):
    """q, k and v become one tensor in mcore; where they differ in dtype it has one that holds all of them exactly."""
    source = hf_folders.make_hf(tmp_path / "hf", "llama", dtype="bfloat16", shard="1GB")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] = weights["model.layers.1.self_attn.k_proj.weight"].float()
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float16)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert hf_folders.differences(source, tmp_path / "back") == []


def test_a_head_that_is_saved_though_it_is_tied(hf, tmp_path):
    source = hf_folders.make_hf(tmp_path / "hf", "llama", tied=True, shard="1GB")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def start(hf, tmp_path_factory):
    """`start(family, tied, dtype)`: a folder of four layers, what it imports to, tokens, and transformers' logits of them."""
    made = {}

    def get(family: str, tied: bool, dtype: str):
        if (family, tied, dtype) not in made:
            source = hf(family, tied=tied, dtype=dtype, layers=4, **FIELDS.get(family, {}))
            imported = tmp_path_factory.mktemp("import") / "mcore"
            import_hf(source, imported, file_bytes=10_000)
            tokens = torch.randint(tiny.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0]
            paths = {"hf": str(source), "imported": str(imported)}
            made[family, tied, dtype] = {**paths, "tokens": tokens, "logits": logits}
        return made[family, tied, dtype]

    return get


@pytest.mark.parametrize(("family", "tied", "dtype", "size", "degrees"), with_layouts(STARTS, (1, 2)))
def test_every_layout_starts_from_an_import(start, family, tied, dtype, size, degrees):
    """Weights bit for bit, and in fp32 logits within the bounds of Hugging Face's."""
    layouts = [{"parallel": each, "dtype": dtype} for each in degrees]
    far = run_case(size, "tests.convert.cases:starts_from_import", layouts=layouts, **start(family, tied, dtype))
    assert len(far) == len(layouts)
    bound = AT_TP1 if size == 1 else ELSEWHERE
    if dtype == "float32":
        assert {layout: distance for layout, distance in far.items() if not distance < bound} == {}


@pytest.mark.parametrize(("family", "tied", "size", "degrees"), with_layouts(EXPORTS, (2,)))
def test_checkpoints_of_every_layout_export(hf, tmp_path, family, tied, size, degrees):
    source = hf(family, tied=tied, layers=4)
    named = {f"layout{i}": {"parallel": each} for i, each in enumerate(degrees)}
    run_case(size, "tests.convert.cases:save_checkpoints", hf=str(source), out=str(tmp_path), layouts=named)
    for name in named:
        export_hf(tmp_path / name, tmp_path / f"hf-{name}", model=str(source))
        saved, written = torch.load(tmp_path / name / "weights.pt"), load_folder(str(tmp_path / f"hf-{name}"))
        assert saved.keys() == written.keys()
        assert [n for n in saved if not torch.equal(saved[n], written[n])] == [], named[name]
        assert hf_folders.differences(source, tmp_path / f"hf-{name}") == []


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
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


def test_a_value_model_comes_back_with_its_own_config(tmp_path):
    source = pathlib.Path(tiny.make_model(str(tmp_path / "hf"), "qwen2", head="value", tied=True))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"id2label": {"0": "good"}, "label2id": {"good": 0}}))
    import_hf(source, tmp_path / "mcore")
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = hf_folders.files_of(source), hf_folders.files_of(tmp_path / "back")
    assert before == after
