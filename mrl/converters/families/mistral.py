"""Mistral: Llama's names without biases (its sliding window has no weights)."""

from mrl.converters.table import ATTENTION, DENSE_MLP, Family

FAMILY = Family(model_type="mistral", layer=ATTENTION, dense=DENSE_MLP)
