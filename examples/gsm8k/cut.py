"""Makes a student of two layers from a model, and short rows to distill it on.

    python examples/gsm8k/cut.py MODEL_FOLDER GSM8K_ROWS.jsonl runs/cut

`runs/cut/student` has the first and the last layer of the model; beside it are train.jsonl and eval.jsonl (short
problems with their worked answers, for `mrl sft`) and prompts.jsonl (short questions, for `mrl ppo`).
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAIN, EVAL, PROMPTS = slice(100, 244), slice(244, 260), slice(0, 368)  # of the rows, the shortest first


def main(source: str, rows: str, out: pathlib.Path) -> None:
    every = [json.loads(line) for line in pathlib.Path(rows).read_text(encoding="utf-8").splitlines()]
    if len(every) < PROMPTS.stop:
        sys.exit(f"{rows} has {len(every)} rows, and {PROMPTS.stop} are needed: give GSM8K's train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0], model.model.layers[-1]])
    model.config.num_hidden_layers = 2
    if kinds := getattr(model.config, "layer_types", None):
        model.config.layer_types = [kinds[0], kinds[-1]]
    for part in (model, tokenizer):
        part.save_pretrained(out / "student")

    def length(*texts: str) -> int:
        return len(tokenizer("".join(texts))["input_ids"])

    worked = [{"prompt": row["question"], "completion": row["answer"].split("####")[0].strip()} for row in every]
    worked.sort(key=lambda row: length(row["prompt"], row["completion"]))
    prompts = sorted(({"prompt": row["question"]} for row in every), key=lambda row: length(row["prompt"]))
    for name, part in (("train", worked[TRAIN]), ("eval", worked[EVAL]), ("prompts", prompts[PROMPTS])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
