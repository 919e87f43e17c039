"""Describes Llama 2 and 3, SmolLM2: the plain table; `attention_bias` and `mlp_bias` give biases to all matrices
there."""

from mrl.weights.fields import DENSE, dense_fields
from mrl.weights.table import ATTENTION, DENSE_MLP, Family, mlp_bias, proj_bias, qkv_bias

FAMILY = Family(
    model_type="llama",
    layer=ATTENTION + qkv_bias("attention_bias") + proj_bias("attention_bias"),
    dense=DENSE_MLP + mlp_bias("mlp_bias"),
    reads=DENSE,
    fields=dense_fields,
)
