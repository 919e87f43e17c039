"""Qwen2 and Qwen2.5: always biases on q, k and v, none elsewhere."""

from mrl.converters.table import ATTENTION, DENSE_MLP, Family, qkv_bias

FAMILY = Family(model_type="qwen2", layer=ATTENTION + qkv_bias(), dense=DENSE_MLP)
