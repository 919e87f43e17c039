"""Cases for worlds of processes (tests/engine/harness.py): several roles in one process, through WorkerDispatch.

`train` makes the calls of every role step by step in turns, so that each role's call stands between another's
`forward_backward` and `optim_step`. What a role does must not depend on which others there are, nor on where they wait.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.batch import Batch
from mrl.config.schema import RoleConfig
from mrl.engine import atomic_checkpoint
from mrl.engine.base import BaseEngine, GenerateRequest
from mrl.engine.offload import KINDS
from mrl.engine.registry import build_engine
from mrl.errors import CheckpointError, ModelError
from mrl.roles.dispatch import WorkerDispatch
from tests.engine import tiny
from tests.engine.contract import assert_close, assert_equal, loss_fn
from tests.engine.test_offload import device_bytes

Configs = Mapping[str, RoleConfig]
NOTHING = dict.fromkeys(KINDS, 0)


def value_loss(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    ctx["metrics"]["values"] = (predictions["values"].detach() * data.loss_mask).sum()
    return tiny.value_loss(data, predictions, ctx)


def entropy_loss(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    ctx["metrics"]["entropy"] = (predictions["entropy"].detach() * data.loss_mask).sum()
    return -(predictions["entropy"] * data.loss_mask).sum(), ctx


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def make_dispatch(configs: Configs, *, offload_idle: bool = False) -> WorkerDispatch:
    dispatch = WorkerDispatch(
        {role: build_engine(config) for role, config in configs.items()}, offload_idle=offload_idle
    )
    dispatch.init_model()
    return dispatch


def loss_of(engine: BaseEngine) -> Callable:
    return loss_fn if engine.config.head == "lm" else value_loss


def assert_others_are_empty(dispatch: WorkerDispatch, role: str) -> None:
    for name, engine in dispatch.engines.items():
        assert name == role or device_bytes(engine) == NOTHING, f"{name} while {role} works: {device_bytes(engine)}"


def train(dispatch: WorkerDispatch, steps: int, *, first: int = 0) -> dict[str, list[tuple]]:
    """(predictions before, predictions, loss, metrics, gradient norm, LR) of each role and step; frozen roles only predict.

    The mini-batch of a step is accumulated in two calls.
    """
    history: dict[str, list[tuple]] = {role: [] for role in dispatch.engines}
    trained = [role for role, engine in dispatch.engines.items() if engine.config.optimizer is not None]
    for step in range(first, first + steps):
        batch = tiny.uneven_batch(seed=step)
        halves = [batch.select(range(start, batch.num_sequences, 2)) for start in (0, 1)]
        before = {role: dispatch.forward(role, batch) for role in dispatch.engines}
        for role in trained:
            dispatch.zero_grad(role)
        results: dict[str, list] = {role: [] for role in trained}
        for half in halves:
            for role in trained:
                results[role].append(dispatch.forward_backward(role, half, loss_of(dispatch.engines[role])))
        for role in trained:
            done = dispatch.optim_step(role)
            assert done.grad_norm.skipped is None and done.problems == []
            history[role].append((before[role], results[role], float(done.grad_norm), done.lr))
        for role in dispatch.engines.keys() - set(trained):
            history[role].append((before[role],))
    return history


def weights_of(dispatch: WorkerDispatch) -> dict[str, dict[str, Tensor]]:
    return {role: {name: t.clone() for name, t in dispatch.hf_weights(role)} for role in dispatch.engines}


def flat(value: Any) -> list[Any]:
    """The numbers and tensors inside nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in flat(value[key])]
    return [x for part in value for x in flat(part)] if isinstance(value, list | tuple) else [value]


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit."""
    a, b = flat(found), flat(expected)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y, (x, y)


# -- several roles -----------------------------------------------------------------------------------------------------


def each_as_if_alone(configs: Configs) -> None:
    """Together, with and without idle roles on the host, every role does what it does alone, bit for bit; on every rank."""
    expected, weights = {}, {}
    for role, config in configs.items():
        alone = make_dispatch({role: config})
        expected |= train(alone, 2)
        weights |= weights_of(alone)
    for offload_idle in (False, True):
        together = make_dispatch(configs, offload_idle=offload_idle)
        found = train(together, 2)
        assert_same(found, expected)
        for role, of_role in weights_of(together).items():
            assert_equal(of_role, weights[role])
    assert all(flat_numbers(other) == flat_numbers(found) for other in everyone(found))


def flat_numbers(value: Any) -> list[Any]:
    return [x.tolist() if isinstance(x, Tensor) else x for x in flat(value)]


def trains(configs: Configs) -> tuple[dict, dict, int, list[int]]:
    """What two steps give, the weights after them, and what the dispatch knows of the ranks."""
    dispatch = make_dispatch(configs)
    return train(dispatch, 2), weights_of(dispatch), dispatch.lcm_dp_size, dispatch.node_ids


def idle_roles_hold_nothing(configs: Configs) -> None:
    """While one role works, storages of all others are empty, and it has only what its call needs; kept otherwise."""
    dispatch = make_dispatch(configs, offload_idle=True)
    assert all(device_bytes(engine) == NOTHING for engine in dispatch.engines.values())
    seen = []
    batch = tiny.uneven_batch()
    for _ in range(2):  # optimizer state exists from the first step on
        for role, engine in dispatch.engines.items():
            loss_here = loss_of(engine)

            def watched(data: Batch, predictions: dict, ctx: dict, role=role, loss_here=loss_here, engine=engine):
                assert_others_are_empty(dispatch, role)
                assert device_bytes(engine)["parameters"]
                seen.append(role)
                return loss_here(data, predictions, ctx)

            dispatch.forward(role, batch)
            assert_others_are_empty(dispatch, role)
            held = device_bytes(engine)
            assert held["parameters"] and not held["gradients"] and not held["optimizer"], held
            if engine.config.optimizer is not None:
                dispatch.zero_grad(role)
                dispatch.forward_backward(role, batch, watched)
                dispatch.optim_step(role)
                waits = set(engine.config.engine.offload)
                assert {kind for kind, size in device_bytes(engine).items() if not size} == waits, device_bytes(engine)
            assert_others_are_empty(dispatch, role)
    assert "actor" in sum(everyone(seen), [])
    kept = make_dispatch(configs, offload_idle=False)
    train(kept, 1)
    assert all(
        device_bytes(e)["parameters"] for e in kept.engines.values() if "parameters" not in e.config.engine.offload
    )


# -- one role ----------------------------------------------------------------------------------------------------------


def losses_add_up(configs: Configs) -> None:
    """Gradients of calls with different losses and weights add up; a weight scales the loss and not the metrics."""
    dispatch = make_dispatch(configs, offload_idle=True)
    engine, batch = dispatch.engines["actor"], tiny.uneven_batch()
    ctx = {"entropy": "differentiable", "temperature": 0.7}

    def gradients(*calls: tuple[Callable, float]) -> tuple[list, dict[str, Tensor]]:
        dispatch.zero_grad("actor")
        results = []
        for fn, weight in calls:
            results.append(dispatch.forward_backward("actor", batch, fn, weight, ctx))
            dispatch.forward("critic", batch)
            assert engine.loss_fn is None
        return results, {name: t.clone() for name, t in engine.hf_gradients()}

    ((_, nll, nll_metrics),), of_nll = gradients((loss_fn, 1.0))
    ((_, entropy, _),), of_entropy = gradients((entropy_loss, 1.0))
    (first, second), of_both = gradients((loss_fn, 2.0), (entropy_loss, -0.5))
    assert abs(first[1] - 2 * nll) < 1e-6 * abs(nll) and first[2] == nll_metrics
    assert abs(second[1] + 0.5 * entropy) < 1e-6 * abs(entropy)
    assert_close(of_both, {name: 2 * of_nll[name] - 0.5 * of_entropy[name] for name in of_nll}, 1e-5)
    assert set(ctx) == {"entropy", "temperature"}
    mean = float((first[0]["log_probs"] * batch.loss_mask).sum()) / batch.denominators["tokens"]
    assert abs(nll + mean) < 1e-5 and first[0]["log_probs"].device.type == "cpu"
    dispatch.zero_grad("actor")
    of_sequences = dispatch.forward_backward("actor", batch, loss_fn, ctx=ctx, denominator="sequences")[1]
    ratio = batch.denominators["tokens"] / batch.denominators["sequences"]
    assert abs(of_sequences / nll - ratio) < 1e-5 * ratio


def fails(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    raise AssertionError("a forward made a loss")


def a_forward_leaves_nothing(configs: Configs) -> None:
    """Trap 18: `forward` is without dropout whatever came before, and leaves no loss, no train mode and no gradient."""
    dispatch = make_dispatch(configs)
    batch = tiny.uneven_batch()
    for role, engine in dispatch.engines.items():
        engine.set_loss_fn(fails)
        first = dispatch.forward(role, batch)
        dispatch.zero_grad(role)
        for _ in range(2):
            with_dropout = dispatch.forward_backward(role, batch, loss_of(engine))[0]
            again = dispatch.forward(role, batch)
            modules = engine.model.chunks if engine.backend == "megatron" else [engine.model.module]
            assert engine.loss_fn is None and not any(m.training for module in modules for m in module.modules())
            for name in first:
                assert torch.equal(first[name], again[name]) and not again[name].requires_grad
                assert not torch.equal(first[name], with_dropout[name])
        dispatch.zero_grad(role)
        dispatch.forward(role, batch)
        assert not any(t.any() for _, t in engine.hf_gradients())


def a_rank_with_nothing(configs: Configs) -> None:
    """Trap 8: ranks and stages without sequences, and metrics that few of them have, hold nobody up and change no mean."""
    dispatch = make_dispatch(configs)

    def with_some(data: Batch, predictions: dict[str, Tensor], ctx: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if data.max_length == 23:
            ctx["metrics"]["of the longest"] = torch.tensor(1.0)
        return (next(iter(predictions.values())) * data.loss_mask).sum(), ctx

    batch = tiny.uneven_batch()
    whole = {role: dispatch.forward(role, batch) for role in dispatch.engines}
    for count in (1, 2):
        few = batch.select(range(count)).with_denominators()
        for role in dispatch.engines:
            dispatch.zero_grad(role)
            predictions, loss, metrics = dispatch.forward_backward(role, few, with_some)
            (name, values), *_ = predictions.items()
            torch.testing.assert_close(values, whole[role][name][: few.num_tokens], rtol=0, atol=1e-5)
            expected = float((values * few.loss_mask).sum()) / few.denominators["tokens"]
            assert abs(loss - expected) < 1e-5
            assert abs(metrics["of the longest"] - 1 / few.denominators["tokens"]) < 1e-9
            assert all(theirs == (loss, metrics) for theirs in everyone((loss, metrics)))
            dispatch.optim_step(role)
            assert dispatch.optim_step(role, guard=True).problems == []  # the same gradients again
            whole[role] = dispatch.forward(role, batch)


def generates_beside_others(configs: Configs) -> None:
    """Completions are the engine's own, whoever waits where; limits arrive."""
    requests = [GenerateRequest(list(range(3, 3 + n)), 4) for n in (2, 5, 3)]
    expected = make_dispatch({"actor": configs["actor"]}).generate("actor", requests)
    dispatch = make_dispatch(configs, offload_idle=True)
    train_critic_once(dispatch)
    assert dispatch.generate("actor", requests) == expected
    few_at_once = dispatch.generate("actor", requests, cache_tokens=16, prefill_tokens=8)
    assert [c.tokens for c in few_at_once] == [c.tokens for c in expected]
    assert_others_are_empty(dispatch, "actor")
    with pytest.raises(Exception, match="cache_tokens"):
        dispatch.generate("actor", requests, cache_tokens=8)


