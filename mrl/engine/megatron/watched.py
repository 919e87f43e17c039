"""Gives the first-step checks (mrl.engine.guards) megatron's tensors: the optimizer's shards, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.engine import guards
from mrl.engine.megatron.model import Model
from mrl.engine.megatron.optim import shards
from mrl.engine.megatron.weights import rule_of_parameters
from mrl.mcore_models import lora
from mrl.weights.rules import Rule


def _name(rule: Rule) -> str:
    """Returns a parameter's name for people: the Hugging Face tensors that it holds."""
    return " + ".join(rule.hf)


def watched_parameters(model: Model) -> Iterator[guards.WatchedParameter]:
    """Yields this rank's shard of every parameter, as the optimizer updates it, with its reduced gradient.

    If B of an adapter is zero, as at the start, the gradient of A is zero. Gradients of MTP layers are zero if no
    training token is so many positions ahead, as with short answers or only rejected ones.
    """
    rules = rule_of_parameters(model.chunks, model.rules)
    of_mtp = model.mtp_params
    waiting = {id(a) for chunk in model.chunks for a in lora.without_gradient(chunk)}
    for _, parameter, main, span in shards(model.optimizer):
        rule = rules[id(parameter)]
        gradient = parameter.main_grad.view(-1)[span]
        idle, waits = rule.expert is not None or id(parameter) in of_mtp, id(parameter) in waiting
        weight = main.detach().view(-1).to(gradient.device)  # HostAdamW has it on the host
        yield guards.WatchedParameter(_name(rule), weight, gradient, may_be_idle=idle, waits=waits)


def weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and weights of `watched_parameters`, after a step; its gradients may be gone."""
    rules = rule_of_parameters(model.chunks, model.rules)
    for _, parameter, main, _ in shards(model.optimizer):
        yield _name(rules[id(parameter)]), main.detach().view(-1).to(parameter.device)


def replica_problems(model: Model) -> list[guards.Problem]:
    """Returns the parameters that differ between ranks with the same shard of them."""
    rules = rule_of_parameters(model.chunks, model.rules)
    everything = [(rules[id(p)], p.data) for chunk in model.chunks for p in chunk.parameters()]

    def chosen(keep: Callable[[Any], bool]) -> list[tuple[str, Tensor]]:
        return [(_name(rule), data) for rule, data in everything if keep(rule)]

    checks = [
        (chosen(lambda rule: rule.expert is None), parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (chosen(lambda rule: rule.expert is not None), parallel_state.get_expert_data_parallel_group()),
        (
            chosen(lambda rule: rule.axis is None and rule.expert is None),
            parallel_state.get_tensor_model_parallel_group(),
        ),
    ]
    if model.dims.etp > 1 and model.adapters:
        whole = chosen(lambda rule: rule.axis is None and rule.expert is not None)
        checks.append((whole, parallel_state.get_expert_tensor_parallel_group()))
    embeddings = chosen(lambda rule: rule.hf == ("model.embed_tokens.weight",))
    group = parallel_state.get_embedding_group(check_initialized=False)
    twice = model.mtp or model.hf["tie_word_embeddings"] and model.config.head == "lm"
    if twice and model.dims.pp > 1 and embeddings:
        checks.append((embeddings, group))
    problems = [problem for parameters, over in checks for problem in guards.replica_problems(parameters, over)]
    return guards.merge_problems(problems) if dist.get_world_size() > 1 else problems
