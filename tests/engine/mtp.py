"""MTP layers as DeepSeek-V3's paper has them, in plain torch around a model of transformers, and what engines do with them.

transformers has none. The block of an MTP layer is a layer of the model itself, so what is written here is what is new:
the shift, the two norms, the matrix that joins, and the loss (arXiv 2412.19437, equations 21 to 25).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.batch import Batch
from mrl.check.reference import delta_rule_by_tokens
from mrl.config.schema import ParallelConfig, RoleConfig
from mrl.engine.base import PLAIN_CTX, BaseEngine
from tests.engine import tiny
from tests.engine.lora import make_engine

NORM = 1e-5  # of tests.engine.tiny's models
FURTHER = {name: name for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj")}
OF_QWEN3_5 = dict(zip(FURTHER, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"), strict=True))
"""What is beside the block, by its name in the paper's first code -> in files."""


def names_of(config: dict[str, Any], layer: int) -> tuple[str, dict[str, str]]:
    """What the names of an MTP layer's block begin with, and of what is beside it."""
    if config["model_type"].startswith("qwen3_5"):
        return "mtp.layers.0.", {name: f"mtp.{of_file}" for name, of_file in OF_QWEN3_5.items()}
    own = f"model.layers.{layer}."
    return own, {name: own + name for name in FURTHER}


def make_model(
    folder: str, family: str, *, layers: int = 1, copies: bool = True, tied: bool = False, **options: Any
) -> str:
    """Saves a tiny model of `family` with MTP layers in `folder` and returns it. copies: with the embedding and the output
    layer in each of them again, as published models have them."""
    tiny.make_model(folder, family, tied=tied, **options)
    place = pathlib.Path(folder)
    config, held = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
    count, hidden, generator = config["num_hidden_layers"], config["hidden_size"], torch.Generator().manual_seed(1)
    for layer in range(count, count + layers):
        last, (own, further) = f"model.layers.{count - 1}.", names_of(config, layer)
        shapes = {own + n.removeprefix(last): t.shape for n, t in held.items() if n.startswith(last)}
        shapes |= {f"{name}.weight": (hidden,) for name in further.values()}
        shapes[further["eh_proj"] + ".weight"] = (hidden, 2 * hidden)
        of_norm = 0.0 if further["hnorm"].startswith("mtp.") else 1.0
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            held[name] = of_norm + 0.1 * noise if "norm" in name else 0.15 * noise
        if copies and of_norm:
            held[own + "embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
            held[own + "shared_head.head.weight"] = held[
                "model.embed_tokens.weight" if tied else "lm_head.weight"
            ].clone()
    save_file(held, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config | {COUNTS[bool(of_norm)]: layers}))
    return folder


COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def reference(
    folder: str, batch: Batch, weight: float, *, detach: bool = False, temperature: float = 1.0
) -> tuple[float, float, dict[str, Tensor]]:
    """Returns the loss, the MTP layers' loss, and the gradient of their sum by the names of files, for one batch.
    detach: the latter's stays within these layers. temperature: divides all logits."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    held: dict[str, Tensor] = {}
    for file in pathlib.Path(folder).glob("*.safetensors"):
        held |= load_file(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    count, layers = config["num_hidden_layers"], next(config[name] for name in COUNTS if config.get(name))
    heads = [_Layer(model, held, names_of(config, count + i)) for i in range(layers)]
    loss, further = torch.zeros(()), torch.zeros(())
    for tokens, labels, mask in zip(
        *(t.split(batch.lengths.tolist()) for t in (batch.tokens, batch.labels, batch.loss_mask)), strict=True
    ):
        with delta_rule_by_tokens(model):
            hidden = model.model(tokens[None]).last_hidden_state[0]
        loss = loss + _sum(model.lm_head.weight / temperature, hidden, labels, mask)
        embedding, output = model.model.embed_tokens.weight, model.lm_head.weight / temperature
        if detach:
            hidden, embedding, output = hidden.detach(), embedding.detach(), output.detach()
        for depth, head in enumerate(heads, start=1):
            if len(tokens) <= depth:
                break
            hidden = head(hidden[:-1], embedding[tokens[depth:]])
            further = further + _sum(output, hidden, labels[depth:], mask[depth:]) / layers
    tokens_of_batch = batch.denominators["tokens"]
    ((loss + weight * further) / tokens_of_batch).backward()
    gradients = _unstacked({name: p.grad for name, p in model.named_parameters()})
    for head in heads:
        gradients |= head.gradients()
    return loss.item() / tokens_of_batch, further.item() / tokens_of_batch, gradients


def _sum(output: Tensor, hidden: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The sum of negative log-likelihoods that the mask weighs. output: the output layer's weight."""
    return (F.cross_entropy(F.linear(hidden, output), labels, reduction="none") * mask).sum()


