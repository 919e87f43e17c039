"""Lists the values that fields of config.json may hold: one table, for imports, engines and the checks before a run.

`check_fields` reads a config.json as it is: a wrong value makes transformers endless, or fails far from the field.
`check_normalized` reads it completed, so that fields are compared with one another. A value in range may still be
unsupported, which the family's `fields` says. `python tools/pages.py ranges` prints the tables of
docs/supported-models.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mrl.errors import ModelError
from mrl.weights.families import family_of
from mrl.weights.json_file import shorten_value

MAX_INT = 2**31 - 1
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True)
class Range:
    """Holds the values that a field may have."""

    kind: type  # a whole number is a float, too, and a float is finite
    low: float | None = None
    high: float | None = None
    above: bool = False  # whether `low` itself is left out
    below: bool = False  # whether `high` itself is left out
    null: bool = True  # whether it may be null, which means the default or that there is none
    switch: str | None = None
    """The field that switches this one off if it is false, in a config.json completed by transformers."""
    of: type | None = None  # the type of what a list holds

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.null
        if self.kind is not float:
            right = type(value) is self.kind
        else:
            right = type(value) is int or (type(value) is float and math.isfinite(value))
        if not right or self.kind not in (int, float):
            return right and (self.of is None or all(type(entry) is self.of for entry in value))
        low = self.low is None or value > self.low or (value == self.low and not self.above)
        return low and (self.high is None or value < self.high or (value == self.high and not self.below))

    @property
    def words(self) -> str:
        parts = [_WORDS[self.kind] if self.of is None else f"a list, each entry {_WORDS[self.of]}"]
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'of at least'} {self.low}")
        if self.high is not None and self.high != MAX_INT:
            parts.append(f"{'below' if self.below else 'of at most'} {self.high}")
        elif self.high is not None:
            parts.append("below 2**31")
        text = f"{parts[0]} {' and '.join(parts[1:])}".strip()
        return f"{text}, or null" if self.null else text


_SIZE, _SWITCH = Range(int, 1, MAX_INT, null=False), Range(bool)
_MAYBE = dataclasses.replace(_SIZE, null=True)
_EXPERTS = Range(int, 1, 4096)
_COUNT = Range(int, 0, MAX_INT)
_POSITIVE = Range(float, 0, above=True)
_THETA, _PART = Range(float, 1, above=True), Range(float, 0, 1, above=True)

FIELDS: Mapping[str, Range] = {
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": Range(int, 1, 10_000, null=False),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _MAYBE,
    "head_dim": _MAYBE,
    "max_position_embeddings": _SIZE,
    "hidden_act": Range(str),
    "rms_norm_eps": Range(float, 0, 1, above=True, null=False),
    "initializer_range": Range(float, 0),
    "attention_dropout": Range(float, 0, 1, below=True),
    "attention_bias": _SWITCH,
    "mlp_bias": _SWITCH,
    "qkv_bias": _SWITCH,
    "tie_word_embeddings": _SWITCH,
    "rope_theta": _THETA,
    "partial_rotary_factor": _PART,
    "sliding_window": dataclasses.replace(_MAYBE, switch="use_sliding_window"),
    "use_sliding_window": _SWITCH,
    "max_window_layers": _COUNT,
    "layer_types": Range(list, of=str),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": dataclasses.replace(_EXPERTS, null=False),
    "experts_per_token": _EXPERTS,
    "norm_topk_prob": _SWITCH,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
    "n_shared_experts": dataclasses.replace(_EXPERTS, null=False),
    "decoder_sparse_step": _SIZE,
    "mlp_only_layers": Range(list, of=int),
    "first_k_dense_replace": dataclasses.replace(_COUNT, null=False),
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "routed_scaling_factor": dataclasses.replace(_POSITIVE, null=False),
    "num_nextn_predict_layers": Range(int, 0, 100),
    "num_mtp_layers": Range(int, 0, 100),
    "mtp_num_hidden_layers": Range(int, 0, 100),
    "mtp_use_dedicated_embeddings": _SWITCH,
    "full_attention_interval": _MAYBE,
    "mamba_ssm_dtype": Range(str),
    "attn_output_gate": _SWITCH,
    "use_qk_norm": _SWITCH,
    "q_lora_rank": _MAYBE,
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "qk_head_dim": _MAYBE,
    "v_head_dim": _SIZE,
    "rope_interleave": _SWITCH,
    "linear_conv_kernel_dim": _SIZE,
    "linear_key_head_dim": _SIZE,
    "linear_value_head_dim": _SIZE,
    "linear_num_key_heads": _SIZE,
    "linear_num_value_heads": _SIZE,
    "swiglu_alpha": dataclasses.replace(_POSITIVE, null=False),
    "swiglu_limit": dataclasses.replace(_POSITIVE, null=False),
    "initial_context_length": _MAYBE,
    "architectures": Range(list, of=str),
    "quantization_config": Range(dict),
}
"""The range of each field. A name means the same in every family that reads it."""

ROPE: Mapping[str, Range] = {
    "rope_type": Range(str),
    "type": Range(str),
    "rope_theta": _THETA,
    "partial_rotary_factor": _PART,
    "factor": Range(float, 1),
    "low_freq_factor": _POSITIVE,
    "high_freq_factor": _POSITIVE,
    "original_max_position_embeddings": _MAYBE,
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "mscale": Range(float, 0),
    "mscale_all_dim": Range(float, 0),
    "truncate": _SWITCH,
}
"""Inside `rope_parameters`, or `rope_scaling`."""

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")
_LOADER = (
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "partial_rotary_factor",
    "architectures",
    "quantization_config",
)
"""Fields that count in every family, and not only in those that read them."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """Is a condition on several fields. It is not checked if one of them is null or absent."""

    words: str
    fields: tuple[str, ...]
    holds: Callable[..., bool]


RELATIONS = (
    Relation(
        "linear_num_key_heads divides linear_num_value_heads",
        ("linear_num_key_heads", "linear_num_value_heads"),
        lambda keys, values: values % keys == 0,
    ),
    Relation(
        "num_key_value_heads divides num_attention_heads",
        ("num_key_value_heads", "num_attention_heads"),
        lambda groups, heads: heads % groups == 0,
    ),
    Relation("head_dim is even", ("head_dim",), lambda head: head % 2 == 0),
    Relation(
        "partial_rotary_factor turns at least one channel of a head",
        ("partial_rotary_factor", "head_dim"),
        lambda part, head: int(head * part) >= 1,
    ),
    Relation(
        "num_experts_per_tok is at most the number of experts",
        ("num_experts_per_tok", "num_experts"),
        lambda chosen, experts: not experts or chosen <= experts,
    ),
    Relation("n_group divides the number of experts", ("n_group", "num_experts"), lambda n, experts: experts % n == 0),
    Relation("topk_group is at most n_group", ("topk_group", "n_group"), lambda chosen, groups: chosen <= groups),
    Relation(
        "num_experts_per_tok is at most the experts of topk_group groups",
        ("num_experts_per_tok", "topk_group", "n_group", "num_experts"),
        lambda chosen, groups, of, experts: chosen <= experts // of * groups,
    ),
    Relation(
        "low_freq_factor is below high_freq_factor",
        ("low_freq_factor", "high_freq_factor"),
        lambda low, high: low < high,
    ),
    # Kimi-K2 has 1 in both, which is a step and not a ramp
    Relation("beta_slow is at most beta_fast", ("beta_slow", "beta_fast"), lambda slow, fast: slow <= fast),
)


def check_fields(raw: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuses a config.json, found at `where`, with a field that is out of its range. Families without a table have no
    ranges."""
    for name, value, allowed in _ranges(raw):
        if allowed.switch is None:
            _check(name, value, allowed, where)