def train_critic_once(dispatch: WorkerDispatch) -> None:
    dispatch.zero_grad("critic")
    dispatch.forward_backward("critic", tiny.uneven_batch(), value_loss)
    dispatch.optim_step("critic")


# -- weights from one role to another ----------------------------------------------------------------------------------


def reference_follows_the_actor(configs: Configs, folder: str) -> None:
    """After `copy_weights` the reference is the actor, in whatever layout, and goes on alone; nothing is left in the folder."""
    dispatch = make_dispatch(configs, offload_idle=True)
    batch = tiny.uneven_batch()
    train(dispatch, 1)
    before = dispatch.forward("reference", batch)["log_probs"]
    dispatch.copy_weights("actor", "reference", folder)
    copied = dispatch.forward("reference", batch)["log_probs"]
    assert not torch.equal(copied, before)
    rounding = 1e-5 if configs["actor"].model.dtype == "float32" else 0.1
    torch.testing.assert_close(copied, dispatch.forward("actor", batch)["log_probs"], rtol=0, atol=rounding)
    found = weights_of(dispatch)
    assert_equal(found["reference"], found["actor"])
    assert os.listdir(folder) == []
    train(dispatch, 1)
    assert torch.equal(dispatch.forward("reference", batch)["log_probs"], copied)


