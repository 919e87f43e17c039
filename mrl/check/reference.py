"""Makes a step of Hugging Face and torch.optim.AdamW, or Muon in plain torch, on one process, one sequence at a time.

Engines are compared with it. mrl computes nothing of it: no padding, no packing, no micro-batches. Labels are shifted
here, from rows as the data gives them, and sums are divided once. Tensors have the names and shapes of the files that
transformers writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.core_model_loading import revert_weight_conversion

from mrl import patches
from mrl.config.schema import OptimizerConfig
from mrl.data.dataset import Example
from mrl.weights.composites import COMPOSITES, as_stored_in
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import VISION_LANGUAGE
from mrl.weights.stacks import restack

HEADS = {"lm": AutoModelForCausalLM, "value": AutoModelForSequenceClassification}

Fields = Mapping[str, Tensor]
TokenLoss = Callable[[Tensor, Tensor, Fields], Tensor]
"""`(log-probs or values [T], labels [T], fields of the labels) -> the loss of each token [T]`."""


def negative_log_prob(log_probs_T: Tensor, labels_T: Tensor, fields: Fields) -> Tensor:
    return -log_probs_T


def policy_gradient(log_probs_T: Tensor, labels_T: Tensor, fields: Fields) -> Tensor:
    return -fields["advantages"] * log_probs_T


def squared_error(values_T: Tensor, labels_T: Tensor, fields: Fields) -> Tensor:
    return (values_T - fields["returns"]) ** 2 / 2


TokenWeights = Callable[[Sequence[Tensor]], list[Tensor]]
"""Loss masks of all sequences, [T] each -> the weight of each token's loss, whose sum is the loss."""


def token_mean(masks: Sequence[Tensor]) -> list[Tensor]:
    count = sum(float(mask_T.sum()) for mask_T in masks)
    return [mask_T / count for mask_T in masks]


def sequence_mean(masks: Sequence[Tensor]) -> list[Tensor]:
    """Weighs tokens for the mean over sequences of the mean over their tokens."""
    count = sum(bool(mask_T.any()) for mask_T in masks)
    return [mask_T / max(float(mask_T.sum()), 1.0) / count for mask_T in masks]


def fixed_length(masks: Sequence[Tensor], length: int) -> list[Tensor]:
    """Weighs tokens for the mean over sequences of their sum over `length`."""
    count = sum(bool(mask_T.any()) for mask_T in masks)
    return [mask_T / length / count for mask_T in masks]