def check_normalized(config: Mapping[str, Any], where: str = "config.json") -> None:
    """Refuses a config.json, completed by `normalize`, if its fields do not fit their ranges or each other."""
    if family_of(config["model_type"]) is None:
        return
    for name, value, allowed in _ranges(config):
        if allowed.switch is None or config.get(allowed.switch) is not False:
            _check(name, value, allowed, where)
    # null in a file that says it in rope_parameters; of neither, transformers makes no frequencies
    _check("rope_theta", config["rope_theta"], dataclasses.replace(_THETA, null=False), where)
    rope = {name: value for field in _ROPE_FIELDS for name, value in (config.get(field) or {}).items()}
    found = {**rope, **config}
    for relation in RELATIONS:
        values = [found.get(name) for name in relation.fields]
        if None not in values and not relation.holds(*values):
            given = ", ".join(
                f"{name} = {shorten_value(value)}" for name, value in zip(relation.fields, values, strict=True)
            )
            raise ModelError(
                where, why=f"{given} do not fit: {relation.words}", fix="correct them, or get the file again"
            )


def _ranges(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Range]]:
    """Yields (field, value, range) for the fields of a config.json that the table knows."""
    family = family_of(config["model_type"])
    if family is None:
        return
    for name, value in config.items():
        if name in _ROPE_FIELDS:
            yield name, value, Range(dict)
            yield from ((f"{name}.{inner}", value[inner], ROPE[inner]) for inner in value or () if inner in ROPE)
        elif name in FIELDS and (name in family.reads or name in _LOADER):
            yield name, value, FIELDS[name]


def _check(name: str, value: Any, allowed: Range, where: str) -> None:
    if not allowed.holds(value):
        raise ModelError(
            where,
            why=f"{name} = {shorten_value(value)} is not {allowed.words}",
            fix="correct the field, or get the file again",
        )
