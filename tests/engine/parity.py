"""The parity table: the engines against Hugging Face on one process, layout by layout. `python -m tests.engine.parity` prints it.

A row is a model, a layout, and a way to cut one global mini-batch of uneven masked sequences into micro-batches. In fp32 it
compares the loss, the gradient of *every* tensor of the model's files, the gradient norm before clipping, the log-prob of
every label, and what three steps of AdamW (weight decay and clipping on) made of every weight. The reference runs one
sequence at a time on one process and divides once (tests/engine/tiny.py).

The bounds, and why they are what they are:
- loss 1e-6 relative, each gradient 1e-5 relative L2, gradient norm 1e-6: sums in another order.
- log-probs 1e-5 absolute: they are differences of logits of size 10, whose fp32 rounding is 1e-6 a term.
- the *update* of each weight, `w_3 - w_0`, 1e-3 relative L2. AdamW divides a gradient by its own size, so an element whose
  gradient `g` is known to `dg` moves by `lr * g / (|g| + eps)`, known to `lr * dg / (|g| + eps)`. With gradients right to
  1e-5 of their norm, elements far below that norm are not known to better than `dg / |g|`; eps = 1e-6 caps it. A
  wrong decay, clip factor, bias correction or learning rate changes updates by 1e-2 and more. Elements whose gradient is
  rounding alone are left out: a bias of keys that no rotation turns (phi) shifts all scores of a query alike, so that its
  gradient is 0 but for what fp32 makes of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.config.schema import FSDPConfig, LoraConfig
from mrl.engine.registry import build_engine
from tests.engine import tiny
from tests.engine.harness import Case, close_worlds, run_world
from tests.engine.layouts import available

LOSS, GRADIENT, NORM, LOG_PROB, UPDATE = 1e-6, 1e-5, 1e-6, 1e-5, 1e-3
MEASURE = "tests.engine.parity:measure"

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}

WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}

# name -> family of tiny.FAMILIES or tiny.OTHERS, and what differs from four layers of it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*tiny.FAMILIES, *tiny.OTHERS)},
    "llama tied": ("llama", {"tied": True}),
    "llama 5 layers": ("llama", {"layers": 5}),
    "llama 7 layers tied": ("llama", {"layers": 7, "tied": True}),
    "llama value head": ("llama", {"head": "value"}),
    "llama tied value head": ("llama", {"head": "value", "tied": True}),
    "llama3 rope": ("llama3", {}),
    "llama dynamic rope": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 10}),
    "qwen2 window": ("qwen2", WINDOW),
    "qwen3 tied": ("qwen3", {"tied": True}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3_moe step 2": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "qwen3_moe window": ("qwen3_moe", WINDOW),  # which transformers does not read
    "olmoe normalised": ("olmoe", {"norm_topk_prob": True}),
    "qwen2_moe window": ("qwen2_moe", WINDOW | {"norm_topk_prob": True, "qkv_bias": False}),
    "glm4_moe groups": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "use_qk_norm": False,
            "attention_bias": False,
        },
    ),
    "deepseek_v3 yarn": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "qwen3_5 long memory": ("qwen3_5", {"long_memory": True}),
    "qwen3_5_moe long memory": ("qwen3_5_moe", {"long_memory": True}),
    "qwen3 one kv head": ("qwen3", {"num_key_value_heads": 1}),
    "qwen3 three kv heads": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "gemma2 tied": ("gemma2", {"tied": True}),
    "gpt2 tied": ("gpt2", {"tied": True}),
    "gpt2 23 positions tied": ("gpt2", {"tied": True, "max_position_embeddings": 23}),
    "phi3 long rope": ("phi3", {}),
    "ernie4_5_moe tied": ("ernie4_5_moe", {"tied": True}),
    "bloom tied": ("bloom", {"tied": True}),
    "gemma2 value head": ("gemma2", {"head": "value"}),
    "gpt2 tied value head": ("gpt2", {"head": "value", "tied": True}),
    "mixtral window": ("mixtral", {"sliding_window": 5}),
}


# name -> what differs from LoraConfig's defaults
LORAS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4, "alpha": 6.0},
    "rslora": {"rank": 4, "alpha": 4.0, "rslora": True},
    "q v": {"rank": 4, "alpha": 6.0, "target_modules": ("q_proj", "v_proj")},
    "k up": {"rank": 3, "alpha": 5.0, "target_modules": ("k_proj", "up_proj")},
    "last layer": {"rank": 4, "alpha": 6.0, "target_modules": r".*layers\.3\..*proj"},
    "experts": {"rank": 4, "alpha": 6.0, "target_modules": ("experts.gate_up_proj",)},
    "stacks": {"rank": 4, "alpha": 6.0, "target_modules": ("experts.gate_up_proj", "experts.down_proj", "o_proj")},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """model: a key of MODELS. layout: as `tp2+sp x pp2 x dp2`, with `x` and no blanks. size, tokens: of a micro-batch;
    one of them. sequences: of the global mini-batch. lengths: of its sequences, in place of their number. one_token: a
    single token of it trains. recompute, recompute_every, fsdp: as in the config. why: what the row is there for. lora: a key
    of LORAS; the adapters start at random, so that A has a gradient too."""

    model: str
    layout: str = "dp1"
    packing: bool = True
    size: int | None = None
    tokens: int | None = None
    sequences: int = 8
    lengths: tuple[int, ...] = ()
    one_token: bool = False
    recompute: str = "none"
    recompute_every: int = 1
    why: str = ""
    backend: str = "megatron"
    lora: str | None = None
    fsdp: FSDPConfig = FSDPConfig()

    @property
    def degrees(self) -> dict[str, Any]:
        """The fields of ParallelConfig, and `dp`."""
        degrees: dict[str, Any] = {"sp": "+sp" in self.layout}
        for part in self.layout.replace("+sp", "").split("x"):
            name, degree = re.fullmatch(r"([a-z]+)(\d+)", part).groups()
            degrees[name] = int(degree)
        return degrees

    @property
    def parallel(self) -> dict[str, Any]:
        return {k: v for k, v in self.degrees.items() if k != "dp"}

    @property
    def world_size(self) -> int:
        d = self.degrees
        return d.get("tp", 1) * d.get("cp", 1) * d.get("pp", 1) * d.get("dp", 1)

    @property
    def head(self) -> str:
        return MODELS[self.model][1].get("head", "lm")

    def __str__(self) -> str:
        cut = f"size {self.size}" if self.size else f"tokens {self.tokens}"
        text = f"{self.model}, {self.layout}, {'packed' if self.packing else 'padded'}, {cut}"
        text += f", {self.sequences} sequences" if self.sequences != 8 else ""
        if self.lengths:
            text += f", {len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)} tokens"
        text += ", one trained token" if self.one_token else ""
        text += f", recompute {self.recompute}" if self.recompute != "none" else ""
        text += f" every {self.recompute_every}" if self.recompute_every > 1 else ""
        text += "".join(f", {k} {v}" for k, v in dataclasses.asdict(self.fsdp).items() if v != getattr(FSDPConfig(), k))
        text += f", lora {self.lora}" if self.lora else ""
        return text + (f", {self.backend}" if self.backend != "megatron" else "")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Errors of a row against its reference; `worst_*` name the tensors."""

    micro_batches: int
    loss: float
    gradient: float
    norm: float
    log_prob: float
    update: float
    worst_gradient: str
    worst_update: str
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        checks = [
            ("loss", self.loss, LOSS), (f"gradient of {self.worst_gradient}", self.gradient, GRADIENT),
            ("gradient norm", self.norm, NORM), ("log-probs", self.log_prob, LOG_PROB),
            (f"update of {self.worst_update}", self.update, UPDATE),
        ]  # fmt: skip
        return [
            f"{what}: {error:.2e}, at most {bound:g} is right" for what, error, bound in checks if not error <= bound
        ]


# -- in the test's process ---------------------------------------------------------------------------------------------


class Table:
    """Runs rows; models and references are made once each, in a folder of its own. device: of the worlds."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._folder = tempfile.TemporaryDirectory(prefix="parity")

    def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Outcome | str]]:
        """(row, its outcome or what went wrong), world size by world size."""
        for row in sorted(rows, key=lambda row: row.world_size):
            start = time.monotonic()
            available(row.backend)
            arguments = {"row": row, "folder": self.model(row.model), "reference": self.reference(row)}
            timeout_s = 900 if row.fsdp.compile else 180
            arguments |= {"adapter": self.adapter(row), "device": self._device}
            result = run_world(row.world_size, [Case(MEASURE, arguments, timeout_s)], self._device)[0]
            if result.error is not None:
                yield row, result.error
            else:
                yield row, dataclasses.replace(result.value, seconds=time.monotonic() - start)

    def check(self, row: Row) -> None:
        """Asserts that a row is within the bounds."""
        ((_, outcome),) = self.run([row])
        assert isinstance(outcome, Outcome), outcome
        assert not outcome.problems, f"{row}: " + "; ".join(outcome.problems)

    @functools.cache  # noqa: B019 - one table a session
    def model(self, name: str) -> str:
        family, fields = MODELS[name]
        return tiny.make_model(str(Path(self._folder.name, name.replace(" ", "_"))), family, **{"layers": 4, **fields})

    def adapter(self, row: Row) -> str | None:
        """A folder with the adapters that a row starts from."""
        if row.lora is None:
            return None
        path = Path(self._folder.name, f"{row.model}-{row.lora}".replace(" ", "_"))
        if not path.exists():
            tiny.make_adapter(str(path), self.model(row.model), lora_of(row), head=row.head)
        return str(path)

    def reference(self, row: Row) -> str:
        """A file with the batch, the weights at the start and the tiny.Reference of a row."""
        lengths = "-".join(map(str, row.lengths or (row.sequences,)))
        name = f"{row.model}-{lengths}-{row.one_token}-{row.lora}.pt"
        path = Path(self._folder.name, name.replace(" ", "_"))
        if not path.exists():
            batch, adapter = batch_of(row), self.adapter(row)
            file = "model.safetensors" if adapter is None else "adapter_model.safetensors"
            start = load_file(Path(adapter or self.model(row.model), file))
            reference = tiny.hf_reference(self.model(row.model), batch, head=row.head, adapter=adapter)
            torch.save({"batch": batch, "start": start, "reference": reference}, path)
        return str(path)


# -- in a world of processes -------------------------------------------------------------------------------------------


def measure(row: Row, folder: str, reference: str, adapter: str | None, device: str = "cpu") -> Outcome | None:
    """Three optimizer steps of an engine on the row's batch, against the reference; the outcome on rank 0."""
    known = torch.load(reference, weights_only=False)
    batch, expected = known["batch"], known["reference"]
    engine = build_engine(config_of(row, folder, device))
    engine.init_model()
    if adapter is not None:
        engine.load_adapter(adapter)
    engine.set_loss_fn(sft_loss if row.head == "lm" else tiny.value_loss)
    losses, norms, gradients, log_probs, counts = [], [], {}, None, []
    share = engine.shard_data(batch)
    for step in range(tiny.STEPS):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            predictions, loss, _ = engine.forward_backward_step(share, preprocess_fn=counting(counts))
        if step == 0:
            name = "log_probs" if row.head == "lm" else "values"
            log_probs = engine.unshard_data({name: predictions[name]}, batch)[name]
            gradients = {name: tensor.cpu() for name, tensor in engine.hf_gradients()}
        losses.append(loss), norms.append(float(engine.optimizer_step())), engine.lr_scheduler_step()
    trained = engine.hf_weights() if adapter is None else engine.adapter_weights()
    weights = {name: tensor.cpu() for name, tensor in trained}
    if not engine.is_main:
        return None
    return compare(
        known["start"], expected, losses, norms, gradients, log_probs.cpu(), weights, len(counts) // tiny.STEPS
    )


