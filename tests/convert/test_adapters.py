"""`mrl convert` of checkpoints that hold adapters, and of folders that peft loads, against what the engines export."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.cli import main
from mrl.config.schema import LoraConfig
from mrl.convert.opening import open_any
from tests.engine import tiny
from tests.engine.harness import run_case

LORA = LoraConfig(rank=4, alpha=6.0)
STACKED = dataclasses.replace(LORA, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
"""For gpt_oss, whose experts all-linear leaves alone."""
KINDS = [
    ("llama", "lm", "float32", "fsdp"),
    ("llama", "lm", "bfloat16", "fsdp"),
    ("llama", "value", "float32", "fsdp"),
    ("qwen3_moe", "lm", "float32", "fsdp"),
    ("gpt_oss", "lm", "float32", "fsdp"),
    ("gpt_oss", "lm", "bfloat16", "fsdp"),
    ("llama", "lm", "float32", "megatron"),
    pytest.param("llama", "value", "float32", "megatron", marks=pytest.mark.slow),
    pytest.param("qwen3_moe", "lm", "float32", "megatron", marks=pytest.mark.slow),
    pytest.param("gpt_oss", "lm", "float32", "megatron", marks=pytest.mark.slow),
]


def invoke(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


def same(a, b):
    ours, theirs = load_file(a), load_file(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(base, folder with a checkpoint of it and both exports) of a kind, saved by two ranks."""
    found = {}

    def of(family="llama", head="lm", dtype="float32", backend="fsdp"):
        if (key := (family, head, dtype, backend)) not in found:
            base, path = (str(tmp_path_factory.mktemp(name)) for name in ("base", "run"))
            tiny.make_model(base, family, head=head)
            lora = STACKED if family == "gpt_oss" else LORA
            parallel = {"tp": 2, "ep": 2 if family != "llama" else 1} if backend == "megatron" else {}
            config = tiny.role(base, head=head, dtype=dtype, backend=backend, parallel=parallel, model={"lora": lora})
            run_case(2, "tests.engine.lora:save_and_export", config=config, path=path)
            found[key] = base, path
        return found[key]

    return of


@pytest.mark.parametrize(("family", "head", "dtype", "backend"), KINDS)
def test_an_export_is_what_the_engine_exports(made, tmp_path, family, head, dtype, backend):
    """To the bit where the engine adds up whole matrices, as a conversion does; a tensor-parallel rank adds up its rows."""
    base, path = made(family, head, dtype, backend)
    for flags, name, weights in (
        ([], "merged", "model.safetensors"),
        (["--adapter"], "adapter", "adapter_model.safetensors"),
    ):
        out = tmp_path / name
        done = invoke("export", f"{path}/checkpoints", out, "--model", base, *flags)
        assert done.exit_code == 0, done.output
        if name == "adapter" or (dtype, backend) == ("float32", "fsdp"):
            assert same(out / weights, f"{path}/{name}/{weights}")
        elif dtype == "float32":  # without the run's config.yaml a model is written in fp32, whatever its dtype was
            ours, theirs = load_file(out / weights), load_file(f"{path}/{name}/{weights}")
            assert ours.keys() == theirs.keys()
            assert max(tiny.relative_l2(ours[n], theirs[n]) for n in ours) < 1e-6


def test_verify_knows_adapter_folders(made):
    """A checkpoint, the folder that peft loads and the merged model are the same model, bit for bit, and the base is not."""
    base, path = made()
    for other, code in ((f"{path}/adapter", 0), (f"{path}/merged", 0), (base, 2)):
        done = invoke("verify", f"{path}/checkpoints", other, "--model", base, "--no-logits")
        assert done.exit_code == code, done.output


def test_a_folder_that_peft_wrote(made, tmp_path):
    """Its selection is peft's own, and the weights are those of `merge_and_unload`."""
    base, _ = made("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    merged = adapted.merge_and_unload()
    expected = tiny._file_names(merged, {name: p.detach() for name, p in merged.named_parameters()})
    with open_any(tmp_path) as source:
        assert source.reader.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tiny.relative_l2(source.reader.tensor(name), tensor) < 1e-6, name


def test_mistakes(made, tmp_path):
    base, path = made()
    other = tiny.make_model(str(tmp_path / "other"), "llama", seed=5)
    whole = str(tmp_path / "whole")
    config = tiny.role(base)
    run_case(1, "tests.engine.lora:save_whole", config=config, path=whole)
    cases = {
        "another base": (("export", f"{path}/checkpoints", tmp_path / "a", "--model", other), "give the base with --model"),
        "no adapters": (("export", whole, tmp_path / "b", "--model", base, "--adapter"), "--adapter: "),
        "shards": (
            ("export", f"{path}/checkpoints", tmp_path / "c", "--adapter", "--max-shard-size", "1GB"), "--max-shard-size: ",
        ),
        "an adapter's base": (
            ("verify", f"{path}/adapter", base, "--model", made("qwen3_moe")[0], "--no-logits"), "give the base with --model",
        ),
    }  # fmt: skip
    for what, (arguments, says) in cases.items():
        done = invoke(*arguments)
        text = str(done.exception) + done.output
        assert done.exit_code != 0 and says in text, (what, text)
    assert not any((tmp_path / name).exists() for name in "abc")
