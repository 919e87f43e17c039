"""The silent bugs of Megatron-LM's issue 7452, and what mrl does instead: cases for worlds of processes (harness.py).

`REPRODUCTIONS` call the installed megatron-core as the issue does. Each returns (observed, reference), which differ where
the bug is. `python -m tests.engine.megatron_bugs` prints them for the megatron-core of this environment.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from unittest import mock

import megatron.core
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import RoleConfig
from mrl.engine.megatron.groups import MegatronState
from mrl.parallel import ParallelDims
from tests.engine import tiny
from tests.engine.contract import everyone, make_engine, train
from tests.engine.harness import run_case

from megatron.core import tensor_parallel  # isort: skip  after the engine, which prepares its import
from megatron.core.distributed import finalize_model_grads  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.pipeline_parallel import schedules  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.tensor_parallel import cross_entropy  # isort: skip
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate  # isort: skip
from megatron.core.transformer import multi_token_prediction  # isort: skip
from megatron.core.transformer.attention import Attention  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

VOCAB = 8
Pair = tuple[list[float], list[float]]


def _tensor_parallel(tp: int = 2) -> MegatronState:
    return MegatronState(ParallelDims(world_size=dist.get_world_size(), tp=tp), seed=0)


def _rounded(values: Tensor) -> list[float]:
    return [round(float(value), 5) for value in values.detach().flatten()]


def _logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, VOCAB, generator=generator), torch.tensor([[1], [6], [3]])


def _transformer(**fields: object) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, tensor_model_parallel_size=2,
        gradient_accumulation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0, **fields,
    )  # fmt: skip


# -- what the issue reports ---------------------------------------------------------------------------------------------


def label_smoothing() -> Pair:
    """1: a rank's loss, against that of the whole vocabulary."""
    logits, target = _logits()
    with _tensor_parallel().installed():
        own = logits.chunk(2, dim=-1)[dist.get_rank()].clone()
        loss = tensor_parallel.vocab_parallel_cross_entropy(own, target, label_smoothing=0.1)
    log_probs = logits.log_softmax(-1)
    smoothing = 0.1 * VOCAB / (VOCAB - 1)
    reference = -(1 - smoothing) * log_probs.gather(-1, target[..., None])[..., 0] - smoothing * log_probs.mean(-1)
    return _rounded(loss), _rounded(reference)


def gathered_logits() -> Pair:
    """2: GPTModel's loss where its output layer gathers logits, against the loss of those logits."""
    with _tensor_parallel().installed():
        model = GPTModel(
            _transformer(), get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=4, parallel_output=False
        )
        tokens, target = torch.tensor([[5, 1, 6]]), torch.tensor([[1, 6, 3]])
        mask = torch.ones(1, 1, 3, 3).triu(1).bool()
        loss = model(tokens, torch.arange(3)[None], mask, labels=target)
        logits = model(tokens, torch.arange(3)[None], mask)
    return _rounded(loss), _rounded(-logits.log_softmax(-1).gather(-1, target[..., None])[..., 0])


def mtp_per_token() -> Pair:
    """3: the gradient of an MTP layer's loss: of two data-parallel ranks, one has 3 tokens of gradient 1, one has 1 of 4.

    0.16.1 has no counts there (`MTPLossAutoScaler.apply(hidden, scale * mtp_loss)` in GPTModel): one sum, of 6 main tokens.
    """
    process = getattr(multi_token_prediction, "process_mtp_loss", None)
    if process is None:
        assert "hidden_states, mtp_loss_scale * mtp_loss\n" in inspect.getsource(GPTModel._postprocess)
        return [round(7 / 6, 5)], [round(7 / 6, 5)]
    config = types.SimpleNamespace(
        mtp_num_layers=1, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True, mtp_detach_heads=False
    )
    multi_token_prediction.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    gradient = torch.zeros(())
    for of_a_token, mask in ((1.0, [1.0, 1.0, 1.0, 1.0]), (4.0, [1.0, 1.0, 0.0, 0.0])):
        weight = torch.ones((), requires_grad=True)
        losses = weight * of_a_token * torch.ones(1, 4)
        out = process(
            hidden_states=torch.zeros(8, 1, 1, requires_grad=True), labels=torch.zeros(1, 4, dtype=torch.int64),
            loss_mask=torch.tensor([mask]), output_layer=lambda x, **_: (x, None), output_weight=None,
            runtime_gather_output=None, is_training=False, compute_language_model_loss=lambda *_, x=losses: x, config=config,
        )  # fmt: skip
        (out.sum() * 0).backward()
        gradient = gradient + weight.grad
    return _rounded(gradient / 6), [(3 * 1.0 + 1 * 4.0) / 4]


