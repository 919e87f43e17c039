"""The models and the rows of gpu.py's tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 32768
PARITY = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
DENSE = PARITY | {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
DENSE_NAME = "dense, 1.1 B parameters"
MOE = PARITY | {
    "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
# 1.0 B parameters, of which a token goes through 0.2 B
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What is measured. needs: a package without which it is left out."""

    name: str
    settings: dict[str, Any]
    needs: str | None = None


def mrl(backend: str = "megatron", dtype: str = "bfloat16", **settings: Any) -> dict[str, Any]:
    return {"kind": "mrl", "backend": backend, "dtype": dtype, **settings}


TE = "transformer-engine"
REFERENCE = Subject("transformers, float32", {"kind": "plain", "dtype": "float32"})
PLAIN = "transformers, bfloat16"
NUMBERS = [
    REFERENCE,
    Subject(PLAIN, {"kind": "plain", "dtype": "bfloat16"}),
    Subject("mrl, local layers, float32", mrl(dtype="float32", layer_spec="local")),
    Subject("mrl, local layers, bfloat16", mrl(layer_spec="local")),
    Subject("mrl, TE's layers, bfloat16", mrl(layer_spec="te"), needs=TE),
    Subject("mrl, fsdp, bfloat16", mrl("fsdp")),
]
TRAINED = [
    Subject("transformers, SDPA", {"kind": "plain", "dtype": "bfloat16"}),
    Subject("transformers, SDPA, torch.compile", {"kind": "plain", "dtype": "bfloat16", "compile": True}),
    Subject("mrl, TE's layers", mrl(layer_spec="te"), needs=TE),
    Subject("mrl, local layers", mrl(layer_spec="local")),
    Subject("mrl, fsdp", mrl("fsdp")),
    Subject("mrl, fsdp, compiled", mrl("fsdp", fsdp={"compile": True})),
    Subject("mrl, fsdp, deferred", mrl("fsdp", fsdp={"defer_sync": True})),
]
OF_EXPERTS = [  # transformers multiplies by `grouped_mm`, in the weights' fp32 under autocast; one by one in bfloat16
    Subject("transformers, SDPA, experts one by one", TRAINED[0].settings | {"experts": "eager"}),
    Subject("mrl, TE's layers, grouped_mm", mrl(layer_spec="te", moe={"grouped_mm": True}), needs=TE),
    Subject("mrl, local layers, experts one by one", mrl(layer_spec="local", moe={"grouped_mm": False})),
]
DRAWN = [
    Subject("transformers, SDPA", {"kind": "plain", "dtype": "bfloat16"}),
    Subject("mrl, TE's layers", mrl(layer_spec="te"), needs=TE),
    Subject("mrl, local layers", mrl(layer_spec="local")),
    Subject("mrl, local layers, rollout.cuda_graphs", mrl(layer_spec="local", cuda_graphs=True)),
    Subject("mrl, fsdp", mrl("fsdp")),
]
KEPT = [Subject("mrl, megatron", mrl()), Subject("mrl, fsdp", mrl("fsdp"))]

ROWS: dict[str, list[Subject]] = {
    "numbers": NUMBERS, "training-dense": TRAINED, "training-experts": [TRAINED[0], *OF_EXPERTS, *TRAINED[1:]], "decoding": DRAWN,
    "checkpoint": KEPT, "handover": [], "ppo": [],
}  # fmt: skip
"""The subjects of each part. Those of the last two depend on the machine, and `--subjects` chooses none of them."""
