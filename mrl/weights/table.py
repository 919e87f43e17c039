"""Has the words of a family's table: one entry per mcore parameter, read in both directions.

A table is data and is never changed: tuples of frozen entries. `{l}` stands for the layer (local on the mcore side,
global on the HF side), `{e}` for the expert (local to the EP rank, global). The llama-like families share the tuples
below; a family's file puts them together and adds its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
    """Is a tensor of the files that holds a matrix or bias of every expert of a layer: see `mrl.weights.stacks`."""

    stored: str  # its name, with `{l}`
    parts: tuple[str, ...]  # names in the table of the tensors of one expert
    interleaved: bool = True  # whether their rows alternate; else they are one behind the other
    transposed: bool = False  # whether the rows of an expert are columns of the file


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes a model family: the names of its tensors, and the meaning of its config.json."""

    model_type: str
    layer: tuple[Entry, ...]  # of a layer, without its MLP
    reads: frozenset[str]  # the fields of config.json that `fields` takes into account
    fields: Callable[[dict[str, Any]], dict[str, Any]]
    """From a config of `read_hf_config` to keyword arguments of megatron's TransformerConfig; ModelError where a value
    is not supported.
    """
    linear: tuple[Entry, ...] = ()  # in place of `layer` where `is_linear` is true
    is_linear: Callable[[HFConfig, int], bool] = _never  # of the config and a layer's number
    dense: tuple[Entry, ...] = ()  # of the MLP of a layer where `is_sparse` is false
    sparse: tuple[Entry, ...] = ()  # of the MLP of the other layers
    is_sparse: Callable[[HFConfig, int], bool] = _never  # of the config and a layer's number
    sizes: Callable[[HFConfig], dict[str, int]] = no_sizes  # words for shapes beyond those of `sizes_of`
    stacks: tuple[Stack, ...] = ()  # experts that the files hold stacked
    mtp: tuple[Entry, ...] = ()  # an MTP layer without its block: see `mrl.weights.accounting`
    mtp_block: str = "model.layers.{l}."  # what the files' names of its block begin with
    prefix: str = "model."  # what files have in place of the `model.` of names in the table
    carries: tuple[str, ...] = ()
    """Beginnings of names in files of tensors that no engine reads, and that exports hold unchanged."""

    def in_files(self, name: str) -> str:
        """Returns the files' name of a tensor that no `Stack` holds. name: the table's, or the files'."""
        other = name.startswith("model.") and not name.startswith((self.prefix, *self.carries))
        return self.prefix + name.removeprefix("model.") if other else name

    def carried(self, names: Iterable[str]) -> set[str]:
        """Returns those of a folder's names that `carries` names."""
        return {name for name in names if name.startswith(self.carries)}

    def layer_entries(self, config: HFConfig, layer: int) -> tuple[Entry, ...]:
        """Returns the entries of global layer number `layer` in a model with this config."""
        attention = self.linear if self.is_linear(config, layer) else self.layer
        entries = attention + (self.sparse if self.is_sparse(config, layer) else self.dense)
        return tuple(
            entry
            for entry in entries
            if (entry.needs is None or config.get(entry.needs))
            and (entry.unless is None or not config.get(entry.unless))
        )

    def mtp_entries(self, config: HFConfig, layer: int) -> tuple[Entry, ...]:
        """Returns the entries of global layer number `layer`, past the last; mcore's `{l}` counts from the first such
        layer."""
        block = (as_mtp_entry(entry, self.mtp_block) for entry in self.layer_entries(config, layer))
        return (*self.mtp, *block)


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
        "ffn": config.get("intermediate_size") or config["moe_intermediate_size"],
        "moe_ffn": config.get("moe_intermediate_size") or config["intermediate_size"],
        "experts": config.get("num_experts") or 0,
    }


