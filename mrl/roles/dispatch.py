"""Stands between a trainer and engines. A trainer knows roles and mini-batches; an engine knows layouts and
micro-batches.

A role is an engine with a job. The actor is a policy and the critic a value head, and both train. The reference is a
policy and the reward a value head without an optimizer. A run of one model has the role `MODEL`. Every rank runs the
same program, holds the whole global batch, and makes every call together with the others. Not here: which roles there
are and what is asked of them (the trainer), and how a batch is divided among ranks (engines).

A checkpoint of roles is whole or nothing, with one marker. A run of the `MODEL` has the checkpoint of its engine alone.
Others have this one:

step_00000100/
    trainer.pt          the trainer's state, and which roles there are
    actor/ ...          what the engine of each role writes
    COMPLETE            as of every checkpoint (engine/atomic_checkpoint.py)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mrl.batch import Batch
from mrl.engine import collective, saving
from mrl.engine.atomic_checkpoint import ROLES, RankGroup, other_backend
from mrl.engine.background import Write
from mrl.engine.base import BaseEngine, Completion, Ctx, GenerateRequest, GradNorm, LossFn, Predictions
from mrl.engine.guards import Problem
from mrl.engine.torch_dist.data_files import saved_bytes
from mrl.errors import CheckpointError, ModelError
from mrl.weights.pt_file import load_pt

T = TypeVar("T")

TRAINER = "trainer.pt"
MODEL = "model"
"""The role that trains in `mrl sft`, `mrl dpo` and `mrl rm`."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    grad_norm: GradNorm
    lr: float  # the rate that the step was made with
    problems: list[Problem]  # what the guard found wrong, if it looked


def mesh(engine: BaseEngine, batch: Batch, run: Callable[[Batch], Predictions]) -> Predictions:
    """Runs on a batch split over the role's data-parallel mesh, each rank on its share. The result is whole, on the
    host of every rank, in the order of `batch`."""
    whole = engine.unshard_data(run(engine.shard_data(batch)), batch)
    return {name: values.cpu() for name, values in whole.items()}


