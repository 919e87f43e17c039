"""Qwen3: a norm on each query and key head; biases only where `attention_bias` says so."""

from mrl.converters.table import ATTENTION, DENSE_MLP, QK_NORM, Family, proj_bias, qkv_bias

FAMILY = Family(
    model_type="qwen3",
    layer=ATTENTION + QK_NORM + qkv_bias("attention_bias") + proj_bias("attention_bias"),
    dense=DENSE_MLP,
)
