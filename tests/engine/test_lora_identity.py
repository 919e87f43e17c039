"""By which of its weights a base is told: every kind of tensor, in several layers."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engine.lora import identity
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config

MODELS = {"llama": {"layers": 64}, "qwen3_moe": {"layers": 12}, "gpt_oss": {}, "deepseek_v3": {"layers": 6}}
"""Regular layers, experts as tensors of their own, experts in stacks, and layers of two kinds."""


def kind_of(name):
    return re.sub(r"\.\d+\.", ".N.", name)


@pytest.mark.parametrize(
    ("family", "known"),
    [("llama", False), ("qwen3_moe", True), ("gpt_oss", True), ("deepseek_v3", True), ("qwen3_moe", False)],
)
def test_a_base_that_differs_in_one_kind_of_tensor_is_another(folder, tmp_path, family, known):
    """known: to a table of mrl, not by the names of its files."""
    base = folder(family, **MODELS[family])
    config = read_hf_config(base)
    table = family_for(config) if known else None
    expected = identity.fingerprint(base, table, config, "lm")
    assert identity.fingerprint(base, table, config, "lm") == expected
    held = load_file(f"{base}/model.safetensors")
    shutil.copy(f"{base}/config.json", tmp_path)
    found = set()
    for kind in {kind_of(name) for name in held}:
        changed = {name: t + 1e-3 if kind_of(name) == kind else t for name, t in held.items()}
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        found.add(identity.fingerprint(str(tmp_path), table, config, "lm"))
        assert expected not in found, kind
    assert len(found) == len({kind_of(name) for name in held})


def test_few_tensors_of_every_kind(folder):
    """64 in all, as many of one kind as of another, wherever a model has them."""
    layers = {f"model.layers.{layer}.{name}" for layer in range(48) for name in ("q.weight", "k.weight", "norm.weight")}
    experts = {f"model.layers.{layer}.experts.{e}.up.weight" for layer in range(48) for e in range(128)}
    chosen = identity.sample_names([*layers, *experts, "embed.weight"])
    counts = {}
    for name in chosen:
        counts[kind_of(name)] = counts.get(kind_of(name), 0) + 1
    assert len(chosen) == identity.SAMPLES and sorted(counts.values()) == [1, 15, 16, 16, 16]
    assert chosen == identity.sample_names(reversed([*layers, *experts, "embed.weight"]))


def test_a_change_in_some_rows_is_seen(folder):
    """The first, the middle and the last row of a matrix, and all of a vector."""
    matrix, vector = torch.zeros(9, 4), torch.zeros(7)
    seen = {identity._hash({"a": (9, 4), "b": (7,)}, {"a": matrix, "b": vector}.__getitem__)}
    for row in (0, 4, 8):
        other = matrix.clone()
        other[row, 3] = 1
        seen.add(identity._hash({"a": (9, 4), "b": (7,)}, {"a": other, "b": vector}.__getitem__))
    other = vector.clone()
    other[5] = 1
    seen.add(identity._hash({"a": (9, 4), "b": (7,)}, {"a": matrix, "b": other}.__getitem__))
    assert len(seen) == 5
