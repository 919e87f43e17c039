"""Finds layers past the last, which predict more tokens (MTP): DeepSeek-V3, arXiv 2412.19437, section 2.2; GLM-4.5.

Files hold them as `model.layers.N` and up, N being num_hidden_layers; those of Qwen3.5 under `mtp.`. Each has norms of
its own, a block, and a matrix that joins a hidden state with the embedding of the next token. It may hold the model's
embedding and output layer a second time; megatron keeps one. Engines neither train nor export these layers unless
`model.mtp` is set; conversions carry them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mrl.weights.table import HFConfig

COUNT, OWN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""How many there are, in config.json; the second for files that have them under `mtp.`, without copies (Qwen3.5)."""
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def count_key(hf_config: HFConfig) -> str:
    """Returns the field of config.json that says how many there are."""
    return OWN_COUNT if OWN_COUNT in hf_config else COUNT


def num_mtp_layers(hf_config: HFConfig) -> int:
    """Returns how many such layers config.json announces. Folders that transformers saves announce some and have
    none."""
    return hf_config.get(count_key(hf_config)) or 0


def mtp_tensors(names: Iterable[str], hf_config: HFConfig) -> list[str]:
    """Returns those of `names` that are of a layer past the last."""
    if OWN_COUNT in hf_config:
        return [name for name in names if name.startswith("mtp.")]
    layers = range(hf_config["num_hidden_layers"], hf_config["num_hidden_layers"] + num_mtp_layers(hf_config))
    return [name for name in names if (match := _LAYER.match(name)) and int(match[1]) in layers]


def mtp_layers(names: Iterable[str], hf_config: HFConfig) -> int:
    """Returns how many such layers a folder with tensors of these names has: as config.json announces, or none.

    Those under `mtp.` do not count: conversions carry them (`Family.carries`).
    """
    if OWN_COUNT in hf_config:
        return 0
    return num_mtp_layers(hf_config) if mtp_tensors(names, hf_config) else 0


def shared_tensors(hf_config: HFConfig, layers: int) -> dict[str, str]:
    """Returns the names of copies that `layers` such layers may hold, with the names of the originals."""
    if OWN_COUNT in hf_config:
        return {}
    head = EMBEDDING if hf_config["tie_word_embeddings"] else LM_HEAD
    own = [f"model.layers.{hf_config['num_hidden_layers'] + i}." for i in range(layers)]
    return {
        f"{layer}{name}.weight": of
        for layer in own
        for name, of in (("embed_tokens", EMBEDDING), ("shared_head.head", head))
    }
