"""Supervised fine-tuning as a program of your own, on either engine: the loop of `mrl sft`, without what surrounds it.

    CONFIG="examples/arithmetic/config.yaml output_dir=runs/my-sft"
    python examples/arithmetic/make_data.py runs/arithmetic-data          # a tiny model, a tokenizer, chat rows
    python examples/engine_loop.py $CONFIG engine.parallel.tp=1
    torchrun --nproc-per-node 2 examples/engine_loop.py $CONFIG           # tensor parallel over two processes
    torchrun --nproc-per-node 2 examples/engine_loop.py $CONFIG engine='{backend: fsdp}'

It reads a config of `mrl sft` and computes the same numbers. Kill it and start it again: it resumes from its last
checkpoint. Every layout gives the same losses, within rounding.

`mrl sft` also has teachers, evaluation, guards, logs, MTP layers, mixtures and streams of data, and checkpoints in the
background or in a store. This loop always resumes, and always exports.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import torch

from mrl.batch import Batch
from mrl.config.checks import micro_batch_tokens
from mrl.config.load import load_config
from mrl.config.schema import RoleConfig, SFTConfig
from mrl.data.batches import BatchSource
from mrl.data.dataset import SFTDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.atomic_checkpoint import find_checkpoint
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.weights.hub import model_folder


def loss_fn(data: Batch, predictions: dict[str, torch.Tensor], ctx: dict) -> tuple[torch.Tensor, dict]:
    """Returns the sum of the negative log-likelihoods of a micro-batch's tokens, never a mean.

    The engine divides by the trained tokens of the global mini-batch, so the loss does not depend on micro-batches.
    """
    return -(predictions["log_probs"] * data.loss_mask).sum(), ctx


def make_engine(config: SFTConfig, folder: str) -> BaseEngine:
    """Returns an engine with a model, an optimizer and a schedule. Every rank calls it, and all that follows."""
    # null becomes 4096, or data.max_length if that is more
    tokens = micro_batch_tokens(config.engine.micro_batch, config.data.max_length)
    micro_batch = dataclasses.replace(config.engine.micro_batch, tokens=tokens)
    engine = build_engine(
        RoleConfig(
            model=dataclasses.replace(config.model, path=folder),
            engine=dataclasses.replace(config.engine, micro_batch=micro_batch),
            optimizer=config.optimizer,
            seed=config.seed,
            packing=config.data.packing,
            total_steps=config.train.steps,
        )
    )
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    return engine


def main(path: str, *overrides: str) -> list[dict[str, float]]:
    """Trains by the config at `path`, with `key=value` over it. Returns a row for each step of this start."""
    config = load_config(path, overrides, SFTConfig)
    assert config.train.steps is not None and config.teacher is None, "give train.steps, and no teacher"
    output_dir = pathlib.Path(config.output_dir)

    # Data. A chat row becomes tokens by the tokenizer's chat template; those of the assistant train. The source shuffles
    # each epoch by the seed, and makes the next global mini-batch in a thread, the same one on every rank.
    folder = model_folder(config.model.path)
    tokenizer = load_tokenizer(folder, chat_template=config.data.chat_template)
    source = BatchSource(
        SFTDataset(config.data, tokenizer),
        global_batch_size=config.train.global_batch_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )

    # Resume. A checkpoint has model, optimizer, schedule, random states, and what `state` holds.
    engine = make_engine(config, folder)
    steps_made, checkpoints = 0, str(output_dir / "checkpoints")
    if engine.on_main(lambda: find_checkpoint(checkpoints)):  # rank 0 looks, and all get its answer
        state = engine.load_checkpoint(checkpoints)
        steps_made = state["step"]
        source.load_state_dict(state["data"])

    rows = []
    for step in range(steps_made + 1, config.train.steps + 1):
        batch = source.next()

        engine.optimizer_zero_grad()
        with engine.train_mode():
            # the loss of the global mini-batch, equal on all ranks
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        grad_norm = engine.optimizer_step()
        lr = engine.lr_scheduler_step()  # the rate of the step just made

        rows.append({"loss": loss, "norm": float(grad_norm), "lr": lr})
        if engine.is_main:
            print(f"step {step}", *(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
        if step == config.train.steps or step % (config.checkpoint.every or config.train.steps) == 0:
            state = {"step": step, "data": source.state_dict()}
            engine.save_checkpoint(checkpoints, global_step=step, max_ckpt_to_keep=config.checkpoint.keep, state=state)

    engine.export_hf(str(output_dir / "hf"))  # for transformers
    source.close()
    return rows


if __name__ == "__main__":
    main(*sys.argv[1:])
