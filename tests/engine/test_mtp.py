"""MTP layers that train: loss, gradients and weights against the paper's equations in plain torch, in every layout."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from mrl.config.sections import MTPConfig, PolicyMTPConfig
from mrl.convert.exporting import export_hf
from mrl.engine.megatron.checks import mtp_layers
from mrl.engine.stored_weights import stored_weights
from mrl.errors import ConfigError, ModelError
from mrl.parallel import ParallelDims
from mrl.weights import family_for, read_hf_config
from tests.convert.cases import load_folder
from tests.engine import mtp, tiny
from tests.engine.harness import run_case
from tests.tiers import in_tiers, slow_but

WEIGHT = 0.3
LAYOUTS = [
    ("deepseek_v3", 1, 1, {}, {"tokens": 64}),
    ("glm4_moe", 2, 1, {}, {"size": 2, "packing": False}),
    ("deepseek_v3", 1, 2, {"pp": 2}, {"size": 2}),
    ("deepseek_v3", 2, 2, {"tp": 2}, {"tokens": 64}),
    ("glm4_moe", 1, 2, {"cp": 2}, {"tokens": 64}),
    ("glm4_moe", 2, 2, {}, {"size": 1}),
    ("deepseek_v3", 1, 2, {"ep": 2}, {"size": 2}),
    ("qwen3_5", 1, 2, {"cp": 2}, {"tokens": 64}),
    ("qwen3_5_moe", 1, 2, {"pp": 2}, {"size": 2}),
    ("qwen3_5", 1, 2, {"tp": 2}, {"size": 4}),
    ("deepseek_v3", 2, 2, {"pp": 2, "vpp": 2}, {"size": 2}),
    ("deepseek_v3", 1, 4, {"tp": 2, "pp": 2}, {"size": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(
    "family, layers, world, parallel, cut", in_tiers(LAYOUTS[:1], LAYOUTS[-3:-1] + LAYOUTS[7:8], LAYOUTS), ids=str
)
def test_one_step_is_the_papers(tmp_path, family, layers, world, parallel, cut):
    deep = {"num_hidden_layers": 2 * parallel["vpp"]} if "vpp" in parallel else {}
    folder = mtp.make_model(str(tmp_path / "model"), family, layers=layers, **deep)
    config = tiny.role(folder, backend="megatron", parallel=parallel, **cut)
    config = dataclasses.replace(config, mtp=MTPConfig(loss_weight=WEIGHT))
    found = run_case(world, "tests.engine.mtp:step", config=config, calls=2)
    loss, mtp_loss, gradients = mtp.reference(folder, tiny.uneven_batch(0), WEIGHT)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["mtp_loss"] == pytest.approx(mtp_loss, rel=1e-6)
    assert found["gradients"].keys() == gradients.keys()
    off = {name: tiny.relative_l2(found["gradients"][name], gradients[name]) for name in gradients}
    assert max(off.values()) < 1e-5, off
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
    assert found["norm"] == pytest.approx(float(norm), rel=1e-5)


DETACHED = [
    ("deepseek_v3", 2, 1, {}, {"size": 1}),
    ("glm4_moe", 1, 1, {}, {"size": 2, "packing": False, "recompute": "full"}),
    ("glm4_moe", 2, 2, {"tp": 2}, {"tokens": 64}),
    ("deepseek_v3", 1, 2, {"pp": 2}, {"size": 2, "recompute": "full"}),
    ("deepseek_v3", 2, 2, {"cp": 2}, {"tokens": 64}),
    ("glm4_moe", 1, 2, {}, {"size": 1}),
    ("deepseek_v3", 1, 2, {"ep": 2}, {"size": 2}),
    ("deepseek_v3", 1, 2, {"pp": 2, "vpp": 2}, {"size": 2}),
    ("deepseek_v3", 1, 4, {"pp": 2}, {"size": 2, "megatron": {"overlap_grad_reduce": True, "bucket_size": 2000}}),
]


@pytest.mark.parametrize(
    "family, layers, world, parallel, cut",
    in_tiers(DETACHED[:1], [DETACHED[2], DETACHED[7]], DETACHED),
    ids=str,
)
def test_detached_they_train_beside_a_model_that_does_not_know_of_them(tmp_path, family, layers, world, parallel, cut):
    """The model's gradients are to the bit those without MTP layers, theirs those of plain torch. Each have a norm and a
    clipping of their own (0.01, below both), so that weights after three steps are the same, too: to the bit where no
    sum over data-parallel ranks lies between."""
    deep = {"num_hidden_layers": 2 * parallel["vpp"]} if "vpp" in parallel else {}
    folder = mtp.make_model(str(tmp_path / "model"), family, layers=layers, **deep)
    config = tiny.role(folder, backend="megatron", parallel=parallel, **cut)
    # eps so large that updates are as large as gradients
    clipped = dataclasses.replace(config.optimizer, clip_grad=0.01, eps=1.0, lr=1.0, weight_decay=0.0)
    config = dataclasses.replace(config, mtp=PolicyMTPConfig(loss_weight=WEIGHT), optimizer=clipped)
    found, without = run_case(world, "tests.engine.mtp:apart", config=config)
    loss, mtp_loss, gradients = mtp.reference(folder, tiny.uneven_batch(0), WEIGHT, detach=True)
    assert found["loss"] == without["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["mtp_loss"] == pytest.approx(mtp_loss, rel=1e-6)
    assert found["gradients"].keys() == gradients.keys() > without["gradients"].keys()
    assert all(torch.equal(found["gradients"][name], value) for name, value in without["gradients"].items())
    own = gradients.keys() - without["gradients"].keys()
    off = {name: tiny.relative_l2(found["gradients"][name], gradients[name]) for name in own}
    assert max(off.values()) < 1e-5, off
    replicas = world > parallel.get("tp", 1) * parallel.get("pp", 1)
    assert found["norm"] == (pytest.approx(without["norm"], rel=1e-6) if replicas else without["norm"])
    far = {name: tiny.relative_l2(found["weights"][name], value) for name, value in without["weights"].items()}
    assert max(far.values()) <= (1e-6 if replicas else 0.0), far
    start, first = load_folder(folder), found["first"]
    for names in (own, without["gradients"].keys()):
        moved = torch.stack([(first[name] - start[name]).double().square().sum() for name in names]).sum().sqrt()
        assert moved == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(
    "world, parallel, others", slow_but([(1, {}, [])], [(1, {}, []), (2, {"pp": 2}, [{"tp": 2}, {}])]), ids=str
)
def test_a_resumed_run_goes_on_to_the_bit_and_exports_them(tmp_path, world, parallel, others):
    """With copies of embedding and output layer in each, as the folder had them; in other layouts within rounding."""
    folder = mtp.make_model(str(tmp_path / "model"), "deepseek_v3", layers=2)
    config = tiny.role(folder, backend="megatron", parallel=parallel, size=2, dtype="float32")
    config = dataclasses.replace(config, mtp=MTPConfig())
    found = run_case(world, "tests.engine.mtp:resumes", config=config, out=str(tmp_path / "out"), parallel=others)
    assert found["far"].pop("losses") == 0 and all(far < 1e-4 for far in found["far"].values()), found["far"]
    before, after = load_folder(folder), load_folder(str(tmp_path / "out/hf"))
    assert after.keys() == before.keys()
    copies = {name for name in before if "embed_tokens" in name or name.endswith("head.weight")}
    assert all(torch.equal(after[name], found["weights"][name]) for name in after.keys() - copies)
    assert torch.equal(after["model.layers.3.shared_head.head.weight"], found["weights"]["lm_head.weight"])
    assert torch.equal(after["model.layers.3.embed_tokens.weight"], found["weights"]["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out/hf/config.json").read_text())["num_nextn_predict_layers"] == 2
    if world == 1:
        kept = {"checkpoint": str(tmp_path / "out/step_00000001"), "folder": folder}
        assert load_folder(exported(tmp_path / "again", **kept)).keys() == before.keys()


def test_those_of_qwen3_5_come_from_the_run_where_they_train_and_from_the_folder_elsewhere(tmp_path):
    folder = mtp.make_model(str(tmp_path / "model"), "qwen3_5")
    for trains in (True, False):
        out = tmp_path / str(trains)
        config = tiny.role(folder, backend="megatron", size=4)
        config = dataclasses.replace(config, mtp=MTPConfig() if trains else None)
        found = run_case(1, "tests.engine.mtp:resumes", config=config, out=str(out), parallel=[])
        before, after = load_folder(folder), load_folder(str(out / "hf"))
        assert after.keys() == before.keys()
        own = {name for name in before if name.startswith("mtp.")}
        assert len(own) == 15 and (own <= found["weights"].keys()) == trains
        again = load_folder(exported(out / "again", checkpoint=str(out / "step_00000001"), folder=folder))
        assert again.keys() == before.keys()
        for name in own:
            assert torch.equal(after[name], found["weights"][name] if trains else before[name]), name
            assert torch.equal(again[name], before[name]) != trains, name


def exported(out, *, checkpoint, folder):
    export_hf(checkpoint, out, model=folder)
    return str(out)


REFUSED = {
    "no MTP layers": ({"num_nextn_predict_layers": 0}, {}, False, "config.json is 0"),
    "adapters": ({}, {}, True, "model.lora adapters alone"),
    "tied": ({"tie_word_embeddings": True}, {"pp": 2}, False, "engine.parallel.pp: value 2 "),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_train_is_refused(fault):
    fields, parallel, lora, words = REFUSED[fault]
    fields = {"model_type": "glm4_moe", "num_nextn_predict_layers": 1, "tie_word_embeddings": False} | fields
    with pytest.raises(ConfigError, match=words):
        mtp_layers(fields, ParallelDims(world_size=2, **parallel), lora=lora)


def test_a_folder_without_those_that_it_announces_is_refused(tmp_path):
    folder = mtp.make_model(str(tmp_path / "model"), "glm4_moe")
    tensors = load_folder(folder)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(kept, tmp_path / "model/model.safetensors", {"format": "pt"})
    family, hf = family_for(read_hf_config(folder)), read_hf_config(folder)
    weights = stored_weights(folder, family, hf, head="lm", trained=True, mtp=1)
    with pytest.raises(ModelError, match=r"lacks .*model\.layers\.2\..* of its MTP layers; leave out"), weights:
        pass
