"""Selects the modules that get an adapter, as peft does.

The Hugging Face model is built on the meta device, without memory, and peft injects into it. Names, shapes and scales
are read from the result. peft says nothing about a part of a selection that matches nothing; here it is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import peft
import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.pytorch_utils import Conv1D

from mrl.config.schema import LoraConfig
from mrl.engine.lora.shapes import ADAPTER, AdapterShape, name_in_base
from mrl.errors import ConfigError, ModelError
from mrl.weights.adapter_folder import CONFIG, MERGE
from mrl.weights.hf_config import VISION_LANGUAGE
from mrl.weights.json_file import read_json

_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""peft 0.21's inits that leave the base as it is. Others (pissa, corda, olora, loftq, lora_ga) write to it."""
_MORE = ("lora_bias", "layer_replication", "bias", "modules_to_save", "trainable_token_indices")
"""Fields that make more of an adapter than B A, beside those that peft marks as variants."""
_HEADS = {"score", "classifier"}
"""Modules of a sequence classifier that peft saves whole."""


@dataclasses.dataclass(frozen=True)
class Injection:
    """Holds peft's result of a selection."""

    config: peft.LoraConfig  # as peft resolved it; a folder has this one
    shapes: Mapping[str, AdapterShape]  # by name
    hidden_size: int  # the model's, for a value head's score


@functools.lru_cache(maxsize=8)
@torch.random.fork_rng(devices=[])  # peft draws an A of each adapter, but only in a process's first call
def injection(model_folder: str, lora: LoraConfig, head: str) -> Injection:
    """Returns the adapters of `mrl.engine.lora.folder.adapters`, with the config as peft resolved it."""
    try:
        model = _meta_model(model_folder, head)
    except ModelError as error:
        fix = f"set it to null, or {error.fix}"
        raise ConfigError("model.lora", why=f"{error.key}: {error.why}", fix=fix) from None
    names = tuple(name for name, _ in model.named_modules() if name)
    stacks = tuple(name for name, p in model.named_parameters() if p.ndim == 3)
    selection = Selection(model_folder, lora, names, stacks)
    config = _peft_config(selection, head)
    inject(model, config, selection)
    shapes = _shapes(model)
    # peft resolves names of experts to parameters, and never excludes parameters
    excluded = [name for name, shape in shapes.items() if shape.parameter and selection.excludes(name)]
    if excluded:
        kept = [shape.parameter for name, shape in shapes.items() if shape.parameter and name not in excluded]
        config.target_parameters = sorted(kept)
        model = _meta_model(model_folder, head)
        inject(model, config, selection)
        shapes = _shapes(model)
    selection.check(config, shapes, excluded, model)
    return Injection(config, MappingProxyType(shapes), model.config.get_text_config().hidden_size)


def inject(model: nn.Module, config: peft.LoraConfig, selection: Selection | None = None) -> None:
    """Puts adapters into `model`; its other parameters then need no gradient. `config` is resolved in place.

    selection: the source of the config, for messages; None if peft has taken the config before.
    """
    with warnings.catch_warnings():
        # peft warns of selections that match nothing; `Selection.check` raises for them
        warnings.filterwarnings("ignore", module=r"peft\..*")
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except (ValueError, re.error) as error:
            if selection is None:
                raise
            raise selection.refused(error) from None


def shapes_of_folder(path: str, model_folder: str) -> tuple[dict[str, AdapterShape], str]:
    """Returns the adapters of a folder that peft or mrl wrote, on the model of `model_folder`, and the model's head.

    Raises ModelError if the folder's adapter_config.json is of something else than B A added to a model's weights.
    """
    check_is_plain(path)
    config = peft.LoraConfig.from_pretrained(path)
    head = "value" if config.task_type == "SEQ_CLS" else "lm"
    config.modules_to_save = None  # it names the head, which is no adapter
    config.init_lora_weights = False  # the values are in the file
    model = _meta_model(model_folder, head)
    try:
        inject(model, config)
    except ValueError as error:
        raise ModelError(
            path,
            why=f"its {CONFIG} does not fit the model in {model_folder} ({error})",
            fix="give the model that it was trained over",
        ) from None
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), nn.Embedding):
            why = f"target_modules takes in {name}, an embedding, which is not supported"
            raise ModelError(Path(path) / CONFIG, why=why, fix=MERGE)
    return _shapes(model), head


