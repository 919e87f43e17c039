"""What `mrl plan` says of a case of tests/cuda. Runs in a process that plans."""

from __future__ import annotations

import dataclasses
import tempfile
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from mrl.algorithms.distill import TEACHER, DistillLoss
from mrl.config.checks import parallel_dims
from mrl.config.schema import RoleConfig
from mrl.engine.megatron import meta
from mrl.engine.megatron.chunk_run import DistillIds
from mrl.parallel import ParallelDims
from mrl.plan import schedule
from mrl.plan.memory import most_activations, sharded_figures
from tests.cuda import models, update
from tests.cuda.cases import Case


def held(case: Case, *, kernels: bool = False) -> list[dict[str, Any]]:
    """Bytes of parameters, buffers, gradients, optimizer and activations on every rank: a list by rank. kernels: of mrl's.
    FLOPs of a micro-batch's forward and backward passes in each chunk."""
    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    if case.lora:
        models.write_zeros(folder)
    config = update.config_of(case, folder)
    dims = parallel_dims(config.engine.parallel, case.world)
    ids = DistillIds(case.ids, DistillLoss(kind="forward_kl"), TEACHER, first_temperature=1.0) if case.ids else None
    ranks = range(0, case.world, case.world // case.pp)
    spec = "te" if case.spec == "te" else "local"
    stages = [meta.measure(config, dims, rank, case.lengths, ids=ids, spec=spec, kernels=kernels) for rank in ranks]
    found = []
    for rank in range(case.world):
        at = dims.coordinates(rank)
        stage = stages[at.pp_rank]
        order = schedule.passes(at.pp_rank, pp=case.pp, vpp=case.vpp, micro_batches=case.micro_batches)
        found.append({
            "parameters": stage.parameters, "buffers": stage.buffers, "gradients": stage.gradients,
            "optimizer": stage.optimizer(at.cp_rank + dims.cp * at.dp_rank, at.edp_rank),
            "activations": most_activations(order, stage.chunks, case.micro_batches),
            "flops": [(chunk.forward_flops, chunk.backward_flops) for chunk in stage.chunks],
        })  # fmt: skip
    return found


def sharded(config: RoleConfig, world: int) -> list[dict[str, int]]:
    """As `held`, of a part on backend fsdp."""
    found = sharded_figures(config, ParallelDims(world))
    return [
        {"parameters": found.parameters, "gradients": found.gradients, "optimizer": found.optimizer(rank, 0)}
        for rank in range(world)
    ]


def tied_gradients(config: RoleConfig, dims: ParallelDims) -> list[int]:
    """Bytes of the gradient that each stage sums with the other end's."""
    ranks = range(0, dims.world_size, dims.world_size // dims.pp)
    return [meta.measure(config, dims, rank, ()).tied_gradient for rank in ranks]


def tensor_parallel_bytes(config: RoleConfig, dims: ParallelDims, lengths: list[int]) -> dict[str, int]:
    """Operation -> bytes of the whole tensors that tp's collectives of an update's micro-batch are about."""
    [chunk] = meta.measure(config, dims, 0, lengths).chunks
    found: dict[str, int] = {}
    for one in (*chunk.forward_traffic, *chunk.backward_traffic):
        if one.group == "tp":
            found[one.op] = found.get(one.op, 0) + one.bytes
    return found


def chunks_of_layouts(
    config: RoleConfig, layouts: list[ParallelDims], lengths: list[int]
) -> tuple[list[list[meta.ChunkFigures]], list[list[meta.ChunkFigures]]]:
    """What the chunks of every stage of the layouts take: each stage measured alone, and with what is known of others."""
    alone, together, known = [], [], {}
    for dims in layouts:
        for rank in range(0, dims.world_size, dims.world_size // dims.pp):
            alone.append(list(meta.measure(config, dims, rank, lengths).chunks))
            together.append(list(meta.measure(config, dims, rank, lengths, known=known).chunks))
    assert len(known) < sum(map(len, together)), "nothing is known of another layout"
    return alone, together


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str


def command(words: list[str], folder: str, hub: str | None = None) -> Done:
    """Runs `mrl` with these words in a folder. hub: the cache of Hugging Face's hub, which is not asked."""
    import os

    from click.testing import CliRunner

    from mrl.cli import main

    os.chdir(folder)
    if hub is not None:
        import huggingface_hub.constants as constants

        constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, hub
    result = CliRunner().invoke(main, words, prog_name="mrl", catch_exceptions=False)
    return Done(result.exit_code, result.stdout, result.stderr)


YAML = {
    "sft": "model: {{path: {0}}}\ndata: {{train: none.jsonl}}\n",
    "ppo": "actor: {{model: {{path: {0}}}, engine: {{micro_batch: {{size: 1}}}}}}\n"
    "algorithm: {{name: grpo, kl_in: loss, kl_coef: 0.01}}\ndata: {{train: none.jsonl}}\nrollout: {{backend: vllm}}\n"
    "rewards: {{functions: [{{name: gsm8k}}]}}\n",
}


def published(
    model: dict, name: str, words: list[str], world_size: int, gpu: str, folder: str
) -> tuple[bool, list[tuple[float, float]], float]:
    """Whether a run of `mrl sft` or `mrl ppo` fits on such GPUs, GiB in all and of gradients in each phase and stage, and what
    there is. words: overrides of its config."""
    import json

    from mrl.config.command import record
    from mrl.config.load import load_config
    from mrl.launch.planning import read_parts
    from mrl.plan import planner
    from mrl.plan.gpus import gpu_of

    path = Path(folder)
    (path / "config.json").write_text(json.dumps(models.COMMON | model))
    (path / "run.yaml").write_text("output_dir: run\n" + YAML[name].format(folder))
    command = record(name)
    config = load_config(path / "run.yaml", ["train.steps=1", *words], command.root)
    made = planner.plan(command, config, *read_parts(command, config, world_size), gpu_of(gpu))
    return made.fits, [(use.total / 2**30, use.gradients / 2**30) for use in made.uses], made.room / 2**30


def verdict_where_the_planner_fails() -> tuple[bool | None, str]:
    """What is said of a run whose plan ends in an error that is no user's."""
    from mrl.config.command import record
    from mrl.launch.planning import planned_verdict
    from mrl.plan.gpus import gpu_of

    return planned_verdict(record("sft"), None, 8, gpu_of("h200"))  # no config: a TypeError


def of_one_size(case: Case) -> list[tuple[int, list[int]]]:
    """(bytes of tensors that are no parameters, of hidden states that each chunk sends on) of each stage."""
    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    config = update.config_of(case, folder)
    dims = parallel_dims(config.engine.parallel, case.world)
    stages = [meta.measure(config, dims, s * (case.world // case.pp), case.lengths) for s in range(case.pp)]
    return [(figures.buffers, [chunk.sent for chunk in figures.chunks]) for figures in stages]


def sampling_of_one_size(case: Case) -> list[list[int]]:
    """Bytes of hidden states that the chunks of each stage send on for prompts that together have more places."""
    from mrl.config.command import Phase, Phases
    from mrl.plan.gpus import gpu_of
    from mrl.plan.memory import plan_role

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    config = update.config_of(case, folder)
    dims = parallel_dims(config.engine.parallel, case.world)
    phase = Phase("sampling", "actor", "sample", 1, cache_tokens=0, prefill_tokens=2 * update.TOKENS)
    plan = plan_role("actor", "none", config, dims, Phases((phase,)), 9, gpu_of("h200"), {})
    return [[chunk.sent for chunk in stage.chunks] for stage in plan.sampling]


def copies_in_8_bits(case: Case, further: dict[str, object]) -> list[tuple[int, int]]:
    """(bytes of parameters, of copies of weights in FP8) of each stage, training and in forward passes alone."""
    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    config = update.config_of(case, folder)
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, megatron=further))
    dims, found = parallel_dims(config.engine.parallel, case.world), []
    for role in (config, dataclasses.replace(config, optimizer=None)):
        for stage in range(case.pp):
            figures = meta.measure(role, dims, stage * (case.world // case.pp), ())
            found.append((figures.parameters, figures.fp8_copies))
    return found


def calibrated(case: Case, seconds: dict[int, tuple], others: int = 0) -> tuple[list, list[str]]:
    """What is said of an update of two micro-batches whose stages take so long: stage -> (forward, backward, optimizer).

    others: ranks of the run that do not train."""
    from mrl.config.command import record
    from mrl.config.load import from_dict
    from mrl.engine.megatron.stage_times import StageTimes
    from mrl.launch.planning import read_parts
    from mrl.plan import calibrating, planner
    from mrl.plan.gpus import gpu_of

    folder = models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes)
    engine = {"parallel": {"pp": case.pp, "vpp": case.vpp}, "micro_batch": {"size": 1}}
    config = from_dict({
        "output_dir": "run", "model": {"path": str(folder)}, "engine": engine, "data": {"train": "none", "max_length": 64},
        "train": {"steps": 1, "global_batch_size": 2 * case.world // case.pp},
    })  # fmt: skip
    command = record("sft")
    made = planner.plan(command, config, *read_parts(command, config, case.world), gpu_of("h200"))
    made = dataclasses.replace(made, world_size=made.world_size + others)

    def run(config: Any, dims: Any, rank: int, *_: object) -> tuple:
        if not seconds:
            raise BrokenProcessPool("killed")
        return StageTimes(*seconds[dims.coordinates(rank).pp_rank]), "here"

    found = calibrating.calibrate(made, planner.EFFICIENCY, run, lambda how_far: None)
    return found, [line for one in found for line in calibrating.lines(made, one)]
