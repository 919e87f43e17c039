"""One checkpoint of all roles: whole or nothing, with one marker.

A run of one role that trains, the `MODEL`, has the checkpoint of its engine alone. Others have this one:

step_00000100/
    trainer.pt          the trainer's state, and which roles there are
    actor/ ...          what the engine of each role writes
    COMPLETE            as of every checkpoint (engine/atomic_checkpoint.py)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mrl.engine import background, saving
from mrl.engine.atomic_checkpoint import ROLES, RankGroup, other_backend
from mrl.engine.base import BaseEngine
from mrl.engine.collective import on_main
from mrl.engine.torch_dist.data_files import saved_bytes
from mrl.errors import CheckpointError
from mrl.weights.pt_file import load_pt

TRAINER = "trainer.pt"
MODEL = "model"
"""The role that trains in `mrl sft`, `mrl dpo` and `mrl rm`."""

Use = Callable[[str], BaseEngine]
"""Role -> its engine, brought to the device."""


def save(
    engines: Mapping[str, BaseEngine],
    use: Use,
    root: str,
    step: int,
    state: Mapping[str, Any],
    *,
    remote: str | None,
    keep: int | None,
    protect: Collection[str],
) -> str:
    """Saves the roles of `engines` and `state` (which may hold tensors). Returns the folder. Collective."""
    if MODEL in engines:
        return use(MODEL).save_checkpoint(root, remote, global_step=step, max_ckpt_to_keep=keep, state=state)

    roles = {role: engine.backend for role, engine in engines.items()}

    def write(folder: str) -> None:
        on_main(lambda: _prepare(folder, roles, dict(state)))
        for role in engines:
            use(role).save_state(os.path.join(folder, role), {})

    return saving.save(root, step, write, backend=ROLES, remote=remote, keep=keep, protect=protect)


def _prepare(folder: str, roles: Mapping[str, str], state: dict[str, Any]) -> None:
    """Makes a folder for each role, and writes the trainer's file."""
    for role in roles:
        os.mkdir(os.path.join(folder, role))
    with open(os.path.join(folder, TRAINER), "wb") as out:
        out.write(saved_bytes({"roles": roles, "state": state}))


def stage(
    engines: Mapping[str, BaseEngine], use: Use, state: Mapping[str, Any], to_come: Callable[[], dict[str, Any]]
) -> background.Write:
    """Copies what `save` writes to host memory. Returns what writes it. Collective.

    to_come: gives more of the state when it is written; of a run of one model it is asked at once.
    """
    if MODEL in engines:
        return use(MODEL).stage_state({**state, **to_come()})
    roles, copied = {role: engine.backend for role, engine in engines.items()}, copy.deepcopy(dict(state))
    writes = {role: use(role).stage_state({}) for role in engines}

    def write_copies(folder: str, ranks: RankGroup) -> None:
        if ranks.rank == 0:
            _prepare(folder, roles, copied | to_come())
        ranks.gather(None)
        for role, write in writes.items():
            write(os.path.join(folder, role), ranks)

    return write_copies


def load(
    engines: Mapping[str, BaseEngine],
    use: Use,
    path: str,
    *,
    remote: str | None,
    may_lack: Collection[str],
    constant: Collection[str] = (),
) -> dict[str, Any]:
    """Restores what `save` wrote. Returns the trainer's state. Collective.

    may_lack: roles that the checkpoint or the run may be without; a role keeps its first weights if the checkpoint
    lacks it. constant: roles that never change, and are not read.
    """
    if MODEL in engines:
        return use(MODEL).load_checkpoint(path, remote)
    with saving.checkpoint_to_load(path, backend=ROLES, remote=remote) as folder:
        saved = load_pt(os.path.join(folder, TRAINER), fields=("roles", "state"))
        _check_roles(saved["roles"], engines, may_lack, folder)
        for role in saved["roles"]:
            if role in engines and role not in constant:
                use(role).load_state(os.path.join(folder, role))
        return saved["state"]


def chosen_in(engines: Mapping[str, BaseEngine], path: str) -> dict[str, str]:
    """Returns `WorkerDispatch.chosen` at the save; empty if an older mrl saved none, or `load` will refuse the
    folder."""
    if MODEL in engines:
        state = engines[MODEL].saved_state(path)
    else:
        try:
            state = load_pt(os.path.join(path, TRAINER), fields=("state",), mmap=True)["state"]
        except CheckpointError:
            state = None
    return (state or {}).get("chosen", {})


def _check_roles(
    saved: Mapping[str, str], engines: Mapping[str, BaseEngine], may_lack: Collection[str], path: str
) -> None:
    """Refuses a checkpoint with other roles, or whose roles another backend saved."""
    fix = "resume with the algorithm it was saved by, or export its actor to Hugging Face and start from that"
    for role in (*engines, *saved):
        if role not in saved and role not in may_lack:
            why = f"has no {role} (it has {', '.join(saved)}), and this run has one"
            raise CheckpointError(path, why=why, fix=fix)
        if role not in engines and role not in may_lack:
            why = f"has a role {role}, and this run has only {', '.join(engines)}"
            raise CheckpointError(path, why=why, fix=fix)
    for role, engine in engines.items():
        if saved.get(role, engine.backend) != engine.backend:
            why = other_backend(saved[role], engine.backend, key=f"{role}.engine.backend")
            raise CheckpointError(f"{path}/{role}", why=why)
