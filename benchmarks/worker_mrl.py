"""mrl: its engine through the engine contract on given batches, or a whole command: `mrl sft`, or the one that the spec names
with its keys."""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

from measure import Meter, leave_world, read_arguments

PACKED, CHATS, COMMAND = "packed", "chats", "command"


def batches(spec: dict):
    """Global mini-batches of the workload."""
    from mrl.batch import make_batch

    folder = pathlib.Path(spec["folder"])
    if spec["data"] == PACKED:
        for rows in json.loads((folder / "packed.json").read_text())[: spec["steps"]]:
            documents = [document for row in rows for document in row]
            yield make_batch(documents, [[1.0] * len(ids) for ids in documents])
        return
    from mrl.config.schema import DataConfig
    from mrl.data.batches import BatchSource
    from mrl.data.dataset import SFTDataset
    from mrl.data.tokenizer import load_tokenizer

    data = DataConfig(train=str(folder / "chats.jsonl"), loss_on="all", max_length=512)
    dataset = SFTDataset(data, load_tokenizer(str(folder / "model")))
    source = BatchSource(dataset, global_batch_size=spec["batch_size"], seed=0, shuffle=False)
    for _ in range(spec["steps"]):
        yield source.next()
    source.close()


def engine_run(spec: dict, out: str) -> None:
    """The loop of examples/engine_loop.py."""
    from mrl.algorithms.sft import sft_loss
    from mrl.config.schema import (
        EngineConfig,
        MicroBatchConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        RoleConfig,
    )
    from mrl.engine.registry import build_engine

    config = RoleConfig(
        model=ModelConfig(path=str(pathlib.Path(spec["folder"]) / "model"), dtype="float32"),
        engine=EngineConfig(
            backend=spec.get("backend", "megatron"), device="cpu", parallel=ParallelConfig(tp=spec.get("tp", 1)),
            micro_batch=MicroBatchConfig(tokens=spec["micro_tokens"]),
        ),
        optimizer=OptimizerConfig(lr=spec["lr"], schedule="constant", betas=(0.9, 0.95), clip_grad=1.0),
        total_steps=spec["steps"],
    )  # fmt: skip
    engine = build_engine(config)
    meter = Meter()
    engine.init_model()
    engine.set_loss_fn(sft_loss)
    meter.mark()
    for batch in batches(spec):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
        engine.optimizer_step()
        engine.lr_scheduler_step()
        meter.step(loss)
    meter.write(out)


def command_run(spec: dict, out: str) -> None:
    """A command as a user starts it, in this process; a step ends where its line of metrics is written."""
    from mrl import metrics
    from mrl.cli import main

    leave_world()
    meter = Meter()
    write = metrics.MetricsLog.write

    def measured(self, step, row):
        write(self, step, row)
        meter.step(row["train/loss"])

    metrics.MetricsLog.write = measured
    folder = pathlib.Path(spec["folder"])
    shutil.rmtree(folder / "run", ignore_errors=True)  # of the round before
    config = {
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "engine": {"device": "cpu", "micro_batch": {"tokens": spec["micro_tokens"]}},
        "optimizer": {"lr": spec["lr"], "schedule": "constant"},
        "data": {"train": str(folder / "chats.jsonl"), "loss_on": "all", "max_length": 512, "shuffle": False},
        "train": {"steps": spec["steps"], "global_batch_size": spec["batch_size"]},
        "checkpoint": {"resume": "never", "export_hf": False},
        "log": {"console": "plain"},
    } | spec.get("keys", {})
    path = folder / "run.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    sys.argv = ["mrl", spec.get("command", "sft"), str(path), "--nproc", "1"]
    if code := main(standalone_mode=False):
        raise SystemExit(code)
    meter.write(out)


if __name__ == "__main__":
    spec, out = read_arguments()
    (command_run if spec["data"] == COMMAND else engine_run)(spec, out)
