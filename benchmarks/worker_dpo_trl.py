"""TRL's trainers on preferences, in the peer's own venv. `spec["trainer"]` names one, `spec["arguments"]` are its config's, over
those below. Losses are taken where they are computed: what TRL logs is rounded."""

from __future__ import annotations

import json
import pathlib

import torch
from datasets import Dataset
from measure import Meter, leave_world, read_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_parts import Clock, InOrder, arguments_of


def of_name(name: str):
    """The trainer and its config. TRL keeps ORPO and CPO, which has simpo's loss, among its experiments."""
    if name == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig
    if name == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig


def in_order(trainer, meter: Meter):
    """The trainer with the rows in the file's order, which keeps each step's loss, and of ORPO's the likelihood in it, which TRL
    takes of the prompt, too."""

    class Noted(InOrder, trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            meter.losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

        def store_metrics(self, metrics, **kwargs):
            if "ORPO" in trainer.__name__:
                meter.more[f"nll {len(meter.losses)}"] = float(metrics["nll_loss"])
            return super().store_metrics(metrics, **kwargs)

    return Noted


def main() -> None:
    spec, out = read_arguments()
    folder = pathlib.Path(spec["folder"])
    leave_world()
    meter = Meter()
    trainer, config = of_name(spec["trainer"])
    own = {"remove_unused_columns": False, "bf16": False, "gradient_checkpointing": False}
    arguments = config(**arguments_of(spec, batch_size=spec["batch_size"], **own))
    rows = [json.loads(line) for line in (folder / spec["rows"]).read_text(encoding="utf-8").splitlines()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), AutoTokenizer.from_pretrained(folder / "model")  # fmt: skip
    more = {}
    if spec["reference"]:  # by a path, another policy; else the start
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(folder / spec["reference"], dtype=torch.float32)
    made = in_order(trainer, meter)(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Clock(meter)], **more,
    )  # fmt: skip
    made.train()
    meter.write(out)


if __name__ == "__main__":
    main()
