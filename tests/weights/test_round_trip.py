"""HF -> shards of every rank -> HF, bit for bit, for every family, tied and not, in fp32 and bf16, in every layout.

Covers names, slices and coordinates. Not covered here: that megatron-core's modules have these names and mean
these rows by them (the engine's parity tests compare logits and gradients with Hugging Face).

Folders with stacked experts (`save_original_format=False`) are the same model under the table's names.

`hf_to_mcore` and `mcore_to_hf`: whose memory shards are, and streams that are not the model.

Their numbers: test_properties.py, and test_mbridge.py with an independent oracle.
"""

from __future__ import annotations

import pytest
import torch

from mrl.errors import ModelError
from mrl.parallel import ParallelDims
from mrl.weights import hf_to_mcore, mcore_to_hf
from mrl.weights.accounting import check_model
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from mrl.weights.rules import chunk_plans, expected_hf_names, export_order, padded_vocab, param_map
from mrl.weights.safetensors_io import SafetensorsReader
from mrl.weights.stacks import restack, unstack_experts, unstacking_read
from tests.weights.models import DENSE_LAYOUTS, LAYOUTS, MODELS, MOE, VOCAB, save

CASES = [(m, layout) for m in MODELS for layout in (LAYOUTS if m in MOE else DENSE_LAYOUTS)]


def load_all(read, family, config, layout, **options):
    """The shards of every rank: {rank: {(chunk, mcore name): tensor}}, and the rules beside them."""
    plans = chunk_plans(config["num_hidden_layers"], layout.pp, layout.vpp)
    shards, rules, read = {}, {}, unstacking_read(read, family)
    for rank in range(layout.world_size):
        coords = layout.coordinates(rank)
        for (pp_rank, chunk), plan in plans.items():
            if pp_rank == coords.pp_rank:
                found = param_map(family, config, layout=layout, coords=coords, chunk=plan, **options)
                for name, rule in found.items():
                    rules[rank, chunk, name] = rule
                    shards[rank, chunk, name] = rule.load(read)
    return shards, rules


def export_all(shards, family, config, layout, **options):
    """What a gather over each rule's group gives, by HF name; a name written twice fails."""
    plans = chunk_plans(config["num_hidden_layers"], layout.pp, layout.vpp)
    out = {}
    coords = {rank: layout.coordinates(rank) for rank in range(layout.world_size)}
    for owned in export_order(family, config, layout=layout, chunks=plans, **options):
        ranks = [r for r in coords if coords[r].pp_rank == owned.pp_rank and owned.ep_rank in (None, coords[r].ep_rank)]
        place = {None: lambda c: 0, "tp": lambda c: c.tp_rank, "etp": lambda c: c.etp_rank}[owned.rule.axis]
        group = {place(coords[rank]): shards[rank, owned.chunk, owned.rule.mcore] for rank in ranks}
        assert sorted(group) == list(range(owned.rule.degree))
        merged = owned.rule.merge([group[i] for i in range(owned.rule.degree)])
        assert not merged.keys() & out.keys(), "written twice"
        out |= merged
    return dict(restack(out.items(), family, config))


VARIANTS = {
    "untied fp32 local": (False, torch.float32, "local"),
    "untied bf16 te": (False, torch.bfloat16, "te"),
    "tied fp32 te": (True, torch.float32, "te"),
    "tied bf16 local": (True, torch.bfloat16, "local"),
}


