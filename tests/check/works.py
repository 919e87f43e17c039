"""Tiny models: with their reference and the work of a layout on them, and in configs as users have them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.check import reference
from mrl.check.compare import BOUNDS
from mrl.check.measure import LayoutWork, StepNumbers
from mrl.check.reference import undecided_tokens
from mrl.config.schema import OptimizerConfig
from tests.engine import tiny
from tests.trainers import tiny_runs

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, schedule="constant")


@dataclasses.dataclass(frozen=True)
class Checked:
    """A model whose reference is made."""

    folder: str
    batch: Batch
    store: str

    dtype: str
    undecided: Tensor | None  # of routers

    def work(self, *, backend: str = "megatron", **parallel: Any) -> LayoutWork:
        config = tiny.role(
            self.folder, backend=backend, size=2, optimizer=OPTIMIZER, parallel=parallel, dtype=self.dtype
        )
        return LayoutWork(
            config=config, batch=self.batch, loss_fn=sft_loss, denominator="tokens", ctx={"temperature": 1.0}, adapter=None,
            reference=self.store, bounds=BOUNDS[self.dtype], undecided=self.undecided,
        )  # fmt: skip


def make(
    place: Path, family: str = "llama", *, dtype: str = "float32", seed: int = 0,
    change: Callable[[torch.nn.Module], None] = lambda model: None, **fields: Any,
) -> Checked:  # fmt: skip
    """change: of transformers' model, before it is saved."""
    folder = tiny.make_model(str(place / "model"), family, seed=seed, **{"layers": 4, **fields})
    batch = tiny.uneven_batch(seed, sequences=8)
    model = reference.load(folder)
    with torch.no_grad():
        change(model)
        model.save_pretrained(folder)
        if dtype == "bfloat16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
    examples = tiny.examples_of(batch)
    narrow = undecided_tokens(model, examples, head="lm", rounding=BOUNDS[dtype].router)
    start = reference.weights_of(model)
    made = reference.run(model, examples, reference.Loss(), optimizer=OPTIMIZER, rates=[OPTIMIZER.lr])
    store = place / "reference"
    store.mkdir()
    StepNumbers(made.loss, made.grad_norm, made.log_probs, start, made.gradients, made.weights).save(store)
    return Checked(folder, batch, str(store), dtype, narrow)


def make_configs(folder: Path) -> None:
    """Writes sft.yaml, lora.yaml, grpo.yaml, ppo.yaml, dpo.yaml, kto.yaml and rm.yaml, and what they name."""
    tiny_runs.make_inputs(folder)
    config = Qwen3Config.from_pretrained(folder / "model")
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    sft = tiny_runs.make_config(folder, folder / "run", engine={"backend": "megatron"})
    tiny_runs.write_config(folder / "sft.yaml", sft)
    lora = sft | {"model": sft["model"] | {"lora": {"rank": 4, "dropout": 0.1}}}
    tiny_runs.write_config(folder / "lora.yaml", lora)
    role = {"model": sft["model"], "engine": {"device": "cpu"}}
    grpo = {
        "output_dir": str(folder / "run"), "actor": role, "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6},
        "algorithm": {"name": "grpo"}, "rewards": {"functions": [{"name": "exact_match"}]},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_length": 24}, "train": {"global_batch_size": 8, "steps": 1},
    }  # fmt: skip
    tiny_runs.write_config(folder / "grpo.yaml", grpo)
    ppo = grpo | {
        "algorithm": {"name": "ppo", "kl_in": "none"},
        "critic": {"engine": {"backend": "fsdp", "device": "cpu"}},
    }
    tiny_runs.write_config(folder / "ppo.yaml", ppo)
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(7 * i) * (1 + i % 2)} for i in range(3, 13)]
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(row | {"weight": 1 + i % 2}) + "\n" for i, row in enumerate(pairs))
    )
    of_pairs = sft | {"data": sft["data"] | {"train": str(folder / "pairs.jsonl")}}
    dpo = of_pairs | {"loss": {"name": "dpo", "sft_weight": 0.5}}
    tiny_runs.write_config(folder / "dpo.yaml", dpo)
    tiny_runs.write_config(folder / "kto.yaml", dpo | {"loss": {"name": "kto"}, "model": lora["model"]})
    tiny_runs.write_config(folder / "rm.yaml", of_pairs | {"loss": {"name": "bradley_terry", "centering": 0.05}})