_MCORE = "decoder.layers.{l}."
_MTP = "mtp.layers.{l}."
# In a checkpoint of every megatron: 0.19 calls the module mtp_model_layer, and its `sharded_state_dict` keeps the older
# name.
_MTP_BLOCK = _MTP + "transformer_layer."
_HF = "model.layers.{l}."


def as_mtp_entry(entry: Entry, block: str = _HF) -> Entry:
    """Returns the entry of a layer as the block of an MTP layer has it. block: what the files' names begin with."""
    te = entry.te and entry.te.replace(_MCORE, _MTP_BLOCK)
    hf = tuple((name.replace(_HF, block), shape) for name, shape in entry.hf)
    return dataclasses.replace(entry, mcore=entry.mcore.replace(_MCORE, _MTP_BLOCK), te=te, hf=hf)


EMBEDDING = Entry("embedding.word_embeddings.weight", (("model.embed_tokens.weight", ("vocab", "hidden")),), "vocab")
FINAL_NORM = Entry("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),), "replicated")
LM_HEAD = Entry("output_layer.weight", (("lm_head.weight", ("vocab", "hidden")),), "vocab")
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.hf, "vocab")
MTP_EMBEDDING = dataclasses.replace(EMBEDDING)  # on the last pipeline stage, for MTP layers
VALUE_HEAD = Entry("output_layer.weight", (("score.weight", ("one", "hidden")),), "replicated")


def in_layer(
    mcore: str, kind: str, hf: Mapping[str, str], *, te: str | None = None, needs: str | None = None,
    unless: str | None = None, buffer: bool = False,
) -> Entry:  # fmt: skip
    """Returns the entry of a layer's parameter. Names are those within the layer, on both sides.

    hf: name -> shape, as words of `sizes_of` with spaces between.
    """
    pairs = tuple((_HF + name, tuple(shape.split())) for name, shape in hf.items())
    return Entry(_MCORE + mcore, pairs, kind, te and _MCORE + te, needs, unless, buffer)


ATTENTION = (
    in_layer(
        "input_layernorm.weight", "replicated", {"input_layernorm.weight": "hidden"},
        te="self_attention.linear_qkv.layer_norm_weight",
    ),
    in_layer(
        "self_attention.linear_qkv.weight", "qkv", {
            "self_attn.q_proj.weight": "q hidden", "self_attn.k_proj.weight": "kv hidden",
            "self_attn.v_proj.weight": "kv hidden",
        },
    ),
    in_layer("self_attention.linear_proj.weight", "row", {"self_attn.o_proj.weight": "hidden q"}),
)  # fmt: skip


