"""Has the words of a family's table: one entry per mcore parameter, read in both directions.

A table is data and is never changed: tuples of frozen entries. `{l}` stands for the layer (local on the mcore side,
global on the HF side), `{e}` for the expert (local to the EP rank, global). The llama-like families share the tuples
below; a family's file puts them together and adds its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

HFConfig = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Maps one mcore parameter to the HF tensors that make it."""

    mcore: str  # name in the local spec
    hf: tuple[tuple[str, tuple[str, ...]], ...]  # pairs of HF name and shape, the shape as words of `sizes_of`
    kind: str  # a key of `algebra.KINDS`
    te: str | None = None  # name in the transformer-engine spec, where it differs
    needs: str | None = None  # a config key: the entry exists where it is true
    unless: str | None = None  # a config key: the entry exists where it is false
    buffer: bool = False  # no parameter: nothing trains it, and it is fp32 whatever the model's dtype

    @property
    def of_expert(self) -> bool:
        return "{e}" in self.mcore

    def name(self, spec: str) -> str:
        """Returns the mcore name pattern under `spec`, "local" or "te"."""
        if spec not in ("local", "te"):
            raise ValueError(f"spec {spec!r} is neither 'local' nor 'te'")
        return self.te if spec == "te" and self.te else self.mcore


def _never(config: HFConfig, layer: int) -> bool:
    return False


def every_layer(config: HFConfig, layer: int) -> bool:
    """Returns True: the `is_sparse` of a family whose layers all have experts."""
    return True


def no_sizes(config: HFConfig) -> dict[str, int]:
    return {}


@dataclasses.dataclass(frozen=True)
class Stack:
    """Is a tensor of the files that holds a matrix or bias of every expert of a layer: see `mrl.converters.stacks`."""

    stored: str  # its name, with `{l}`
    parts: tuple[str, ...]  # what the table calls the tensors of one expert, whose rows are interleaved
    transposed: bool = False  # whether the rows of an expert are columns of the file
    bias: bool = False  # whether an expert's tensor has one dimension


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes a model family: the names of its tensors, and the meaning of its config.json."""

    model_type: str
    layer: tuple[Entry, ...]  # of every layer
    reads: frozenset[str]  # the fields of config.json that `fields` takes into account
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    """From a config of `read_hf_config` to keyword arguments of megatron's TransformerConfig; ModelError where a value
    is not supported.
    """
    dense: tuple[Entry, ...] = ()  # of the MLP of a layer where `is_sparse` is false
    sparse: tuple[Entry, ...] = ()  # of the MLP of the other layers
    is_sparse: Callable[[HFConfig, int], bool] = _never  # of the config and a layer's number
    sizes: Callable[[HFConfig], dict[str, int]] = no_sizes  # words for shapes beyond those of `sizes_of`
    stacks: tuple[Stack, ...] = ()  # experts that the files hold stacked
    mtp: tuple[Entry, ...] = ()  # what an MTP layer has beside a block: see `mrl.converters.mtp`

    def layer_entries(self, config: HFConfig, layer: int) -> tuple[Entry, ...]:
        """Returns the entries of global layer number `layer` in a model with this config."""
        entries = self.layer + (self.sparse if self.is_sparse(config, layer) else self.dense)
        return tuple(
            entry
            for entry in entries
            if (entry.needs is None or config.get(entry.needs))
            and (entry.unless is None or not config.get(entry.unless))
        )

    def mtp_entries(self, config: HFConfig, layer: int) -> tuple[Entry, ...]:
        """Returns the entries of global layer number `layer`, past the last; mcore's `{l}` counts from the first such
        layer."""
        return self.mtp + tuple(map(as_mtp_entry, self.layer_entries(config, layer)))


def sizes_of(config: HFConfig, padded: int) -> dict[str, int]:
    """Returns the numbers of shapes by name, from a config of `read_hf_config`. padded: the padded vocabulary."""
    head_dim, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "one": 1,
        "vocab": config["vocab_size"],
        "padded_vocab": padded,
        "hidden": config["hidden_size"],
        "two_hidden": 2 * config["hidden_size"],
        "head_dim": head_dim,
        "heads": heads,
        "groups": groups,
        "q": heads * head_dim,
        "kv": groups * head_dim,
        "ffn": config["intermediate_size"],
        "moe_ffn": config.get("moe_intermediate_size") or config["intermediate_size"],
        "experts": config.get("num_experts") or 0,
    }


_MCORE = "decoder.layers.{l}."
_MTP = "mtp.layers.{l}."
# In a checkpoint of every megatron: 0.19 calls the module mtp_model_layer, and its `sharded_state_dict` keeps the older
# name.
_MTP_BLOCK = _MTP + "transformer_layer."
_HF = "model.layers.{l}."


def as_mtp_entry(entry: Entry) -> Entry:
    """Returns the entry of a layer as the block of an MTP layer has it."""
    te = entry.te and entry.te.replace(_MCORE, _MTP_BLOCK)
    return dataclasses.replace(entry, mcore=entry.mcore.replace(_MCORE, _MTP_BLOCK), te=te)


EMBEDDING = Entry("embedding.word_embeddings.weight", (("model.embed_tokens.weight", ("vocab", "hidden")),), "vocab")
FINAL_NORM = Entry("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),), "replicated")
LM_HEAD = Entry("output_layer.weight", (("lm_head.weight", ("vocab", "hidden")),), "vocab")
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.hf, "vocab")
MTP_EMBEDDING = dataclasses.replace(EMBEDDING)  # on the last pipeline stage, for MTP layers
VALUE_HEAD = Entry("output_layer.weight", (("score.weight", ("one", "hidden")),), "replicated")

ATTENTION = (
    Entry(
        _MCORE + "input_layernorm.weight",
        ((_HF + "input_layernorm.weight", ("hidden",)),),
        "replicated",
        te=_MCORE + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(
        _MCORE + "self_attention.linear_qkv.weight",
        (
            (_HF + "self_attn.q_proj.weight", ("q", "hidden")),
            (_HF + "self_attn.k_proj.weight", ("kv", "hidden")),
            (_HF + "self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        "qkv",
    ),
    Entry(_MCORE + "self_attention.linear_proj.weight", ((_HF + "self_attn.o_proj.weight", ("hidden", "q")),), "row"),
)


def only_where(key: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Returns the same entries, for models with the config key set to true."""
    return tuple(dataclasses.replace(entry, needs=key) for entry in entries)


