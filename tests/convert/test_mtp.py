"""Layers past the last, which predict further tokens: conversions carry them. Engines leave them unread and say so.

What they compute and how they train: tests/engine/test_mtp.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mrl.config.sections import MTPConfig
from mrl.convert.exporting import export_hf
from mrl.convert.importing import import_hf
from mrl.errors import ModelError
from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, read_hf_config
from tests.convert import hf_folders
from tests.convert.cases import load_folder
from tests.convert.test_refused import invoke, run
from tests.convert.test_runs import train
from tests.convert.test_verify import verify
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.engine.test_quantized import CASES
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies

FAMILIES = ("deepseek_v3", "glm4_moe")
EMBED, HEAD = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"


@pytest.fixture
def folder(hf, tmp_path):
    """`folder(family, layers=1, copies=True, ...)`: a folder with MTP layers, to change at will."""

    def make(family="deepseek_v3", *, layers=1, copies=True, **options):
        shutil.copytree(hf(family, **options), tmp_path / "hf")
        hf_folders.add_mtp(tmp_path / "hf", layers=layers, copies=copies)
        return tmp_path / "hf"

    return make


CASES_OF_ROUND_TRIP = [
    ("deepseek_v3", False, "bfloat16", 2, True),
    ("deepseek_v3", True, "float32", 1, True),
    ("glm4_moe", False, "bfloat16", 1, True),
    ("glm4_moe", True, "float32", 2, False),
]


@pytest.mark.parametrize(("family", "tied", "dtype", "layers", "copies"), CASES_OF_ROUND_TRIP)
def test_the_files_come_back_byte_for_byte(folder, tmp_path, family, tied, dtype, layers, copies):
    source = folder(family, layers=layers, copies=copies, tied=tied, dtype=dtype)
    done = import_hf(source, tmp_path / "mcore", file_bytes=10_000)
    assert done.tensors == len(load_folder(str(source)))
    assert [note for note in done.notes if EMBED in note] == done.notes[: int(copies)]
    code, found = verify(source, tmp_path / "mcore", "--no-logits")
    assert code == 0 and found["same"], found
    export_hf(tmp_path / "mcore", tmp_path / "cut", max_shard_size="15KB")
    assert hf_folders.differences(source, tmp_path / "cut") == []
    export_hf(tmp_path / "mcore", tmp_path / "back")
    before, after = hf_folders.files_of(source), hf_folders.files_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == []


def test_block_fp8(hf, tmp_path):
    """Every projection of the layer in blocks, as published; what is exported is plain, and has the copies."""
    quantise, fields, method, _ = CASES["deepseek_v3"]
    source = hf_folders.make_hf(tmp_path / "hf", "deepseek_v3", dtype="bfloat16", **fields)
    hf_folders.add_mtp(source)
    torch.manual_seed(0)
    stored, plain = quantise(load_folder(str(source)))
    for file in source.glob("model*"):
        file.unlink()
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    done = invoke("import", source, tmp_path / "mcore", "--verify")
    assert done.exit_code == 0, done.output
    export_hf(tmp_path / "mcore", tmp_path / "back")
    written = load_folder(str(tmp_path / "back"))
    assert written.keys() == plain.keys() and {EMBED, HEAD} < written.keys()
    assert [n for n in plain if plain[n].dtype != written[n].dtype or not torch.equal(plain[n], written[n])] == []
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1


def changed(folder, change):
    held = load_file(folder / "model-mtp.safetensors")
    change(held)
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    kept = {n: f for n, f in fields["weight_map"].items() if f != "model-mtp.safetensors"}
    save_file(held, folder / "model-mtp.safetensors", {"format": "pt"})
    index.write_text(json.dumps(fields | {"weight_map": kept | dict.fromkeys(held, "model-mtp.safetensors")}))


REFUSED = {
    "lost": (lambda w: w.pop("model.layers.2.hnorm.weight"), "1 missing (model.layers.2.hnorm.weight)"),
    "lost layer": (lambda w: [w.pop(n) for n in list(w) if n.startswith("model.layers.3.")], "missing (model.layers.3."),
    "unknown": (lambda w: w.update({"model.layers.2.gnorm.weight": torch.zeros(32)}), "1 left over (model.layers.2.gnorm.weight)"),
    "a layer more": (lambda w: w.update({"model.layers.4.enorm.weight": torch.zeros(32)}), "1 left over (model.layers.4.enorm.weight)"),
    "shape": (lambda w: w.update({"model.layers.2.eh_proj.weight": torch.zeros(32, 32)}), "eh_proj.weight is [32, 32], not [32, 64]"),
    "own embedding": (lambda w: w[EMBED].view(torch.int32)[3, 4].bitwise_xor_(1), f"{EMBED} differs from model.embed_tokens.weight"),
    "own head": (lambda w: w.update({HEAD: w[HEAD].bfloat16()}), f"{HEAD} differs from lm_head.weight"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_fit_is_refused_by_name(folder, tmp_path, fault):
    change, words = REFUSED[fault]
    source = folder(layers=2)
    changed(source, change)
    code, said = run("import", source, tmp_path / "out")
    assert code == 2 and words in said and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()


def test_a_stream_may_hold_them(folder):
    """The model that a rank holds has none: they are passed over, and what no such layer has is refused."""
    source = folder()
    config, weights = read_hf_config(source), load_folder(str(source))
    family = family_for(config)
    plain = {n: t for n, t in weights.items() if not n.startswith("model.layers.2.")}
    with_mtp, without = (
        {name: shard for _, name, shard in hf_to_mcore(held.items(), family, ParallelDims(), 0, hf_config=config)}
        for held in (weights, plain)
    )
    assert with_mtp.keys() == without.keys() and not any(name.startswith("mtp.") for name in with_mtp)
    assert all(torch.equal(with_mtp[name], without[name]) for name in without)
    with pytest.raises(ModelError, match="model.layers.2.gnorm.weight: the model has no such tensor"):
        unknown = {**weights, "model.layers.2.gnorm.weight": torch.zeros(2)}
        list(hf_to_mcore(unknown.items(), family, ParallelDims(), 0, hf_config=config))


@pytest.mark.parametrize("mtp", [MTPConfig(), None], ids=["with", "without"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_train_with_them_and_without(folder, tmp_path, family, mtp):
    """From an import. An export without them says that it has none, and transformers loads it."""
    source, out = folder(family, layers=2), tmp_path / "out"
    import_hf(source, tmp_path / "mcore")
    role = tiny.role(str(tmp_path / "mcore"), backend="megatron")
    run_case(1, "tests.convert.cases:start_and_export", config=dataclasses.replace(role, mtp=mtp), out=str(out))
    plain, written = load_folder(str(source)), load_folder(str(out))
    if mtp is None:
        plain = {n: t for n, t in plain.items() if not n.startswith(("model.layers.2.", "model.layers.3."))}
        assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
        _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert run("import", out, tmp_path / "again")[0] == 0
    assert written.keys() == plain.keys() and all(torch.equal(written[n], plain[n]) for n in plain)


def train_and_tell(command: str, path: str) -> str:
    """A case: what a run of `mrl sft` or `mrl ppo` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(command, path)
    return said.getvalue()


