"""Plans a run: from its config to figures of every stage and phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mrl.config.checks import parallel_dims
from mrl.config.command import SAMPLING_RANKS, Config, Part, Phases, TrainingCommand
from mrl.engine.lora.folder import adapters
from mrl.engine.megatron import meta
from mrl.errors import ConfigError
from mrl.parallel import ParallelDims
from mrl.plan import memory
from mrl.plan.cost import Cost, cost, estimated_times
from mrl.plan.gpus import GPU
from mrl.plan.memory import MemoryUse, RolePlan
from mrl.trainers.throughput import adapter_weights, training_flops
from mrl.weights.families import family_of
from mrl.weights.hf_config import normalize

RESERVED_GIB = 4.0
"""What a GPU needs beside tensors, an assumption: CUDA's context and kernels, NCCL's buffers, cuBLAS's workspace, and
what the caching allocator cannot hand out again."""

EFFICIENCY = 0.5
"""The share of a GPU's peak that matrix products are taken to reach, an assumption."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Holds all that a run takes on `world_size` GPUs."""

    command: str
    world_size: int
    gpu: GPU
    reserved: int  # bytes of each GPU that are left for what is no tensor
    longest: int  # tokens of a sequence
    phases: Phases
    roles: dict[str, RolePlan]
    uses: list[MemoryUse]
    costs: dict[str, Cost]  # by the name of the phase; none of sampling, nor of parts on backend fsdp
    model_flops: dict[str, float]  # of a token in an update, by role
    batches: dict[str, memory.MicroBatches]  # by the name of the phase
    has_experts: bool = False  # in some role

    @property
    def fullest(self) -> MemoryUse:
        return max(self.uses, key=lambda use: use.total)

    @property
    def room(self) -> int:
        """Bytes that tensors may take on a GPU."""
        return self.gpu.memory - self.reserved

    @property
    def fits(self) -> bool:
        """Whether what is planned fits; `whole` says whether that is everything."""
        return self.fullest.total <= self.room

    @property
    def whole(self) -> bool:
        """Whether activations of all parts are planned."""
        return all(use.activations is not None for use in self.uses)

    @property
    def known_to_fit(self) -> bool | None:
        """Whether it fits; None where what is planned does, and there is more."""
        return None if self.fits and not self.whole else self.fits

    @property
    def untimed(self) -> list[str]:
        """Phases whose time is not estimated."""
        return [phase.name for phase in self.phases.phases if phase.name not in self.costs]

    @property
    def seconds(self) -> float:
        """Seconds of a step, without `untimed` phases."""
        return sum(one.seconds for one in self.costs.values())