# each model in each layout with one of the four variants in turn
ONE_EACH = [(*case, list(VARIANTS)[i % 4]) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("model", "layout", "variant"), ONE_EACH)
def test_shards_merge_to_the_same_tensors(saved, model, layout, variant):
    tied, dtype, spec = VARIANTS[variant]
    hf, layout = saved(model, tied=tied, dtype=dtype), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    family = family_for(config)
    with SafetensorsReader(hf.path) as reader:
        assert check_model(reader, family, config) == []
        shards, rules = load_all(reader, family, config, layout, spec=spec)
    assert all(tuple(shards[key].shape) == rule.shape() for key, rule in rules.items())
    out = export_all(shards, family, config, layout, spec=spec)
    assert list(out) == list(expected_hf_names(family, config)) or layout.ep > 1
    assert out.keys() == hf.weights.keys()
    for name, tensor in hf.weights.items():
        assert out[name].dtype == tensor.dtype == dtype and torch.equal(out[name], tensor), name


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_each_rank_reads_only_its_part(saved, model):
    hf = saved(model)
    config = read_hf_config(hf.path)
    layout = LAYOUTS["tp2xep2_etp2"]
    read_elements = dict.fromkeys(hf.weights, 0)

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, key):
            part = hf.weights[self.name][key]
            read_elements[self.name] += part.numel()
            return part

    plan = chunk_plans(4, 1)[0, 0]
    coords = layout.coordinates(0)
    rules = param_map(family_for(config), config, layout=layout, coords=coords, chunk=plan)
    for rule in rules.values():
        before = {name: read_elements[name] for name in rule.hf}
        shard = rule.load(Recorder)
        assert sum(read_elements[name] - before[name] for name in rule.hf) <= shard.numel()
    assert all(count <= hf.weights[name].numel() for name, count in read_elements.items())
    of_others = [name for name in hf.weights if ".experts.2." in name or ".experts.3." in name]
    assert all(read_elements[name] == 0 for name in of_others)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_trap_13_padding_rows_are_zero_on_import_and_trimmed_on_export(saved, tp):
    hf = saved("qwen3")
    config = read_hf_config(hf.path)
    family, layout = family_for(config), DENSE_LAYOUTS[f"tp{tp}"]
    for multiple in (1, 128):
        padded = padded_vocab(VOCAB, tp, multiple)
        assert padded >= VOCAB and padded % tp == 0 and padded - VOCAB < multiple * tp
        shards, _ = load_all(hf.weights.__getitem__, family, config, layout, vocab_multiple=multiple)
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            whole = torch.cat([shards[rank, 0, name] for rank in range(tp)])
            assert whole.shape == (padded, 32)
            assert whole[VOCAB:].count_nonzero() == 0
            for rank in range(tp):  # whatever training left in the padding never reaches the file
                local = shards[rank, 0, name]
                first = rank * (padded // tp)
                shards[rank, 0, name] = torch.cat([local[: max(VOCAB - first, 0)], local[max(VOCAB - first, 0) :] + 9])
        out = export_all(shards, family, config, layout, vocab_multiple=multiple)
        assert torch.equal(out["lm_head.weight"], hf.weights["lm_head.weight"])
        assert torch.equal(out["model.embed_tokens.weight"], hf.weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("layout", ["tp2", "pp2xvpp2", "tp2xpp2"])
def test_trap_11_tied_weights_are_on_both_ends_of_the_pipeline_and_exported_once(saved, layout):
    hf, layout = saved("llama", tied=True), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    family = family_for(config)
    shards, rules = load_all(hf.weights.__getitem__, family, config, layout)
    last = layout.vpp - 1
    for rank in range(layout.world_size):
        is_last = layout.coordinates(rank).pp_rank == layout.pp - 1
        assert ((rank, last, "output_layer.weight") in rules) == (is_last and layout.pp > 1)
        if is_last and layout.pp > 1:
            first = rank - (layout.pp - 1) * layout.tp
            assert rules[rank, last, "output_layer.weight"].copy
            copy = shards[rank, last, "output_layer.weight"]
            assert torch.equal(copy, shards[first, 0, "embedding.word_embeddings.weight"])
    out = export_all(shards, family, config, layout)
    assert "lm_head.weight" not in out
    assert out.keys() == hf.weights.keys()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["tp1", "tp2xpp2"])
def test_trap_12_a_value_head_is_never_tied(saved, tied, layout):
    hf, layout = saved("qwen3", tied=tied), LAYOUTS[layout]
    config = read_hf_config(hf.path)
    family = family_for(config)
    weights = {k: v for k, v in hf.weights.items() if k != "lm_head.weight"} | {"score.weight": torch.randn(1, 32)}
    shards, rules = load_all(weights.__getitem__, family, config, layout, head="value")
    heads = [rule for (_, _, name), rule in rules.items() if name == "output_layer.weight"]
    assert len(heads) == layout.tp * layout.dp
    assert all(rule.hf == ("score.weight",) and rule.axis is None and not rule.copy for rule in heads)
    out = export_all(shards, family, config, layout, head="value")
    assert out.keys() == weights.keys()
    assert all(torch.equal(out[name], weights[name]) for name in out)
    with SafetensorsReader(hf.path) as reader:  # a critic starts from a model with an LM head
        assert check_model(reader, family, config, head="value", may_lack=["score.weight"]) == ["score.weight"]


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_stacked_experts_load_like_split_ones(saved, tmp_path, model):
    folder = save(tmp_path / "stacked", model, tied=False, save_original_format=False)
    config, layout = read_hf_config(folder), LAYOUTS["tp2xep2_etp2"]
    family, split = family_for(config), saved(model).weights
    with SafetensorsReader(folder) as stored:
        assert "model.layers.0.mlp.experts.gate_up_proj" in stored.tensors
        reader = unstack_experts(stored, family)
        assert check_model(reader, family, config) == []
        assert all(torch.equal(reader(name)[()], split[name]) for name in split)
        shards, _ = load_all(reader, family, config, layout)
        with pytest.raises(ModelError, match="missing"):
            check_model(reader, family, config | {"num_experts": 5})
    out = export_all(shards, family, config, layout)
    assert out.keys() == split.keys()
    assert all(torch.equal(out[name], split[name]) for name in split)


def test_split_experts_need_no_view(saved):
    hf = saved("mixtral")
    with SafetensorsReader(hf.path) as reader:
        assert unstack_experts(reader, family_for(read_hf_config(hf.path))) is reader


@pytest.fixture
def model(saved):
    """(config, family, weights) by name."""

    def get(name, tied=False):
        hf = saved(name, tied=tied)
        config = read_hf_config(hf.path)
        return config, family_for(config), hf.weights

    return get


def test_memory_is_this_ranks_own(model):
    """What is kept does not alias the stream's tensors, which a sender may reuse."""
    config, family, weights = model("llama")
    expected = {n: s.clone() for _, n, s in hf_to_mcore(weights.items(), family, ParallelDims(), 0, hf_config=config)}

    def reused():
        for name, tensor in weights.items():
            buffer = tensor.clone()
            yield name, buffer
            buffer.fill_(torch.nan)

    got = {name: shard for _, name, shard in hf_to_mcore(reused(), family, ParallelDims(), 0, hf_config=config)}
    assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got)


