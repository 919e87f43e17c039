"""The workers of gpu.py, each in a process of its own: a step's loss and gradients, steps of training, decoding, a checkpoint.

spec: "what" (a function below), "folder" (with model/), "subject": {"kind": "mrl" or "plain", and its settings}.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import Meter, memory_mb, read_arguments
from safetensors.torch import save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR = 1e-4


def device_of(spec: dict[str, Any]) -> torch.device:
    return torch.device("cuda", 0) if spec["device"] == "cuda" else torch.device("cpu")


def synchronize(spec: dict[str, Any]) -> None:
    """What was queued on the GPU has ended when this returns."""
    if spec["device"] == "cuda":
        torch.cuda.synchronize()


def peak_gb(spec: dict[str, Any]) -> float:
    """Peak memory in 10^9 bytes: allocated on the GPU, or resident where there is none."""
    return torch.cuda.max_memory_allocated() / 1e9 if spec["device"] == "cuda" else memory_mb() * 2**20 / 1e9


def rows_of(spec: dict[str, Any]) -> list[list[int]]:
    """The same rows for every subject: `rows` documents of `row` tokens and one more, as labels are shifted."""
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(5, spec["vocabulary"] // 10, (spec["rows"], spec["row"] + 1), generator=numbers)
    return ids.tolist()


def mrl_engine(spec: dict[str, Any]) -> Any:
    """An engine of mrl as `mrl sft` builds it, with the subject's keys."""
    from mrl.algorithms.sft import sft_loss
    from mrl.check.measure import make_engine
    from mrl.config.load import from_dict
    from mrl.trainers.sft import SFTTask

    subject = spec["subject"]
    config = {
        "output_dir": "x", "model": {"path": str(pathlib.Path(spec["folder"]) / "model"), "dtype": subject["dtype"]},
        "engine": {
            "backend": subject["backend"], "layer_spec": subject.get("layer_spec", "auto"), "device": spec["device"], "moe": subject.get("moe", {}),
            "micro_batch": {"tokens": spec["micro_tokens"]}, "fsdp": subject.get("fsdp", {}),
        },
        "optimizer": {"lr": LR, "schedule": "constant"}, "data": {"train": "x", "max_length": spec["row"]},
        "train": {"steps": max(spec.get("steps", 1), 1), "global_batch_size": spec["rows"]},
    }  # fmt: skip
    if subject["backend"] == "megatron":
        del config["engine"]["fsdp"]
    return make_engine(SFTTask(from_dict(config)).role(config["model"]["path"]), sft_loss)


