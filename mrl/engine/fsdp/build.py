"""The transformers module of a model, without memory.

Then its buffers, which checkpoints do not hold, and the weights of a model that starts from scratch.
"""

from __future__ import annotations

import copy
import hashlib
import re

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from mrl.config.schema import RoleConfig
from mrl.engine.checks import Sequences
from mrl.engine.fsdp import attention, delta_net
from mrl.engine.fsdp.blocks import blocks_of
from mrl.errors import ModelError
from mrl.weights.hf_config import VISION_LANGUAGE, reads_images
from mrl.weights.table import HFConfig

_POSITIONS = re.compile(r"(^|\.)(wpe|(embed_)?positions?(_embeddings?|_embed)?)$")
"""Names of learned positions in transformers' models."""


def check_known(model_type: str) -> None:
    """Raises ModelError if transformers builds no language model of that type."""
    if model_type in VISION_LANGUAGE:
        return
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            "config.json",
            why=f"model_type {model_type!r} is no causal language model that transformers builds",
            fix="give one, or upgrade transformers",
        )


def check_sequences(raw: HFConfig, sequences: Sequences) -> None:
    """Raises ModelError if transformers builds no language model of `raw`, or one that cannot take the sequences.

    It is for models without a table in mrl, and builds them without memory.
    """
    model_type = raw["model_type"]
    check_known(model_type)
    if model_type in VISION_LANGUAGE:
        return
    config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if sequences.packed and not supports_attention(hf):
        raise ModelError(_not_packed(model_type))
    learned = [
        name
        for name, module in hf.named_modules()
        if isinstance(module, nn.Embedding) and module is not hf.get_input_embeddings() and _POSITIONS.search(name)
    ]
    limit = getattr(config, "max_position_embeddings", None)  # of any class of transformers: some have none
    if learned and limit is not None and sequences.longest > limit:
        why = f"is above the {limit} positions that {learned[0]} of a {model_type!r} model has"
        raise ModelError(sequences.key, sequences.longest, why, f"give at most {limit}, or use another model")


def supports_attention(hf: nn.Module) -> bool:
    """Returns whether a model computes what crosses tokens by functions that mrl gives it.

    transformers says no of a model with gated delta nets, whose rule it does not give away.
    """
    return bool(hf._supports_attention_backend or delta_net.delta_nets(hf))


def _not_packed(model_type: str) -> str:
    return (
        f"config.json: model_type {model_type!r} does not use transformers' attention interface, and so sequences are "
        "not packed for it on backend fsdp; set data.packing to false"
    )


def build(config: RoleConfig, hf_config: HFConfig) -> nn.Module:
    """Returns the model of config.json, fp32, on the meta device, with our attention if it takes any.

    Raises ModelError.
    """
    model_type = hf_config["model_type"]
    check_known(model_type)
    # trust_remote_code: no code of the folder runs
    transformers_config = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
    kind = AutoModelForImageTextToText if reads_images(hf_config) else AutoModelForCausalLM
    with torch.device("meta"):
        hf = kind.from_config(transformers_config, dtype=torch.float32, attn_implementation="eager")
    hf.config.use_cache = False  # else a forward makes transformers' own cache of keys and values, and nobody reads it
    # transformers gives the row of `pad_token_id` no gradient. Nothing here is padded with it, and where it is a
    # token of the data, as an end-of-turn token often is, it trains like any other.
    hf.get_input_embeddings().padding_idx = None
    if supports_attention(hf):
        ours = attention.NAME
        # a vision tower attends in both directions, within an image, and tells images apart by itself
        hf.set_attn_implementation(
            {"": ours, "text_config": ours, "vision_config": "sdpa"} if reads_images(hf_config) else ours
        )
    elif config.packing:
        raise ModelError(_not_packed(model_type))
    delta_net.replace_forwards(hf)
    return hf


def with_value_head(hf: nn.Module, *, checked: bool) -> None:
    """Replaces the output layer by a layer of one output, a module of its own also if the old one was tied.

    checked: raises ModelError if no sequence classifier of transformers is this model with a layer `score`. Its folder
    could not be loaded.
    """
    before = hf.get_output_embeddings()
    if checked:
        _check_classifier(hf, before)
    with torch.device("meta"):
        hf.set_output_embeddings(nn.Linear(before.weight.shape[1], 1, bias=False))


