"""Describes Mistral: Llama's names without biases, and a sliding window in every layer."""

from typing import Any

from mrl.weights.fields import DENSE, dense_fields, window_fields
from mrl.weights.table import ATTENTION, DENSE_MLP, Family


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    return dense_fields(hf) | window_fields(hf)


FAMILY = Family(model_type="mistral", layer=ATTENTION, dense=DENSE_MLP, reads=DENSE | {"sliding_window"}, fields=fields)