def check_is_plain(path: str) -> None:
    """Refuses adapters that are more than B A over the base as it is published.

    Some inits take B A out of the base, or quantise it. Their adapter is right only over that other base. A folder that
    peft converted (`path_initial_model_for_weight_conversion`) says true.
    """
    file = Path(path) / CONFIG
    about = read_json(file)
    kind, init = about.get("peft_type", "LORA"), about.get("init_lora_weights")
    if kind != "LORA":
        raise ModelError(file, why=f"peft_type {kind!r} is not supported", fix="give an adapter of peft_type 'LORA'")
    if init not in _INITS:
        raise ModelError(
            file,
            why=f"init_lora_weights {init!r} changed the base, and B A is right over that other one alone",
            fix="save the adapter with peft's path_initial_model_for_weight_conversion, or the "
            "changed base with init_lora_weights true",
        )
    variants = [field.name for field in dataclasses.fields(peft.LoraConfig) if field.metadata.get("is_lora_variant")]
    if about.get("bias") == "none":
        about["bias"] = None
    if about.get("task_type") == "SEQ_CLS":
        about["modules_to_save"] = sorted(set(about.get("modules_to_save") or ()) - _HEADS)
    # velora_config changes gradients, not the adapter
    more = [name for name in (*variants, *_MORE) if about.get(name) and name != "velora_config"]
    if more:
        why = f"{more[0]} makes more of it than B A, which is not supported"
        raise ModelError(file, why=why, fix="train it without" if more[0] == "lora_bias" else MERGE)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Checks a user's selection on a model."""

    model: str
    lora: LoraConfig
    names: tuple[str, ...]  # of the model's modules
    stacks: tuple[str, ...]  # of its parameters of three dimensions (experts)

    def of_stacks(self) -> list[str]:
        """Returns the targets that are ends of experts' parameters; peft takes these in another field."""
        targets = self.lora.target_modules
        if isinstance(targets, str):
            return []
        return [t for t in targets if "experts." in t and any(_is_end(t, name) for name in self.stacks)]

    def excludes(self, parameter: str) -> bool:
        """Returns whether an adapted parameter, or the module that has it, is excluded."""
        excluded = self.lora.exclude_modules
        # a parameter named as its module is the module's weight
        candidates = [parameter] if parameter in self.names else [parameter, parameter.rpartition(".")[0]]
        return any(_matches(excluded, entry, name) for entry in _entries(excluded) for name in candidates)

    def check(
        self, config: peft.LoraConfig, shapes: Mapping[str, AdapterShape], dropped: list[str], model: nn.Module
    ) -> None:
        """Raises ConfigError for a part of the selection without effect, and for modules that get no adapter here."""
        resolved = config.target_modules or ()
        for entry in () if isinstance(self.lora.target_modules, str) else self.lora.target_modules:
            known = any(_is_end(entry, name) for name in (*self.names, *self.stacks))
            if not known and (entry in resolved or not config.target_parameters):
                raise self._unknown("target_modules", entry)
        excluded = self.lora.exclude_modules
        for entry in _entries(excluded):
            if not any(_matches(excluded, entry, name) for name in (*self.names, *dropped)):
                raise self._unknown("exclude_modules", entry)
        if not shapes:
            raise ConfigError(
                "model.lora.exclude_modules", self.lora.exclude_modules, "leaves no adapter", "exclude fewer modules"
            )
        ends = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        output = model.get_output_embeddings()
        for name, module in ends.items():
            if module is output or isinstance(module.get_base_layer(), nn.Embedding) or name == "score":
                raise ConfigError(
                    "model.lora.target_modules",
                    self.lora.target_modules,
                    f"takes in {name}",
                    (
                        f"embeddings and output layers get no adapter: name other modules, or keep {name} out by "
                        "model.lora.exclude_modules"
                    ),
                )

    def refused(self, error: Exception) -> ConfigError:
        """Returns peft's refusal as one line."""
        why = f"is refused by peft ({error})"
        return ConfigError("model.lora", why=why, fix=f"name {self._some()} in target_modules")

    def _unknown(self, key: str, entry: str) -> ConfigError:
        return ConfigError(f"model.lora.{key}", entry, f"matches no module of {self.model}", f"name {self._some()}")

    def _some(self) -> str:
        """Returns examples for a message: the ends of names that look like the model's linear layers."""
        leaves = {name.rpartition(".")[2] for name in self.names if name.rpartition(".")[2].endswith("proj")}
        experts = {f"experts.{name.rpartition('.')[2]}" for name in self.stacks}
        return "all-linear or some of " + ", ".join(sorted(leaves) + sorted(experts))


