"""One micro-batch through a transformers model: inputs, model, outputs; and who divides the loss.

Dimensions: `T` tokens of the micro-batch without padding, `S` sequences; `R` rows of `L` places. `C` ranks share the
sequences (Ulysses), so each has `L/C` places of a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mrl.batch import Batch, to_device
from mrl.engine.base import Ctx, Predictions
from mrl.engine.fsdp import vision
from mrl.engine.fsdp.output import hidden_states, output_weight
from mrl.engine.fsdp.rotary import LengthDependentRotary
from mrl.engine.fsdp.ulysses import Ulysses
from mrl.engine.fsdp.vision import Images
from mrl.engine.logprobs import LogitRule, VocabShard, log_probs_from_hidden, top_log_probs
from mrl.ops.packed import Documents


def fsdp_loss(loss_sum: Tensor, *, denominator: float, ranks: int) -> Tensor:
    """Returns the scalar to call backward on, for a micro-batch's loss sum.

    A loss function returns the sum `s[d, m]` over micro-batch `m` of data-parallel rank `d`, and we want, for the
    denominator `D` of the global mini-batch,

        G = d/dw  sum over d and m of  s[d, m] / D

    The `cp` ranks that share the sequences of `d` gather the outputs (Ulysses.whole) and compute the same `s[d, m]`.
    The backward pass hands each rank `c` the part of the gradient that comes through its own places. Over `c` the parts
    add up to the gradient of one loss. FSDP averages each backward pass over all ranks of the data, `ranks = dp * cp`,
    whether they hold shards or copies (HSDP). The results of several backward passes add up. With `L = s / D * f` the
    gradient is `sum over m of (1 / ranks) sum over d and c of d/dw L[d, m] part c`. That is `G * f / ranks`, hence
    `f = ranks`. The number of micro-batches takes no part.
    """
    return loss_sum * (ranks / denominator)


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """Holds the model's inputs on this rank."""

    tokens: Tensor  # [R, L/C], one row where packed, else one for each sequence, padded on the right
    positions: Tensor  # [R, L/C]; [3, R, L/C] of a model that reads images
    labels: Tensor  # [R * L/C] or [R * L/C, K]
    trained: Tensor | None  # which of these places count in the loss; None for all
    documents: Documents | None  # in the one packed row of L places; None when padded
    places: Tensor | None
    """[T] where each real token lies in the R * L places of all ranks; None where one rank has these and no others."""
    ulysses: Ulysses
    images: Images | None = None  # of a model that reads them
    rotary: LengthDependentRotary | None = None  # of a model whose angles follow the length of a sequence
    lengths: Tensor | None = None
    """With rotary: [R, L/C], on the host, of the sequence that a place is in, 1 for padding."""

    def restore(self, outputs: Tensor) -> Tensor:
        """Gathers [R * L/C, ..] of this rank to [T, ..] of the micro-batch, the same on all ranks that share it."""
        if self.places is None:
            return outputs
        return self.ulysses.whole(outputs.unflatten(0, self.tokens.shape)).flatten(0, 1)[self.places]


