"""What ranks do with checkpoints of `mrl convert`: cases of tests/engine/harness.py."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mrl.batch import make_batch
from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.errors import UserError


def engine_of(
    path: str, *, backend: str = "megatron", dtype: str = "float32", trained: bool = False, parallel: dict | None = None
) -> BaseEngine:
    config = RoleConfig(
        model=ModelConfig(path=path, dtype=dtype),
        engine=EngineConfig(backend=backend, device="cpu", parallel=ParallelConfig(**(parallel or {}))),
        optimizer=OptimizerConfig() if trained else None,
    )
    engine = build_engine(config)
    engine.init_model()
    return engine


def starts_from_import(
    hf: str, imported: str, layouts: list[dict], tokens: list[int], logits: torch.Tensor
) -> dict[str, float]:
    """An engine that starts from the imported folder has the HF weights, bit for bit, and so has one that loads it as its
    checkpoint. Returns, by layout, how far its logits of `tokens` are from `logits` at most."""
    far = {}
    for layout in layouts:
        engine = engine_of(imported, **layout)
        wrong = _differences(engine, hf, f"started {layout}")
        far[str(layout["parallel"])] = _distance(engine, tokens, logits)
        with torch.no_grad():
            for model in engine.model.chunks:
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.zero_()
        engine.load_checkpoint(imported)
        assert wrong + _differences(engine, hf, f"loaded {layout}") == []
    return far


def what_starts_say(folders: list[str], backend: str) -> list[str | None]:
    """For each folder the mistake that every rank named, or None where an engine started."""
    said = []
    for folder in folders:
        try:
            engine_of(folder, backend=backend)
            mine = None
        except UserError as error:
            mine = str(error)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        assert len(set(everyone)) == 1, everyone
        said.append(mine)
    return said


def _distance(engine: BaseEngine, tokens: list[int], expected: torch.Tensor) -> float:
    """The largest difference of the engine's logits of a sequence, before log-probs are made of them, over all ranks."""
    from megatron.core import parallel_state

    from mrl.engine.megatron import inputs, pipeline

    log_probs, seen = pipeline._log_probs, []

    def watched(hidden, weight, *, setup, ins, ctx):
        own = torch.nn.functional.linear(hidden, weight).float()
        parts = [torch.empty_like(own) for _ in range(setup.dims.tp)]
        dist.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
        whole = inputs.restore(torch.cat(parts, dim=-1), ins, parallel_state.get_context_parallel_group())
        seen.append(whole[:, : setup.vocab_size])
        return log_probs(hidden, weight, setup=setup, ins=ins, ctx=ctx)

    pipeline._log_probs = watched
    try:
        with engine.eval_mode():
            engine.forward_backward_step(make_batch([tokens], [[1.0] * len(tokens)]), forward_only=True)
    finally:
        pipeline._log_probs = log_probs
    far = torch.zeros(1)
    assert bool(seen) == (engine.model.coords.pp_rank == engine.model.dims.pp - 1)
    if seen:  # micro-batches that only fill the schedule are empty
        found = torch.cat([logits for logits in seen if len(logits)])
        assert len(found) == len(tokens) - 1, (len(found), len(tokens))
        far[0] = (found - expected[: len(found)]).abs().nan_to_num(nan=float("inf")).max()
    dist.all_reduce(far, op=dist.ReduceOp.MAX)
    return float(far)


def _differences(engine: BaseEngine, hf: str, what: str) -> list[str]:
    streamed = dict(engine.hf_weights())
    if dist.get_rank():
        return []
    expected = load_folder(hf)
    if streamed.keys() != expected.keys():
        return [f"{what}: names {sorted(streamed.keys() ^ expected.keys())}"]
    return [f"{what}: {name}" for name in expected if not torch.equal(streamed[name], expected[name])]


def load_folder(folder: str) -> dict[str, torch.Tensor]:
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    return {k: v for name in files for k, v in load_file(os.path.join(folder, name)).items()}


def save_checkpoints(hf: str, out: str, layouts: dict[str, dict]) -> list[str]:
    """A checkpoint of every layout in `out/NAME`, of random weights that no file holds, which are in `out/NAME/weights.pt`."""
    for name, layout in layouts.items():
        engine = engine_of(hf, trained=True, **layout)
        root = os.path.join(out, name)
        engine.save_checkpoint(root, global_step=3)
        weights = dict(engine.hf_weights())
        if not dist.get_rank():
            torch.save(weights, os.path.join(root, "weights.pt"))
    return sorted(layouts)


def stored_keys(hf: str, out: str) -> tuple[list[str], list[str]]:
    """(keys of tensors, keys of objects) of what the Megatron engine saves without an optimizer."""
    from mrl.engine.torch_dist.reader import TorchDistReader

    engine = engine_of(hf)
    folder = engine.save_checkpoint(out, global_step=1) or os.path.join(out, "step_00000001")
    reader = TorchDistReader(os.path.join(folder, "mcore"))
    objects = [key for key in reader.objects if not re.match("common_state", key)]
    return sorted(reader.tensors), sorted(objects)


def start_and_export(config: RoleConfig, out: str) -> None:
    engine = build_engine(config)
    engine.init_model()
    engine.export_hf(out)
