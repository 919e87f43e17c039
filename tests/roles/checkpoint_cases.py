"""Cases for worlds of processes: one checkpoint of all roles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from mrl.engine import atomic_checkpoint
from mrl.errors import CheckpointError
from tests.engine.contract import assert_equal
from tests.roles.cases import Configs, assert_same, make_dispatch, train, weights_of

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
