"""The parts that a run will use and why, in words: the answers of choices.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.doctor.ask import json_lines, python
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.imports import LIMIT_S
from mrl.mcore_models.layout import EXPERTS

TITLE = "What a run will use: engine.layer_spec auto, bfloat16 (of your model: mrl sft CONFIG --dry-run)"

KERNELS: Mapping[str, Mapping[str, str]] = {
    "te": {"flash": "flash-attn 2", "fused": "cuDNN (fused)", "unfused": "unfused"},
    "local": {"sdpa": "torch's sdpa", "flash": "torch's flash kernel", "blocks": "masked blocks"},
}


def choices(limit_s: float = LIMIT_S) -> Mapping[str, Any]:
    """Returns the `rows` and the `optimizer` of choices.py, or an `error`."""
    answer = python("-m", "mrl.doctor.choices", limit_s=limit_s)
    answers = [entry for entry in json_lines(answer.out) if "error" in entry or "rows" in entry]
    return answers[-1] if answers else {"error": f"the process that looked {answer.ended}"}


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a line for each kind of model and degree of context parallelism."""
    lines = [["model", "cp", "layers", "attention", "norm", "experts"]]
    for row in rows:
        cells = ["refused", "-", "-", "-"]
        if "error" not in row:
            kernels = KERNELS[row["spec"]]
            attention = ", ".join(kernels.get(kernel, kernel) for kernel in row["attention"]) or "any"
            if row["cp_communication"]:
                attention += f" by {row['cp_communication']}"
            experts = row["modules"]["experts"] or "-"
            cells = [row["spec"], attention, row["modules"]["norm"], EXPERTS.get(experts, experts)]
        lines.append([row["model"], "1" if row["cp"] == 1 else "2 or more", *cells])
    return lines if rows else []


def section(found: Mapping[str, Any]) -> Iterator[Finding]:
    if "error" in found:
        fix = "mend the packages above; if they are whole, report this with `mrl doctor --json`"
        yield fault("used", f"what a run will use cannot be told ({found['error']})", fix)
        return
    yield from _specs(found["rows"])
    optimizer, norm = found["optimizer"]["optimizer"], found["optimizer"]["norm"]
    yield ok("used.optimizer", f"AdamW: {optimizer}; norms of gradients: {norm}", **found["optimizer"])
    yield ok("used.fsdp", "engine.backend: fsdp uses torch's scaled_dot_product_attention and AdamW, and none of these")


def _specs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields one finding for each reason."""
    reasons: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        reasons.setdefault((row.get("spec", "refused"), row.get("error") or row["why"]), []).append(row)
    for number, ((spec, why), of) in enumerate(reasons.items(), start=1):
        name = "used.spec" if number == 1 else f"used.spec.{number}"
        models = ", ".join(dict.fromkeys(row["model"] for row in of))
        if spec == "refused":
            fix = "install transformer-engine as docs/gpu-install.md says, or set engine.layer_spec=local"
            yield fault(name, f"a run stops for {models}: {why}", fix, rows=of)
            continue
        what = f"layers: {spec} for {models} ({why})"
        if any(row["attention"] == ["unfused"] for row in of):
            yield warning(name, what, "take what that names, or keep rows short (data.max_length)", rows=of)
        else:
            yield (ok if spec == "te" else note)(name, what, rows=of)
