"""An export of the FSDP engine is the folder that was given, trained: all of its tensors, under the folder's own names.

The models are of text and more, and transformers trains the text part alone. Numbers of the text part are those of
test_fsdp_parity.py.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from mrl.config.schema import LoraConfig
from mrl.errors import ModelError
from mrl.kernels import delta_rule
from tests.convert.test_quantised import STRAYS
from tests.engine import tiny, tiny_composite
from tests.engine.contract import make_engine, train
from tests.engine.harness import run_case

PACKED = ("llama4", "mllama", "emu3", "qwen3_5")
"""qwen3_5_moe could be. The others have attention of their own, and take one sequence a row."""
IDLE = {
    "mllama": r"layers\.1\.",
    "dots3_note": "indexer|e_score",
    "qwen4_exp": "indexer|ple.norm_conv|_sizes|_offsets|_multipliers",
}
"""What the first step of text leaves as it is: attention to images, the choice of tokens, buffers."""


def tensors_of(folder: str | pathlib.Path) -> dict[str, torch.Tensor]:
    return {name: t for file in pathlib.Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


def trained(engine):
    train(engine, 1)
    return engine


def with_more(folder: str, more: dict[str, torch.Tensor]) -> None:
    """Splits the tensors of a folder, and `more`, over two shards, as large folders are."""
    file = pathlib.Path(folder, "model.safetensors")
    tensors = load_file(file) | more
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, of in shards.items():
        save_file({name: tensors[name] for name in of}, file.with_name(shard), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, of in shards.items() for name in of}}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    file.unlink()


@pytest.mark.parametrize("kind", tiny_composite.KINDS)
def test_an_export_has_the_tensors_of_the_folder_under_their_names(kind, tmp_path):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), kind)
    if kind.startswith("qwen"):  # the kinds that are published with MTP layers
        with_more(folder, {"mtp.fc.weight": torch.randn(32, 64).bfloat16(), "mtp.norm.weight": torch.ones(32)})
    trained(make_engine(tiny.role(folder, packing=kind in PACKED))).export_hf(str(tmp_path / "out"))
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    same = {name for name in before if torch.equal(before[name], after[name])}
    more = {name for name in before if any(word in name for word in ("vis", "vq", "mtp", "audio", "multi_modal"))}
    assert more and more <= same, "the rest is carried over unchanged"
    left = {name for name in same - more if kind not in IDLE or not re.search(IDLE[kind], name)}
    assert not left, "the text part trains"
    _, found = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and all(name.startswith("mtp.") for name in found["unexpected_keys"])


def test_the_text_part_of_an_export_is_what_trained(tmp_path):
    """The same steps on a folder of the text part alone give the same weights."""
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5_moe", tied=True)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(tmp_path / "text")
    text = json.loads((tmp_path / "in" / "config.json").read_text())["text_config"]
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    for source in ("in", "text"):
        trained(make_engine(tiny.role(str(tmp_path / source), packing=False))).export_hf(
            str(tmp_path / f"{source}-out")
        )
    ours, right = (
        AutoModelForCausalLM.from_pretrained(tmp_path / f"{source}-out").state_dict() for source in ("in", "text")
    )
    torch.testing.assert_close(ours, right, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True], ids=["one expert a tensor", "fused experts"])
def test_experts_are_written_as_they_were_stored(fused, tmp_path):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5_moe")
    if fused:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "in" / "model.safetensors")
    engine = trained(make_engine(tiny.role(folder, packing=False)))
    engine.export_hf(str(tmp_path / "out"))
    assert tensors_of(tmp_path / "out").keys() == tensors_of(folder).keys()
    assert any("experts.gate_up_proj" in name for name in tensors_of(folder)) == fused
    assert {name for name, _ in engine.hf_weights()} == {n for n in tensors_of(folder) if "visual" not in n}


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_tied_head_that_is_stored_again_follows_the_embedding(tmp_path, backend):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5", tied=True)
    embedding = tensors_of(folder)["model.language_model.embed_tokens.weight"]
    with_more(folder, {"lm_head.weight": embedding.clone()})
    trained(make_engine(tiny.role(folder, packing=False, backend=backend))).export_hf(str(tmp_path / "out"))
    after = tensors_of(tmp_path / "out")
    assert after.keys() == tensors_of(folder).keys()
    assert torch.equal(after["lm_head.weight"], after["model.language_model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], embedding)


def export(engine_config, folder):
    trained(make_engine(engine_config)).export_hf(folder)


@pytest.mark.slow
def test_two_ranks_in_bf16_with_adapters_write_the_folder(tmp_path):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5")
    lora = LoraConfig(rank=2, alpha=4, export="merged")
    config = tiny.role(folder, packing=False, dtype="bfloat16", model={"lora": lora})
    run_case(2, "tests.engine.test_fsdp_composite:export", engine_config=config, folder=str(tmp_path / "out"))
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {t.dtype for n, t in after.items() if "visual" in n} == {torch.float32}
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["text_config"]["dtype"] == "bfloat16" and about["architectures"] == ["Qwen3_5ForConditionalGeneration"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_value_head_over_the_text_part_is_a_classifier_of_the_whole(tmp_path, backend):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5")
    make_engine(tiny.role(folder, packing=False, head="value", backend=backend)).export_hf(str(tmp_path / "out"))
    model, found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and model.score.weight.shape == (1, 32)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_random_weights_of_the_text_part_have_its_config(tmp_path, backend):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5")
    config = tiny.role(folder, packing=False, optimizer=None, model={"init": "random"}, backend=backend)
    make_engine(config).export_hf(str(tmp_path / "out"))
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model).__name__ == "Qwen3_5ForCausalLM" and not found["missing_keys"] and not found["unexpected_keys"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3_5_text"
    if backend == "fsdp":
        return
    # as transformers starts it: norms of 1 + 0, decays of any head, a convolution of four weights
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            assert weight.eq(1.0 if "linear_attn" in name else 0.0).all(), name
        elif name.endswith("dt_bias"):
            assert weight.eq(1.0).all()
        elif name.endswith("A_log"):
            assert weight.exp().min() >= 0.01 and weight.exp().max() <= 16 and weight.std() > 0
        elif name.endswith("conv1d.weight"):
            assert 0.4 < weight.abs().max() <= 0.5


@pytest.mark.parametrize(("name", "dtype", "why"), STRAYS)
def test_what_is_of_no_part_is_refused(name, dtype, why, tmp_path):
    folder = tiny_composite.make_composite(str(tmp_path / "in"), "qwen3_5")
    with_more(folder, {name: torch.zeros(3, dtype=dtype)})
    with pytest.raises(ModelError, match=why):
        make_engine(tiny.role(folder, packing=False))


def test_on_a_gpu_a_whole_folder_has_the_rule_of_its_text_part(tmp_path):
    engine = make_engine(tiny.role(tiny_composite.make_composite(str(tmp_path), "qwen3_5")))
    engine._device = torch.device("cuda")
    assert delta_rule.NAME in engine.chosen and any("gated delta" in note for note in engine.notes)
