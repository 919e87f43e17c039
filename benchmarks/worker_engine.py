"""An engine of mrl with any keys of its config, on the packed rows: the loop of examples/engine_loop.py.

Memory is that of the work: the most that this process, or the GPU, held above what it held before the model was there. State
is what is on the device between two steps of parameters, gradients and optimizer state; on a CPU, what is offloaded is in the
same memory as what is not, and only this column shows it.
"""

from __future__ import annotations

import pathlib

import torch
from fsdp import config_of
from measure import Meter, memory_mb, read_arguments
from torch import Tensor
from worker_mrl import PACKED, batches

from mrl.algorithms.sft import sft_loss
from mrl.config.load import from_dict
from mrl.engine.fsdp import forward
from mrl.engine.offload import KINDS
from mrl.engine.registry import build_engine
from mrl.trainers.sft import SFTTask


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor, *, rows=None, temperature=1.0, entropy="none", **_):
    """Log-probs and entropies the plain way, from all logits at once in fp32; every label trains here."""
    assert rows is None and temperature == 1.0
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    log_probs = log_p.gather(1, labels[:, None])[:, 0]
    return log_probs, None if entropy == "none" else -(log_p.exp() * log_p).sum(1)


def with_entropy(data, predictions, ctx):
    """The loss of supervised fine-tuning less a little of the entropy."""
    loss, ctx = sft_loss(data, predictions, ctx)
    return loss - 0.01 * (predictions["entropy"] * data.loss_mask).sum(), ctx


def state_mb(engine) -> float:
    """Of this rank, on the device now."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for kind in KINDS for t in engine.offload._tensors[kind]()}  # fmt: skip
    return sum(storages.values()) / 2**20


def resident_mb() -> float:
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        return memory_mb()
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS")) / 1024


def main() -> None:
    spec, out = read_arguments()
    config = from_dict(config_of(spec["keys"], str(pathlib.Path(spec["folder"]) / "model")))
    if spec["more"]["full_logits"]:
        forward.log_probs_from_hidden = whole_logits
    entropy = spec["more"]["entropy"]
    meter, before = Meter(), resident_mb()
    engine = build_engine(SFTTask(config).role(config.model.path))
    engine.init_model()
    engine.set_loss_fn(with_entropy if entropy else sft_loss)
    meter.mark()
    for batch in batches(spec | {"data": PACKED}):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(
                engine.shard_data(batch), {"temperature": 1.0, "entropy": entropy or "none"}
            )
        engine.optimizer_step()
        engine.lr_scheduler_step()
        meter.step(loss)
    on_gpu = engine.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else memory_mb() - before
    meter.more = {"work_mb": peak, "state_mb": state_mb(engine)}
    meter.write(out)


if __name__ == "__main__":
    main()
