"""The FSDP engine on models that mrl has no table of, and what it never holds: parity is in test_fsdp_parity.py."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from mrl.config.schema import FSDPConfig
from mrl.engine.base import GenerateRequest
from mrl.engine.fsdp import attention
from mrl.engine.fsdp.blocks import block_lists, embedding_of
from mrl.engine.fsdp.output import logit_rule
from mrl.engine.fsdp.probe import check
from mrl.engine.logprobs import LogitRule
from mrl.engine.peak_bytes import PeakBytes
from mrl.errors import CheckpointError, ConfigError, ModelError
from mrl.ops.masked import explicit_attention
from tests.engine import tiny
from tests.engine.contract import make_engine
from tests.engine.harness import run_case

# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "block"), [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("bloom", "BloomBlock")]
)
@pytest.mark.parametrize("layers", [1, 3])  # one is a block by transformers' word
def test_blocks_are_the_layers(folder, family, block, layers):
    config = AutoConfig.from_pretrained(folder(family))
    config.num_hidden_layers = layers
    for tied in (False, True):
        config.tie_word_embeddings = tied
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config)
        assert [[type(block).__name__ for block in found] for found in block_lists(hf)] == [[block] * layers]
        assert (embedding_of(hf) is not None) == (not tied)


def test_a_vision_tower_has_blocks_of_its_own():
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 131, "max_position_embeddings": 128,
    }  # fmt: skip
    vision = {"depth": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    with torch.device("meta"):
        hf = AutoModelForImageTextToText.from_config(config)
    found = [(len(blocks), type(blocks[0]).__name__) for blocks in block_lists(hf)]
    assert sorted(found) == [(2, "Qwen2_5_VLDecoderLayer"), (3, "Qwen2_5_VLVisionBlock")]


# -- logits ------------------------------------------------------------------------------------------------------------


def test_what_is_done_to_logits_is_seen(folder):
    token = torch.ones(1, 1, dtype=torch.int64)
    rules = {}
    for family in ("llama", "gemma2", "granite"):
        hf = AutoModelForCausalLM.from_pretrained(folder(family)).eval()
        rules[family] = logit_rule(hf, input_ids=token, position_ids=token - 1)
    assert rules == {"llama": LogitRule(), "gemma2": LogitRule(softcap=3.0), "granite": LogitRule(0.25)}
    plain = hf.forward

    def clamped(**inputs: object):  # which no model is known to do
        out = plain(**inputs)
        out.logits = out.logits.clamp(-5, 5)
        return out

    hf.forward = clamped
    with pytest.raises(ModelError, match="'granite' changes its logits after the output layer by something else than"):
        logit_rule(hf, input_ids=token, position_ids=token - 1)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields", "options", "message"),
    [
        ("bloom", {}, {"packing": True}, "'bloom' does not use .* attention interface.*; set data.packing to false$"),
        ("granite", {}, {"head": "value"}, "'granite' has no sequence classifier .* gives it no value head"),
        ("bert", {}, {}, "'bert' (lets tokens see those that follow|has attention in both directions)"),
        ("roberta", {"is_decoder": True}, {}, "'roberta' gives packed sequences other numbers than each has alone"),
        ("recurrent_gemma", {}, {}, "'recurrent_gemma' gives packed sequences other numbers .*; set data.packing to false, or"),
        ("t5", {}, {}, "'t5' is no causal language model that transformers builds"),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(tmp_path, family, fields, options, message):
    known = tiny.OTHERS | {
        "bert": ("bert", {}), "roberta": ("roberta", {}), "t5": ("t5", {}),
        "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8}),
    }  # fmt: skip
    model_type, of_family = known[family]
    common = {
        "vocab_size": 131,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(model_type, **common | of_family | fields)
    config.save_pretrained(tmp_path)
    config = tiny.role(str(tmp_path), model={"init": "random"}, optimizer=None, **options)
    with pytest.raises(ModelError, match=message):
        make_engine(config)


@pytest.mark.parametrize(("backend", "family"), [("fsdp", "phi3"), ("fsdp", "llama"), ("megatron", "llama")])
def test_the_head_of_a_random_value_model_starts_at_zero(folder, backend, family):
    """With a table of the family and without one. The rest is random."""
    engine = make_engine(tiny.role(folder(family), head="value", model={"init": "random"}, backend=backend))
    weights = dict(engine.hf_weights())
    assert not weights["score.weight"].any() and weights["model.layers.0.self_attn.o_proj.weight"].all()


def test_an_own_attention_generates_nothing(folder):
    engine = make_engine(tiny.role(folder("bloom"), packing=False, optimizer=None))
    with pytest.raises(ModelError, match="'bloom' keeps to attention of its own.*rollout.backend"):
        engine.generate([])


def test_what_is_generated_is_as_short_as_angles_stay_the_same(folder):
    """Kept keys were turned by the angles of a shorter sequence than the one that trains."""
    engine = make_engine(tiny.role(folder("phi3"), optimizer=None))
    (completion,) = engine.generate([GenerateRequest([5, 9, 17], 7)])
    assert len(completion.tokens) == 7
    with pytest.raises(ModelError, match='of 11 tokens is above the 10 .* embedding "longrope" .*; give at most 10'):
        engine.generate([GenerateRequest([5, 9, 17], 8)])


def test_every_tensor_is_accounted_for(folder, tmp_path):
    """Names of older files are read as transformers reads them; what is missing, left over, of another shape or untied is said."""
    shutil.copytree(folder("gpt2", tied=True), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    whole = dict(make_engine(tiny.role(str(tmp_path), optimizer=None)).hf_weights())

    def saved(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
        now = {n: t for n, t in (tensors | changed).items() if t is not None}
        save_file(now, file, {"format": "pt"})
        return dict(make_engine(tiny.role(str(tmp_path), optimizer=None)).hf_weights())

    older = {name.removeprefix("transformer."): t for name, t in tensors.items()} | {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4)
    }
    found = saved(**dict.fromkeys(tensors), **older)
    assert found.keys() == older.keys() - {"h.0.attn.bias"}, "weights keep the names of their folder"
    assert all(torch.equal(found[n.removeprefix("transformer.")], whole[n]) for n in whole)
    name, embedding = "transformer.h.1.ln_2.bias", tensors["transformer.wte.weight"]
    found = saved(**{"lm_head.weight": embedding.clone()})
    assert found.keys() == whole.keys()
    for changed, message in (
        ({name: None}, f"1 missing .{name}."), ({"extra": torch.ones(2)}, "1 left over .extra."),
        ({name: torch.ones(3)}, f"{name} is .3., not .32."), ({"lm_head.weight": embedding + 1}, "config.json ties them"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            saved(**changed)


class _Moves(TorchFunctionMode):
    """`places`: what tensors were asked to be on."""

    def __init__(self):
        super().__init__()
        self.places: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        asked = [*args[1:], *(kwargs or {}).values()] if func is torch.Tensor.to else []
        self.places += ["cpu"] if func is torch.Tensor.cpu else [v for v in asked if isinstance(v, str | torch.device)]
        return func(*args, **(kwargs or {}))


def test_weights_stay_where_the_engine_is(folder):
    """Who reads them takes them to the host, where they have to go there."""
    engine = make_engine(tiny.role(folder("qwen3_moe"), optimizer=None, dtype="bfloat16"))
    with _Moves() as moves:
        assert {t.dtype for _, t in engine.hf_weights()} == {torch.bfloat16}
    assert not moves.places


def test_a_checkpoint_of_another_architecture_is_refused(folder, tmp_path):
    """The shapes are the same; what the maths depends on is not."""
    engine = make_engine(tiny.role(folder("granite")))
    path = engine.save_checkpoint(str(tmp_path / "checkpoints"), global_step=1)
    other = make_engine(tiny.role(folder("granite", logits_scaling=2.0)))
    with pytest.raises(CheckpointError, match="logits_scaling is 4.0 in the checkpoint and 2.0 in config.json"):
        other.load_checkpoint(path)


def test_a_compiler_is_needed(folder):
    config = tiny.role(folder("llama"), fsdp=FSDPConfig(compile=True))
    none = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
    with (
        none,
        pytest.raises(ConfigError, match="engine.fsdp.compile: value true needs a C.. compiler, and there is none"),
    ):
        make_engine(config)


# -- masks -------------------------------------------------------------------------------------------------------------


def attend(q, k, v, mask, **options):
    """[N, L, H, D] of the function that models of transformers call."""
    return attention.document_attention(torch.nn.Module(), q, k, v, mask, scaling=0.3, **options)[0]


def test_windows_and_chunks_are_those_of_transformers():
    """Also of a document that is one token longer than the window, and of one that ends at a chunk's border."""
    torch.manual_seed(0)
    zero, none = torch.zeros((), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for length, size in itertools.product(range(1, 9), range(1, 9)):
        at, config = torch.arange(length), types.SimpleNamespace(attention_chunk_size=size)
        q, k, v = (torch.randn(1, heads, length, 4, dtype=torch.float64) for heads in (2, 1, 1))
        for rule, theirs in (
            (attention.mask_of_rule(local_size=size), sliding_window_causal_mask_function(size)),
            (attention.mask_of_rule(local_size=size, config=config), chunked_causal_mask_function(size, none)),
            (attention.mask_of_rule(), causal_mask_function),
        ):
            wanted = explicit_attention(q, k, v, theirs(zero, 0, at[:, None], at[None]), scale=0.3).transpose(1, 2)
            torch.testing.assert_close(attend(q, k, v, rule), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rule, options",
    [({"window": 64}, {}), ({"window": 700}, {"sinks": True}), ({}, {"softcap": 30.0})],
    ids=str,
)
def test_attentions_memory_grows_with_the_length(rule, options):
    """Forward and backward: twice the tokens take at most 2.3 times the bytes; scores, or a mask of all of them, take
    four times."""

    def peak(length):
        given = [torch.randn(1, heads, length, 8, requires_grad=True) for heads in (2, 1, 1)]
        s_aux = torch.zeros(2, requires_grad=True) if "sinks" in options else None
        with PeakBytes() as memory:
            out = attend(*given, attention.DocumentMask(**rule), s_aux=s_aux, softcap=options.get("softcap"))
            out.sum().backward()
        return memory.peak

    short, long = peak(2048), peak(4096)
    assert long < 2.3 * short, f"{short / 2**20:.1f} MiB at 2048 tokens, {long / 2**20:.1f} MiB at 4096"


# -- memory ------------------------------------------------------------------------------------------------------------


def largest_while_made(config) -> tuple[int, int]:
    """(the most elements of a tensor while the engine is made, of the largest parameter)."""
    with PeakBytes("cpu") as seen:
        engine = make_engine(config)
    return seen.largest // 4, max(p.numel() for p in engine.model.parameters().values())


def test_no_rank_holds_a_whole_parameter(folder):
    """Weights are read shard by shard: on two ranks no tensor is larger than half of the largest parameter."""
    config = tiny.role(folder("qwen3_moe", vocab=512))
    made, largest = run_case(2, "tests.engine.test_fsdp_model:largest_while_made", config=config)
    assert made <= largest // 2


def bytes_while_streamed(config) -> tuple[int, int]:
    """(the most bytes that are alive for a stream of the weights, those of the largest tensor in it)."""
    engine, largest = make_engine(config), 0
    with PeakBytes() as memory:
        for _, tensor in engine.hf_weights():
            largest = max(largest, tensor.nbytes)
            del tensor
    return memory.peak, largest


def test_weights_are_gathered_in_the_dtype_of_the_files(folder):
    """Masters are fp32, which would be twice as much to send; what is gathered is there once more as it is given."""
    config = tiny.role(folder("llama", vocab=512), dtype="bfloat16")
    peak, largest = run_case(2, "tests.engine.test_fsdp_model:bytes_while_streamed", config=config)
    assert peak < 2.1 * largest


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_the_probe_finds_what_leaks(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder("gemma2")).eval()
    hf.set_attn_implementation(attention.NAME)
    check(hf, packed=True, device=torch.device("cpu"))
    embedding = hf.get_input_embeddings()
    plain = embedding.forward
    embedding.forward = lambda ids: plain(ids) + 0.01 * plain(ids)[:, :1]  # of the row, whatever document it is of
    with pytest.raises(ModelError, match="'gemma2' gives packed sequences other numbers than each has alone"):
        check(hf, packed=True, device=torch.device("cpu"))


def test_config_of_the_export_says_what_it_is(folder, tmp_path):
    engine = make_engine(dataclasses.replace(tiny.role(folder("gemma2"), dtype="bfloat16"), optimizer=None))
    engine.export_hf(str(tmp_path))
    assert json.loads(pathlib.Path(tmp_path, "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.final_logit_softcapping == 3.0
