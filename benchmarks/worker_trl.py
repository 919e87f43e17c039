"""(b) TRL's SFTTrainer on chat rows, in the peer's own venv. `spec["arguments"]` are SFTConfig's, over those below."""

from __future__ import annotations

import os
import pathlib

import torch
from datasets import load_dataset
from measure import Meter, read_arguments
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class InOrder(SFTTrainer):
    """Takes the rows in the file's order, so that both trainers see the same batches."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args, state, control, **kwargs):
        self.meter.mark()

    def on_step_end(self, args, state, control, **kwargs):
        self.meter.step()


def main() -> None:
    spec, out = read_arguments()
    folder = pathlib.Path(spec["folder"])
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    meter = Meter()
    config = SFTConfig(
        output_dir=str(folder / "trl"), use_cpu=True, max_steps=spec["steps"], learning_rate=spec["lr"],
        per_device_train_batch_size=spec["batch_size"] // world_size, report_to=[], save_strategy="no", logging_steps=1,
        lr_scheduler_type="constant", adam_beta2=0.95, dataloader_pin_memory=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"}, **spec["arguments"],
    )  # fmt: skip
    dataset = load_dataset(
        "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    trainer = InOrder(model=str(folder / "model"), args=config, train_dataset=dataset, callbacks=[Clock(meter)])
    trainer.train()
    meter.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    meter.write(out)


if __name__ == "__main__":
    main()