GroupLoss = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Fields]], Tensor]
"""`(log-probs or values [T], loss masks [T], fields)`, of all sequences of a group -> what they add to the loss."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """Is the loss that the gradient is taken of."""

    of_tokens: TokenLoss = negative_log_prob
    weights: TokenWeights = token_mean
    head: str = "lm"  # a key of `HEADS`
    temperature: float = 1.0  # that logits are divided by
    of_group: GroupLoss | None = None  # takes the place of `of_tokens` and `weights`
    group: int = 1  # neighbouring sequences that `of_group` takes together


@dataclasses.dataclass
class Reference:
    """Holds the numbers of one process; tensors by the names of the model's files, or of peft's if adapters train."""

    loss: float  # of the first step
    grad_norm: float  # of the first step, before clipping
    log_probs: Tensor  # [T] of the first step, in the order of the batch; 0 where the mask is 0. Values of a value head
    gradients: dict[str, Tensor]  # fp32, of the first step, before clipping
    weights: dict[str, Tensor]  # after the last step
    losses: list[float]
    grad_norms: list[float]


def run(
    model: torch.nn.Module,
    examples: Sequence[Example],
    loss: Loss,
    *,
    optimizer: OptimizerConfig,
    rates: Sequence[float],
    fields: Sequence[Fields] = (),
) -> Reference:
    """Makes a step of the optimizer for each learning rate in `rates`, all on the same batch.

    optimizer: its name, betas, eps, weight decay, clipping and Muon's keys count. fields: of each example's labels, for
    the loss.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kind = model.config.model_type if optimizer.name == "muon" else ""
    of_muon = [(name, p) for name, p in trained if kind and matrices(name, p.data, model_type=kind)]
    muon, in_muon = Muon(of_muon, optimizer, model_type=kind), {name for name, _ in of_muon}
    # stacked biases of experts have two dimensions, and are biases
    decayed = [p for name, p in trained if p.ndim >= 2 and not name.endswith("bias") and name not in in_muon]
    others = [p for name, p in trained if p.ndim < 2 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, foreach=False)
    losses, norms, first = [], [], None
    for rate in rates:
        for _, parameter in trained:
            parameter.grad = None
        total, log_probs = backward(model, examples, loss, fields)
        # frozen parameters ask for a gradient after transformers loads them, and get none
        gradients = {name: p.grad for name, p in trained if p.grad is not None}
        if first is None:
            first = (log_probs, file_names(model, gradients))
        # torch's own norm of 28 million entries is off by 1e-5 in fp32
        norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
        if optimizer.clip_grad and norms[-1] > optimizer.clip_grad:
            for _, parameter in trained:
                if parameter.grad is not None:
                    parameter.grad *= optimizer.clip_grad / (norms[-1] + 1e-6)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        muon.step(rate)
        losses.append(total)
    assert first is not None, "no step was asked for"
    return Reference(losses[0], norms[0], *first, weights=weights_of(model), losses=losses, grad_norms=norms)


def backward(
    model: torch.nn.Module, examples: Sequence[Example], loss: Loss, fields: Sequence[Fields] = ()
) -> tuple[float, Tensor]:  # fmt: skip
    """Returns the loss and the log-probs [T] (0 if the mask is 0) or values [T].

    Gradients of the loss are added to those of the model.
    """
    device = next(model.parameters()).device
    masks = [torch.tensor(example.mask[1:], dtype=torch.float32, device=device) for example in examples]
    own = [{name: values.to(device) for name, values in of_one.items()} for of_one in fields or [{}] * len(examples)]
    weights = loss.weights(masks) if loss.of_group is None else []
    total, predictions = 0.0, []
    for first in range(0, len(examples), loss.group):
        group = slice(first, first + loss.group)
        predicted = []
        for example, mask_T in zip(examples[group], masks[group], strict=True):
            predicted_T, labels_T = predict(model, example, head=loss.head, temperature=loss.temperature)
            predicted.append(predicted_T * (mask_T != 0) if loss.head == "lm" else predicted_T)
        if loss.of_group is None:
            share = (loss.of_tokens(predicted[0], labels_T, own[first]) * weights[first]).sum()
        else:
            share = loss.of_group(predicted, masks[group], own[group])
        share.backward()
        total += share.item()
        predictions += [predicted_T.detach() for predicted_T in predicted]
    return total, torch.cat(predictions).cpu()