def prepare(
    batch: Batch,
    *,
    packed: bool,
    device: torch.device,
    ulysses: Ulysses,
    reads_images: nn.Module | None = None,
    rotary: LengthDependentRotary | None = None,
) -> ModelInputs:
    """Makes the model's inputs: step one. Without sequences they are one dummy token a rank; `places` keeps none of it.

    reads_images: the model, if it is one of vision and language. rotary: its angles, if they follow the length of a
    sequence.
    """
    lengths = batch.lengths.tolist()
    if packed:
        length = ulysses.padded(batch.num_tokens)
        shape, places = (1, length), torch.arange(batch.num_tokens)
        padding = length - batch.num_tokens
        documents = [*lengths, padding] if padding else lengths  # padding is a document of its own
    else:
        length = ulysses.padded(batch.max_length)
        shape, documents = (max(len(lengths), 1), length), None
        starts = torch.arange(len(lengths)) * length
        places = batch.position_ids.cpu() + starts.repeat_interleave(batch.lengths.cpu())

    def laid_out(values: Tensor) -> Tensor:
        rows = torch.zeros(*values.shape[:-1], shape[0] * shape[1], dtype=values.dtype)
        rows[..., places] = values.cpu()
        return rows

    # All that is aligned with tokens, and nothing else, is divided into the ranks' shares: here alone.
    aligned = {
        "tokens": laid_out(batch.tokens),
        "positions": laid_out(batch.position_ids),  # 0 of padding, which no model is short of
        "labels": laid_out(batch.labels.movedim(0, -1)),
        "counts": laid_out(batch.loss_mask) != 0,
    }
    if reads_images is not None:
        aligned["positions"] = laid_out(vision.positions(reads_images, batch))
        takes = vision.image_tokens(reads_images, batch)
        aligned["features"] = laid_out(takes.cumsum(0) * takes)  # as `Images.feature`
    if rotary is not None:
        aligned["lengths"] = laid_out(batch.lengths.repeat_interleave(batch.lengths)).clamp(min=1)
        if reads_images is not None:  # whose positions are not those of its tokens
            rotary.check(batch.max_length, "a model that reads images does not follow it")
    own = {name: ulysses.own(values.view(*values.shape[:-1], *shape)) for name, values in aligned.items()}
    counts = own["counts"].flatten()
    return ModelInputs(
        tokens=to_device(own["tokens"], device),
        positions=to_device(own["positions"], device),
        labels=to_device(own["labels"].flatten(-2).movedim(-1, 0), device),
        trained=None if counts.all() else to_device(counts.nonzero()[:, 0], device),
        documents=None if documents is None else Documents.of(documents, device),
        places=None if len(places) == shape[0] * shape[1] and ulysses.size == 1 else to_device(places, device),
        ulysses=ulysses,
        images=None if reads_images is None else vision.images_of(reads_images, batch, own["features"], device),
        rotary=rotary if reads_images is None else None,
        lengths=own.get("lengths"),
    )


def hidden_of(hf: nn.Module, inputs: ModelInputs) -> Tensor:
    """Returns [R * L/C, H]: the input of the output layer for each place of this rank."""
    options: dict[str, Any] = {"position_ids": inputs.positions}
    options |= {} if inputs.documents is None else {"documents": inputs.documents}
    options |= {"ulysses": inputs.ulysses} if inputs.ulysses.size > 1 else {}
    if inputs.images is None:
        by_lengths = contextlib.nullcontext() if inputs.rotary is None else inputs.rotary.by_lengths(inputs.lengths)
        with by_lengths:
            return hidden_states(hf, input_ids=inputs.tokens, **options).flatten(0, 1)
    fed = vision.embed_images(hf, inputs.tokens, inputs.images)
    return hf.model.language_model(**fed, **options, use_cache=False).last_hidden_state.flatten(0, 1)


def predict(hf: nn.Module, inputs: ModelInputs, *, head: str, ctx: Ctx, rule: LogitRule) -> Predictions:
    """Returns the predictions, steps two and three: log-probs in the labels' shape, or values [T] of a value head.

    If asked for, entropies [T] come with them, 0 where no label trains, and the largest log-probs [T, top].

    head: "lm" or "value". rule: from the numbers of the output layer to logits.
    ctx: "temperature" divides the logits; "entropy" is none (default), detached or differentiable; "top" is how many;
    "first_temperature" as in `BaseEngine.forward_backward_step`.
    """
    hidden, weight = output_weight(hf, hidden_of(hf, inputs))
    if head == "value":
        # A copy: an operation in place on a view drops FSDP's pre-backward hook, and the backward pass then gathers no
        # weights (torch 2.13, _fsdp_state.py, _register_pre_backward_hook).
        values = (hidden @ weight.t())[:, 0].clone().float()
        return {"values": inputs.restore(values)}
    shard, temperature = VocabShard(weight.shape[0]), ctx["temperature"]
    log_probs, entropy = log_probs_from_hidden(
        hidden, weight, inputs.labels, shard=shard, rows=inputs.trained, temperature=temperature,
        entropy=ctx.get("entropy", "none"), rule=rule, first_temperature=ctx.get("first_temperature"),
    )  # fmt: skip
    outputs = {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
    if top := ctx.get("top", 0):
        found = top_log_probs(hidden, weight, top, shard=shard, rows=inputs.trained, temperature=temperature, rule=rule)
        outputs |= dict(zip(("top_log_probs", "top_tokens"), found, strict=True))
    return {name: inputs.restore(values) for name, values in outputs.items()}
