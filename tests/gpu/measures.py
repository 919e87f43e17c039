"""What a case measures, in its process. Each function returns figures by name; it raises where something is wrong."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.check import reference
from mrl.config.schema import FSDPConfig, LoraConfig, MoEConfig, OptimizerConfig, RoleConfig
from mrl.engine import links
from mrl.engine.registry import build_engine
from mrl.mcore_models import grouped
from tests.engine import contract, generation, tiny
from tests.engine.harness import Case, run_world
from tests.gpu import models

DEVICE = os.environ.get("MRL_GPU_TESTS_ON", "cuda")
"""`cpu` shows that a case runs, where no GPU is."""
TIMES_THE_NOISE = 3.0
"""In 16 bits and fewer: the error of mrl is at most so many times that of transformers in bfloat16."""
LOSS, GRADIENT, LOG_PROB, UPDATE = 1e-6, 2e-5, 2e-5, 1e-3
"""In fp32, as tests/engine/parity.py has them; gradients and log-probs have twice that, as sequences are seven times as long."""
SGD_LIKE = OptimizerConfig(lr=1e-3, min_lr=1e-3, eps=1e-6, weight_decay=0.1, clip_grad=1.0, schedule="linear")


@functools.cache
def folder_of(family: str, head: str = "lm") -> str:
    of = hashlib.sha256(repr((models.sizes(family), transformers.__version__, os.getuid())).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir(), "mrl_gpu_models", f"{family}-{head}-{of}")
    if not (path / "config.json").exists():  # cases run side by side: a folder appears whole
        path.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(dir=path.parent)
        tiny.make_model(made, family, head=head, **models.sizes(family))
        try:
            Path(made).rename(path)
        except OSError:
            assert (path / "config.json").exists()
    return str(path)


def batch_of(seed: int = 0) -> Batch:
    return tiny.uneven_batch(seed, sequences=models.SEQUENCES, longest=models.LONGEST, vocab=models.VOCAB)


def role(family: str, *, dtype: str, lora: bool = False, **options: Any) -> RoleConfig:
    """A role on the GPU. options: of `tiny.role`. keys: of `engine.fsdp`; moe: of `engine.moe`."""
    model = {"lora": LoraConfig(rank=8, alpha=16.0)} if lora else {}
    if keys := options.pop("keys", {}):
        options["fsdp"] = FSDPConfig(**keys)
    if moe := options.pop("moe", {}):
        options["moe"] = MoEConfig(**moe)
    given = {"tokens": models.MICRO_TOKENS, "backend": "megatron", "device": DEVICE, "optimizer": SGD_LIKE} | options
    if given.get("size") is not None:
        del given["tokens"]
    return tiny.role(folder_of(family), dtype=dtype, model=model, **given)


def built(config: RoleConfig) -> Any:
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(sft_loss)
    return engine


@dataclasses.dataclass
class Step:
    loss: float
    log_probs: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step_of(engine: Any, batch: Batch) -> Step:
    """Log-probs and gradients are of the main process alone."""
    engine.optimizer_zero_grad()
    share = engine.shard_data(batch)
    with engine.train_mode():
        predictions, loss, _ = engine.forward_backward_step(share, {"temperature": 1.0, "last": True})
    found = engine.unshard_data({"log_probs": predictions["log_probs"]}, batch)["log_probs"]
    gradients = {n: g.float().cpu() for n, g in engine.hf_gradients()}
    return Step(loss, found.cpu() * batch.loss_mask if engine.is_main else torch.empty(0), gradients)


@functools.cache
def expected(family: str, dtype: str = "float32", adapter: str | None = None) -> Step:
    """Of transformers: in fp32 on the CPU, in bfloat16 on the GPU, a sequence at a time, its gradients summed in fp32. adapter: a
    folder of adapters, which then train alone."""
    exact = dtype == "float32"
    model = reference.load(folder_of(family), dtype=getattr(torch, dtype), attention="eager", adapter=adapter)
    if exact:
        loss, log_probs = reference.backward(model, tiny.examples_of(batch_of()), reference.Loss())
        gradients = reference.file_names(model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        return Step(loss, log_probs, gradients)
    model.to(DEVICE)
    examples, sums = tiny.examples_of(batch_of()), {}
    weights = reference.token_mean([torch.tensor(e.mask[1:], device=DEVICE) for e in examples])
    total, all_log_probs = 0.0, []
    for example, weight in zip(examples, weights, strict=True):
        log_probs, _ = reference.predict(model, example)
        loss = -(log_probs * weight).sum()
        loss.backward()
        total += loss.item()
        all_log_probs.append((log_probs * (weight != 0)).detach().cpu())
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0.0) + p.grad.float().cpu()
                p.grad = None
    return Step(total, torch.cat(all_log_probs), reference.file_names(model, sums))


def errors(found: Step, of: Step) -> dict[str, Any]:
    assert set(found.gradients) == set(of.gradients), sorted(set(found.gradients) ^ set(of.gradients))
    each = {name: tiny.relative_l2(found.gradients[name], g) for name, g in of.gradients.items()}
    gap = sum(float((found.gradients[n].double() - g.double()).square().sum()) for n, g in of.gradients.items())
    whole = sum(float(g.double().square().sum()) for g in of.gradients.values())
    worst = max(each, key=each.get)
    difference = (found.log_probs - of.log_probs).abs()
    return {
        "loss": abs(found.loss - of.loss) / abs(of.loss), "gradients": (gap / whole) ** 0.5, "worst": each[worst],
        "worst_name": worst, "log_prob": float(difference.max()), "log_prob_mean": float(difference.mean()),
    }  # fmt: skip


def in_ranks(ranks: int, function: str, **arguments: Any) -> Any:
    """Returns what "module:function" gives on the first of `ranks` processes, which share the GPU (tests/engine/harness.py)."""
    return run_world(ranks, [Case(function, arguments, timeout_s=150.0)], DEVICE)[0].get()


def numbers(
    family: str,
    dtype: str,
    *,
    at_most: float = TIMES_THE_NOISE,
    log_probs_at_most: float | None = None,
    ranks: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """A step's loss, log-probs and gradients against transformers in fp32; then two optimizer steps, after which the loss is lower.
    at_most: of what transformers in bfloat16 is off by; log_probs_at_most: of log-probs, where that is another bound."""
    if ranks > 1:
        return in_ranks(ranks, "tests.gpu.measures:numbers", family=family, dtype=dtype, at_most=at_most, **options)
    config = role(family, dtype=dtype, **options)
    engine, adapter = built(config), None
    if config.model.lora is not None:
        adapter = tiny.make_adapter(tempfile.mkdtemp(), folder_of(family), config.model.lora)
        engine.load_adapter(adapter)
    first = step_of(engine, batch_of())
    for _ in range(2):
        norm = engine.optimizer_step()
        assert norm.skipped is None, norm.skipped
        engine.lr_scheduler_step()
        later = step_of(engine, batch_of())
    if not engine.is_main:
        return {}
    found = errors(first, expected(family, adapter=adapter)) | {"spec": getattr(engine.model, "spec", None)}
    found["later"] = later.loss - first.loss
    problems = [] if later.loss < first.loss else [f"the loss rose by {later.loss - first.loss:.2e}"]
    in_tf32 = options.get("layer_spec") == "te" and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"  # of products in fp32
    if dtype == "float32" and not in_tf32:
        bounds = {"loss": LOSS, "worst": GRADIENT, "log_prob": LOG_PROB}
    else:
        noise = errors(expected(family, "bfloat16", adapter), expected(family, adapter=adapter))
        at_most = at_most if dtype == "bfloat16" else 1.0
        found |= {"noise_gradients": noise["gradients"], "noise_log_prob_mean": noise["log_prob_mean"]}
        factors = {"gradients": at_most, "log_prob_mean": log_probs_at_most or at_most}
        bounds = {name: factor * noise[name] for name, factor in factors.items()}
    problems += [
        f"{k} {found[k]:.2e}, at most {bound:.1e} is right" for k, bound in bounds.items() if not found[k] <= bound
    ]
    return found | {"problems": problems}


def same_as_without(
    family: str, dtype: str, change: dict[str, Any], *, bound: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Three steps of training with and without `change` of the engine's keys, and without once more: largest differences."""
    runs = []
    for more in ({}, {}, change):
        engine = built(role(family, dtype=dtype, **(options | more)))
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = []
        for seed in range(3):
            losses.append(step_of(engine, batch_of(seed)).loss)
            engine.optimizer_step(), engine.lr_scheduler_step()
        runs.append(
            (
                losses,
                {n: w.float().cpu() for n, w in engine.hf_weights()},
                torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
            )
        )
        del engine
    (first, start, peak), again, (changed, weights, peak_then) = runs
    largest = [max(tiny.relative_l2(other[n], w) for n, w in start.items()) for other in (again[1], weights)]
    found = {
        "again_loss": max(abs(a - b) for a, b in zip(first, again[0], strict=True)), "again_weights": largest[0],
        "loss": max(abs(a - b) for a, b in zip(first, changed, strict=True)), "weights": largest[1],
        "peak_mb": peak / 1e6, "peak_mb_then": peak_then / 1e6,
    }  # fmt: skip
    worst = max(bound, 3 * found["again_weights"])
    return found | {
        "problems": []
        if found["weights"] <= worst
        else [f"weights differ by {found['weights']:.1e}, at most {worst:.1e}"]
    }


