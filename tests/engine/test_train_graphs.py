"""`engine.cuda_graphs` changes no bit of training: layers that are replayed on other rows, other lengths and other numbers of sequences
give what they give without graphs. CUDA is a stand-in that calls a capture's operators again (recorded_graphs.py)."""

from __future__ import annotations

import pytest

from mrl.config.schema import MoEConfig
from tests.engine import tiny
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but

EXPERTS = {"moe": MoEConfig(grouped_mm=True, aux_loss=0.1, z_loss=0.01)}
CASES = [
    ("qwen3_moe", 1, {}, EXPERTS),
    ("qwen3", 2, {"tp": 2}, {}),
    ("qwen3_moe", 2, {}, EXPERTS),
    ("qwen3", 1, {}, {"layer_spec": "te"}),
    ("mistral", 1, {}, {"dtype": "bfloat16"}),
    ("llama", 2, {"tp": 2, "sp": False}, {}),
    ("qwen3", 4, {"tp": 2}, {}),
    ("qwen3_moe", 2, {"tp": 2, "etp": 1}, EXPERTS),
]


def compared(tmp_path, family, world, parallel, options, **more):
    folder = tiny.make_model(str(tmp_path / "model"), family, tied=family == "llama")
    config = tiny.role(folder, backend="megatron", parallel=parallel, **options)
    te = options.get("layer_spec") == "te"
    return run_case(world, "tests.engine.train_graphs:compare", config=config, te=te, timeout_s=60.0, **more)


@pytest.mark.parametrize(
    "family, world, parallel, options", in_tiers(CASES[:3], [*CASES[3:5], CASES[7]], CASES), ids=str
)
def test_replays_change_no_bit(tmp_path, family, world, parallel, options):
    found = compared(tmp_path, family, world, parallel, options)
    assert found.differ == {} and found.lines == []
    # since the model was on the host. Replicas have a bucket for all lengths; so has transformer-engine, up to 64 tokens
    replicas, te = world > parallel.get("tp", 1), options.get("layer_spec") == "te"
    buckets = (2, 1) if replicas else (2, 2) if te else (3, 2)
    assert found.replays >= 8 and (found.buckets, found.shapes) == buckets


@pytest.mark.parametrize("stale", ["hidden", "cu_seqlens", "rotary_pos_emb", "padding_mask"])
def test_an_input_that_stays_as_it_was_shows(tmp_path, stale):
    assert compared(tmp_path, *CASES[0], stale=stale).differ


@pytest.mark.parametrize("refuses", nightly_but([1], [0, 1]))
def test_tensor_parallel_ranks_have_graphs_all_or_none(tmp_path, refuses):
    found = compared(tmp_path, *CASES[1], refuses=refuses)
    assert found.differ == {} and found.replays == 0
    why = "out of graphs" if refuses == 0 else "on another rank"
    assert found.lines == [f"engine.cuda_graphs: layers were not captured ({why}); training runs without graphs"]


@pytest.mark.parametrize("refuses", nightly_but([0], [0, 1]))
def test_a_replica_that_replays_and_one_that_does_not_train_the_same(tmp_path, refuses):
    found = compared(tmp_path, *CASES[2], refuses=refuses)
    assert found.differ == {} and bool(found.replays) == (refuses == 1)


def test_a_backward_pass_on_other_activations_is_refused(tmp_path):
    config = tiny.role(tiny.make_model(str(tmp_path / "model"), "qwen3"), backend="megatron")
    said = run_case(1, "tests.engine.train_graphs:overwritten", config=config)
    assert said == "another micro-batch has overwritten the activations of this one"