def predict(
    model: torch.nn.Module, example: Example, *, head: str = "lm", temperature: float = 1.0
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (log-probs of the labels or values [T], labels [T])."""
    device = next(model.parameters()).device
    ids = torch.tensor(example.ids, device=device)
    tokens_T, labels_T = ids[:-1], ids[1:]
    images = {name: tensor.to(device) for name, tensor in example.multi_modal_inputs.items()}
    _forget_lengths(model)
    if head == "lm":
        if images:
            images = {**images, "mm_token_type_ids": (tokens_T[None] == model.config.image_token_id).int()}
        with delta_rule_by_tokens(model):
            logits = model(input_ids=tokens_T[None], **images).logits[0]
        # in fp64: over 49,152 entries torch's fp32 log_softmax is off by 5e-6 on a CPU, always to the same side
        log_probs = torch.log_softmax(logits.double() / temperature, -1)
        return log_probs.gather(1, labels_T[:, None])[:, 0].float(), labels_T
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    with delta_rule_by_tokens(model):
        hidden = inner.base_model(input_ids=tokens_T[None]).last_hidden_state
    return inner.score(hidden)[0, :, 0], labels_T


@contextlib.contextmanager
def delta_rule_by_tokens(model: torch.nn.Module) -> Iterator[None]:
    """Computes the gated delta rule inside token by token.

    transformers' rule by chunks sums decays in fp32. A head that forgets fast loses their differences: gradients of
    A_log were off by up to 1e-3 (5.23.0).
    """
    modules = {type(module).__module__ for module in model.modules() if hasattr(module, "A_log")}
    by_tokens = {name: getattr(sys.modules[name], "torch_recurrent_gated_delta_rule", None) for name in modules}
    new = {f"{name}:torch_chunk_gated_delta_rule": rule for name, rule in by_tokens.items() if rule is not None}
    with patches.replaced(new):
        yield


def load(
    folder: str, head: str = "lm", *, dtype: torch.dtype = torch.float32, attention: str = "eager",
    adapter: str | None = None,
) -> torch.nn.Module:  # fmt: skip
    """Returns the model in `folder` as transformers loads it; with `adapter`, a folder of peft's, that alone trains."""
    reads_images = AutoConfig.from_pretrained(folder).model_type in VISION_LANGUAGE
    kind = AutoModelForImageTextToText if reads_images else HEADS[head]
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).train()
    # transformers gives the row of `pad_token_id` no gradient, which may be a token of the data (docs/loss.md)
    model.get_input_embeddings().padding_idx = None
    return model if adapter is None else with_adapter(model, adapter)


