"""Tiny random models of every family, uneven batches, and what Hugging Face computes for them on one process.

The reference runs one sequence at a time, so it has neither padding nor packing, divides once by the batch's
denominator, and reports gradients and weights under the names of the files that transformers writes.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from mrl.batch import Batch, make_batch
from mrl.check import reference
from mrl.check.compare import relative_l2  # noqa: F401 - tests take it from here
from mrl.check.reference import HEADS, Reference
from mrl.config.schema import (
    EngineConfig,
    LoraConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RoleConfig,
)
from mrl.data.dataset import Example
from mrl.engine.lora.folder import adapters, write_adapter
from mrl.engine.lora.shapes import adapter_shapes

VOCAB = 131  # odd and prime: padded under every tensor-parallel degree
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 4.0, 6.0],
}  # fmt: skip

QWEN3_5 = {
    "initializer_range": 0.06,  # with 0.15 half a unit in the last place of the weights moves gradients by 1e-5
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip

# model_type, and what makes the family what it is.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True,
            "head_dim": 16,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 24,
            "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 20,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8, "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
            },
        },
    ),
    "qwen3_5": ("qwen3_5_text", QWEN3_5),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        QWEN3_5
        | {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}  # fmt: skip

# Of these mrl has no table: backend fsdp takes them as transformers builds them.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 5, "head_dim": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        "granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "gpt2": ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 10}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8, "rotary_dim": 8},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    ),
    "flint": ("flint", {}),
    "olmo2": ("olmo2", {}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "bloom": ("bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
}  # fmt: skip

OPTIMIZER = OptimizerConfig(lr=1e-2, min_lr=1e-3, eps=1e-6, weight_decay=0.1, clip_grad=1.0, schedule="linear")
STEPS = 3


def make_model(
    folder: str,
    family: str,
    *,
    layers: int = 2,
    tied: bool = False,
    vocab: int = VOCAB,
    seed: int = 0,
    head: str = "lm",
    long_memory: bool = False,
    **overrides: Any,
) -> str:
    """Saves a random fp32 model of `family` in `folder` and returns it. overrides: fields of its config.

    head: "value" gives it a linear head of one output, `score.weight`, in place of the output layer. long_memory: gated
    delta nets keep a part of their state over 64 tokens; random ones keep none.

    Norm weights and biases are random too, so that leaving one out shows.
    """
    config = config_of(family, layers=layers, tied=tied, vocab=vocab, **overrides)
    torch.manual_seed(seed)
    if head == "value":
        config.num_labels = 1
    model = HEADS[head].from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or name.endswith("bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            if long_memory and name.endswith("dt_bias"):
                parameter -= 8.0
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer += 0.1 * torch.randn(buffer.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def config_of(family: str, *, layers: int = 2, tied: bool = False, vocab: int = VOCAB, **overrides: Any) -> Any:
    """transformers' config of a tiny model. overrides: its fields."""
    model_type, fields = (FAMILIES | OTHERS)[family]
    common = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "initializer_range": 0.15, "tie_word_embeddings": tied, "rope_parameters": DEFAULT_ROPE,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model(
        model_type, **copy.deepcopy({**common, **fields, **overrides})
    )  # it edits its arguments


