"""What the first-step checks (mrl.engine.guards) look at on this backend: the optimizer's shards, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.converters.rules import Rule
from mrl.engine import guards
from mrl.engine.megatron.optim import shards
from mrl.mcore_models import lora

if TYPE_CHECKING:
    from mrl.engine.megatron.engine import MegatronEngine


def names(models: Sequence, rules: Sequence[Mapping[str, Rule]]) -> dict[int, tuple[str, Rule]]:
    """id of a parameter -> its name for people (the Hugging Face tensors that it holds) and rule."""
    found = {}
    for model, of_chunk in zip(models, rules, strict=True):
        for name, parameter in model.named_parameters():
            found[id(parameter)] = (" + ".join(of_chunk[name].hf), of_chunk[name])
    return found


def watched(engine: "MegatronEngine") -> Iterator[guards.Watched]:
    """This rank's shard of every parameter: what the optimizer updates, and the reduced gradient that it will use.

    A of an adapter whose B is zero, as B is at the start, has no gradient but zero.
    """
    named = names(engine.models, engine.rules)
    waiting = {id(a) for model in engine.models for a in lora.without_gradient(model)}
    for _, parameter, main, span in shards(engine.optimizer):
        name, rule = named[id(parameter)]
        gradient = parameter.main_grad.view(-1)[span]
        idle, waits = rule.expert is not None, id(parameter) in waiting
        yield guards.Watched(name, main.detach().view(-1), gradient, may_be_idle=idle, waits=waits)


def replica_problems(engine: "MegatronEngine") -> list[str]:
    """Parameters that differ between ranks that hold the same piece of them."""
    named = names(engine.models, engine.rules)
    everything = [(*named[id(p)], p.data) for model in engine.models for p in model.parameters()]

    def chosen(keep) -> list[tuple[str, Tensor]]:
        return [(name, data) for name, rule, data in everything if keep(rule)]

    checks = [
        (chosen(lambda rule: rule.expert is None), parallel_state.get_data_parallel_group(with_context_parallel=True)),
        (chosen(lambda rule: rule.expert is not None), parallel_state.get_expert_data_parallel_group()),
        (
            chosen(lambda rule: rule.axis is None and rule.expert is None),
            parallel_state.get_tensor_model_parallel_group(),
        ),
    ]
    if engine.dims.etp > 1 and engine.adapters:
        whole = chosen(lambda rule: rule.axis is None and rule.expert is not None)
        checks.append((whole, parallel_state.get_expert_tensor_parallel_group()))
    embeddings = chosen(lambda rule: rule.hf == ("model.embed_tokens.weight",))
    group = parallel_state.get_embedding_group(check_initialized=False)
    if engine.hf["tie_word_embeddings"] and engine.config.head == "lm" and engine.dims.pp > 1 and embeddings:
        checks.append((embeddings, group))
    found = [problem for parameters, over in checks for problem in guards.replica_problems(parameters, over)]
    return guards.union(found) if dist.get_world_size() > 1 else found
