"""What offload to host memory frees on the device: storages of what waits are empty, and full where it is used."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.config.schema import RoleConfig
from mrl.engine.offload import KINDS, Offload
from tests.engine import tiny
from tests.engine.contract import assert_equal, gradients, make_engine
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role


def device_bytes(engine) -> dict[str, int]:
    """Bytes of each kind's storages; a storage that kinds share (fp32 masters are the parameters) counts for the first."""
    counted: set[int] = set()
    result = {}
    for kind in KINDS:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in engine.offload._tensors[kind]()}
        result[kind] = sum(size for key, size in storages.items() if key not in counted)
        counted |= set(storages)
    return result


def on_host(offload: Offload, kind: str) -> int:
    """Bytes of a kind that wait on the host, or are on their way."""
    parked = offload._parked.get(kind)
    return 0 if parked is None or parked.blocks is None else sum(parked.sizes)


def bytes_by_use(config: RoleConfig) -> dict[tuple[str, ...], dict[str, dict[str, int]]]:
    """Rank 0's bytes at rest and in use, of an engine that keeps everything and of one that offloads each kind."""
    found = {}
    for kinds in ((), *((kind,) for kind in KINDS)):
        engine = make_engine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, offload=kinds)))
        gradients(engine, engine.shard_data(tiny.uneven_batch()))
        engine.optimizer_step()  # optimizer state exists from here on
        seen = {"at rest": device_bytes(engine)}
        for use, mode in (("in use", engine.train_mode), ("evaluating", engine.eval_mode)):
            with mode():
                seen[use] = device_bytes(engine)
            assert device_bytes(engine) == seen["at rest"]
        for place in ("host", "device"):
            engine.to(place)
            seen[f"to {place}"] = device_bytes(engine)
        found[kinds] = seen
    return found


@pytest.mark.parametrize(
    "layout, dtype",
    [("fsdp dp2", "bfloat16"), ("megatron dp2", "float32"), ("megatron dp2", "bfloat16"), ("external dp2", "float32")],
)
def test_what_waits_on_the_host_leaves_the_device(folder, layout, dtype):
    world_size, config = world_and_role(layout, folder(), dtype=dtype)
    found = run_case(world_size, "tests.engine.test_offload:bytes_by_use", config=config)
    plain, empty = found.pop(()), dict.fromkeys(KINDS, 0)
    kept = plain["at rest"]
    assert all(kept[k] > 0 for k in KINDS) and plain == dict.fromkeys(plain, kept) | {"to host": empty}
    for (kind,), seen in found.items():
        without = {**kept, kind: 0}
        assert seen == {
            "at rest": without,
            "in use": without if kind == "optimizer" else kept,  # it waits for the optimizer's step
            "evaluating": kept if kind == "parameters" else without,  # which takes parameters alone
            "to host": empty,
            "to device": kept,
        }


# -- spent gradients ---------------------------------------------------------------------------------------------------


def copies_gradients_until_they_are_spent(config: RoleConfig) -> dict[str, int]:
    """Bytes of gradients on the host after each call, of an engine that offloads them; accumulation is exact."""
    kept, engine = (
        make_engine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, offload=kinds)))
        for kinds in ((), KINDS)
    )
    found = {"built": on_host(engine.offload, "gradients")}
    for step in range(2):
        shares = [engine.shard_data(tiny.uneven_batch(seed=seed)) for seed in (step, step + 1)]
        for each in (kept, engine):
            each.optimizer_zero_grad()
        found["zeroed"] = on_host(engine.offload, "gradients")
        for share in shares:
            for each in (kept, engine):
                with each.train_mode():
                    each.forward_backward_step(share)
            found["accumulated"] = on_host(engine.offload, "gradients")
        assert_equal(dict(engine.hf_gradients()), dict(kept.hf_gradients()))
        tokens = [each.guard_before_step() for each in (kept, engine)]
        assert engine.optimizer_step() == kept.optimizer_step()
        found["stepped"] = on_host(engine.offload, "gradients")
        assert [each.guard_after_step(token) for each, token in zip((kept, engine), tokens, strict=True)] == [[], []]
        found["checked"] = on_host(engine.offload, "gradients")
        with pytest.raises(AssertionError, match="spent"):
            dict(engine.hf_gradients())
        with pytest.raises(AssertionError, match="spent|reduced already"):
            engine.forward_backward_step(shares[0])
    assert_equal(dict(engine.hf_weights()), dict(kept.hf_weights()))
    return found


