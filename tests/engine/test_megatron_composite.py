"""The Megatron engine on folders of models of text and more: the text part trains as alone, the rest stays as it is.

Numbers of the text part are those of test_parity_megatron.py, conversions those of tests/convert/test_quantised.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mrl.config.schema import EngineConfig, LoraConfig, TrainedModelConfig
from mrl.config.sections import MTPConfig
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.engine.megatron.checks import MegatronChecks
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from tests.convert.test_quantised import make
from tests.engine import tiny, tiny_composite
from tests.engine.contract import make_engine, train
from tests.engine.harness import run_case
from tests.engine.test_fsdp_composite import tensors_of
from tests.tiers import slow_but

KINDS = ["qwen3_5", "qwen3_5_moe"]
CARRIED = ("model.visual.", "mtp.")
LORA = LoraConfig(rank=2, alpha=4, export="merged", target_modules=("q_proj", "in_proj_qkv", "out_proj", "down_proj"))


def exported(folder, out, steps: int = 2, **fields):
    """Returns the tensors of an export after some steps of the engine."""
    engine = make_engine(tiny.role(str(folder), backend="megatron", **fields))
    train(engine, steps)
    engine.export_hf(str(out))
    return tensors_of(out)


def check(folder, after) -> None:
    """The text part has trained, and all else is as it was."""
    before = tensors_of(folder)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if name.startswith(CARRIED):
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
        else:
            assert after[name].dtype == torch.float32 and after[name].shape == tensor.shape
            assert not torch.equal(after[name], tensor.float()), name


@pytest.mark.parametrize(
    ("kind", "tied", "stacked"),
    slow_but(
        [("qwen3_5", True, True), ("qwen3_5_moe", False, False)],
        [("qwen3_5", True, True), ("qwen3_5_moe", False, False), ("qwen3_5_moe", True, True)],
    ),
)
def test_the_text_part_trains_as_alone(kind, tied, stacked, tmp_path):
    folder = make(tmp_path / "in", kind, tied=tied, stacked=stacked)
    text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text.save_pretrained(tmp_path / "text")
    ours = exported(folder, tmp_path / "out")
    check(folder, ours)
    exported(tmp_path / "text", tmp_path / "text-out")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "text-out")]
    torch.testing.assert_close(*models, rtol=0, atol=0)
    _, found = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"]
    import_hf(folder, tmp_path / "mcore")
    again = exported(tmp_path / "mcore", tmp_path / "again")
    torch.testing.assert_close(again, ours, rtol=0, atol=0)


def export_of_ranks(config, out):
    engine = make_engine(config)
    train(engine, 1)
    engine.export_hf(out)


@pytest.mark.slow
def test_ranks_in_bf16_write_the_folder(tmp_path):
    folder = make(tmp_path / "in", "qwen3_5_moe")
    config = tiny.role(str(folder), backend="megatron", dtype="bfloat16", parallel={"tp": 2, "ep": 2, "pp": 2})
    run_case(4, "tests.engine.test_megatron_composite:export_of_ranks", config=config, out=str(tmp_path / "out"))
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith(CARRIED))
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["text_config"]["dtype"] == "bfloat16"
    assert about["architectures"] == ["Qwen3_5MoeForConditionalGeneration"]


@pytest.mark.parametrize("kind", slow_but(["qwen3_5"], KINDS))
def test_merged_adapters_and_their_folder_over_the_composite(kind, tmp_path):
    """The folder of adapters has peft's names over AutoModelForCausalLM, and merging it makes the merged export."""
    from peft import PeftModel

    folder = make(tmp_path / "in", kind)
    engine = make_engine(tiny.role(str(folder), backend="megatron", model={"lora": LORA}))
    train(engine, 2)
    engine.export_hf(str(tmp_path / "merged"))
    engine.export_adapter(str(tmp_path / "adapter"))
    export_hf(tmp_path / "adapter", tmp_path / "by-convert")
    merged, by_convert = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "by-convert")
    torch.testing.assert_close(by_convert, merged, rtol=0, atol=0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.tensor([[7, 3, 5, 11]])
    torch.testing.assert_close(ours(tokens).logits, peft(tokens).logits, rtol=0, atol=1e-5)


def test_mtp_layers_of_the_whole_are_found_before_a_run(tmp_path):
    """config.json of the whole says how many there are in its text part."""
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5", mtp_num_hidden_layers=1)
    raw = json.loads((tmp_path / "in" / "config.json").read_text())
    model, dims = TrainedModelConfig(path=folder, mtp=MTPConfig()), ParallelDims(world_size=2, pp=2)
    assert "mtp_num_hidden_layers" in raw["text_config"]
    MegatronChecks.check_anywhere(model, EngineConfig(), dims, raw)
    raw["text_config"]["mtp_num_hidden_layers"] = 0
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers of its config.json is 0"):
        MegatronChecks.check_anywhere(model, EngineConfig(), dims, raw)