def case(
    name: str, family: str, dtype: str, *, arguments: tuple[str, ...] = (), ranks: int = 1, **options: Any
) -> dict[str, Any]:
    """A case of tests/engine (contract.py, generation.py) with an engine on the GPU. arguments: "path", "model", of the function beside
    the config."""
    function = getattr(contract, name, None) or getattr(generation, name)
    folder = tiny.make_model(tempfile.mkdtemp(), family, **options.pop("sizes", {}))
    config = tiny.role(folder, dtype=dtype, backend=options.pop("backend", "megatron"), device=DEVICE, **options)
    known = {
        "path": tempfile.mkdtemp,
        "model": lambda: folder,
        "expected": lambda: generation.hugging_face(folder, generation.sampled_requests()),
    }
    names = list(inspect.signature(function).parameters)
    given = dict(zip(names, [config, *(known[a]() for a in arguments)], strict=True))
    found = function(**given) if ranks == 1 else in_ranks(ranks, f"{function.__module__}:{name}", **given)
    return {"returned": found if isinstance(found, (bool, int, float)) else None, "problems": []}


def overlapped(family: str, dtype: str, *, ranks: int, **options: Any) -> dict[str, Any]:
    """Steps with `overlap_grad_reduce` and `overlap_param_gather` against steps without (tests/engine/overlap.py)."""
    found = in_ranks(ranks, "tests.engine.overlap:compare", config=role(family, dtype=dtype, **options), again=True)
    bounds = {"norms": 1e-4, "others": 3 * found["again"]}  # 0 in dense models: what is reduced is the same to the bit
    problems = [
        f"{k} differ by {found[k]:.1e}, at most {bound:.1e}" for k, bound in bounds.items() if not found[k] <= bound
    ]
    return found | {
        "problems": problems + [f"nothing was {what}" for what in ("reduced", "gathered") if not found[what]]
    }