def only_where(key: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Returns the same entries, for models with the config key set to true."""
    return tuple(dataclasses.replace(entry, needs=key) for entry in entries)


def qkv_bias(needs: str | None = None) -> tuple[Entry, ...]:
    """Returns biases on q, k and v."""
    hf = {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"}
    return (in_layer("self_attention.linear_qkv.bias", "qkv", hf, needs=needs),)


def proj_bias(needs: str | None = None) -> tuple[Entry, ...]:
    """Returns a bias on the attention's output projection."""
    hf = {"self_attn.o_proj.bias": "hidden"}
    return (in_layer("self_attention.linear_proj.bias", "replicated", hf, needs=needs),)


def _qk_norm(query: str, key: str) -> tuple[Entry, ...]:
    return tuple(
        in_layer(f"self_attention.{x}_layernorm.weight", "replicated", {f"self_attn.{x}_norm.weight": size})
        for x, size in (("q", query), ("k", key))
    )


QK_NORM = _qk_norm("head_dim", "head_dim")
QK_NORM_OVER_HEADS = _qk_norm("q", "kv")  # a norm over all query heads, and one over all key heads


def _latent(mcore: str, kind: str, hf: str, shape: str, *, te: str | None = None, **options: Any) -> Entry:
    te = te and "self_attention." + te
    return in_layer("self_attention." + mcore, kind, {"self_attn." + hf: shape}, te=te, **options)


_LOW = "q_lora_rank"
LATENT_ATTENTION = (
    in_layer("input_layernorm.weight", "replicated", {"input_layernorm.weight": "hidden"}),
    _latent("linear_q_proj.weight", "column", "q_proj.weight", "latent_q hidden", unless=_LOW),
    _latent("linear_q_down_proj.weight", "replicated", "q_a_proj.weight", "q_rank hidden", needs=_LOW),
    _latent(
        "q_layernorm.weight", "replicated", "q_a_layernorm.weight", "q_rank", needs=_LOW,
        te="linear_q_up_proj.layer_norm_weight",
    ),
    _latent("linear_q_up_proj.weight", "column", "q_b_proj.weight", "latent_q q_rank", needs=_LOW),
    _latent("linear_kv_down_proj.weight", "replicated", "kv_a_proj_with_mqa.weight", "kv_down hidden"),
    _latent(
        "kv_layernorm.weight", "replicated", "kv_a_layernorm.weight", "kv_rank",
        te="linear_kv_up_proj.layer_norm_weight",
    ),
    _latent("linear_kv_up_proj.weight", "column", "kv_b_proj.weight", "latent_kv kv_rank"),
    _latent("linear_proj.weight", "row", "o_proj.weight", "hidden latent_out"),
)  # fmt: skip
"""Multi-head latent attention (DeepSeek-V2), with and without a latent of queries."""


def delta_net(block: str) -> tuple[Entry, ...]:
    """Returns a gated delta net (arXiv 2412.06464) and the norm before it. Shapes are in words of `delta_sizes`."""

    def entry(mcore: str, kind: str, hf: Mapping[str, str], *, te: str | None = None) -> Entry:
        return in_layer(f"self_attention.{mcore}", kind, {f"{block}.{name}": hf[name] for name in hf}, te=te)

    inputs = {
        "in_proj_qkv.weight": "delta_mixed hidden", "in_proj_z.weight": "delta_values hidden",
        "in_proj_b.weight": "delta_value_heads hidden", "in_proj_a.weight": "delta_value_heads hidden",
    }  # fmt: skip
    return (
        in_layer(
            "input_layernorm.weight", "replicated", {"input_layernorm.weight": "hidden"},
            te="self_attention.in_proj.layer_norm_weight",
        ),
        entry("in_proj.weight", "delta", inputs),
        entry("conv_weight", "delta", {"conv1d.weight": "delta_mixed one delta_kernel"}),
        entry("A_log", "column", {"A_log": "delta_value_heads"}),
        entry("dt_bias", "column", {"dt_bias": "delta_value_heads"}),
        entry("out_norm.weight", "replicated", {"norm.weight": "delta_value"}),
        entry("out_proj.weight", "row", {"out_proj.weight": "hidden delta_values"}),
    )  # fmt: skip


def delta_sizes(config: HFConfig) -> dict[str, int]:
    """Returns the words of `delta_net`."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return {
        "delta_heads": config["linear_num_key_heads"],
        "delta_value_heads": config["linear_num_value_heads"],
        "delta_value": config["linear_value_head_dim"],
        "delta_keys": keys,
        "delta_values": values,
        "delta_mixed": 2 * keys + values,
        "delta_kernel": config["linear_conv_kernel_dim"],
        "two_q": 2 * config["num_attention_heads"] * config["head_dim"],
    }


def mlp_norm(*, sparse: bool) -> tuple[Entry, ...]:
    """Returns the norm before the MLP; transformer-engine fuses it into a dense layer's linear_fc1."""
    fused = None if sparse else "mlp.linear_fc1.layer_norm_weight"
    return (
        in_layer("pre_mlp_layernorm.weight", "replicated", {"post_attention_layernorm.weight": "hidden"}, te=fused),
    )


def _mlp(mcore: str, hf: str, size: str) -> tuple[Entry, ...]:
    """Returns the matrices of an MLP. size: the word for its channels."""
    both = {f"{hf}.gate_proj.weight": f"{size} hidden", f"{hf}.up_proj.weight": f"{size} hidden"}
    return (
        in_layer(f"{mcore}.linear_fc1.weight", "gate_up", both),
        in_layer(f"{mcore}.linear_fc2.weight", "row", {f"{hf}.down_proj.weight": f"hidden {size}"}),
    )


DENSE_MLP = (*mlp_norm(sparse=False), *_mlp("mlp", "mlp", "ffn"))


def mlp_bias(needs: str) -> tuple[Entry, ...]:
    """Returns biases on all three matrices of a dense MLP."""
    fc1 = {"mlp.gate_proj.bias": "ffn", "mlp.up_proj.bias": "ffn"}
    return (
        in_layer("mlp.linear_fc1.bias", "gate_up", fc1, needs=needs),
        in_layer("mlp.linear_fc2.bias", "replicated", {"mlp.down_proj.bias": "hidden"}, needs=needs),
    )


def of_experts(linear: str, tensor: str, kind: str, hf: Mapping[str, str]) -> Entry:
    """Returns the entry of every expert's parameter, such as ("linear_fc1", "weight")."""
    local = f"mlp.experts.local_experts.{{e}}.{linear}.{tensor}"
    return in_layer(local, kind, hf, te=f"mlp.experts.{linear}.{tensor}{{e}}")


def sparse_mlp(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Entry, ...]:
    """Returns norm, router and experts of an MoE layer.

    HF names are `{block}.gate` and `{block}.experts.{e}.{gate|up|down}`.
    """
    expert = block + ".experts.{e}."
    both = {f"{expert}{gate}.weight": "moe_ffn hidden", f"{expert}{up}.weight": "moe_ffn hidden"}
    return (
        *mlp_norm(sparse=True),
        in_layer("mlp.router.weight", "replicated", {f"{block}.gate.weight": "experts hidden"}),
        of_experts("linear_fc1", "weight", "gate_up", both),
        of_experts("linear_fc2", "weight", "row", {f"{expert}{down}.weight": "hidden moe_ffn"}),
    )


def shared_mlp(block: str) -> tuple[Entry, ...]:
    """Returns the expert of every token, HF names `{block}.{gate|up|down}_proj`; its sizes have `shared_ffn`."""
    return _mlp("mlp.shared_experts", block, "shared_ffn")


# a factor in (0, 1) on what the shared expert gives
SHARED_GATE = (
    in_layer("mlp.shared_experts.gate_weight", "replicated", {"mlp.shared_expert_gate.weight": "one hidden"}),
)

# added to the score of an expert when experts are chosen, and to nothing else
EXPERT_BIAS = (
    in_layer("mlp.router.expert_bias", "replicated", {"mlp.gate.e_score_correction_bias": "experts"}, buffer=True),
)

# an MTP layer: norms of a token's embedding and of the hidden state, and the matrix that joins the two
MTP = (
    *(Entry(_MTP + f"{x}.weight", ((_HF + f"{x}.weight", ("hidden",)),), "replicated") for x in ("enorm", "hnorm")),
    Entry(_MTP + "eh_proj.weight", ((_HF + "eh_proj.weight", ("hidden", "two_hidden")),), "column"),
    Entry(_MTP + "final_layernorm.weight", ((_HF + "shared_head.norm.weight", ("hidden",)),), "replicated"),
)
# the same of the one MTP layer of a Qwen3.5
OWN_MTP = tuple(
    Entry(_MTP + f"{name}.weight", ((f"mtp.{hf}.weight", shape),), kind)
    for name, hf, shape, kind in (
        ("enorm", "pre_fc_norm_embedding", ("hidden",), "replicated"),
        ("hnorm", "pre_fc_norm_hidden", ("hidden",), "replicated"),
        ("eh_proj", "fc", ("hidden", "two_hidden"), "column"),
        ("final_layernorm", "norm", ("hidden",), "replicated"),
    )
)