def parity(spec: dict[str, Any], out: str) -> None:
    """Writes the loss of one batch into the meter, and gradients by Hugging Face's names into `gradients`."""
    meter = Meter()
    rows = [ids[: 1 + len(ids) * (i + 1) // spec["rows"]] for i, ids in enumerate(rows_of(spec))]  # of other lengths
    if spec["subject"]["kind"] == "plain":
        loss, gradients = plain_parity(spec, rows)
    else:
        from mrl.batch import make_batch
        from mrl.check.measure import forward_backward

        engine = mrl_engine(spec)
        loss, _ = forward_backward(engine, make_batch(rows, [[1.0] * len(ids) for ids in rows]))
        gradients = {name: gradient.cpu() for name, gradient in engine.hf_gradients()}
    meter.step(loss)
    whole = {name: g.detach().float().cpu().contiguous() for name, g in gradients.items()}
    save_file(whole, spec["gradients"])
    meter.write(out)


def plain_parity(spec: dict[str, Any], rows: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers, a row at a time; in bfloat16 as its weights are, with gradients summed in fp32."""
    from mrl.check import reference

    model = reference.load(
        str(pathlib.Path(spec["folder"]) / "model"), dtype=DTYPES[spec["subject"]["dtype"]], attention="sdpa"
    ).to(device_of(spec))
    count, total = sum(len(ids) - 1 for ids in rows), 0.0
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    for ids in rows:
        tokens = torch.tensor([ids], device=model.device)
        logits = model(input_ids=tokens[:, :-1]).logits[0].float()
        loss = F.cross_entropy(logits, tokens[0, 1:], reduction="sum") / count
        loss.backward()
        total += float(loss)
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad.float()
                p.grad = None
    return total, reference.file_names(model, sums)


def training(spec: dict[str, Any], out: str) -> None:
    """Steps on the same rows; a step ends when the GPU has done it."""
    meter = Meter()
    run = plain_training if spec["subject"]["kind"] == "plain" else mrl_training
    run(spec, meter)
    meter.more = {"peak_gb": peak_gb(spec)}
    meter.write(out)


def mrl_training(spec: dict[str, Any], meter: Meter) -> None:
    from mrl.batch import make_batch

    engine = mrl_engine(spec)
    rows = rows_of(spec)
    batch = make_batch(rows, [[1.0] * len(ids) for ids in rows])
    meter.mark()
    for _ in range(spec["steps"]):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(engine.shard_data(batch), {"temperature": 1.0, "last": True})
        engine.optimizer_step()
        engine.lr_scheduler_step()
        synchronize(spec)
        meter.step(loss)


def plain_training(spec: dict[str, Any], meter: Meter) -> None:
    """transformers and torch: fp32 weights, bfloat16 by autocast, SDPA, fused AdamW, clipping; a loss of all logits."""
    from transformers import AutoModelForCausalLM

    folder = pathlib.Path(spec["folder"]) / "model"
    device = device_of(spec)
    more = {"experts_implementation": spec["subject"]["experts"]} if "experts" in spec["subject"] else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **more)
    model.to(device).train()
    forward = torch.compile(model) if spec["subject"].get("compile") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tokens = torch.tensor(rows_of(spec), device=device)
    at_once = max(1, spec["micro_tokens"] // spec["row"])
    autocast = spec["subject"]["dtype"] == "bfloat16"
    meter.mark()
    for _ in range(spec["steps"]):
        total = torch.zeros((), device=device)
        for first in range(0, spec["rows"], at_once):
            part = tokens[first : first + at_once]
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                logits = forward(input_ids=part[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            loss = loss / (spec["rows"] * spec["row"])
            loss.backward()
            total += loss.detach()
            del logits, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(spec)
        meter.step(float(total))


def decoding(spec: dict[str, Any], out: str) -> None:
    """Rounds of `new_tokens` after prompts of `prompt` tokens, none of which ends before, for each number of `at_once`."""
    meter, new = Meter(), spec["new_tokens"]
    prompts = [ids[: spec["prompt"]] for ids in rows_of(spec)]
    draw = (plain_decoder if spec["subject"]["kind"] == "plain" else mrl_decoder)(spec)
    for at_once in spec["at_once"]:
        seconds = []
        for _ in range(spec["steps"]):
            meter.mark()
            draw(prompts[:at_once])
            synchronize(spec)
            meter.step()
            seconds.append(meter.wall[-1])
        meter.more[f"tokens_s_{at_once}"] = at_once * new / statistics.median(seconds[1:])
    meter.more["peak_gb"] = peak_gb(spec)
    meter.write(out)


def mrl_decoder(spec: dict[str, Any]) -> Callable[[list[list[int]]], None]:
    from mrl.engine.base import GenerateRequest
    from mrl.engine.sampling import SamplingKey, SamplingParams

    engine, new = mrl_engine(spec), spec["new_tokens"]
    graphs = {"cuda_graphs": True} if spec["subject"].get("cuda_graphs") else {}

    def draw(prompts: list[list[int]]) -> None:
        requests = [
            GenerateRequest(
                tokens=prompt, max_new_tokens=new, stop_tokens=(), sampling=SamplingParams(), key=SamplingKey(seed=0, prompt=i, sample=0)
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        drawn = engine.generate(requests, cache_tokens=len(prompts) * (spec["prompt"] + new + 1), **graphs)
        assert all(len(one.tokens) == new for one in drawn)

    return draw


def plain_decoder(spec: dict[str, Any]) -> Callable[[list[list[int]]], None]:
    from transformers import AutoModelForCausalLM

    folder, device = pathlib.Path(spec["folder"]) / "model", device_of(spec)
    dtype = DTYPES[spec["subject"]["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    new = spec["new_tokens"]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": new, "min_new_tokens": new, "eos_token_id": None}

    def draw(prompts: list[list[int]]) -> None:
        tokens = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            drawn = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        assert drawn.shape[1] == tokens.shape[1] + new

    return draw


def checkpoint(spec: dict[str, Any], out: str) -> None:
    """Saves of a model that has made a step, at once and in the background, each beside a plain write of as many bytes
    with fsync; and a load."""
    from mrl.batch import make_batch
    from mrl.check.measure import forward_backward

    meter, folder = Meter(), pathlib.Path(spec["folder"]) / "checkpoints"
    engine, rows = mrl_engine(spec), rows_of(spec)[:1]
    forward_backward(engine, make_batch(rows, [[1.0] * len(ids) for ids in rows]))
    engine.optimizer_step()
    saves, held, writes, loads, size = [], [], [], [], 0
    for number in range(spec["steps"]):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        synchronize(spec)
        began = time.perf_counter()
        background = begin_save(engine, folder, 2 * number, then=lambda: None)
        held.append(time.perf_counter() - began)
        background.finish()
        began = time.perf_counter()
        saved = pathlib.Path(engine.save_checkpoint(str(folder), global_step=2 * number + 1))
        saves.append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        writes.append(seconds_to_write(folder / "plain", size))
        began = time.perf_counter()
        engine.load_checkpoint(str(folder))
        synchronize(spec)
        loads.append(time.perf_counter() - began)
        meter.step()
    meter.more = {
        "bytes": size, "save_s": min(saves), "held_s": min(held), "write_s": min(writes), "load_s": min(loads)
    }  # fmt: skip
    meter.write(out)


def begin_save(engine: Any, folder: pathlib.Path, step: int, then: Callable[[], None]) -> Any:
    """Returns as soon as training may go on; `then` is called when the checkpoint is whole."""
    from mrl.trainers.common import CheckpointSaver

    saves = CheckpointSaver(engine.device)
    saves.begin(
        str(folder), step, lambda: engine.stage_state({}), backend=engine.backend, remote=None, keep=None, then=then
    )  # fmt: skip
    return saves


def seconds_to_write(path: pathlib.Path, size: int) -> float:
    block = os.urandom(2**24)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = size
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    spec, out = read_arguments()
    {"parity": parity, "training": training, "decoding": decoding, "checkpoint": checkpoint}[spec["what"]](spec, out)