def masters_follow_too(configs: Configs, other: str) -> None:
    """`load_hf` on a role that trains, in bfloat16: the next update starts from the new weights, in full precision."""
    for config in configs.values():
        from_start = make_dispatch({"role": reading(config, other)})
        late = make_dispatch({"role": config})
        late.engines["role"].load_hf(other)
        assert_same(train(late, 2), train(from_start, 2))
        found = weights_of(late)["role"]
        assert_equal(found, weights_of(from_start)["role"])
        model = dataclasses.replace(config.model, path=other, dtype="float32")
        in_fp32 = make_dispatch({"role": dataclasses.replace(config, model=model)})
        train(in_fp32, 2)
        assert_close(found, weights_of(in_fp32)["role"], 0.2)


def reading(config: RoleConfig, folder: str) -> RoleConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=folder))


def refuses_weights(configs: Configs, other: str, message: str) -> None:
    """Trap 31: a folder that is not whole, or of another model, changes nothing: all of it is checked before any of it is read."""
    for role, engine in make_dispatch(configs).engines.items():
        before = {name: t.clone() for name, t in engine.hf_weights()}
        with pytest.raises(ModelError) as caught:
            engine.load_hf(other)
        assert message in str(caught.value) and "\n" not in str(caught.value), role
        assert_equal(dict(engine.hf_weights()), before)


