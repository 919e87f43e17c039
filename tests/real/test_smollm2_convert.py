"""`mrl convert` on real weights: SmolLM2-135M-Instruct there and back, its logits, and mbridge's shards of it.

Slow tier.
"""

from __future__ import annotations

import pathlib

import pytest
import torch
from safetensors.torch import load_file

from mrl.parallel import ParallelDims
from mrl.weights import family_for, hf_to_mcore, mcore_to_hf, read_hf_config
from tests.convert import hf_folders
from tests.convert.test_refused import run
from tests.convert.test_verify import verify
from tests.real.test_smollm2 import smollm2
from tests.weights.mbridge_oracle import bridge_for, merged, shards_of
from tests.weights.test_mbridge import same

__all__ = ["smollm2"]

pytestmark = pytest.mark.slow
PROMPTS = ("def fibonacci(n):\n", "17 + 25 =")


@pytest.fixture(scope="module")
def imported(smollm2: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:  # noqa: F811
    out = tmp_path_factory.mktemp("smollm2") / "mcore"
    code, said = run("import", smollm2, out)
    assert code == 0, said
    return out


def test_every_file_comes_back_byte_for_byte(smollm2: pathlib.Path, imported: pathlib.Path, tmp_path: pathlib.Path):  # noqa: F811
    code, said = run("export", imported, tmp_path / "back")
    assert code == 0, said
    before, after = hf_folders.files_of(smollm2), hf_folders.files_of(tmp_path / "back")
    assert before.keys() == after.keys() and {"model.safetensors", "tokenizer.json"} <= before.keys()
    assert [name for name in before if before[name] != after[name]] == []


@pytest.mark.always
def test_verify_finds_the_same_bits_and_the_same_logits(smollm2: pathlib.Path, imported: pathlib.Path):  # noqa: F811
    """Logits of 30 layers, of megatron-core and of transformers: their spread is about 5, and fp32 rounds to 3e-5."""
    code, found = verify(smollm2, imported, *(part for text in PROMPTS for part in ("--prompt", text)))
    assert code == 0 and found["same"] and found["differences"] == [] and found["tensors"] == 272
    assert [row["prompt"] for row in found["logits"]] == list(PROMPTS)
    for row in found["logits"]:
        assert row["max_difference"] < 1e-4 and row["mean_difference"] < 2e-5 and abs(row["kl"]) < 1e-9, row
        assert row["top1_agreement"] == 1.0 and row["spread"] > 1.0, row


def test_mbridge_makes_the_same_shards(smollm2: pathlib.Path):  # noqa: F811
    weights, config = load_file(smollm2 / "model.safetensors"), read_hf_config(smollm2)
    family, layout, ranks = family_for(config), ParallelDims(world_size=3, tp=3), []
    for rank in range(3):
        found = hf_to_mcore(weights.items(), family, layout, rank, hf_config=config, spec="te")
        ranks.append({(chunk, name): shard for chunk, name, shard in found})
        bridge = bridge_for(str(smollm2), layout, rank, dtype=torch.bfloat16)
        assert same(ranks[rank], shards_of(bridge, weights, layout, rank, ranks[rank])) == []
    shards = [(rank, *key, shard) for rank, held in enumerate(ranks) for key, shard in held.items()]
    assert same(weights, dict(mcore_to_hf(shards, family, layout, hf_config=config, spec="te"))) == []
    assert (
        same(weights, merged(bridge_for(str(smollm2), layout, 0, dtype=torch.bfloat16), weights, ranks, layout)) == []
    )