def recomputed_group() -> Pair:
    """4: what a saved activation, distributed over the model's own tensor-parallel group, is recomputed from."""
    own = _groups([0, 2], [1, 3])
    x = torch.arange(4.0) + 10 * own.rank()  # equal on the ranks of the model's group
    x = everyone_of(own, x)[0] + 100 * (dist.get_rank() % 2)
    seen: list[Tensor] = []
    with _tensor_parallel().installed():
        given = x.clone().requires_grad_()
        takes = inspect.signature(tensor_parallel.checkpoint).parameters
        extra = {"tp_group": own} if "tp_group" in takes else {}
        tensor_parallel.checkpoint(
            lambda t: (seen.append(t.detach().clone()), t * 2)[1], True, given, **extra
        ).sum().backward()
    return _rounded(seen[-1]), _rounded(x)


def padding_mask_group() -> Pair:
    """5: the shard of GPTModel's padding mask, under a tensor-parallel group that is not the process-wide one."""
    own = _groups([0, 2], [1, 3])
    mask = torch.tensor([[False, False, True, True]])
    config = types.SimpleNamespace(sequence_parallel=True, multi_latent_attention=False, mtp_num_layers=None)
    model = types.SimpleNamespace(
        pre_process=True, config=config, pg_collection=types.SimpleNamespace(tp=own), position_embedding_type="none",
        embedding=_Embedding(), mtp_process=False,
    )  # fmt: skip
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with _tensor_parallel().installed():
        outputs = GPTModel._preprocess(model, tokens, tokens, padding_mask=mask)
    found = next(t for t in outputs if isinstance(t, Tensor) and t.dtype == torch.bool)
    return _rounded(found), _rounded(mask.chunk(2, dim=1)[own.rank()])