class _Layer:
    """One MTP layer. In a sequence of n tokens that of depth k has n - k places."""

    def __init__(self, model: Any, held: dict[str, Tensor], names: tuple[str, dict[str, str]]) -> None:
        self.model, (self.own, self.names) = model, names
        self.centered = self.own.startswith("mtp.")
        self.block = copy.deepcopy(model.model.layers[-1])
        of_block = {n.removeprefix(self.own): t for n, t in held.items() if n.startswith(self.own)}
        self.further = {name: torch.nn.Parameter(held[f"{own}.weight"]) for name, own in self.names.items()}
        for other in (*FURTHER, "embed_tokens", "shared_head.head"):
            of_block.pop(f"{other}.weight", None)
        wanted = self.block.state_dict()
        stacked = _stacked(of_block)
        assert stacked.keys() == wanted.keys(), stacked.keys() ^ wanted.keys()
        self.block.load_state_dict(stacked)

    def __call__(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        joined = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", hidden)], dim=-1)
        x = F.linear(joined, self.further["eh_proj"])[None]
        positions = torch.arange(x.shape[1])[None]
        causal = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        output = self.block(
            x,
            attention_mask=causal,
            position_ids=positions,
            position_embeddings=self.model.model.rotary_emb(x, positions),
        )
        return self._norm("shared_head.norm", output[0] if output.dim() == 3 else output)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.further[name] + 1 if self.centered else self.further[name], NORM)

    def gradients(self) -> dict[str, Tensor]:
        found = _unstacked({name: p.grad for name, p in self.block.named_parameters()})
        further = {f"{self.names[name]}.weight": p.grad for name, p in self.further.items()}
        return {self.own + name: grad for name, grad in found.items()} | further


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer's file, experts as transformers' module has them: stacked, gate and up joined."""
    plain = {n: t for n, t in tensors.items() if ".experts." not in n}
    experts = 1 + max((int(n.split(".experts.")[1].split(".")[0]) for n in tensors if ".experts." in n), default=-1)
    if not experts:
        return plain
    of = [{k: tensors[f"mlp.experts.{e}.{k}_proj.weight"] for k in ("gate", "up", "down")} for e in range(experts)]
    plain["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in of])
    plain["mlp.experts.down_proj"] = torch.stack([x["down"] for x in of])
    return plain


def _unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    found = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name, stack in tensors.items():
        if ".experts." not in name:
            continue
        place = name.rpartition(".")[0]
        for e, matrix in enumerate(stack):
            parts = (
                [("gate_proj", "up_proj"), matrix.chunk(2)]
                if name.endswith("gate_up_proj")
                else [("down_proj",), [matrix]]
            )
            found |= {f"{place}.{e}.{part}.weight": t for part, t in zip(*parts, strict=True)}
    return found


def resumes(config: RoleConfig, out: str, parallel: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Saves after a step; a new engine goes on from there as the first one does, to the bit, and exports. parallel:
    other layouts that load the checkpoint. Returns what they differ by, and the weights after two steps."""
    first = make_engine(config)
    _update(first, 0)
    first.save_checkpoint(out, global_step=1)
    loss, second = _update(first, 1), make_engine(config)
    second.load_checkpoint(out)
    again = _update(second, 1)
    weights = {name: value.clone() for name, value in first.hf_weights()}
    of_second = {name: value.clone() for name, value in second.hf_weights()}
    second.export_hf(f"{out}/hf")
    assert all(torch.equal(weights[name], of_second[name]) for name in weights) and weights.keys() == of_second.keys()
    far = {"losses": float(loss != again)}
    for layout in parallel:
        engine = dataclasses.replace(config.engine, parallel=ParallelConfig(**layout))
        other = make_engine(dataclasses.replace(config, engine=engine))
        other.load_checkpoint(out)
        _update(other, 1)
        differ = [tiny.relative_l2(value, weights[name]) if weights else 0.0 for name, value in other.hf_weights()]
        far[str(layout)] = max(differ, default=0.0)
    return {"far": far, "weights": weights}


def _update(engine: BaseEngine, seed: int) -> tuple[float, float]:
    return _trained(engine, tiny.uneven_batch(seed))


def _trained(engine: BaseEngine, batch: Batch) -> tuple[float, float]:
    found = _calls(engine, batch, 1)
    engine.optimizer_step()
    engine.lr_scheduler_step()
    return found["loss"], found["mtp_loss"]


def step(config: RoleConfig, *, seed: int = 0, calls: int = 1) -> dict[str, Any]:
    """One step of an engine on all ranks: losses, gradients, norm, and weights after it. calls: of how many the
    mini-batch comes in."""
    return _found(make_engine(config), seed, calls)


def _found(engine: BaseEngine, seed: int, calls: int) -> dict[str, Any]:
    found = _calls(engine, tiny.uneven_batch(seed), calls)
    found["gradients"] = {name: value.clone() for name, value in engine.hf_gradients()}
    found["norm"] = float(engine.optimizer_step())
    found["weights"] = {name: value.clone() for name, value in engine.hf_weights()}
    return found


def apart(config: RoleConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `step` finds with MTP layers and without them, after two further steps each."""
    found = []
    for of in (config, dataclasses.replace(config, mtp=None)):
        engine = make_engine(of)
        first = _found(engine, 0, 2)
        first["first"] = first.pop("weights")
        for seed in (1, 2):
            _calls(engine, tiny.uneven_batch(seed), 1)
            engine.optimizer_step()
            engine.lr_scheduler_step()
        found.append(first | {"weights": {name: value.clone() for name, value in engine.hf_weights()}})
    return found[0], found[1]


def _calls(engine: BaseEngine, batch: Batch, calls: int) -> dict[str, Any]:
    engine.optimizer_zero_grad()
    loss = mtp_loss = 0.0
    with engine.train_mode():
        for part in range(calls):
            rows = list(range(part, batch.num_sequences, calls))
            share = engine.shard_data(batch.select(rows))
            _, of_call, ctx = engine.forward_backward_step(share, PLAIN_CTX | {"last": part == calls - 1})
            loss, mtp_loss = loss + of_call, mtp_loss + ctx["metrics"].get("mtp_loss", math.nan)
    return {"loss": loss, "mtp_loss": mtp_loss}
