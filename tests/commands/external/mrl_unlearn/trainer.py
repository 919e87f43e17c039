"""The trainer of `mrl unlearn`. It evaluates nothing, writes no metrics, and saves at its end."""

from __future__ import annotations

import dataclasses
import pathlib

from mrl.config.checks import micro_batch_tokens
from mrl.config.load import to_dict
from mrl.config.resume import check_resume
from mrl.config.schema import RoleConfig
from mrl.data.batches import BatchSource
from mrl.data.dataset import SFTDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.trainers.run_directory import RunDirectory, choose_start
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.hub import check_same_model, model_fingerprint, model_folder
from mrl_unlearn.loss import UnlearnLoss
from mrl_unlearn.record import UnlearnConfig


def run(config: UnlearnConfig, command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` are made."""
    folder = model_folder(config.model.path)
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
    rows = SFTDataset(config.data, tokenizer, vocab_size=vocab_size_of(read_hf_config(folder)))
    source = BatchSource(rows, global_batch_size=config.train.global_batch_size, seed=config.seed, prefetch=False)
    engine = build_engine(role_config(config, folder))
    directory = RunDirectory(pathlib.Path(config.output_dir))
    start = engine.on_main(lambda: choose_start(directory, config))
    engine.init_model()
    engine.set_loss_fn(UnlearnLoss(config.forget.floor))
    step = 0
    if start.checkpoint is not None:
        step = restore(config, engine, source, start.checkpoint)
    engine.on_main(lambda: directory.prepare(config, command_line))
    while step < config.train.steps:
        batch = source.next()
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        engine.optimizer_step()
        engine.lr_scheduler_step()
        step += 1
        if engine.is_main and step % config.forget.say_every == 0:
            print(f"step {step}: {loss:.6f} above the floor", flush=True)
    state = {
        "step": step,
        "data": source.state_dict(),
        "model": model_fingerprint(engine.config.model.path),
        "config": to_dict(config),
    }
    engine.save_checkpoint(str(directory.checkpoints), global_step=step, state=state)


def role_config(config: UnlearnConfig, folder: str) -> RoleConfig:
    tokens = micro_batch_tokens(config.engine.micro_batch, config.data.max_length)
    return RoleConfig(
        model=dataclasses.replace(config.model, path=folder),
        engine=dataclasses.replace(
            config.engine, micro_batch=dataclasses.replace(config.engine.micro_batch, tokens=tokens)
        ),
        optimizer=config.optimizer,
        seed=config.seed,
        packing=config.data.packing,
        total_steps=config.train.steps,
    )


def restore(config: UnlearnConfig, engine: BaseEngine, source: BatchSource, checkpoint: str) -> int:
    """Goes on from the checkpoint. Returns the steps that were made."""
    state = engine.load_checkpoint(checkpoint)
    for note in check_resume(state["config"], to_dict(config)):
        if engine.is_main:
            print(f"changed since the checkpoint: {note}", flush=True)
    before, now = state["config"]["model"]["path"], config.model.path
    check_same_model(state["model"], model_fingerprint(engine.config.model.path), before=before, now=now)
    source.load_state_dict(state["data"])
    return state["step"]