def plan(
    command: TrainingCommand, config: Config, parts: list[Part], layouts: list[ParallelDims], gpu: GPU, *,
    reserved_gib: float = RESERVED_GIB, efficiency: float = EFFICIENCY, known: memory.KnownChunks | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan of a config whose parts and layouts have been checked. `meta.prepare` must have been called.

    known: what was measured for other plans with the same config.json, and is added to."""
    known = {} if known is None else known
    longest, _ = command.longest(config)
    phases = command.phases(config)
    roles, costs, batches, model_flops = {}, {}, {}, {}
    names = {part.role: part.model.path for part in command.parts(config)}  # a hub id, where that is what was given
    beside = command.processes_beside(config)
    training = layouts[0].world_size
    roles_of = [(part.role, part, dims, 0) for part, dims in zip(parts, layouts, strict=True)]
    for part in command.parts_beside(config, parts):
        roles_of.append((SAMPLING_RANKS, part, parallel_dims(part.engine.parallel, beside), training))
    for name, part, dims, first_rank in roles_of:
        if not any(phase.role == name for phase in phases.phases):
            continue
        if part.engine.backend not in ("megatron", "fsdp"):
            raise ConfigError(
                part.key("engine.backend"), part.engine.backend, "is not planned", "plan megatron or fsdp"
            )
        role_config = command.engine_config(config, part)
        made = memory.plan_role(name, names[part.role], role_config, dims, phases, longest, gpu, known)
        roles[name] = dataclasses.replace(made, first_rank=first_rank)
        if part.optimizer is not None and family_of(part.hf.get("model_type")) is not None:
            model_flops[part.role] = _flops_of_a_token(part, longest)
    for phase in phases.phases:
        if phase.kind == "sample":
            continue
        role = roles[phase.role]
        found = memory.micro_batches(role.config, role.dims, phase.sequences // phase.steps, longest)
        batches[phase.name] = found
        if role.config.engine.backend == "fsdp":
            continue
        trains = phase.kind == "train"
        stages = role.trains if trains else role.forward
        costs[phase.name] = cost(
            role, stages, found, gpu, steps=phase.steps, times=estimated_times(stages, gpu, efficiency),
            forward_only=not trains,
        )  # fmt: skip
    return Plan(
        command=command.name, world_size=training + beside, gpu=gpu, reserved=int(reserved_gib * 2**30),
        longest=longest, phases=phases, roles=roles,
        uses=memory.memory_uses(phases, roles, longest, gpu.memory),
        costs=costs, model_flops=model_flops, batches=batches,
        has_experts=any(normalize(dict(part.hf)).get("num_experts") for part in parts if part.role in roles),
    )  # fmt: skip


def _flops_of_a_token(part: Part, longest: int) -> float:
    """Returns FLOPs of a token in an update, as `perf/mfu` counts them. All of `longest` tokens train.

    A value head has one output in place of the vocabulary's, so it counts nothing.
    """
    hf = normalize(dict(part.hf), where="config.json")
    lora = part.model.lora
    of_adapters = None if lora is None else adapter_weights(adapters(part.model.path, lora, part.head).values(), hf)
    labels = longest if part.head == "lm" else 0
    return training_flops(hf, torch.tensor([longest]), labels, of_adapters) / longest


def prepare() -> None:
    """Makes this process one that plans."""
    meta.prepare()


def _optimizer_bytes(role: RolePlan, stage: int) -> list[int]:
    """Returns the different amounts that ranks of a stage have, the least first."""
    dims = role.dims
    ranks = dims.world_size // dims.pp
    places = {(at.cp_rank + dims.cp * at.dp_rank, at.edp_rank) for at in map(dims.coordinates, range(ranks))}
    return sorted({role.stages[stage].optimizer(*place) for place in places})


_JSON_NAMES = {"distill_inputs": "given", "distill_log_probs": "said", "distill_joined": "joined"}
"""Names of fields of `ChunkFigures` in the JSON, which readers of it know."""


def as_json(made: Plan) -> dict[str, Any]:
    """Returns the plan as plain data, in bytes, seconds and FLOPs."""
    roles = {}
    for role, one in made.roles.items():
        stages = [
            {
                "stage": i, "layers": [list(layers) for layers in stage.layers], "parameter_bytes": stage.parameters,
                "gradient_bytes": stage.gradients, "buffer_bytes": stage.buffers,
                "optimizer_bytes": _optimizer_bytes(one, i),
                "chunks": [
                    {_JSON_NAMES.get(name, name): value for name, value in dataclasses.asdict(chunk).items()}
                    for chunk in stage.chunks
                ],
            }
            for i, stage in enumerate(one.stages)
        ]  # fmt: skip
        roles[role or "model"] = {
            "layout": one.dims.describe(),
            "layer_spec": None if one.config.engine.backend == "fsdp" else one.spec,
            "degrees": dataclasses.asdict(one.dims),
            "stages": stages,
        }
    return {
        "command": made.command, "world_size": made.world_size, "gpu": dataclasses.asdict(made.gpu),
        "reserved_bytes": made.reserved, "fits": made.known_to_fit, "longest_sequence": made.longest, "roles": roles,
        "phases": [dataclasses.asdict(use) | {"total": use.total} for use in made.uses],
        "updates": {name: dataclasses.asdict(one) | {"seconds": one.seconds} for name, one in made.costs.items()},
        "untimed_phases": made.untimed, "activations_planned": made.whole,
        "model_flops_per_token": {role or "model": flops for role, flops in made.model_flops.items()},
        "step_seconds": made.seconds, "served_tokens": made.phases.served_tokens, "notes": list(made.phases.notes),
    }  # fmt: skip