def qkv_bias(needs: str | None = None) -> tuple[Entry, ...]:
    """Returns biases on q, k and v."""
    names = ("q_proj", "q"), ("k_proj", "kv"), ("v_proj", "kv")
    hf = tuple((_HF + f"self_attn.{name}.bias", (size,)) for name, size in names)
    return (Entry(_MCORE + "self_attention.linear_qkv.bias", hf, "qkv", needs=needs),)


def proj_bias(needs: str | None = None) -> tuple[Entry, ...]:
    """Returns a bias on the attention's output projection."""
    hf = ((_HF + "self_attn.o_proj.bias", ("hidden",)),)
    return (Entry(_MCORE + "self_attention.linear_proj.bias", hf, "replicated", needs=needs),)


QK_NORM = tuple(
    Entry(
        _MCORE + f"self_attention.{x}_layernorm.weight",
        ((_HF + f"self_attn.{x}_norm.weight", ("head_dim",)),),
        "replicated",
    )
    for x in "qk"
)


# a norm over all query heads, and one over all key heads
QK_NORM_OVER_HEADS = tuple(
    Entry(
        _MCORE + f"self_attention.{x}_layernorm.weight",
        ((_HF + f"self_attn.{x}_norm.weight", (size,)),),
        "replicated",
    )
    for x, size in (("q", "q"), ("k", "kv"))
)


def _latent(mcore: str, hf: str, shape: tuple[str, ...], kind: str, **options: Any) -> Entry:
    attention = _MCORE + "self_attention."
    te = options.pop("te", None)
    return Entry(attention + mcore, ((_HF + "self_attn." + hf, shape),), kind, te=te and attention + te, **options)


_LOW = "q_lora_rank"
LATENT_ATTENTION = (
    Entry(_MCORE + "input_layernorm.weight", ((_HF + "input_layernorm.weight", ("hidden",)),), "replicated"),
    _latent("linear_q_proj.weight", "q_proj.weight", ("latent_q", "hidden"), "column", unless=_LOW),
    _latent("linear_q_down_proj.weight", "q_a_proj.weight", ("q_rank", "hidden"), "replicated", needs=_LOW),
    _latent(
        "q_layernorm.weight", "q_a_layernorm.weight", ("q_rank",), "replicated", needs=_LOW,
        te="linear_q_up_proj.layer_norm_weight",
    ),
    _latent("linear_q_up_proj.weight", "q_b_proj.weight", ("latent_q", "q_rank"), "column", needs=_LOW),
    _latent("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", ("kv_down", "hidden"), "replicated"),
    _latent(
        "kv_layernorm.weight", "kv_a_layernorm.weight", ("kv_rank",), "replicated",
        te="linear_kv_up_proj.layer_norm_weight",
    ),
    _latent("linear_kv_up_proj.weight", "kv_b_proj.weight", ("latent_kv", "kv_rank"), "column"),
    _latent("linear_proj.weight", "o_proj.weight", ("hidden", "latent_out"), "row"),
)  # fmt: skip
"""Multi-head latent attention (DeepSeek-V2), with and without a latent of queries."""