def _meta_model(folder: str, head: str) -> nn.Module:
    """Returns the Hugging Face model on the meta device. Raises ModelError if transformers has none with that head."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if head == "value":
        config.num_labels = 1
    lm = AutoModelForImageTextToText if config.model_type in VISION_LANGUAGE else AutoModelForCausalLM
    kind, what = {"lm": (lm, "language model"), "value": (AutoModelForSequenceClassification, "sequence classifier")}[
        head
    ]
    if type(config) not in kind._model_mapping:
        raise ModelError(
            "config.json",
            why=f"model_type {config.model_type!r} has no {what} in transformers, whose modules adapters are named by",
            fix="use another model",
        )
    with torch.device("meta"):
        return kind.from_config(config, dtype=torch.float32)


def _peft_config(selection: Selection, head: str) -> peft.LoraConfig:
    lora, stacks = selection.lora, selection.of_stacks()
    targets, excluded = lora.target_modules, lora.exclude_modules
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else [t for t in targets if t not in stacks],
        target_parameters=stacks or None,
        exclude_modules=list(excluded) if isinstance(excluded, tuple) else excluded,
        use_rslora=lora.rslora,
        init_lora_weights=False,  # `initial_a` does it
        task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
    )


def _shapes(model: nn.Module) -> dict[str, AdapterShape]:
    """Returns the adapters that peft has put into a model, in the model's order."""
    shapes = {}
    for peft_name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name, parameter, experts = peft_name, None, 0
        transposed = isinstance(layer.get_base_layer(), Conv1D)
        if isinstance(layer, ParamWrapper):
            name = name_in_base(peft_name)
            parameter = f"{name}.{layer.parameter_name}"
            if layer.parameter_name != "weight":
                name = parameter
            experts = layer.num_experts if layer.get_param().ndim == 3 else 0
            transposed = bool(experts) and not layer._did_swap_in_out_features
        shapes[name] = AdapterShape(
            name,
            peft_name,
            layer.in_features,
            layer.out_features,
            layer.r[ADAPTER],
            layer.scaling[ADAPTER],
            experts,
            transposed,
            parameter,
        )
    return shapes


def _is_end(end: str, name: str) -> bool:
    """Applies peft's rule for an entry of a list."""
    return name == end or name.endswith(f".{end}")


def _entries(selected: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the entries of a list of modules; of an expression, the expression."""
    if selected is None:
        return ()
    return (selected,) if isinstance(selected, str) else selected


def _matches(selected: str | tuple[str, ...] | None, entry: str, name: str) -> bool:
    """Returns whether an entry of `selected` is for a name."""
    return re.fullmatch(entry, name) is not None if isinstance(selected, str) else _is_end(entry, name)