def with_adapter(model: torch.nn.Module, adapter: str) -> torch.nn.Module:
    """Returns the model with the adapters of a folder, which alone train, as peft loads them."""
    from peft import PeftModel  # here: a vLLM of a venv of its own has none

    return PeftModel.from_pretrained(model, adapter, is_trainable=True)  # type: ignore[arg-type]


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns copies of the tensors in the model's files, by the names there; with adapters, of those alone."""
    if hasattr(model, "get_base_model"):
        return file_names(model, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    in_files = model.state_dict()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    weights |= {name: buffer for name, buffer in model.named_buffers() if name in in_files}
    return file_names(model, weights)


def file_names(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies under the names and in the shapes of the files (transformers holds experts fused)."""
    if hasattr(model, "get_base_model"):
        inside = (".modules_to_save.default.", ".default.")
        return {name.replace(inside[0], ".").replace(inside[1], "."): t.clone() for name, t in tensors.items()}
    found = {name: t.clone() for name, t in revert_weight_conversion(model, dict(tensors)).items()}
    if model.config.model_type not in COMPOSITES.values():
        return found
    # transformers writes experts that a composite's folder holds stacked one by one, in part
    family = as_stored_in(model.name_or_path, FAMILIES[model.config.model_type])
    of_table = ((name.replace(family.prefix, "model.", 1), tensor) for name, tensor in found.items())
    return dict(restack(of_table, family, model.config.to_dict()))


def _forget_lengths(model: torch.nn.Module) -> None:
    """Resets rotary embeddings of type "dynamic": they keep the frequencies of the longest sequence so far."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq, module.max_seq_len_cached = module.original_inv_freq.clone(), module.original_max_seq_len


def matrices(name: str, tensor: Tensor, *, model_type: str) -> list[Tensor]:
    """Returns views of the matrices that Muon updates in a parameter of a transformers model, or in its gradient.

    Embeddings, heads, norms, biases and convolutions have none. transformers holds the experts of a layer in one
    parameter, and the two projections of each side by side.
    """
    if ".layers." not in name or name.endswith(("bias", "conv1d.weight")) or tensor.ndim < 2:
        return []
    if tensor.ndim == 2:
        return [tensor]
    joined = "gate_up" in name
    if model_type == "gpt_oss":  # columns are outputs, and those of the two projections alternate
        return [m.T for expert in tensor for m in ([expert[:, ::2], expert[:, 1::2]] if joined else [expert])]
    return [m for expert in tensor for m in (expert.chunk(2) if joined else [expert])]


class Muon:
    """Updates the matrices of some parameters by Muon, with fp64 products, as its author describes it.

    https://kellerjordan.github.io/posts/muon
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig, *, model_type: str) -> None:
        self.named, self.config, self.model_type = named, config, model_type
        self.averages: dict[tuple[str, int], Tensor] = {}

    def step(self, rate: float) -> None:
        """Makes an update from the gradients that are there."""
        own = self.config.muon
        for name, parameter in self.named:
            if parameter.grad is None:
                continue
            pairs = (matrices(name, t, model_type=self.model_type) for t in (parameter.data, parameter.grad))
            for number, (weight, gradient) in enumerate(zip(*pairs, strict=True)):
                average = (1 - own.momentum) * gradient
                if (name, number) in self.averages:
                    average += own.momentum * self.averages[name, number]
                self.averages[name, number] = average
                moved = own.momentum * average + (1 - own.momentum) * gradient if own.use_nesterov else average
                scale = own.extra_scale_factor * _muon_scale(own.scale_mode, *weight.shape)
                update = scale * newton_schulz(moved.double(), own.num_ns_steps)
                weight -= rate * (self.config.weight_decay * weight + update.to(weight.dtype))


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Returns the matrix with singular values near 1: each step makes of one, s, 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(steps):
        x3 = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * x3 + 2.0315 * (x @ x.T @ x3)
    return x


def _muon_scale(mode: str, rows: int, columns: int) -> float:
    return {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": math.sqrt(max(1, rows / columns)),
    }[mode]


# -- tokens that a router is undecided about ---------------------------------------------------------------------------


def has_experts(raw: Mapping[str, Any]) -> bool:
    """Returns whether the model of a config.json routes tokens to experts."""
    counts = [value for name, value in raw.items() if name.endswith("experts") and type(value) is int]
    return any(count > 1 for count in counts)


class _Choices(TorchFunctionMode):
    """Notes narrow decisions of `torch.topk`: all routers of transformers choose by it, over [tokens, experts].

    Two right computations may send such a token to different experts, and give other numbers from there on.
    """

    def __init__(self, rounding: float) -> None:
        super().__init__()
        self.rounding = rounding
        self.narrow: Tensor | None = None  # [T], of any layer; None before the first choice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores, count = args[0], args[1] if len(args) > 1 else (kwargs or {})["k"]
            if scores.ndim == 2 and count < scores.shape[1]:  # of three dimensions are the best experts within a group
                narrow_T = self._narrow(scores.detach().float(), count)
                self.narrow = narrow_T if self.narrow is None else self.narrow | narrow_T
        return found

    def _narrow(self, scores_TE: Tensor, count: int) -> Tensor:
        ordered_TE = scores_TE.sort(-1, descending=True).values
        last_T, next_T = ordered_TE[:, count - 1], ordered_TE[:, count]
        finite_TE = torch.where(scores_TE.isfinite(), scores_TE, 0.0)  # groups that are left out have -inf
        size_T = torch.maximum(last_T.abs(), finite_TE.std(-1))
        return next_T.isfinite() & (last_T - next_T <= self.rounding * size_T)


@torch.no_grad()
def undecided_tokens(
    model: torch.nn.Module, examples: Sequence[Example], *, head: str, rounding: float
) -> Tensor | None:  # fmt: skip
    """Returns for each token of the batch [T] whether its router, or an earlier one in its sequence, is undecided.

    Returns None for a model without routers, or without such a token.

    rounding: how far apart two right scores may be, relative to their size.
    """
    found = []
    for example in examples:
        with _Choices(rounding) as choices:
            predict(model, example, head=head)
        if choices.narrow is None:
            return None
        found.append(choices.narrow.cummax(0).values)
    all_T = torch.cat(found).cpu()
    return all_T if all_T.any() else None