def test_streams_that_are_not_the_model_are_refused(model):
    config, family, weights = model("llama")
    name = "model.layers.1.mlp.up_proj.weight"

    def run(items):
        return list(hf_to_mcore(items, family, ParallelDims(), 0, hf_config=config))

    with pytest.raises(ModelError, match=f"1 tensors missing .*{name}"):
        run((n, t) for n, t in weights.items() if n != name)
    with pytest.raises(ModelError, match="extra.weight: the model has no such tensor"):
        run([*weights.items(), ("extra.weight", torch.zeros(1))])
    with pytest.raises(ModelError, match=f"{name}: came twice"):
        run([*weights.items(), (name, weights[name])])
    with pytest.raises(ModelError, match=rf"{name}: is \[3\], not \[48, 32\]"):
        run([*((n, t) for n, t in weights.items() if n != name), (name, torch.zeros(3))])
    layout = LAYOUTS["tp2"]
    shards = [
        (rank, *found)
        for rank in range(2)
        for found in hf_to_mcore(weights.items(), family, layout, rank, hf_config=config)
    ]
    with pytest.raises(ModelError, match="tensors missing"):
        list(mcore_to_hf(shards[: len(shards) // 2], family, layout, hf_config=config))
    with pytest.raises(ModelError, match="rank 0 of tp2 has no such parameter"):
        list(mcore_to_hf([(0, 0, "nothing", torch.zeros(1))], family, layout, hf_config=config))
