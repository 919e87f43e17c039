"""The parts that a run will use and why, in words: the answers of choices.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mrl.doctor.ask import json_lines, python
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.imports import LIMIT_S, START_S, ImportResult, ended
from mrl.mcore_models.layout import EXPERTS

TITLE = "What a run will use: engine.layer_spec auto, bfloat16 (of your model: mrl sft CONFIG --dry-run)"

KERNELS: Mapping[str, Mapping[str, str]] = {
    "te": {"flash": "flash-attn 2", "fused": "cuDNN (fused)", "unfused": "unfused"},
    "local": {"sdpa": "torch's sdpa", "flash": "torch's flash kernel", "blocks": "masked blocks"},
}


@dataclasses.dataclass(frozen=True)
class Choices:
    """The answers of choices.py."""

    device: str | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    megatron: Literal["begun", "loads"] | None = None  # how far its import is; None where it was not come to
    modules: Sequence[Mapping[str, Any] | None] = ()  # of each row
    optimizer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str | None = None  # what ended it, in words

    @property
    def imported_megatron(self) -> ImportResult:
        """The import of megatron-core; nothing else imports it."""
        if self.megatron == "loads":
            return ImportResult()
        return ImportResult(error=self.error) if self.megatron == "begun" else ImportResult(blocked_by=UNKNOWN_LINE)


UNKNOWN_LINE = "what a run will use"
"""Blocks megatron-core where the process did not come to it."""


def choices(limit_s: float = START_S + LIMIT_S) -> Choices:
    """Asks choices.py."""
    answer = python("-m", "mrl.doctor.choices", limit_s=limit_s)
    found: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(Choices)}
    for entry in json_lines(answer.out):
        found |= {name: value for name, value in entry.items() if name in names}
    if "optimizer" not in found and "error" not in found:
        begun = found.get("megatron") == "begun"
        found["error"] = ended(answer, limit_s) if begun else f"the process that looked {answer.said}"
    return Choices(**found)


def section(found: Choices, *, torch_works: bool) -> Iterator[Finding]:
    if torch_works:
        yield from _findings(found)
    else:
        yield note("used", "nothing can be said without torch")


def table(found: Choices) -> list[list[str]]:
    """Returns a line for each kind of model, or two if context parallelism makes a difference."""
    lines: dict[str, list[tuple[str, list[str]]]] = {}
    for i, row in enumerate(found.rows):
        modules = found.modules[i] if i < len(found.modules) else None
        lines.setdefault(row["model"], []).append((str(row["cp"]), _cells(row, modules)))
    made = [["model", "cp", "layers", "attention", "norm", "experts"]]
    for model, ways in lines.items():
        if all(cells == ways[0][1] for _, cells in ways):
            made.append([model, "any", *ways[0][1]])
            continue
        for i, (cp, cells) in enumerate(ways):
            made.append([model if i == 0 else "", cp if i == 0 else f"{cp} or more", *cells])
    return made if len(made) > 1 else []


def _cells(row: Mapping[str, Any], modules: Mapping[str, Any] | None) -> list[str]:
    if "error" in row:
        return ["refused", "-", "-", "-"]
    attention = ", ".join(KERNELS[row["spec"]].get(kernel, kernel) for kernel in row["attention"]) or "any"
    if row["cp_communication"]:
        attention += f" by {row['cp_communication']}"
    if modules is None:
        return [row["spec"], attention, "?", "?"]
    experts = modules["experts"]
    return [row["spec"], attention, modules["norm"], EXPERTS.get(experts, experts) if experts else "-"]


def _findings(found: Choices) -> Iterator[Finding]:
    report = "mend the packages above; if they are whole, report this with `mrl doctor --json`"
    if not found.rows:
        yield fault("used", f"what a run will use cannot be told ({found.error})", report)
        return
    yield from _specs(found.rows)
    if found.optimizer:
        optimizer, norm = found.optimizer["optimizer"], found.optimizer["norm"]
        yield ok("used.optimizer", f"AdamW: {optimizer}; norms of gradients: {norm}", **found.optimizer)
    elif found.megatron == "loads":
        what = f"megatron-core loads, and what it makes layers of cannot be told ({found.error})"
        yield warning("used.modules", what, report)
    yield ok("used.fsdp", "engine.backend: fsdp uses torch's scaled_dot_product_attention and AdamW, and none of these")


def _specs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields one finding for each reason."""
    reasons: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        reasons.setdefault((row.get("spec", "refused"), row.get("error") or row["why"]), []).append(row)
    for number, ((spec, why), of) in enumerate(reasons.items(), start=1):
        name = "used.spec" if number == 1 else f"used.spec.{number}"
        models = "" if len(reasons) == 1 else f" for {_models(of)}"
        what = f"layers: {spec}{models} ({why})"
        if spec == "refused":
            fix = "install transformer-engine as docs/gpu.md says, or set engine.layer_spec=local"
            yield fault(name, f"a run stops{models}: {why}", fix, rows=of)
        elif any(row["attention"] == ["unfused"] for row in of):
            yield warning(name, what, "take what that names, or keep rows short (data.max_length)", rows=of)
        elif spec == "te":
            yield ok(name, what, rows=of)
        else:
            yield note(name, what, rows=of)


def _models(rows: Sequence[Mapping[str, Any]]) -> str:
    cps: dict[str, list[int]] = {}
    for row in rows:
        cps.setdefault(row["model"], []).append(row["cp"])
    return ", ".join(model if len(found) > 1 else f"{model} at cp {found[0]}" for model, found in cps.items())