@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron dp2"])
def test_spent_gradients_are_dropped_and_others_kept_to_the_bit(folder, layout):
    world_size, config = world_and_role(layout, folder(), dtype="bfloat16")
    found = run_case(world_size, "tests.engine.test_offload:copies_gradients_until_they_are_spent", config=config)
    assert found["accumulated"] > 0
    assert {**found, "accumulated": 0} == dict.fromkeys(found, 0)


# -- failures in the middle --------------------------------------------------------------------------------------------


def toy(kinds: tuple[str, ...] = KINDS) -> tuple[dict[str, torch.Tensor], Offload]:
    tensors = {kind: torch.arange(10.0) + i for i, kind in enumerate(KINDS)}
    return tensors, Offload(kinds, {kind: lambda k=kind: [tensors[k]] for kind in KINDS})


def where(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {kind: t.untyped_storage().size() for kind, t in tensors.items()}


def assert_whole(tensors: dict[str, torch.Tensor], offload: Offload) -> None:
    with offload.used(*KINDS):
        for i, kind in enumerate(KINDS):
            assert torch.equal(tensors[kind], torch.arange(10.0) + i)


def test_an_error_inside_puts_everything_back():
    tensors, offload = toy()
    with pytest.raises(ZeroDivisionError), offload.used("parameters"), offload.used("parameters", "optimizer"):
        assert where(tensors) == {"parameters": 40, "gradients": 0, "optimizer": 40}
        raise ZeroDivisionError
    assert where(tensors) == dict.fromkeys(KINDS, 0)
    assert_whole(tensors, offload)


def test_what_is_in_use_stays_until_its_last_user_has_done():
    tensors, offload = toy()
    with offload.used("parameters"):
        with offload.used("parameters", "optimizer"):
            pass
        inside = where(tensors)  # pytest would show tensors that have no memory
    after = where(tensors)
    assert inside == {"parameters": 40, "gradients": 0, "optimizer": 0} and after == dict.fromkeys(KINDS, 0)


def test_what_was_sent_away_by_hand_goes_back_after_use():
    tensors, offload = toy(kinds=())
    offload.park("parameters")
    with offload.used("parameters", "gradients"):
        assert where(tensors) == dict.fromkeys(KINDS, 40)
    assert where(tensors) == {"parameters": 0, "gradients": 40, "optimizer": 40}


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_device_without_memory_leaves_what_there_is(monkeypatch, fails):
    """The growth of one storage fails: all kinds are where they were, nothing is in use, and a later try finds all of it."""
    tensors, offload = toy()
    grown, resize = [], torch.UntypedStorage.resize_

    def refuse(storage: torch.UntypedStorage, size: int) -> object:
        grown.extend([size] if size else [])
        if size and len(grown) == fails:
            raise torch.OutOfMemoryError("none left")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", refuse)
    with pytest.raises(torch.OutOfMemoryError), offload.used(*KINDS):
        raise AssertionError("used without its memory")
    assert where(tensors) == dict.fromkeys(KINDS, 0)
    assert_whole(tensors, offload)
    assert where(tensors) == dict.fromkeys(KINDS, 0)


def test_a_storage_is_parked_once_and_shared_ones_with_the_parameters():
    flat, moment = torch.arange(10.0), torch.ones(5)
    tensors = {"parameters": [flat[:4], flat[4:]], "gradients": [], "optimizer": [flat[2:6], moment, moment[:2]]}
    offload = Offload((), {kind: lambda k=kind: tensors[k] for kind in KINDS})
    for first, second in (("parameters", "optimizer"), ("optimizer", "parameters")):
        offload.park(first), offload.park(second)
        assert (on_host(offload, "parameters"), on_host(offload, "optimizer")) == (40, 20)
        offload.restore(first), offload.restore(second)
        assert torch.equal(flat, torch.arange(10.0)) and torch.equal(moment, torch.ones(5))
