"""`mrl convert` of checkpoints that hold adapters, and of folders that peft loads, against what the engines export."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrl.config.schema import LoraConfig
from mrl.convert import exporting, sources, workspace
from mrl.convert.sources import open_any
from mrl.errors import CheckpointError
from tests.convert.test_refused import invoke
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.trainers import tiny_runs

LORA = LoraConfig(rank=4, alpha=6.0)
STACKED = dataclasses.replace(LORA, target_modules=("q_proj", "experts.gate_up_proj", "experts.down_proj"))
"""For gpt_oss, whose experts all-linear leaves alone."""
KINDS = [
    ("llama", "lm", "float32", "fsdp"),
    ("llama", "value", "float32", "fsdp"),
    *(
        pytest.param(*kind, "fsdp", marks=pytest.mark.nightly)
        for kind in (
            ("llama", "lm", "bfloat16"),
            ("qwen3_moe", "lm", "float32"),
        )
    ),
    ("gpt_oss", "lm", "bfloat16", "fsdp"),
    ("deepseek_v3", "lm", "bfloat16", "fsdp"),
    ("llama", "lm", "float32", "megatron"),
    ("deepseek_v3", "lm", "bfloat16", "megatron"),
    pytest.param("gpt_oss", "lm", "float32", "megatron", marks=pytest.mark.nightly),
]


def same(a, b):
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys()
    return all(ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours)


def config_of_a_run(path, base, dtype, lora, **data):
    """What `mrl sft` leaves beside the checkpoints in `path`."""
    model = {"path": base, "dtype": dtype, "lora": dataclasses.asdict(lora)}
    config = tiny_runs.make_config(pathlib.Path(path), path, model=model, data=data)
    tiny_runs.write_config(pathlib.Path(path, "config.yaml"), config)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(base, output_dir of a run over it, with a checkpoint and both exports) of a kind, saved by two ranks."""
    found = {}

    def of(family="llama", head="lm", dtype="float32", backend="fsdp"):
        if (key := (family, head, dtype, backend)) not in found:
            base, path = (str(tmp_path_factory.mktemp(name)) for name in ("base", "run"))
            tiny.make_model(base, family, head=head)
            lora = STACKED if family == "gpt_oss" else LORA
            parallel = {"tp": 2, "ep": 2 if family != "llama" else 1} if backend == "megatron" else {}
            config = tiny.role(base, head=head, dtype=dtype, backend=backend, parallel=parallel, model={"lora": lora})
            run_case(2, "tests.engine.lora:save_and_export", config=config, path=path)
            config_of_a_run(path, base, dtype, lora)
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
        done = invoke("export", path, out, *flags)
        assert done.exit_code == 0, done.output
        if name == "adapter" or backend == "fsdp":
            assert same(out / weights, f"{path}/{name}/{weights}")
            continue
        ours, theirs = load_file(out / weights), load_file(f"{path}/{name}/{weights}")
        assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
        bound = {"float32": 1e-6, "bfloat16": 1e-3}[dtype]
        assert max(tiny.relative_l2(ours[n], theirs[n]) for n in ours) < bound
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["modules_to_save"] == (["score"] if head == "value" else None)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    biases = [tensor for name, tensor in found.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == (family == "deepseek_v3")
    assert all(t.dtype == torch.float32 and not torch.equal(t, t.bfloat16().float()) for t in biases)


def test_verify_knows_adapter_folders(made):
    """A checkpoint, the folder that peft loads and the merged model are the same model, bit for bit, and the base is not."""
    base, path = made()
    for other, code in ((f"{path}/adapter", 0), (f"{path}/merged", 0), (base, 2)):
        done = invoke("verify", f"{path}/checkpoints", other, "--model", base, "--no-logits")
        assert done.exit_code == code, done.output


def flipped(out):
    """The lowest bit of one entry, which no merged bf16 weight would show."""
    file = out / "adapter_model.safetensors"
    held = load_file(file)
    held[sorted(held)[-1]].view(torch.int32)[0, 0] ^= 1
    save_file(held, file, {"format": "pt"})


def edited(**fields):
    def edit(out):
        about = json.loads((out / "adapter_config.json").read_text())
        (out / "adapter_config.json").write_text(json.dumps(about | fields))

    return edit


def exported_then(monkeypatch, change):
    """The adapter folder changes between its export and its comparison."""
    real = exporting.export_adapter

    def then_changes(checkpoint, out, **options):
        done = real(checkpoint, out, **options)
        change(pathlib.Path(out))
        return done

    monkeypatch.setattr(exporting, "export_adapter", then_changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_folder_is_verified_by_what_it_says(made, tmp_path, monkeypatch, dtype):
    """In any dtype of the run, over a base whose files are fp32: tensors, scales and the base that the folder names."""
    base, path = made(dtype=dtype)
    done = invoke("export", path, tmp_path / "right", "--adapter", "--verify")
    assert done.exit_code == 0 and done.stdout.endswith("the same\n"), done.output
    held = load_file(tmp_path / "right/adapter_model.safetensors")
    assert f"tensors  {len(held)} of {len(held)} the same, bit for bit" in done.stdout
    copied, other = tmp_path / "copied", tiny.make_model(str(tmp_path / "other"), "llama", seed=5)
    shutil.copytree(base, copied)
    wrong = {
        "1 entries differ": flipped,
        "scale 1.5 and 1.75": edited(lora_alpha=7.0),
        "base model.embed_tokens.weight: ": edited(base_model_name_or_path=other),
    }
    for n, (says, change) in enumerate(wrong.items()):
        with monkeypatch.context() as patched:
            exported_then(patched, change)
            done = invoke("export", path, tmp_path / str(n), "--adapter", "--verify", "--no-logits")
        assert done.exit_code == 2 and says in done.stdout and "not to be used" in str(done.stderr), (says, done.output)
        assert not (tmp_path / str(n)).exists() and (tmp_path / f"{n}.different").is_dir()
    edited(base_model_name_or_path=str(copied))(tmp_path / "right")  # the same weights in another place
    done = invoke("verify", path, tmp_path / "right", "--no-logits")
    assert done.exit_code == 0, done.output


def test_a_chat_template_that_is_not_there_is_one_line(tmp_path):
    config_of_a_run(tmp_path, "base", "float32", LORA, chat_template="gone.jinja")
    with pytest.raises(CheckpointError, match=r"'gone.jinja' is not there; run this from where the run was started"):
        sources._model_of(tmp_path / "checkpoints" / "step_00000001", None, None, weights=False)


def test_an_adapter_folder_appears_whole(made, tmp_path, monkeypatch):
    """With the run's chat template in it, and every file on disk before the folder has its name."""
    base, path = made()
    run, out, synced = tmp_path / "run", tmp_path / "out", []
    shutil.copytree(path, run)
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    config_of_a_run(run, base, "float32", LORA, chat_template=str(tmp_path / "template.jinja"))
    sync = workspace.fsync_path
    monkeypatch.setattr(workspace, "fsync_path", lambda file: (synced.append((file.name, out.exists())), sync(file)))
    with monkeypatch.context() as patched:
        patched.setattr(exporting, "write_chat_template", interrupted)
        with pytest.raises(KeyboardInterrupt):
            exporting.export_adapter(run, out)
    assert not out.exists() and not synced
    exporting.export_adapter(run, out)
    names = ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]
    assert sorted(file.name for file in out.iterdir()) == names
    assert {(name, False) for name in names} <= set(synced)


def interrupted(*arguments):
    raise KeyboardInterrupt


MORE = {
    "bias": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["norm"]},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "use_dora": {"use_dora": True},
    "target_modules": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize("what", MORE)
def test_an_adapter_that_is_more_than_b_a_is_told_how_to_merge(made, tmp_path, what):
    """The key of adapter_config.json is named, and what the advice makes is a model that mrl takes."""
    base, _ = made("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"} | MORE[what]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**fields))
    adapted.save_pretrained(tmp_path / "adapter")
    done = invoke("export", tmp_path / "adapter", tmp_path / "out")
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"adapter_config.json: {what} " in done.output and "merge_and_unload" in done.output
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    with open_any(tmp_path / "merged"):
        pass