class _Embedding:
    scatter_to_sequence_parallel = True

    def __call__(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return torch.zeros(2, 1, 1)


def sinks_in_the_norm() -> Pair:
    """8: on how many ranks the gradient's norm counts a rank's own sinks."""
    config = _transformer(softmax_type="learnable", params_dtype=torch.float32)
    with _tensor_parallel().installed():
        attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        counted = bool(param_is_not_tensor_parallel_duplicate(attention.softmax_offset))
    return [float(sum(everyone(counted)))], [2.0]


def masked_context_parallel() -> Pair:
    """9: the gradient of one micro-batch of 4 tokens that count, 3 on one context-parallel rank and 1 on the other."""
    config = types.SimpleNamespace(calculate_per_token_loss=False, timers=None, grad_scale_func=None)
    gradient = torch.zeros(())
    for tokens in (3, 1):
        weight = torch.ones((), requires_grad=True)
        output, _ = schedules.forward_step_calc_loss(
            None, torch.zeros(1), lambda _, w=weight, n=tokens: (w * n * n, torch.tensor(n), {}), config, None, False, 1, [],
            cp_group_size=2, is_last_stage=True,
        )  # fmt: skip
        output.backward()
        gradient += weight.grad / 2  # DistributedDataParallel averages over context-parallel ranks
    return _rounded(gradient), [(9 + 1) / 4]


def router_counts() -> Pair:
    """10: a rank's own number of tokens that are no padding, where ranks have 3 and 1."""
    rank = dist.get_rank()
    routing = torch.zeros(4, 2, dtype=torch.int64)
    routing[: (3, 1)[rank], 0] = 1
    with _tensor_parallel().installed():
        group = megatron.core.parallel_state.get_tensor_model_parallel_group()
        _, own, _ = get_tokens_per_expert_and_token_count(routing, group, topk=1, with_padding_mask=True)
    return _rounded(torch.as_tensor(own)), [float((3, 1)[rank])]


def norm_of_delta_nets() -> Pair:
    """11: the gradient of a gated delta net's norm after megatron's finalizer, ranks having parts 1 and 2."""
    model = torch.nn.Module()
    model.out_norm = torch.nn.LayerNorm(1, bias=False)
    model.ddp_config = types.SimpleNamespace(use_megatron_fsdp=False)
    model.out_norm.weight.main_grad = torch.tensor([1.0 + dist.get_rank()])
    config = types.SimpleNamespace(sequence_parallel=False, qk_layernorm=True)
    finalize = inspect.getmodule(finalize_model_grads)._allreduce_non_tensor_model_parallel_grads
    with _tensor_parallel().installed():
        finalize([model], config, megatron.core.parallel_state.get_tensor_model_parallel_group())
    return _rounded(model.out_norm.weight.main_grad), [3.0]


def rebound_context_parallel() -> Pair:
    """13: whether attention puts the group that it was built with back into the collection of a caller."""
    source = inspect.getsource(Attention)
    return [float("pg_collection.cp =" in source)], [0.0]


REPRODUCTIONS: dict[int, tuple[int, Callable[[], Pair]]] = {
    1: (2, label_smoothing), 2: (2, gathered_logits), 3: (1, mtp_per_token), 4: (4, recomputed_group),
    5: (4, padding_mask_group), 8: (2, sinks_in_the_norm), 9: (1, masked_context_parallel), 10: (2, router_counts),
    11: (2, norm_of_delta_nets), 13: (1, rebound_context_parallel),
}  # fmt: skip
"""Number in the issue -> processes, function."""


def reproduced(number: int) -> list[Pair]:
    """Returns what each rank has observed, with its reference."""
    return everyone(REPRODUCTIONS[number][1]())


def _groups(*members: list[int]) -> dist.ProcessGroup:
    """Returns this rank's group of those."""
    groups = [dist.new_group(ranks, backend="gloo") for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)


def everyone_of(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


# -- mrl ----------------------------------------------------------------------------------------------------------------


def trains_without_megatrons_loss(config: RoleConfig) -> None:
    """1, 2: a step calls neither megatron's cross entropy nor its loss of labels."""
    engine = make_engine(config)
    called = AssertionError("megatron's own loss was called")
    with (
        mock.patch.object(GPTModel, "compute_language_model_loss", side_effect=called),
        mock.patch.object(cross_entropy._VocabParallelCrossEntropy, "apply", side_effect=called),
    ):
        assert train(engine, 1)


def groups_are_the_engines_own(first: RoleConfig, second: RoleConfig) -> None:
    """4, 5, 6, 7, 13: modules hold the groups that are process-wide while their engine works, and keep them.

    Bugs of an explicit group beside a process-wide one need two that differ. Two engines of different layouts share the
    process; each trains and evaluates several batches inside the other's turn.
    """
    engines = [make_engine(first), make_engine(second)]
    held = [_held(engine) for engine in engines]
    for seed in range(2):
        for engine in engines:
            train(engine, 1, first=seed)
            with engine.eval_mode(), torch.no_grad():
                engine.forward_backward_step(engine.shard_data(tiny.uneven_batch(seed)), forward_only=True)
    for engine, before in zip(engines, held, strict=True):
        assert _held(engine) == before, "a module's group has changed"


def _held(engine: object) -> dict[str, int]:
    """Returns the id of each group that a module has, by its name, having compared it with the process-wide ones."""
    found: dict[str, int] = {}
    with engine.model.state.installed():
        state = megatron.core.parallel_state
        known = {id(value) for value in vars(state).values() if isinstance(value, dist.ProcessGroup)}
        exact = {"tp": state.get_tensor_model_parallel_group(), "cp": state.get_context_parallel_group()}
        for index, chunk in enumerate(engine.model.chunks):
            for name, module in chunk.named_modules():
                for key, value in _groups_of(module):
                    assert id(value) in known, f"{name}.{key} is no group of its engine"
                    if key in ("pg_collection.tp", "pg_collection.cp"):
                        assert value is exact[key.rpartition(".")[2]], f"{name}.{key}"
                    found[f"{index}.{name}.{key}"] = id(value)
    assert any(key.endswith("pg_collection.cp") for key in found)
    return found


def _groups_of(module: torch.nn.Module) -> list[tuple[str, dist.ProcessGroup]]:
    found = []
    for key, value in vars(module).items():
        of = vars(value) if isinstance(value, ProcessGroupCollection) else {"": value}
        found += [(f"{key}.{k}".rstrip("."), v) for k, v in of.items() if isinstance(v, dist.ProcessGroup)]
    return found


if __name__ == "__main__":
    print(f"megatron-core {megatron.core.__version__}: number, what each rank observed, the reference")
    for number, (size, _) in REPRODUCTIONS.items():
        for observed, reference in run_case(size, f"{__spec__.name}:reproduced", number=number):
            print(f"{number:2d}  {'bug' if observed != reference else 'ok':4}{observed}  {reference}")
