"""The hidden states of a transformers model, and its rule from the output layer to logits, without making logits.

The model runs whole, but its output layer (`get_output_embeddings`) only keeps its input. It answers with a few known
numbers instead of [.., V] logits. The model does to those what it does to logits: nothing, a factor, or soft capping.
So the names of the model's parts do not matter.

Dimensions: `R` rows, `L` tokens in a row, `H` what the output layer takes, `V` the vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mrl.engine.logprobs import PLAIN, LogitRule
from mrl.errors import ModelError

PROBES = (-300.0, -40.0, -7.5, -1.0, -(2.0**-12), 0.0, 2.0**-12, 1.0, 3.0, 29.0, 1e9)


@contextlib.contextmanager
def capture_output(layer: nn.Module, answer: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Lets `layer` keep its input, inside the context, and give `answer` for every token, or one zero.

    Gives the list of inputs [R, L, H], one for each call.
    """
    kept: list[Tensor] = []

    def keep(hidden: Tensor) -> Tensor:
        kept.append(hidden)
        shown = hidden.new_zeros(1) if answer is None else answer.to(hidden.device)
        return shown.expand(*hidden.shape[:-1], -1)

    layer.forward = keep  # an attribute of the layer hides its class's method until it is deleted
    try:
        yield kept
    finally:
        del layer.forward


def hidden_states(hf: nn.Module, **inputs: object) -> Tensor:
    """Returns [R, L, H]: the input of the output layer of `hf`, run on `inputs`, with position_ids if it takes any."""
    with capture_output(hf.get_output_embeddings()) as kept:
        hf(**_taken(hf, inputs), use_cache=False)
    (hidden,) = kept
    return hidden


def _taken(hf: nn.Module, inputs: dict[str, object]) -> dict[str, object]:
    """Returns the inputs that `hf` takes: a model without positions (ALiBi, recurrent ones) takes none."""
    takes = inspect.signature(hf.forward).parameters.values()
    known = any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in takes)
    return inputs if known else {name: value for name, value in inputs.items() if name != "position_ids"}


def output_weight(hf: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (hidden, weight) whose product `hidden @ weight.T` the output layer gives. hidden: [.., H].

    A bias is one more column of the weight.
    """
    layer = hf.get_output_embeddings()
    if layer.bias is None:
        return hidden, layer.weight
    ones = hidden.new_ones(*hidden.shape[:-1], 1)
    return torch.cat([hidden, ones], -1), torch.cat([layer.weight, layer.bias[:, None]], 1)


def logit_rule(hf: nn.Module, **inputs: object) -> LogitRule:
    """Returns the rule from the numbers of `hf`'s output layer to logits, seen in a forward of `inputs`.

    Raises ModelError if it is not known.
    """
    given = torch.tensor(PROBES, dtype=torch.float64)
    with capture_output(hf.get_output_embeddings(), given) as kept:
        logits = hf(**_taken(hf, inputs), use_cache=False).logits
    model_type = hf.config.model_type
    if len(kept) != 1:
        raise ModelError(
            "config.json",
            why=f"model_type {model_type!r} calls its output layer {len(kept)} times in "
            "a forward, which backend fsdp does not support",
            fix="use another model",
        )
    made = logits.reshape(-1, len(PROBES))[-1].double().cpu() if logits.shape[-1] == len(PROBES) else None
    for rule in () if made is None else _candidates(made):
        if torch.allclose(rule(given), made, rtol=1e-5, atol=0):
            return rule
    raise ModelError(
        "config.json",
        why=f"model_type {model_type!r} changes its logits after the output layer by "
        "something else than a factor or soft capping, which backend fsdp does not "
        "support",
        fix="use another model",
    )


def _candidates(made: Tensor) -> Iterator[LogitRule]:
    """Yields rules that some of the numbers fit."""
    yield PLAIN
    yield LogitRule(scale=made[PROBES.index(1.0)].item())
    near_zero = PROBES.index(2.0**-12)
    softcap = made[-1].item()
    if softcap > 0:
        yield LogitRule(softcap=softcap)
        yield LogitRule(made[near_zero].item() / PROBES[near_zero], softcap)
