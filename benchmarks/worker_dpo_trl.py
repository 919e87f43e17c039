"""TRL's trainers on preferences, of reward models and with a teacher, in the peer's own venv. `spec["trainer"]` names one,
`spec["arguments"]` are its config's, over those below. Losses are taken where they are computed: what TRL logs is rounded."""

from __future__ import annotations

import json
import pathlib

import torch
from datasets import Dataset
from measure import Meter, leave_world, read_arguments
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl_parts import Clock, InOrder, arguments_of


def of_name(name: str):
    """The trainer and its config. TRL keeps ORPO, CPO, which has simpo's loss, and GKD among its experiments."""
    if name == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig
    if name == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig
    if name == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    if name == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer, RewardConfig
    if name == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        return GKDTrainer, GKDConfig
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig


def in_order(trainer, meter: Meter):
    """The trainer with the rows in the file's order, which keeps each step's loss."""

    class Noted(InOrder, trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            meter.losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

    return Noted


def tokenized(row, tokenizer):
    """A row of GKD as TRL's collator takes it once its tokens are known: the answer is trained, with the end token."""
    prompt, answer = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
    ids = [*prompt, *answer, tokenizer.eos_token_id]
    return {
        "prompt": row["prompt"],
        "input_ids": ids,
        "completion_mask": [int(i >= len(prompt)) for i in range(len(ids))],
    }


def main() -> None:
    spec, out = read_arguments()
    folder = pathlib.Path(spec["folder"])
    leave_world()
    meter = Meter()
    trainer, config = of_name(spec["trainer"])
    own = {"remove_unused_columns": False, "bf16": False, "gradient_checkpointing": False}
    arguments = config(**arguments_of(spec, batch_size=spec["batch_size"], **own))
    rows = [json.loads(line) for line in (folder / spec["rows"]).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / spec["model"])
    kind = AutoModelForSequenceClassification if spec["trainer"] == "reward" else AutoModelForCausalLM
    model = kind.from_pretrained(folder / spec["model"], dtype=torch.float32)
    more = {}
    if spec["other"]:  # by a path, another policy; else the start
        role = "teacher_model" if spec["trainer"] == "gkd" else "ref_model"
        more[role] = AutoModelForCausalLM.from_pretrained(folder / spec["other"], dtype=torch.float32)
    if spec["trainer"] == "gkd":
        rows = [tokenized(row, tokenizer) for row in rows]
    made = in_order(trainer, meter)(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Clock(meter)], **more,
    )  # fmt: skip
    made.train()
    meter.write(out)


if __name__ == "__main__":
    main()
