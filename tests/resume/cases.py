"""What the ranks of a test world run beside the trainer itself."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mrl.config.load import from_dict
from mrl.engine.base import BaseEngine
from mrl.engine.megatron.optim import optimizers_of
from mrl.engine.registry import build_engine
from mrl.trainers.sft import SFTTask


def make_engine(config: Mapping[str, Any]) -> BaseEngine:
    checked = from_dict(config)
    engine = build_engine(SFTTask(checked).role(checked.model.path))
    engine.set_total_steps(checked.train.steps)
    engine.init_model()
    return engine


def resave(config: Mapping[str, Any], checkpoint: str) -> str:
    """Reads a checkpoint and saves it into the run's own folder, without a step."""
    engine = make_engine(config)
    state = engine.load_checkpoint(checkpoint)
    return engine.save_checkpoint(str(config["output_dir"]), global_step=state["progress"]["step"], state=state)


def step_counts(config: Mapping[str, Any], checkpoint: str) -> tuple[set[int], int, bool]:
    """After a load: AdamW's step counts over all parameters here, the schedule's step, whether gathers overlap."""
    engine = make_engine(config)
    engine.load_checkpoint(checkpoint)
    states = [state for part in optimizers_of(engine.model.optimizer) for state in part.optimizer.state.values()]
    overlap = any(chunk.ddp_config.overlap_param_gather for chunk in engine.model.wrapped)
    return {int(state["step"]) for state in states}, engine.schedule_step, overlap


def load_of_another_device(config: Mapping[str, Any], checkpoint: str) -> bool:
    """Loads a checkpoint whose device's generators are those of a GPU. Whether the host's generator was restored."""
    engine = make_engine(config)
    rng = sorted(p for p in pathlib.Path(checkpoint).rglob("*.pt") if "rng" in p.relative_to(checkpoint).as_posix())
    if dist.get_rank() == 0:
        for path in rng:
            saved = torch.load(path, weights_only=True)
            of_a_gpu = torch.zeros(16, dtype=torch.uint8)  # no state of a CPU's generator, which has 5056 bytes
            if "tracker" in saved:
                saved |= {"tracker": {name: of_a_gpu for name in saved["tracker"]}}
            torch.save(saved | {"device_type": "cuda", "device": of_a_gpu}, path)
            remark(pathlib.Path(checkpoint), path)
    dist.barrier()
    host = torch.load(rng[dist.get_rank()], weights_only=True)["host"]
    engine.load_checkpoint(checkpoint)
    with (engine.model.state if engine.backend == "megatron" else engine.generators).installed():
        return torch.equal(torch.get_rng_state(), host)


def remark(checkpoint: pathlib.Path, path: pathlib.Path) -> None:
    """Makes the marker agree with a file that was changed."""
    marker = json.loads((checkpoint / "COMPLETE").read_text())
    content = path.read_bytes()
    facts = {"size": len(content), "crc32": zlib.crc32(content)}
    marker["files"][path.relative_to(checkpoint).as_posix()] = facts
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))