def test_a_run_says_so_at_its_start(tmp_path):
    tiny_runs.make_inputs(tmp_path)
    shape = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/model.safetensors").unlink()
    hf_folders.make_hf(tmp_path / "model", "deepseek_v3", vocab=shape["vocab_size"])
    hf_folders.add_mtp(tmp_path / "model")
    config = tiny_runs.make_config(
        tmp_path, tmp_path / "run", train={"steps": 2}, engine={"backend": "megatron", "device": "cpu"}
    )
    path = tiny_runs.write_config(tmp_path / "c.yaml", config)
    lines = run_case(1, "tests.convert.test_mtp:train_and_tell", command="sft", path=str(path)).splitlines()
    [line] = [line for line in lines if "predict further tokens" in line]
    assert "model.path: " in line and "(MTP: model.layers.2." in line
    exported = json.loads((tmp_path / "run/hf/config.json").read_text())
    assert exported["num_nextn_predict_layers"] == 0
    [note] = export_hf(tmp_path / "run", tmp_path / "again").notes
    assert note.startswith(
        f"num_nextn_predict_layers is 0 in config.json: the layers of {tmp_path / 'model'} that predict"
    )
    assert hf_folders.differences(tmp_path / "run/hf", tmp_path / "again") == []
    assert json.loads((tmp_path / "again/config.json").read_text()) == exported


def test_each_role_of_a_ppo_run_says_so(tmp_path):
    """Actor, critic and reference start from one folder; a value head and its export have no such layers either."""
    tiny_policies.make_inputs(tmp_path)
    (tmp_path / "model/model.safetensors").unlink()
    hf_folders.make_hf(tmp_path / "model", "glm4_moe", vocab=tiny_policies.VOCAB)
    hf_folders.add_mtp(tmp_path / "model")
    engine = tiny_policies.engine("megatron")
    config = tiny_policies.make_config(
        tmp_path, tmp_path / "run", "ppo", actor={"engine": engine}, critic={"engine": engine}
    )
    path = tiny_runs.write_config(tmp_path / "c.yaml", config)
    lines = run_case(1, "tests.convert.test_mtp:train_and_tell", command="ppo", path=str(path)).splitlines()
    said = [line.partition(":")[0] for line in lines if "predict further tokens" in line]
    assert said == ["actor.model.path", "critic.model.path", "reference.model.path"]
    export_hf(tmp_path / "run", tmp_path / "critic", role="critic")
    critic = load_folder(str(tmp_path / "critic"))
    assert "score.weight" in critic and not any(name.startswith("model.layers.2.") for name in critic)
    assert json.loads((tmp_path / "critic/config.json").read_text())["num_nextn_predict_layers"] == 0
