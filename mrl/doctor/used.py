"""What a run on this machine will be made of, and why: asked of the functions that choose it, and in words.

`python -m mrl.doctor.used` asks them, in a process of its own: it imports torch and megatron-core, and on a GPU
transformer-engine and apex. Its answer is a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.config.schema import EngineConfig
from mrl.doctor.ask import LIMIT_S, json_lines, python
from mrl.doctor.findings import Finding, fault, note, ok, warning
from mrl.doctor.probe import own_output
from mrl.errors import UserError
from mrl.mcore_models.layout import EXPERTS
from mrl.parallel import ParallelDims

TITLE = "What a run will use: engine.layer_spec auto, bfloat16 (of your model: mrl sft CONFIG --dry-run)"

KERNELS: Mapping[str, Mapping[str, str]] = {
    "te": {"flash": "flash-attn 2", "fused": "cuDNN (fused)", "unfused": "unfused"},
    "local": {"sdpa": "torch's sdpa", "flash": "torch's flash kernel", "blocks": "masked blocks"},
}

MODELS: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
"""Kinds of models that kernels tell apart: config.json of one each, with two layers. The last one has any experts."""


def rows() -> list[dict[str, Any]]:
    """Returns layer spec, reason and attention kernels for each kind of model, with cp 1 and 2."""
    return [_row(model, cp) for model in MODELS for cp in (1, 2)]


def _row(model: str, cp: int) -> dict[str, Any]:
    import torch

    from mrl.mcore_models import layer_spec
    from mrl.mcore_models.te_limits import AttentionShape, Gpu
    from mrl.weights.families import fields_of
    from mrl.weights.hf_config import normalize

    fields, dims = fields_of(normalize(dict(MODELS[model]))), ParallelDims(world_size=cp, cp=cp)
    try:
        spec = layer_spec.choose(EngineConfig(), fields, dims, dtype=torch.bfloat16)
    except UserError as error:
        return {"model": model, "cp": cp, "error": str(error)}
    attention = AttentionShape.of(fields, dims)
    return {
        "model": model,
        "cp": cp,
        "spec": spec.name,
        "why": spec.why,
        "attention": _te_kernels(attention, Gpu.here()) if spec.name == "te" else _local_kernels(attention),
        "cp_communication": attention.cp_communication if spec.name == "te" and cp > 1 else None,
    }


def _te_kernels(attention: Any, gpu: Any) -> list[str]:
    """Returns the kernel that transformer-engine takes of the usable ones."""
    import torch

    from mrl.mcore_models.te_limits import kernels

    return [] if gpu.capability is None else list(kernels(attention, gpu, torch.bfloat16)[:1])


def _local_kernels(attention: Any) -> list[str]:
    """Returns the kernels of layers without a window, and with one."""
    import torch

    from mrl.ops import causal, devices

    def heads(count: int, queries: int, size: int) -> torch.Tensor:
        return torch.empty((1, count, queries, size), dtype=torch.bfloat16, device=devices.device())

    keys, found = 64, []
    for window in (None, 16) if attention.windowed else (None,):
        query = heads(attention.heads, keys // attention.cp, attention.query_size)
        value = heads(attention.groups, keys, attention.value_size)
        found.append(
            causal.attention_kind(query, keys, value, window=window, sinks=attention.sinks, dropout=attention.dropout)
        )  # fmt: skip
    return list(dict.fromkeys(found))


def modules(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the classes of the last layer of a row's model. Needs `cpu_stand_in.prepare()`."""
    import torch

    from mrl.mcore_models.build import transformer_config
    from mrl.mcore_models.modules import modules_of
    from mrl.weights.hf_config import normalize

    hf = normalize(dict(MODELS[row["model"]]))
    dims = ParallelDims(world_size=row["cp"], cp=row["cp"])
    config = transformer_config(hf, dims, dtype=torch.bfloat16, layer_spec=row["spec"])
    return dataclasses.asdict(modules_of(config, hf["num_hidden_layers"] - 1))


def choices(limit_s: float = LIMIT_S) -> Mapping[str, Any]:
    """Returns the `rows` and the `optimizer` that a process of its own found, or an `error`."""
    answer = python("-m", "mrl.doctor.used", limit_s=limit_s)
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


def main() -> None:
    say = own_output()
    try:
        from mrl.mcore_models import cpu_stand_in

        cpu_stand_in.prepare()
        from mrl.engine.megatron import optim

        found = rows()
        for row in found:
            if "spec" in row:
                row["modules"] = modules(row)
        say({"rows": found, "optimizer": optim.implementations()})
    except Exception as error:  # what megatron-core or a package that it looks for raises
        say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