def _check_classifier(hf: nn.Module, output: nn.Module) -> None:
    own = {name for name, p in hf.named_parameters(remove_duplicate=False) if p is output.weight or p is output.bias}
    own -= {name for name, p in hf.base_model.named_parameters(prefix=hf.base_model_prefix)}
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(hf.config), None)
    names: set[str] = set()
    if classifier is not None:
        config = copy.deepcopy(hf.config)
        config.num_labels = 1
        with torch.device("meta"):
            names = {name for name, _ in classifier(config).named_parameters()}
    if names != {name for name, _ in hf.named_parameters()} - own | {"score.weight"}:
        raise ModelError(
            "config.json",
            why=f"model_type {hf.config.model_type!r} has no sequence classifier in "
            "transformers that is the model with a layer `score`, so that backend fsdp "
            "gives it no value head",
            fix="use another model",
        )


@torch.no_grad()
def fill_buffers(hf: nn.Module) -> None:
    """Computes the buffers that follow from the config (rotary frequencies): the meta device has left them empty.

    Raises ModelError for a buffer that transformers does not compute: it would keep what its memory held before.
    """
    having = [module for module in hf.modules() if any(True for _ in module.buffers(recurse=False))]
    parameters = list(hf.parameters())
    for parameter in parameters:
        # transformers' functions in `_init_weights` (initialization.py, 5.23) leave a marked tensor alone. Without the
        # mark they would overwrite weights.
        parameter._is_hf_initialized = True
    computed = []
    # Twice, over zeros and over ones: what `_init_weights` leaves alone then differs.
    for before in (0, 1):
        for buffer in hf.buffers():
            buffer.fill_(before)
        for module in having:
            hf._init_weights(module)
        computed.append({name: buffer.clone() for name, buffer in hf.named_buffers()})
    for parameter in parameters:
        del parameter._is_hf_initialized
    first, second = computed
    in_files = hf.state_dict().keys()
    empty = [name for name in first if name not in in_files and not torch.equal(first[name], second[name])]
    if empty:
        raise ModelError(
            "config.json",
            why=f"model_type {hf.config.model_type!r}: transformers does not compute the buffer "
            f"{empty[0]}, so that backend fsdp cannot build it",
            fix="use another model",
        )


class InitialWeights:
    """Makes weights as transformers initialises them, of one block, or of one module outside, at a time.

    They are the same on any number of ranks: a block's weights are a function of (seed, its name). hf: on the meta
    device, tied once.
    """

    def __init__(self, hf: nn.Module, *, seed: int, score: str | None = None) -> None:
        """score: the name of a value head, which starts at zero."""
        self.hf, self.seed, self.score = hf, seed, score
        blocks = {id(block) for block in blocks_of(hf)}
        self._units: dict[str, tuple[str, nn.Module]] = {}
        self._find("", hf, blocks)
        self._made: tuple[str, dict[str, Tensor]] = ("", {})

    def _find(self, name: str, module: nn.Module, blocks: set[int]) -> None:
        """Notes the unit of each parameter and buffer: (the unit's name, the unit)."""
        prefix = f"{name}." if name else ""
        if id(module) in blocks:
            self._units |= {prefix + inner: (name, module) for inner in module.state_dict()}
            return
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        self._units |= {prefix + inner: (name, module) for inner, _ in own}
        for child_name, child in module.named_children():
            self._find(prefix + child_name, child, blocks)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Returns rows `start` to `stop` of dimension 0 of a parameter or buffer."""
        unit_name, unit = self._units[name]
        if self._made[0] != unit_name or name not in self._made[1]:
            self._made = unit_name, self._make(unit_name, unit)
        whole = self._made[1][name]
        if name == self.score:
            whole = torch.zeros_like(whole)
        return whole[start:stop] if whole.ndim else whole

    @torch.no_grad()
    def _make(self, name: str, unit: nn.Module) -> dict[str, Tensor]:
        if id(unit) not in {id(block) for block in blocks_of(self.hf)}:
            unit = copy.copy(unit)  # without its children: they are units of their own
            unit._modules = {}
            unit._parameters = dict(unit._parameters)
            unit._buffers = dict(unit._buffers)
        made = copy.deepcopy(unit).to_empty(device="cpu")
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            # children first, as transformers initialises them (5.23, modeling_utils.py, smart_apply): a parent may
            # overwrite its children's weights
            for module in reversed(list(made.modules())):
                self.hf._init_weights(module)
        prefix = f"{name}." if name else ""
        return {prefix + inner: tensor for inner, tensor in made.state_dict().items()}