def training_graphs(family: str, dtype: str, *, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """Steps with `engine.cuda_graphs` against steps without (tests/engine/train_graphs.py)."""
    found = in_ranks(ranks, "tests.engine.train_graphs:repeated", config=role(family, dtype=dtype, **options))
    problems = list(found.pop("lines")) + ["no graph was replayed"] * (DEVICE == "cuda" and not found["replays"])
    if not found["differ"] <= 3 * found["again"]:
        problems.append(
            f"numbers differ by {found['differ']:.1e}, and those of two runs without by {found['again']:.1e}"
        )
    return found | {"problems": problems}


def link(way: str, *, mib: int = 1024, ranks: int = 1) -> dict[str, Any]:
    """Weights from one process to another, as to a rollout server's (mrl/engine/links.py): every byte, and how fast."""
    if ranks > 1:
        found = in_ranks(ranks, "tests.gpu.measures:link", way=way, mib=mib)
        return found | {"problems": [f"{found['wrong']} came as others"] if found["wrong"] else []}
    device = torch.device(DEVICE)
    generator = torch.Generator(device).manual_seed(0)
    sizes = [3, 1, 2**16 + 1, *[2**24] * (mib // 32), 5]
    weights = [(f"w{i}", torch.randn(n, generator=generator, device=device).bfloat16()) for i, n in enumerate(sizes)]
    return _sent(way, weights) if dist.get_rank() == 0 else _received(weights)


def _sent(way: str, weights: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    device = weights[0][1].device
    given = links.SharedMemoryLink(device, 1)
    if way == "broadcast":
        given = links.BroadcastLink(device, "127.0.0.1", [1], timeout_s=60)
    _told(given.offers()[0], by=0)
    given.connect(lambda: False)
    seconds, wrong = 0.0, []
    for _ in range(2):  # the first makes NCCL's connections, and maps the buffers
        began = time.perf_counter()
        for bucket in links.buckets(iter(weights), 2**28, given.buffer):
            if device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            _told(given.describe(bucket)[0], by=0)
            given.send(bucket, lambda: False)
            _told(None, by=1)  # it has the bucket
        seconds = time.perf_counter() - began
        _told(None, by=0)
        wrong += _told(None, by=1)
    given.close()
    return {"gb_s": sum(w.nbytes for _, w in weights) / seconds / 1e9, "wrong": wrong}


def _received(weights: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    end = links.make_receiver(_told(None, by=0), 0)
    for _ in range(2):
        came: list[tuple[str, torch.Tensor]] = []
        while update := _told(None, by=0):
            came += links.unpack(update, end.receive(update, weights[0][1].device))
            _told(None, by=1)
        pairs = zip(weights, came, strict=True)
        _told([name for (name, w), (other, c) in pairs if name != other or not torch.equal(w, c)], by=1)
    end.close()
    return {}


def _told(what: Any, *, by: int) -> Any:
    said = [what]
    dist.broadcast_object_list(said, src=by)
    return said[0]


def grouped_products(splits: tuple[int, ...]) -> dict[str, Any]:
    """Products of experts and their gradients (mrl/mcore_models/grouped.py) against one product each, in fp32 of the same factors."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE).requires_grad_()

    x, weights, grad = drawn(sum(splits), 64), [drawn(96, 64) for _ in splits], drawn(sum(splits), 96).detach()
    found = grouped.grouped_product(x, grouped.row_ends(torch.tensor(splits), x), weights)
    found.backward(grad)
    exact = [t.detach().float().requires_grad_() for t in (x, *weights)]
    rows = exact[0].split(splits)
    expected = torch.cat([one @ weight.T for one, weight in zip(rows, exact[1:], strict=True)])
    expected.backward(grad.float())
    pairs = {"product": (found, expected)} | {
        name: (of.grad, to.grad)
        for name, of, to in zip(("x", *map(str, range(len(splits)))), (x, *weights), exact, strict=True)
    }
    errors = {
        name: float((of.detach() - to.detach()).norm() / to.detach().norm().clamp(min=1.0))
        for name, (of, to) in pairs.items()
    }
    return {
        "worst": max(errors.values()),
        "problems": [f"{n} is off by {e:.1e}" for n, e in errors.items() if not e < 2**-8],
    }


def waits(family: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Where the host waits for the GPU in a step of training after the first ones, as torch's own check tells."""
    engine = built(role(family, dtype=dtype, **options))
    batch = engine.shard_data(batch_of())

    def one() -> None:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch, {"temperature": 1.0, "last": True})
        engine.optimizer_step()
        engine.lr_scheduler_step()

    one(), one()
    with counted() as lines:
        one()
    return {"waits": sum(lines.values()), "lines": dict(lines.most_common()), "problems": []}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    lines: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for warning in found:
        if "synchronizing CUDA operation" in str(warning.message):
            lines[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1


def decoding_waits(family: str, dtype: str, **options: Any) -> dict[str, Any]:
    """The same of drawing 64 tokens in each of 4 sequences, by token; and log-probs of samples against those of a forward pass. In 16
    bits both are held against transformers in fp32, and the mean error to that of transformers in as many bits: a router's near tie,
    which other sums decide otherwise, moves one token's log-prob by much more than rounding does."""
    graphs = options.pop("cuda_graphs", False)
    engine = built(role(family, dtype=dtype, **options))
    requests = [
        generation.GenerateRequest(row, 64, key=generation.SamplingKey(3, 0, i, 0))
        for i, row in enumerate([[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]])
    ]
    more = {"cuda_graphs": True} if graphs else {}
    engine.generate(requests, **more)
    with counted() as lines:
        drawn = engine.generate(requests, **more)
    rows = [[*r.tokens, *c.tokens] for r, c in zip(requests, drawn, strict=True)]
    masks = [[0.0] * len(r.tokens) + [1.0] * len(c.tokens) for r, c in zip(requests, drawn, strict=True)]
    batch = generation.make_batch(rows, masks)
    with engine.eval_mode():
        share = engine.shard_data(batch)
        predictions, _ = engine.forward_backward_step(share, {"temperature": 1.0}, forward_only=True)
        scored = engine.unshard_data({"log_probs": predictions["log_probs"]}, batch)["log_probs"].cpu()
    sampled = torch.cat(
        [torch.tensor([0.0] * (len(r.tokens) - 1) + c.log_probs) for r, c in zip(requests, drawn, strict=True)]
    )
    trained = batch.loss_mask > 0
    gaps = (scored - sampled).abs()[trained]
    found = {
        "waits_a_token": sum(lines.values()) / 64, "lines": dict(lines.most_common(8)),
        "log_prob_gap": float(gaps.max()), "log_prob_gap_mean": float(gaps.mean()),
    }  # fmt: skip
    if dtype == "float32":
        return found | {"problems": [] if gaps.max() <= 1e-4 else [f"log-probs differ by {gaps.max():.1e}"]}
    exact = _predicted(family, "float32", batch)
    of = {"sampled": sampled, "scored": scored, "noise": _predicted(family, dtype, batch)}
    for name, log_probs in of.items():
        apart = (log_probs - exact).abs()[trained]
        found |= {f"{name}_mean": float(apart.mean()), f"{name}_max": float(apart.max())}
    bound = TIMES_THE_NOISE * found["noise_mean"]
    wrong = [name for name in ("sampled", "scored") if not found[f"{name}_mean"] <= bound]
    return found | {
        "problems": [
            f"{name} log-probs are off by {found[f'{name}_mean']:.1e}, at most {bound:.1e} is right" for name in wrong
        ]
    }


def _predicted(family: str, dtype: str, batch: Batch) -> torch.Tensor:
    """Log-probs of transformers [tokens], in fp32 on the CPU, else on the GPU."""
    model = reference.load(folder_of(family), dtype=getattr(torch, dtype), attention="eager")
    model.to("cpu" if dtype == "float32" else DEVICE)
    with torch.no_grad():
        return torch.cat([reference.predict(model, example)[0].float().cpu() for example in tiny.examples_of(batch)])
