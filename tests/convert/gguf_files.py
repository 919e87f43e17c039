"""GGUF files of tiny models, written as llama.cpp's convert_hf_to_gguf.py writes them: its names, stacks and order of rows."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any

import gguf
import numpy as np
import torch

from tests.convert.cases import load_folder

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}  # fmt: skip
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_MIXTRAL = {"w1": "layers.{}.feed_forward.experts.w1", "w2": "layers.{}.feed_forward.experts.w2", "w3": "layers.{}.feed_forward.experts.w3"}  # fmt: skip


def write(
    source: pathlib.Path,
    out: pathlib.Path,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    lose: str = "",
    tokenizer: dict | None = None,
    **keys: Any,
) -> dict[str, torch.Tensor]:
    """Writes the folder `source` as the file `out`, matrices of type `kind`. Returns what its tensors stand for, in fp32.

    kinds: types of those matrices whose name has this part. lose: a tensor that is left out. keys: metadata of the architecture over what the model says; None leaves one out.
    """
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(out, gguf.MODEL_ARCH_NAMES[arch])
    for key, value in (_metadata(config) | keys).items():
        if value is not None:
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
            add[type(value)](f"{gguf.MODEL_ARCH_NAMES[arch]}.{key}", value)
    for key, value in (tokenizer or {}).items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    held, stands_for = _stacked(load_folder(str(source))), {}
    if factors := _llama3(config):
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    for name, parts in held.items():
        tensor = torch.stack(list(parts.values())) if name not in parts else parts[name]
        own = next((of for part, of in (kinds or {}).items() if part in name), kind)
        quantised = _write(writer, names, config, name, tensor, own, lose)
        if name in parts:
            stands_for[name] = quantised
        else:
            stands_for |= dict(zip(parts, quantised, strict=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def _write(writer, names, config, name: str, tensor: torch.Tensor, kind: str, lose: str) -> torch.Tensor:
    module, _, ending = name.rpartition(".")
    stored = f"{names.get_name(module)}.{ending}"
    assert names.get_name(module) is not None, name
    array = tensor.float().numpy()
    if name.endswith("shared_expert_gate.weight"):
        array = array.squeeze()
    small = array.ndim == 1 or ".ffn_gate_inp." in stored
    of = gguf.GGMLQuantizationType[kind]
    fits = array.shape[-1] % gguf.GGML_QUANT_SIZES[of][0] == 0
    of = of if fits and not small else gguf.GGMLQuantizationType.F32
    if config["model_type"] in ("llama", "mistral", "mixtral") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        array = array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
    if stored != lose:
        writer.add_tensor(stored, gguf.quantize(array, of), raw_dtype=of)
    rows = tensor.float().numpy()
    return torch.from_numpy(gguf.dequantize(gguf.quantize(rows, of), of).astype(np.float32).reshape(rows.shape))


def _stacked(held: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of one name in the file, by a name that gguf's map knows: of all experts, in order, or one."""
    groups: dict[str, dict[int, tuple[str, torch.Tensor]]] = {}
    for name, tensor in held.items():
        if found := _EXPERT.fullmatch(name):
            layer, expert, part = found.groups()
            merged = _MIXTRAL[part].format(layer) if part in _MIXTRAL else f"model.layers.{layer}.mlp.experts.{part}"
            groups.setdefault(f"{merged}.weight", {})[int(expert)] = name, tensor
        else:
            groups[name] = {0: (name, tensor)}
    return {merged: dict(parts[i] for i in sorted(parts)) for merged, parts in groups.items()}


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    fields = {
        "context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]), "rope.dimension_count": size,
        "attention.key_length": size, "attention.value_length": size, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    if config["rope_parameters"]["rope_type"] == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config["rope_parameters"]["factor"])}
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        fields |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if "shared_expert_intermediate_size" in config:
        fields["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return fields


def _llama3(config: dict[str, Any]) -> list[float]:
    """What `LlamaModel.generate_extra_tensors` writes for Llama 3's scaling of the rotary frequencies."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return []
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors
