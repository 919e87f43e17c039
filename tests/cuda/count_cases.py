"""Steps whose operations are counted, and the figures that follow from the counts: rows of ceilings.json."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda.cases import DELTA, DENSE, LATENT, MOE, Case

CEILINGS = Path(__file__).with_name("ceilings.json")

STEPS = 3  # of decoding, that are counted together
EVEN = (2048,) * 4
RAGGED = (
    312, 187, 451, 98, 263, 140, 379, 225, 166, 297, 118, 494, 203, 341, 154, 276, 91, 412, 238, 189,
    325, 130, 257, 173, 466, 211, 108, 286, 359, 147, 232, 195, 434, 124, 271, 160, 393, 218, 305, 183,
)  # fmt: skip
"""Tokens of sequences as rows of GSM8K have them: question and answer, no two alike."""

_NARROW = {"vocab_size": 32768, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_EXPERTS = {"hidden_size": 1024, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": (DENSE, _NARROW | {"hidden_size": 2048, "intermediate_size": 6144}),
    "experts": (MOE, _NARROW | _EXPERTS),
    "latent": (LATENT, {"vocab_size": 32768, "n_routed_experts": 32, "first_k_dense_replace": 0}),
    "delta": (DELTA, {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 6144}),
}
"""Models of benchmarks/gpu_subjects.py, one of latent attention and experts, and one of gated delta nets by mrl's rule."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A step of a model. te: whether transformer-engine is there, whose optimizer megatron-core takes then."""

    model: str  # of MODELS
    spec: str  # local, te, or fsdp, which is the other engine
    te: bool = False
    grouped: bool = False  # torch's grouped products of experts
    decodes: bool = False
    graphs: bool = False  # of steps of decoding, or of layers in training

    def __str__(self) -> str:
        words = (
            [self.model, self.spec] + ["with te"] * (self.te and self.spec == "local") + ["grouped_mm"] * self.grouped
        )
        return " ".join(words + ["decode"] * self.decodes + ["graphs"] * self.graphs)

    def case(self, layers: int) -> Case:
        name, changes = MODELS[self.model]
        spec = "auto" if self.spec == "fsdp" else self.spec
        places = sum(RAGGED) if self.graphs and not self.decodes else 0
        return Case(name, layers=layers, spec=spec, grouped=self.grouped, lengths=EVEN, changes=changes, graphs=places)


QUICK = [Row("dense", "local")]
OTHERS = [
    Row("dense", "fsdp"),
    Row("dense", "local", decodes=True),
    Row("experts", "local", grouped=True),
    Row("experts", "fsdp"),
    Row("latent", "local", grouped=True),
    Row("dense", "te", te=True),
    Row("experts", "te", te=True),
    Row("experts", "te", te=True, grouped=True),
    Row("latent", "te", te=True),
    Row("dense", "local", te=True),
    Row("experts", "local", te=True, grouped=True),
    Row("experts", "local", decodes=True),
    Row("latent", "local", decodes=True),
    Row("dense", "te", te=True, decodes=True),
    Row("dense", "local", decodes=True, graphs=True),
    Row("experts", "local", decodes=True, graphs=True),
    Row("latent", "local", decodes=True, graphs=True),
    Row("dense", "te", te=True, decodes=True, graphs=True),
    Row("dense", "local", graphs=True),
    Row("dense", "te", te=True, graphs=True),
    Row("experts", "local", grouped=True, graphs=True),
    Row("delta", "local"),
    Row("delta", "fsdp"),
    Row("delta", "te", te=True),
    Row("delta", "local", decodes=True),
    Row("delta", "local", decodes=True, graphs=True),
]
ROWS = {str(row): row for row in [*QUICK, *OTHERS]}
IN_CI = [
    ROWS[name] for name in (
        "dense fsdp", "dense local decode", "experts local grouped_mm", "dense te", "dense te decode graphs",
    )
]  # fmt: skip
"""Of OTHERS those of CI's slow tier: fsdp, experts, te, decoding and its graphs. The rest is of the nightly one."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Operations of the parts of a step, with transformer-engine's kernels, by name; and their lines."""

    operators: dict[str, Counter[str]]
    lines: dict[str, Counter[str]]

    def of(self, part: str) -> int:
        return self.operators[part].total()

    def of_attention(self, part: str) -> int:
        return sum(n for name, n in self.operators[part].items() if "attention" in name or "attn" in name)


def figures(row: Row, one: Counted, two: Counted) -> dict[str, float]:
    """Returns operations by what they grow with, from those of a model of one layer and of one of two."""
    if row.decodes:
        layer, rest = two.of("step") - one.of("step"), 2 * one.of("step") - two.of("step")
        found = {"layer": layer / STEPS, "rest of a step": rest / STEPS}
        captured = two.of("capture") - one.of("capture")
        return found | ({"layer in a graph": captured} if row.graphs else {})
    second = one.of("2 micro-batches") - one.of("1 micro-batch")
    layer = two.of("2 micro-batches") - two.of("1 micro-batch") - second
    of_layers = two.of("1 micro-batch") - one.of("1 micro-batch")
    in_optimizer = two.of("optimizer") - one.of("optimizer")
    return {
        "layer and micro-batch": layer,
        "head and micro-batch": second - layer,  # embedding, last norm, log-probs, loss
        "layer": of_layers - layer,
        "rest of an update": one.of("1 micro-batch") - second - (of_layers - layer),
        "optimizer, layer": in_optimizer,
        "optimizer, rest": one.of("optimizer") - in_optimizer,
        "ragged, layer and micro-batch": two.of("ragged") - one.of("ragged") - (of_layers - layer),
        "ragged, attention of a layer": two.of_attention("ragged") - one.of_attention("ragged"),
    }


# -- ceilings ----------------------------------------------------------------------------------------------------------

COMMAND = "python -m tests.cuda counts --lower"
PACKAGES = ("megatron-core", "torch", "transformers")


def installed() -> dict[str, str]:
    return {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}


def read() -> dict[str, Any]:
    """Returns {"versions": of the packages that were counted with, "ceilings": figures by row}."""
    return json.loads(CEILINGS.read_text(encoding="utf-8"))


def above(row: Row, found: Mapping[str, float], ceilings: Mapping[str, float]) -> list[str]:
    """Returns a line for each figure above its ceiling."""
    return [
        f"{row}: {name}: {n:g} operations, and the ceiling is {ceilings[name]:g}"
        for name, n in found.items() if n > ceilings.get(name, n)
    ]  # fmt: skip


def below(row: Row, found: Mapping[str, float], ceilings: Mapping[str, float]) -> list[str]:
    """Returns a line for each figure below its ceiling, or without one."""
    return [
        f"{row}: {name}: {n:g} operations, and the ceiling is {ceilings.get(name, 'missing')}: `{COMMAND}` writes it"
        for name, n in found.items() if n < ceilings.get(name, n + 1)
    ]  # fmt: skip


def lower(row: Row, found: Mapping[str, float]) -> None:
    """Writes the ceilings of a row down to what was found. None rises."""
    file = read()
    old = file["ceilings"].get(str(row), {})
    file["ceilings"][str(row)] = {name: min(n, old.get(name, n)) for name, n in found.items()}
    file["ceilings"] = {name: file["ceilings"][name] for name in ROWS if name in file["ceilings"]}
    CEILINGS.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