def batch_of(row: Row) -> Batch:
    batch = tiny.uneven_batch(sequences=row.sequences, lengths=row.lengths)
    if not row.one_token:
        return batch
    only = torch.zeros_like(batch.loss_mask)
    only[4] = 1.0
    return dataclasses.replace(batch, loss_mask=only).with_denominators()


def config_of(row: Row, folder: str, device: str = "cpu"):
    """On a GPU layers are local: transformer-engine multiplies fp32 by TF32, and has no attention in it for all models."""
    spec = {"layer_spec": "local"} if device == "cuda" and row.backend == "megatron" else {}
    return tiny.role(
        folder, device=device, backend=row.backend, packing=row.packing, size=row.size, tokens=row.tokens, parallel=row.parallel,
        recompute=row.recompute, recompute_every=row.recompute_every, fsdp=row.fsdp, head=row.head, model={"lora": lora_of(row)},
        **spec,
    )  # fmt: skip


def lora_of(row: Row) -> LoraConfig | None:
    return None if row.lora is None else LoraConfig(**LORAS[row.lora])


def counting(counts: list[int]):
    """A preprocess hook that notes the sequences of each micro-batch that has any."""

    def count(data: Batch, ctx: dict) -> tuple[Batch, dict]:
        counts.append(data.num_sequences)
        return data, ctx

    return count


