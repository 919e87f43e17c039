"""No value of a field of config.json ends in a traceback or in a model that is none: it is in range, or refused by its name."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ModelError
from mrl.weights import ranges
from mrl.weights.families import FAMILIES, fields_of
from mrl.weights.hf_config import normalize, read_hf_config
from mrl.weights.json_file import MAX_DEPTH
from mrl.weights.ranges import FIELDS, ROPE, Range
from mrl.weights.rules import expected_hf_names
from tests.engine import tiny
from tools import pages

NAMES = {model_type: name for name, (model_type, _) in reversed(tiny.FAMILIES.items())} | {"llama": "llama3"}
ODD = (float("nan"), float("inf"), -float("inf"), 10**400, -1, 0, "many", "", True, [], [[1]], {}, {"a": 1})


def config_of(model_type: str) -> dict[str, Any]:
    return json.loads(tiny.config_of(NAMES[model_type]).to_json_string())


def said(raw: dict[str, Any]) -> str | None:
    """Why an import refuses the content of a config.json; None where it does not."""
    logging.disable(logging.WARNING)
    try:
        config = normalize(copy.deepcopy(raw))
        fields_of(config)
        expected_hf_names(FAMILIES[config["model_type"]], config)
    except ModelError as error:
        return str(error)
    finally:
        logging.disable(logging.NOTSET)
    return None


def outside(allowed: Range) -> Iterator[Any]:
    """Values that are not in range: the next one past each bound, and of other types."""
    step = 1 if allowed.kind is int else 1e-9
    if allowed.low is not None:
        yield allowed.low if allowed.above else allowed.low - step
    if allowed.high is not None:
        yield allowed.high if allowed.below else allowed.high + step
    yield from (value for value in ODD if not allowed.holds(value))
    if not allowed.null:
        yield None


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_field_has_a_range_and_what_is_outside_is_refused_by_its_name(model_type):
    whole, count = config_of(model_type), 0
    assert said(whole) is None
    for name, allowed in FIELDS.items():
        if name not in FAMILIES[model_type].reads and name not in ranges._LOADER:
            continue
        for value in outside(allowed):
            # a window that nobody uses may be anything
            line = said(whole | {name: value} | ({"use_sliding_window": True} if name == "sliding_window" else {}))
            assert line is not None and name in line and "\n" not in line and len(line) < 400, (name, value, line)
            count += 1
    for name, allowed in ROPE.items():
        for value in outside(allowed):
            line = said(whole | {"rope_parameters": whole["rope_parameters"] | {name: value}})
            assert line is not None and name in line and "\n" not in line and len(line) < 400, (name, value, line)
            count += 1
    assert count > 200
    unbounded = FAMILIES[model_type].reads - FIELDS.keys() - {"rope_parameters", "rope_scaling"}
    held = {"scoring_func", "topk_method", "clip_qkv", "ep_size", "moe_layer_freq"}  # to the values that are supported
    assert unbounded <= held | {"aux_loss_alpha", "seq_aux"}, "which change nothing"


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_value_at_all_is_a_traceback(model_type):
    """Of fields without a range, and of values in range that fit no other field: accepted, or one line."""
    whole = config_of(model_type)
    for name in whole:
        if name != "model_type":
            for value in (*(() if name in FIELDS else ODD), None, 1, 3, 0.5, ["x", "x"], [[1], [1]]):
                line = said(whole | {name: value})
                assert line is None or ("\n" not in line and len(line) < 500), (name, value, line)


NONSENSE = {
    "theta of 0": ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta = 0 is not a number above 1"),
    "old theta of 0": ("llama", {"rope_parameters": None, "rope_theta": 0}, "rope_theta = 0 is not a number above 1"),
    "factor in words": ("llama", {"rope_parameters": {"factor": "two"}}, "rope_parameters.factor = 'two' is not a number of at least 1"),
    "equal factors": ("llama", {"rope_parameters": {"low_freq_factor": 3.0}}, "low_freq_factor is below high_freq_factor"),
    "unknown key": ("llama", {"rope_parameters": {"base": 3.0}}, "rope_parameters.base = 3.0 has no meaning"),
    "key of another type": ("llama", {"rope_parameters": {"beta_fast": 3.0}}, "rope_parameters.beta_fast = 3.0 has no meaning"),
    "factor of no type": ("qwen2", {"rope_parameters": {"factor": 3.0}}, "in rotary embeddings of type default"),
    "yarn's betas": ("gpt_oss", {"rope_parameters": {"beta_fast": 1.0, "beta_slow": 4.0}}, "beta_slow is at most beta_fast"),
    "kind in a list": ("llama", {"rope_parameters": {"rope_type": ["llama3"]}}, "rope_parameters.rope_type = ['llama3'] is not a text"),
    "more chosen than experts": ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is at most the number of experts"),
    "KV heads": ("llama", {"num_key_value_heads": 3}, "num_key_value_heads divides num_attention_heads"),
    "groups": ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "n_group divides the number of experts"),
    "chosen groups": ("deepseek_v3", {"topk_group": 5}, "topk_group is at most n_group"),
    "experts of the chosen groups": ("deepseek_v3", {"num_experts_per_tok": 7}, "the experts of topk_group groups"),
    "odd heads": ("qwen3", {"head_dim": 7}, "head_dim"),
    "no part of a head": ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.02}}, "turns at least one channel"),
    "window of 0": ("mistral", {"sliding_window": 0}, "sliding_window = 0 is not a whole number of at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_what_is_no_model_is_refused(name):
    model_type, changes, words = NONSENSE[name]
    whole = config_of(model_type)
    for field, value in changes.items():
        whole[field] = whole[field] | value if isinstance(value, dict) else value
    assert words in (said(whole) or "accepted")


def test_a_window_that_is_switched_off_may_be_anything():
    assert said(config_of("qwen2") | {"use_sliding_window": False, "sliding_window": 0}) is None


PUBLISHED = {
    "meta-llama/Llama-3.2-1B": ("llama", {"rope_parameters": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "lmsys/vicuna-7b-v1.5-16k": ("llama", {"max_sequence_length": 16384, "pad_token_id": 0}),
    "unsloth/Llama-3.2-1B": ("llama", {"unsloth_fixed": True, "unsloth_version": "2024.9"}),
    "mistralai/Mistral-Nemo-Base-2407": ("mistral", {"max_position_embeddings": 1024000, "sliding_window": None}),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 4096}),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "qwen3_moe", {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "max_window_layers": 28},
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", {"router_jitter_noise": 0.0, "head_dim": None}),
    "moonshotai/Kimi-K2-Instruct as deepseek_v3": (
        "deepseek_v3", {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "rope_parameters": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn",
        }},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_say_is_accepted(name):
    """Fields and values of config.json files on the hub, in the tiny model of their family."""
    model_type, changes = PUBLISHED[name]
    whole = config_of(model_type)
    for field, value in changes.items():
        whole[field] = whole[field] | value if isinstance(value, dict) else value
    assert said(whole) is None


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 500, 30_000])
def test_a_file_that_nests_deep_is_one_line(tmp_path, levels):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "x": ' + "[" * levels + "]" * levels + "}")
    with pytest.raises(ModelError, match=f"it nests deeper than {MAX_DEPTH} levels"):
        read_hf_config(tmp_path)


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[2] / "docs/supported-models.md").read_text(encoding="utf-8")
    assert pages.ranges() in page, "put what `python tools/pages.py ranges` prints into docs/supported-models.md"