# -- one checkpoint of all roles ---------------------------------------------------------------------------------------


STATE = {"step": 2, "epoch": 0.5, "names": ["a"], "old": torch.arange(2**18, dtype=torch.float32)}
BYTES = 2**20  # of STATE["old"]


def resume_is_bitwise(configs: Configs, path: str, folder: str) -> None:
    """Four steps, and two that are saved, read by new engines and followed by two, are equal in every bit, in every role.

    The reference has taken the actor's weights before the save, so its folder alone does not bring it back.
    """
    whole = make_dispatch(configs)
    train(whole, 2)
    whole.copy_weights("actor", "reference", folder)
    expected = train(whole, 2, first=2)
    first = make_dispatch(configs, offload_idle=True)
    train(first, 2)
    first.copy_weights("actor", "reference", folder)
    saved = first.save_checkpoint(path, global_step=2, state=STATE)
    assert saved == f"{path}/step_00000002"
    assert_same(train(first, 2, first=2), expected)  # saving leaves the roles as they were
    second = make_dispatch(configs, offload_idle=True)
    train(second, 1, first=7)  # what they did before does not matter
    state = second.load_checkpoint(path)
    assert torch.equal(state.pop("old"), STATE["old"]) and state == {k: v for k, v in STATE.items() if k != "old"}
    assert_same(train(second, 2, first=2), expected)
    for role, weights in weights_of(second).items():
        assert_equal(weights, weights_of(whole)[role])
    assert_whole_and_once(saved, set(configs) - {"reward"})


def assert_whole_and_once(saved: str, roles: set[str]) -> None:
    """One folder for each role, one marker with checksums of every file, the trainer's tensors once."""
    entries = set(os.listdir(saved))
    assert entries == {*roles, "trainer.pt", "COMPLETE"}, entries
    files = atomic_checkpoint.verify(saved).files
    assert {file.split("/")[0] for file in files} == entries - {"COMPLETE"}
    assert files["trainer.pt"]["size"] > BYTES
    assert (
        sum(facts["size"] for file, facts in files.items() if os.path.basename(file) in ("engine.pt", "state.pt"))
        < BYTES
    )
    assert [file for file in files if file.endswith("COMPLETE")] == []


def save_after_two(configs: Configs, path: str) -> None:
    dispatch = make_dispatch(configs)
    train(dispatch, 2)
    dispatch.save_checkpoint(path, global_step=2, state={"step": 2})


def loads(configs: Configs, path: str) -> None:
    assert make_dispatch(configs).load_checkpoint(path) == {"step": 2}


def save_of_one_model(configs: Configs, path: str) -> None:
    """As `mrl sft` saves."""
    (engine,) = make_dispatch(configs).engines.values()
    engine.save_checkpoint(path, global_step=2)


def refuses(configs: Configs, path: str, message: str, alone: bool = False) -> None:
    """A checkpoint that does not fit is refused on every rank in one line, and all roles are as they were.

    alone: by the first role's engine, as `mrl sft` loads.
    """
    dispatch = make_dispatch(configs)
    before = weights_of(dispatch)
    reader: Any = next(iter(dispatch.engines.values())) if alone else dispatch
    with pytest.raises(CheckpointError) as caught:
        reader.load_checkpoint(path)
    assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    for role, weights in weights_of(dispatch).items():
        assert_equal(weights, before[role])
