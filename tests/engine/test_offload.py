"""What offload to host memory frees on the device: storages of what waits are empty, and full where it is used."""

from __future__ import annotations

import dataclasses

import pytest

from mrl.config.schema import RoleConfig
from mrl.engine.offload import KINDS
from tests.engine import tiny
from tests.engine.contract import gradients, make_engine
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny.make_model(str(tmp_path_factory.mktemp("llama")), "llama")


def device_bytes(engine) -> dict[str, int]:
    """Bytes of each kind's storages; a storage that kinds share (fp32 masters are the parameters) counts for the first."""
    counted: set[int] = set()
    result = {}
    for kind in KINDS:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in engine.offload.tensors(kind)}
        result[kind] = sum(size for key, size in storages.items() if key not in counted)
        counted |= set(storages)
    return result


def frees_what_it_names(config: RoleConfig, kind: str) -> dict[str, dict[str, int]]:
    """Rank 0's bytes at rest and in use, of an engine that keeps everything and of one that offloads `kind`."""
    found = {}
    for name, kinds in (("kept", ()), ("offloaded", (kind,))):
        engine = make_engine(dataclasses.replace(config, engine=dataclasses.replace(config.engine, offload=kinds)))
        gradients(engine, engine.shard_data(tiny.uneven_batch()))
        engine.optimizer_step()  # optimizer state exists from here on
        found[name, "at rest"] = device_bytes(engine)
        with engine.train_mode():
            found[name, "in use"] = device_bytes(engine)
        assert device_bytes(engine) == found[name, "at rest"]
        with engine.eval_mode():
            found[name, "evaluating"] = device_bytes(engine)
        assert device_bytes(engine) == found[name, "at rest"]
        engine.to("host")
        found[name, "to host"] = device_bytes(engine)
        engine.to("device")
        found[name, "to device"] = device_bytes(engine)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["fsdp dp2", "megatron dp2", "external dp2"])
def test_what_waits_on_the_host_leaves_the_device(folder, layout, kind, dtype):
    world_size, config = world_and_role(layout, folder, dtype=dtype)
    found = run_case(world_size, "tests.engine.test_offload:frees_what_it_names", config=config, kind=kind)
    kept = found["kept", "at rest"]
    assert all(kept[k] > 0 for k in KINDS)
    assert found["offloaded", "at rest"] == {**kept, kind: 0}
    assert found["kept", "in use"] == found["kept", "to device"] == found["offloaded", "to device"] == kept
    in_use = {**kept, "optimizer": 0} if kind == "optimizer" else kept  # it waits for the optimizer's step
    assert found["offloaded", "in use"] == in_use
    # evaluation takes parameters alone
    assert found["kept", "evaluating"] == kept
    assert found["offloaded", "evaluating"] == (kept if kind == "parameters" else {**kept, kind: 0})
    assert found["kept", "to host"] == found["offloaded", "to host"] == dict.fromkeys(KINDS, 0)