class WorkerDispatch:
    """The pool of roles, each an engine under its name.

    offload_idle: a call brings to the device what it needs of its role, and offloads all other roles to the host.
    Otherwise only the parts in a role's own `engine.offload` move. constant: roles with weights that never change, so
    no checkpoint needs to hold them. bases: role -> another role; it has no engine, and is the other one's model
    without adapters.
    """

    def __init__(
        self,
        engines: Mapping[str, BaseEngine],
        *,
        offload_idle: bool,
        constant: Collection[str] = ("reward",),
        bases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        assert engines, "no roles"
        assert not bases.keys() & engines.keys(), f"{', '.join(bases)}: both a role of its own and another's base"
        self.engines, self.offload_idle, self.constant = dict(engines), offload_idle, frozenset(constant)
        self.bases = dict(bases)
        self._any = next(iter(self.engines.values()))

    # -- where and who ------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that roles compute on."""
        return self._any.device

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self._any.is_main

    @property
    def world_size(self) -> int:
        """Processes that all roles run on."""
        return self._any.world_size

    @property
    def node_ids(self) -> list[int]:
        """The node of each rank, numbered from 0; the same list on every rank."""
        return collective.node_ids()

    @property
    def lcm_dp_size(self) -> int:
        """Least common multiple of the roles' data-parallel degrees: so many sequences give every rank of each role as
        many."""
        return math.lcm(*(engine.dp_size for engine in self.engines.values()))

    @property
    def chosen(self) -> dict[str, str]:
        """The choices of each role's engine by "role.name" (`BaseEngine.chosen`); of the `MODEL` alone, by name."""
        if MODEL in self.engines:
            return self.engines[MODEL].chosen
        return {
            f"{role}.{name}": value for role, engine in self.engines.items() for name, value in engine.chosen.items()
        }

    def on_main(self, fn: Callable[[], T]) -> T:
        """Calls `fn` on the main process only; its result, or the UserError that it raised, is on every rank."""
        return self._any.on_main(fn)

    def max_over_ranks(self, *values: float) -> list[float]:
        """Returns the largest of each value over all ranks."""
        return self._any.max_over_ranks(*values)

    # -- life ---------------------------------------------------------------------------------------------------------

    def keep_choices(self, folder: str) -> None:
        """Makes engines choose as those of a checkpoint did, if they can. Call it before `init_model`."""
        chosen = self.on_main(lambda: self._chosen_in(folder))
        for role, engine in self.engines.items():
            of_role = "" if role == MODEL else f"{role}."
            engine.keep_choices({k.removeprefix(of_role): v for k, v in chosen.items() if k.startswith(of_role)})

    def init_model(self) -> None:
        """Builds every role, one after the other. A built one waits on the host if idle ones do.

        A ModelError names the folder; of a role beside the actor it names its key too.
        """
        for role, engine in self.engines.items():
            try:
                engine.init_model()
            except ModelError as error:
                if role in ("actor", MODEL):
                    raise
                raise ModelError(f"{role}.model.path", why=str(error)) from None
            if self.offload_idle:
                engine.to("host")

    def _use(self, role: str, *, gradients: bool = False, optimizer: bool = False) -> BaseEngine:
        """Returns the engine of `role`, its weights on the device, and gradients and optimizer state where asked for.

        The rest goes to the host, but for optimizer state while the role trains: from one optimizer step to the next it
        stays. State that the role's own `engine.offload` names is brought and put back by the engine.
        """
        assert role in self.engines, f"there is no role {role!r}; there are {', '.join(self.engines)}"
        engine = self.engines[role]
        if not self.offload_idle:
            return engine
        for other in self.engines.values():
            if other is not engine:
                other.to("host")
        waiting = set(engine.config.engine.offload)
        engine.to("host", model=False, gradients=not gradients, optimizer=not (gradients or optimizer))
        engine.to(
            "device",
            model="parameters" not in waiting,
            gradients=gradients and "gradients" not in waiting,
            optimizer=optimizer and "optimizer" not in waiting,
        )
        return engine

    def offload_all(self) -> None:
        """All roles wait on the host, where idle ones do, and their memory is free for other programs on the device."""
        if self.offload_idle:
            for engine in self.engines.values():
                engine.to("host")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # where roles stay on the device too: what their last step has left

    # -- mini-batches -------------------------------------------------------------------------------------------------

    def forward(self, role: str, batch: Batch, ctx: Ctx | None = None) -> Predictions:
        """Predictions of a global batch, [T] each in its order, on the host of every rank.

        Dropout is off and no loss is made.
        """
        engine = self._use(self.bases.get(role, role))
        engine.set_loss_fn(None)
        with engine.eval_mode(), engine.without_adapters() if role in self.bases else contextlib.nullcontext():
            return mesh(engine, batch, lambda share: engine.forward_backward_step(share, ctx, forward_only=True)[0])

    def forward_backward(
        self,
        role: str,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight: float = 1.0,
        ctx: Ctx | None = None,
        denominator: str = "tokens",
        gathers: bool = True,
    ) -> tuple[Predictions, float, dict[str, float]]:
        """Adds the gradient of a global mini-batch's loss to what has accumulated since `zero_grad`.

        loss_fn: sums over a micro-batch (see `engine.base.LossFn`), divided by `batch.denominators[denominator]`. The
        loss and its gradient, not the metrics, count `loss_weight` times. gathers: False if nobody reads the
        predictions; they are empty then. Returns (predictions as from `forward`, the loss, the metrics), the latter two
        as means over the global batch, the same on every rank.
        """
        engine = self._use(role, gradients=True)
        found: dict[str, Any] = {}

        def weighted(data: Batch, predictions: Predictions, ctx: Ctx) -> tuple[Tensor, Ctx]:
            loss, ctx = loss_fn(data, predictions, ctx)
            return loss * loss_weight, ctx

        def run(share: Batch) -> Predictions:
            predictions, found["loss"], found["ctx"] = engine.forward_backward_step(share, ctx)
            return predictions

        engine.set_loss_fn(weighted, denominator)
        try:
            with engine.train_mode():
                predictions: Predictions = {}
                if gathers:
                    predictions = mesh(engine, batch, run)
                else:
                    run(engine.shard_data(batch))
        finally:
            engine.set_loss_fn(None)
        return predictions, found["loss"], found["ctx"]["metrics"]

    def evaluate(
        self, role: str, batch: Batch, loss_fn: LossFn, ctx: Ctx | None = None, denominator: str = "tokens"
    ) -> tuple[float, dict[str, float]]:
        """Returns the loss and the metrics of a global batch, as `forward_backward` does, without dropout and a
        gradient."""
        engine = self._use(role)
        engine.set_loss_fn(loss_fn, denominator)
        try:
            with engine.eval_mode():
                _, ctx = engine.forward_backward_step(engine.shard_data(batch), ctx, forward_only=True)
        finally:
            engine.set_loss_fn(None)
        return ctx["loss"], ctx["metrics"]

    def zero_grad(self, role: str) -> None:
        """Forgets the gradients that a role has accumulated."""
        self._use(role, gradients=True).optimizer_zero_grad()

    def optim_step(self, role: str, guard: bool = False) -> StepResult:
        """Makes one optimizer step on the accumulated gradients, then one of the LR schedule.

        guard: check that the step did to the parameters what it should.
        """
        engine = self._use(role, gradients=True, optimizer=True)
        before = engine.guard_before_step() if guard else None
        grad_norm = engine.optimizer_step()
        problems = engine.guard_after_step(before) if guard else []
        return StepResult(grad_norm, engine.lr_scheduler_step(), problems)

    def generate(self, role: str, requests: Sequence[GenerateRequest], **how: Any) -> list[Completion]:
        """Completions in the order of the requests, the same on every rank. how: options of `BaseEngine.generate`."""
        return self._use(role).generate(requests, **how)

    # -- weights ------------------------------------------------------------------------------------------------------

    def hf_weights(self, role: str, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Streams (Hugging Face name, whole tensor) on the main rank; others take part and get nothing.

        To be used up before another role is asked for anything. everywhere: every rank gets them all.
        """
        return self._use(role).hf_weights(everywhere=everywhere)

    def adapter_weights(self, role: str) -> Iterator[tuple[str, Tensor]]:
        """Streams the adapters alone as `hf_weights` does, under the names of peft's files."""
        return self._use(role).adapter_weights()

    def save_hf_model(self, role: str, path: str) -> None:
        """Writes a folder for transformers, or the adapters alone if the role's config says so."""
        self._use(role).export_hf(path)

    def copy_weights(self, source_role: str, target_role: str, folder: str) -> None:
        """Gives the target the weights of the source, all of them or (where this raises) none; layouts and backends may
        differ.

        folder: on storage that all nodes see, with room for the model; what is written there is removed afterwards.
        """
        path = os.path.join(folder, f".{source_role}-to-{target_role}")
        self.on_main(lambda: shutil.rmtree(path, ignore_errors=True))  # of a run that was killed
        source = self._use(source_role)
        # a backend that knows no adapters takes no word about them
        source.export_hf(path, **({} if source.config.model.lora is None else {"merged": True}))
        if self.max_over_ranks(not os.path.isdir(path)) != [0.0]:
            raise CheckpointError(
                folder, why="a rank does not see what rank 0 wrote there", fix="use storage all nodes share"
            )
        self._use(target_role).load_hf(path)
        collective.wait_for_all()
        self.on_main(lambda: shutil.rmtree(path))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def checkpoint_backend(self) -> str:
        """The backend that a checkpoint's marker names."""
        return self.engines[MODEL].backend if MODEL in self.engines else ROLES

    def _saved(self) -> dict[str, BaseEngine]:
        """Returns the roles that a checkpoint holds."""
        return {name: engine for name, engine in self.engines.items() if name not in self.constant}

    def save_checkpoint(
        self,
        root: str,
        *,
        global_step: int,
        state: Mapping[str, Any],
        remote: str | None = None,
        keep: int | None = None,
        protect: Collection[str] = (),
    ) -> str:
        """Saves all roles and the trainer's `state` as `root/step_XXXXXXXX`, whole or nothing. Returns that folder.

        state: may hold tensors. remote: a URL for a copy. keep: so many newest checkpoints stay. protect: names
        (step_XXXXXXXX) of others that stay.
        """
        if MODEL in self.engines:
            engine = self._use(MODEL)
            return engine.save_checkpoint(root, remote, global_step=global_step, max_ckpt_to_keep=keep, state=state)
        saved = self._saved()

        def write(folder: str) -> None:
            self.on_main(lambda: _prepare(folder, saved, dict(state)))
            for role in saved:
                self._use(role).save_state(os.path.join(folder, role), {})

        return saving.save(root, global_step, write, backend=ROLES, remote=remote, keep=keep, protect=protect)

    def stage_checkpoint(self, state: Mapping[str, Any], to_come: Callable[[], dict[str, Any]]) -> Write:
        """Copies what `save_checkpoint` writes to host memory. Returns what writes it, in a thread of each rank.

        to_come: gives more of the state, in that thread; it may wait. Of a run of one model it is asked at once.
        """
        if MODEL in self.engines:
            return self._use(MODEL).stage_state({**state, **to_come()})
        saved, copied = self._saved(), copy.deepcopy(dict(state))
        writes = {role: self._use(role).stage_state({}) for role in saved}

        def write_copies(folder: str, ranks: RankGroup) -> None:
            if ranks.rank == 0:
                _prepare(folder, saved, copied | to_come())
            ranks.gather(None)
            for role, write in writes.items():
                write(os.path.join(folder, role), ranks)

        return write_copies

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Restores the newest whole checkpoint of `path` (or `path` itself), also into other layouts.

        Returns the trainer's `state`. A role keeps its first weights if the checkpoint lacks it. Raises CheckpointError
        where the roles there are not the roles here.
        """
        if MODEL in self.engines:
            return self._use(MODEL).load_checkpoint(path, None)
        with saving.checkpoint_to_load(path, backend=ROLES, remote=None) as folder:
            saved = load_pt(os.path.join(folder, TRAINER), fields=("roles", "state"))
            self._check_roles(saved["roles"], folder)
            for role in saved["roles"]:
                if role in self.engines and role not in self.constant:
                    self._use(role).load_state(os.path.join(folder, role))
            return saved["state"]

    def _chosen_in(self, path: str) -> dict[str, str]:
        """Returns `chosen` at the save; empty if an older mrl saved none, or `load_checkpoint` will refuse the
        folder."""
        if MODEL in self.engines:
            state = self.engines[MODEL].saved_state(path)
        else:
            try:
                state = load_pt(os.path.join(path, TRAINER), fields=("state",), mmap=True)["state"]
            except CheckpointError:
                state = None
        return (state or {}).get("chosen", {})

    def _check_roles(self, saved: Mapping[str, str], path: str) -> None:
        """Refuses a checkpoint with other roles, or whose roles another backend saved."""
        engines, may_lack = self.engines, set(self.constant)
        if "actor" in engines and engines["actor"].config.model.lora is not None:
            may_lack.add("reference")  # it is the actor's base, whether a copy of its own holds that or not
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


def _prepare(folder: str, engines: Mapping[str, BaseEngine], state: dict[str, Any]) -> None:
    """Makes a folder for each role, and writes the trainer's file."""
    for role in engines:
        os.mkdir(os.path.join(folder, role))
    roles = {role: engine.backend for role, engine in engines.items()}
    with open(os.path.join(folder, TRAINER), "wb") as out:
        out.write(saved_bytes({"roles": roles, "state": state}))