def make_adapter(folder: str, model: str, lora: LoraConfig, *, head: str = "lm", seed: int = 0) -> str:
    """Saves random adapters for the model in the folder `model`, B not zero, and returns `folder`."""
    shapes = adapter_shapes(
        adapters(model, lora, head), head, AutoConfig.from_pretrained(model).get_text_config().hidden_size
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = [(name, 0.1 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    write_adapter(folder, lora, model, tensors, head=head)
    return folder


def uneven_batch(
    seed: int = 0, *, sequences: int = 9, longest: int = 24, vocab: int = VOCAB, lengths: Sequence[int] = ()
) -> Batch:
    """A global mini-batch of sequences of 2 to `longest` tokens with holes in their masks, the third trained on nowhere.
    lengths: of the batch's sequences, which have a token less than what they were made of."""
    rng = random.Random(seed)
    if lengths:
        sizes = [length + 1 for length in lengths]
    else:
        sizes = [longest, 2] + [rng.randint(3, longest) for _ in range(sequences - 2)]
    rows = [[rng.randrange(3, vocab) for _ in range(size)] for size in sizes]
    masks = [[float(rng.random() < 0.7) for _ in row] for row in rows]
    masks[0][-1] = 1.0
    masks[2] = [0.0] * sizes[2]
    return make_batch(rows, masks)


def role(
    folder: str,
    *,
    backend: str = "fsdp",
    packing: bool = True,
    size: int | None = None,
    tokens: int | None = None,
    dtype: str = "float32",
    optimizer: OptimizerConfig | None = OPTIMIZER,
    total_steps: int = 10,
    head: str = "lm",
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    device: str = "cpu",
    **engine: Any,
) -> RoleConfig:
    """A role on the model in `folder`. parallel, model, engine: fields of those config sections."""
    if size is None and tokens is None:
        tokens = 64
    return RoleConfig(
        model=ModelConfig(path=folder, dtype=dtype, **(model or {})),
        engine=EngineConfig(
            backend=backend,
            device=device,
            micro_batch=MicroBatchConfig(size=size, tokens=tokens),
            parallel=ParallelConfig(**(parallel or {})),
            **engine,
        ),
        optimizer=optimizer,
        packing=packing,
        total_steps=total_steps,
        head=head,
    )


def examples_of(batch: Batch) -> list[Example]:
    """The sequences of a batch as rows give them: labels not shifted, as the reference takes them."""
    images = batch.multi_modal_inputs or [{}] * batch.num_sequences
    split = (t.split(batch.lengths.tolist()) for t in (batch.tokens, batch.labels, batch.loss_mask))
    return [
        Example([*tokens.tolist(), int(labels[-1])], [0, *mask.tolist()], False, of_images)
        for tokens, labels, mask, of_images in zip(*split, images, strict=True)
    ]


def hf_reference(
    folder: str,
    batch: Batch,
    *,
    optimizer: OptimizerConfig = OPTIMIZER,
    total_steps: int = 10,
    steps: int = STEPS,
    head: str = "lm",
    adapter: str | None = None,
) -> Reference:
    """What Hugging Face and torch.optim.AdamW compute in fp32 on one process (mrl/check/reference.py).

    adapter: a folder of adapters, which peft loads over the model and which train alone; names are those of its file. head: with "value", `log_probs` are the values and the loss is that of `value_loss`. optimizer: `schedule` must
    be linear without warm-up; its rates are written out here, apart from mrl's.
    """
    assert optimizer.schedule == "linear" and optimizer.warmup_steps == 0 and optimizer.decay_steps is None
    rates = [optimizer.lr + (optimizer.min_lr - optimizer.lr) * step / total_steps for step in range(steps)]
    model = reference.load(folder, head, adapter=adapter)
    return reference.run(model, examples_of(batch), LOSSES[head], optimizer=optimizer, rates=rates)


def log_probs_of(folder: str, batch: Batch, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Tensor:
    """[T] of the labels that train, 0 elsewhere, as transformers computes them with the model in `folder`."""
    return hf_loss(reference.load(folder, dtype=dtype, attention=attention), batch)[1]


def hf_loss(model: torch.nn.Module, batch: Batch, head: str = "lm") -> tuple[float, Tensor]:
    """(token mean loss, log-probs, 0 where the mask is 0, or values [T]); gradients of the loss are left on the model."""
    return reference.backward(model, examples_of(batch), LOSSES[head])


def value_loss(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """A loss of a value head: the squared distance to a number made from each label."""
    return (squared_distance(predictions["values"], data.labels) * data.loss_mask).sum(), ctx


def squared_distance(values: Tensor, labels: Tensor, fields: Any = None) -> Tensor:
    return (values - (labels.float() / VOCAB - 0.5)) ** 2


LOSSES = {"lm": reference.Loss(), "value": reference.Loss(squared_distance, head="value")}


def tensor_files(folder: str) -> list[str]:
    """The safetensors files of a model folder."""
    return sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".safetensors"))