def mlp_norm(*, sparse: bool) -> tuple[Entry, ...]:
    """Returns the norm before the MLP; transformer-engine fuses it into a dense layer's linear_fc1."""
    fused = None if sparse else _MCORE + "mlp.linear_fc1.layer_norm_weight"
    hf = ((_HF + "post_attention_layernorm.weight", ("hidden",)),)
    return (Entry(_MCORE + "pre_mlp_layernorm.weight", hf, "replicated", te=fused),)


DENSE_MLP = (
    *mlp_norm(sparse=False),
    Entry(
        _MCORE + "mlp.linear_fc1.weight",
        (
            (_HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_HF + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "gate_up",
    ),
    Entry(_MCORE + "mlp.linear_fc2.weight", ((_HF + "mlp.down_proj.weight", ("hidden", "ffn")),), "row"),
)


def mlp_bias(needs: str) -> tuple[Entry, ...]:
    """Returns biases on all three matrices of a dense MLP."""
    fc1 = tuple((_HF + f"mlp.{name}.bias", ("ffn",)) for name in ("gate_proj", "up_proj"))
    fc2 = ((_HF + "mlp.down_proj.bias", ("hidden",)),)
    return (
        Entry(_MCORE + "mlp.linear_fc1.bias", fc1, "gate_up", needs=needs),
        Entry(_MCORE + "mlp.linear_fc2.bias", fc2, "replicated", needs=needs),
    )


def sparse_mlp(block: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Returns norm, router and experts of an MoE layer, with HF names `{block}.gate` and
    `{block}.experts.{e}.{gate|up|down}`."""
    expert, local = _HF + block + ".experts.{e}.", _MCORE + "mlp.experts.local_experts.{e}."
    return (
        *mlp_norm(sparse=True),
        Entry(_MCORE + "mlp.router.weight", ((_HF + block + ".gate.weight", ("experts", "hidden")),), "replicated"),
        Entry(
            local + "linear_fc1.weight",
            (
                (expert + gate + ".weight", ("moe_ffn", "hidden")),
                (expert + up + ".weight", ("moe_ffn", "hidden")),
            ),
            "gate_up",
            te=_MCORE + "mlp.experts.linear_fc1.weight{e}",
        ),
        Entry(
            local + "linear_fc2.weight",
            ((expert + down + ".weight", ("hidden", "moe_ffn")),),
            "row",
            te=_MCORE + "mlp.experts.linear_fc2.weight{e}",
        ),
    )


def shared_mlp(block: str) -> tuple[Entry, ...]:
    """Returns the expert of every token, HF names `{block}.{gate|up|down}_proj`; its sizes have `shared_ffn`."""
    shared, hf = _MCORE + "mlp.shared_experts.", _HF + block
    return (
        Entry(
            shared + "linear_fc1.weight",
            (
                (hf + ".gate_proj.weight", ("shared_ffn", "hidden")),
                (hf + ".up_proj.weight", ("shared_ffn", "hidden")),
            ),
            "gate_up",
        ),
        Entry(shared + "linear_fc2.weight", ((hf + ".down_proj.weight", ("hidden", "shared_ffn")),), "row"),
    )


# a factor in (0, 1) on what the shared expert gives
SHARED_GATE = (
    Entry(
        _MCORE + "mlp.shared_experts.gate_weight",
        ((_HF + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
        "replicated",
    ),
)

# what is added to an expert's score when experts are chosen, and to nothing else
EXPERT_BIAS = (
    Entry(
        _MCORE + "mlp.router.expert_bias",
        ((_HF + "mlp.gate.e_score_correction_bias", ("experts",)),),
        "replicated",
        buffer=True,
    ),
)

# of a layer that predicts a further token: norms of a token's embedding and of the hidden state, and what joins the two
MTP = (
    *(Entry(_MTP + f"{x}.weight", ((_HF + f"{x}.weight", ("hidden",)),), "replicated") for x in ("enorm", "hnorm")),
    Entry(_MTP + "eh_proj.weight", ((_HF + "eh_proj.weight", ("hidden", "two_hidden")),), "column"),
    Entry(_MTP + "final_layernorm.weight", ((_HF + "shared_head.norm.weight", ("hidden",)),), "replicated"),
)
