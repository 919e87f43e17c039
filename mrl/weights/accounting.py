"""Accounts for every tensor of a model folder: present, known, of the right shape and a dtype that can be read.

The table says which tensors a model of this config has; all differences are one error.

Layers past the last predict more tokens (MTP): DeepSeek-V3, arXiv 2412.19437, section 2.2; GLM-4.5. Files hold them as
`model.layers.N` and up, N being num_hidden_layers; those of Qwen3.5 under `mtp.`. Each has norms of its own, a block,
and a matrix that joins a hidden state with the embedding of the next token. It may hold the model's embedding and
output layer a second time; megatron keeps one. Engines neither train nor export these layers unless `model.mtp` is set;
conversions carry them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import torch

from mrl.errors import ModelError
from mrl.weights.algebra import Shape
from mrl.weights.rules import expected_hf_names
from mrl.weights.safetensors_io import DTYPES, TensorInfo, WeightReader, count_groups
from mrl.weights.table import Family, HFConfig

COUNT, OWN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"
"""How many there are, in config.json; the second for files that have them under `mtp.`, without copies (Qwen3.5)."""
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Buffers that older versions of transformers saved and that follow from the config.
_BUFFERS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# GPTQ and AWQ; compressed-tensors and modelopt; bitsandbytes: where config.json does not say so
_PACKED = re.compile(r"\.(qweight|weight_packed|weight\.absmax|SCB)$")
_READABLE = ("F32", "BF16", "F16", "F64")
_ROWS_AT_ONCE = 8192
SCORE = "score.weight"


def follows_from_config(name: str) -> bool:
    """Returns whether a tensor of a folder is a buffer that config.json decides, so nobody reads it."""
    return _BUFFERS.search(name) is not None


def account(
    found: Mapping[str, TensorInfo],
    expected: Mapping[str, Shape],
    *,
    where: str,
    may_lack: Collection[str] = (),
    may_have: Collection[str],
) -> list[str]:
    """Compares the tensors of a folder with those of the model; ModelError lists every difference.

    may_lack: names that the caller makes itself if they are absent. Absent ones are returned.

    may_have: names that the caller leaves unread. Rotary `inv_freq` buffers are always left unread.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [n for n in found if n not in expected and n not in may_have and not follows_from_config(n)]
    both = [(name, found[name]) for name in expected if name in found]
    shapes = [
        f"{name} is {list(info.shape)}, not {list(expected[name])}"
        for name, info in both
        if info.shape != tuple(expected[name])
    ]
    dtypes = [f"{name} is {info.dtype}" for name, info in both if info.dtype not in _READABLE]
    odd = [f"{name} is {found[name].dtype}" for name in may_have if name in found and found[name].dtype not in DTYPES]
    lost = [name for name in missing if name not in may_lack]
    parts = count_groups(
        {
            "missing": lost,
            "left over": unexpected,
            "of another shape than config.json says": shapes,
            f"of a dtype that cannot be read, use one of {', '.join(_READABLE)}": dtypes,
            f"of a dtype that cannot be carried over to an export, use one of {', '.join(DTYPES)}": odd,
            "quantised in a way that cannot be read, give the model that they were made from": [
                name for name in found if _PACKED.search(name)
            ],
        }
    )
    if lost == [LM_HEAD]:
        parts[0] += ", set tie_word_embeddings to true in config.json if the model shares it with the embedding"
    if parts:
        raise ModelError(
            where,
            why=f"tensors do not fit config.json: {', '.join(parts)}",
            fix="get the config.json and the weights of one model",
        )
    return missing


def check_model(
    reader: WeightReader,
    family: Family,
    hf_config: HFConfig,
    *,
    head: str = "lm",
    may_lack: Collection[str] = (),
    carried: bool = False,
) -> list[str]:
    """Accounts for a whole folder before anything is loaded from it; returns the absent names of `may_lack`.

    A value head leaves the LM head unread. MTP layers are there as config.json says, or not at all. `lm_head.weight` of
    a model with tied embeddings is allowed if it equals them bit for bit. `carried`: copies in MTP layers must equal
    the model's tensors too, because they are converted. An engine leaves them unread.
    """
    mtp = mtp_layers(reader.tensors, hf_config)
    expected = expected_hf_names(family, hf_config, head=head, mtp=mtp)
    may_have = {LM_HEAD} if head == "value" else set()
    if head == "value" and SCORE in reader.tensors and reader.tensors[SCORE].shape[0] != 1:
        raise ModelError(
            reader.path,
            why=f"{SCORE} gives {reader.tensors[SCORE].shape[0]} labels and a value is one number",
            fix="use a sequence classifier that was made with num_labels=1",
        )
    known = copies_of(family, hf_config, head=head, mtp=mtp)
    copies = {name: of for name, of in known.items() if name in reader.tensors and of in reader.tensors}
    may_have |= copies.keys() | family.carried(reader.tensors)
    absent = account(reader.tensors, expected, where=str(reader.path), may_lack=may_lack, may_have=may_have)
    for name, of in copies.items():
        if not (carried or name == LM_HEAD) or equal_tensors(reader, name, of):
            continue
        why, fix = (
            "and megatron has one for both",
            f"remove the layers that predict further tokens, and set {COUNT} to 0",
        )
        if name == LM_HEAD:
            why, fix = "though config.json ties them", f"set tie_word_embeddings to false or remove {LM_HEAD}"
        raise ModelError(reader.path, why=f"{name} differs from {of} {why}", fix=fix)
    return absent


def copies_of(family: Family, hf_config: HFConfig, *, head: str, mtp: int) -> dict[str, str]:
    """Returns the names of copies that a folder may hold, with the name of the original.

    These are the tied output layer, and tensors that `mtp` MTP layers share with the model.
    """
    tied = {LM_HEAD: family.in_files(EMBEDDING)} if head == "lm" and hf_config["tie_word_embeddings"] else {}
    return tied | shared_tensors(hf_config, mtp)


def equal_tensors(reader: WeightReader, a: str, b: str) -> bool:
    """Returns whether two tensors are equal bit for bit, read a block of rows at a time."""
    if reader.tensors[a].shape != reader.tensors[b].shape or reader.tensors[a].dtype != reader.tensors[b].dtype:
        return False
    rows = reader.tensors[a].shape[0]
    blocks = (slice(at, min(at + _ROWS_AT_ONCE, rows)) for at in range(0, rows, _ROWS_AT_ONCE))
    return all(torch.equal(_bits(reader(a)[block]), _bits(reader(b)[block])) for block in blocks)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


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