def compare(
    start: dict, expected: tiny.Reference, losses: list, norms: list, gradients: dict, log_probs: Any, weights: dict,
    micro_batches: int,
) -> Outcome:  # fmt: skip
    assert set(gradients) == set(expected.gradients), sorted(set(gradients) ^ set(expected.gradients))
    assert set(weights) == set(expected.weights), sorted(set(weights) ^ set(expected.weights))
    by_gradient = {name: tiny.relative_l2(gradients[name], value) for name, value in expected.gradients.items()}
    by_update = {}
    for name, value in expected.weights.items():
        known = is_known(expected.gradients.get(name, value), expected.grad_norm)
        by_update[name] = tiny.relative_l2(
            *(known * (after.double() - start[name]) for after in (weights[name], value))
        )
    worst_gradient, worst_update = (max(errors, key=errors.get) for errors in (by_gradient, by_update))
    return Outcome(
        micro_batches=micro_batches,
        loss=abs(losses[0] - expected.loss) / abs(expected.loss),
        gradient=by_gradient[worst_gradient],
        norm=abs(norms[0] - expected.grad_norm) / expected.grad_norm,
        log_prob=(log_probs - expected.log_probs).abs().max().item(),
        update=by_update[worst_update],
        worst_gradient=worst_gradient,
        worst_update=worst_update,
    )


def is_known(gradient: torch.Tensor, norm: float) -> torch.Tensor:
    """Of each element, whether its gradient is more than fp32's rounding of the whole gradient; an exact 0 is."""
    return (gradient == 0) | (gradient.abs() > 2**-24 * norm)


# -- the table ---------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'family':21} {'layout':20} {'packing':7} {'micro':>5} {'loss':>8} {'gradient':>8} {'norm':>8} {'log-prob':>8} "
    f"{'update':>8} {'s':>5}  ok"
)


def line(row: Row, outcome: Outcome | str) -> str:
    layout = (
        (f"{row.backend} " if row.backend != "megatron" else "")
        + (f"{row.fsdp.replicate} x " if row.fsdp.replicate > 1 else "")
        + row.layout
        + {"none": "", "full": " full", "selective": " sel."}[row.recompute]
        + (f" {row.lora}" if row.lora else "")
    )
    head = f"{row.model:21} {layout:20} {'packed' if row.packing else 'padded':7} "
    if isinstance(outcome, str):
        return head + "failed: " + outcome.strip().splitlines()[-1]
    numbers = (outcome.loss, outcome.gradient, outcome.norm, outcome.log_prob, outcome.update)
    return (
        head + f"{outcome.micro_batches:5d} " + " ".join(f"{n:8.1e}" for n in numbers) + f" {outcome.seconds:5.1f}  "
        + ("; ".join(outcome.problems) or "ok")
    )  # fmt: skip


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="engines against Hugging Face, layout by layout, in fp32")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose text contains one of these")
    parser.add_argument(
        "--several-gpus", action="store_true", help="rows that need several GPUs, and ran over NCCL on no machine yet"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: all ranks on one GPU")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    from tests.engine import parity_rows as rows

    chosen = [
        row
        for row in (rows.SEVERAL_GPUS if options.several_gpus else rows.ALL)
        if any(text in str(row) for text in options.only)
    ]
    if not chosen:
        parser.error(f"--only: no row has {' or '.join(options.only)}")
    failed = 0
    print(HEADER)
    for row, outcome in Table(options.device).run(chosen):
        failed += isinstance(outcome, str) or bool(outcome.problems)
        print(line(row, outcome), flush=True)
    close_worlds()
    print(f"{failed} of the rows failed" if failed else "every row is right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