def test_whole_weights_beside_adapters_are_told_how_to_merge(made, tmp_path):
    """peft saves embeddings whole where the vocabulary was resized, which no key of adapter_config.json says."""
    base, _ = made()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    done = invoke("export", tmp_path / "adapter", tmp_path / "out")
    assert done.exit_code == 2 and "merge_and_unload" in done.output


def test_an_adapter_folder_is_exported_merged(made, tmp_path):
    """Of peft's own selection, to the weights of `merge_and_unload`; with the tokenizer and chat template of the adapter,
    which a base model may not have."""
    base, _ = made("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages }}")
    done = invoke("export", tmp_path / "adapter", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, tensor in adapted.merge_and_unload().state_dict().items():
        assert tiny.relative_l2(found[name], tensor) < 1e-6, name


def test_mistakes(made, tmp_path):
    base, path = made()
    other = tiny.make_model(str(tmp_path / "other"), "llama", seed=5)
    whole = str(tmp_path / "whole")
    config = tiny.role(base)
    run_case(1, "tests.engine.lora:save_whole", config=config, path=whole)
    cases = {
        "another base": (("export", f"{path}/checkpoints", tmp_path / "a", "--model", other), "give the base with --model"),
        "another family": (
            ("export", f"{path}/checkpoints", tmp_path / "c", "--model", made("qwen3_moe")[0]), "is another model",
        ),
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
        assert done.exit_code != 0 and says in done.output, (what, done.output)
    assert not any((tmp_path / name).exists() for name in "abc")
