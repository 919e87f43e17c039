"""(b) TRL's SFTTrainer on chat rows, in the peer's own venv. `spec["arguments"]` are SFTConfig's, over those below."""

from __future__ import annotations

import os
import pathlib

from datasets import load_dataset
from measure import Meter, leave_world, read_arguments
from trl import SFTConfig, SFTTrainer
from trl_parts import Clock, InOrder, arguments_of


class Trainer(InOrder, SFTTrainer): ...


def main() -> None:
    spec, out = read_arguments()
    folder = pathlib.Path(spec["folder"])
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        leave_world()
    meter = Meter()
    batch_size = spec["batch_size"] // world_size
    config = SFTConfig(**arguments_of(spec, batch_size=batch_size, model_init_kwargs={"dtype": "float32"}))
    dataset = load_dataset(
        "json", data_files=str(folder / "chats.jsonl"), split="train", cache_dir=str(folder / "cache")
    )
    trainer = Trainer(model=str(folder / "model"), args=config, train_dataset=dataset, callbacks=[Clock(meter)])
    trainer.train()
    meter.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    meter.write(out)


if __name__ == "__main__":
    main()
