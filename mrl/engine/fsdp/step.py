"""One micro-batch through a transformers model: inputs, model, outputs; and who divides the loss.

Dimensions: `T` tokens of the micro-batch without padding, `S` sequences, `L` the longest of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mrl.batch import Batch
from mrl.engine.base import Ctx, Predictions
from mrl.engine.fsdp.output import hidden_states, output_weight
from mrl.engine.logprobs import LogitRule, VocabShard, log_probs_from_hidden


def fsdp_loss(loss_sum: Tensor, *, denominator: float, dp: int) -> Tensor:
    """The scalar to call backward on, for a micro-batch's loss sum. Who divides on this backend, by what:

    A loss function returns the sum `s[r, m]` over micro-batch `m` of rank `r`, and we want, for the denominator `D` of
    the global mini-batch,

        G = d/dw  sum over ranks r and micro-batches m of  s[r, m] / D

    FSDP averages what each backward pass leaves over the `dp` ranks of its mesh, and the results of several backward
    passes add up. With `L = s / D * f` the gradient is `sum over m of (1 / dp) sum over r of d/dw L[r, m]`, which is
    `G * f / dp`; hence `f = dp`. The number of micro-batches takes no part.
    """
    return loss_sum * (dp / denominator)


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """What the model is fed. tokens, positions: [1, T] packed or [S, L] padded on the right. labels: [T].
    trained: which of these count in the loss; None for all.

    document_lengths: of the documents in the one packed row, None when padded. places: [T] where each real token lies
    in the flattened rows, None when that is where it already is.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    trained: Tensor | None
    document_lengths: list[int] | None
    places: Tensor | None


def prepare(batch: Batch, *, packed: bool, device: torch.device) -> ModelInputs:
    """Step one. A micro-batch without sequences is one dummy token, of which `places` keeps nothing."""
    if not batch.num_sequences:
        dummy = torch.zeros(1, 1, dtype=torch.int64, device=device)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return ModelInputs(dummy, dummy, nothing, None, None, nothing)
    lengths = batch.lengths.tolist()
    labels, positions = batch.labels.to(device), batch.position_ids
    counts = batch.loss_mask.cpu() != 0
    trained = None if counts.all() else counts.nonzero()[:, 0].to(device)
    if packed:
        rows = (batch.tokens[None].to(device), positions[None].to(device))
        return ModelInputs(*rows, labels, trained, lengths, None)
    tokens = pad_sequence(batch.tokens.split(lengths), batch_first=True)
    longest = tokens.shape[1]
    row_starts = torch.arange(len(lengths), device=positions.device).repeat_interleave(batch.lengths) * longest
    every_position = torch.arange(longest).expand(len(lengths), -1)
    return ModelInputs(
        tokens.to(device), every_position.to(device), labels, trained, None, (row_starts + positions).to(device)
    )  # fmt: skip


def hidden_of(hf: nn.Module, inputs: ModelInputs) -> Tensor:
    """[T, H] what the output layer is given for each token."""
    documents = {} if inputs.document_lengths is None else {"document_lengths": inputs.document_lengths}
    hidden = hidden_states(hf, input_ids=inputs.tokens, position_ids=inputs.positions, **documents).flatten(0, 1)
    return hidden if inputs.places is None else hidden[inputs.places]


def predict(hf: nn.Module, inputs: ModelInputs, *, head: str, ctx: Ctx, rule: LogitRule) -> Predictions:
    """Steps two and three: log-probs [T] of the labels, and entropies [T] where asked for, 0 where a label does not train; or values [T].

    head: "lm" or "value". rule: what the model makes of what its output layer gives.
    ctx: "entropy" is none (default), detached or differentiable; "temperature" divides the logits (default 1).
    """
    hidden, weight = output_weight(hf, hidden_of(hf, inputs))
    if head == "value":
        return {"values": (hidden @ weight.t())[:, 0].clone().float()}  # FSDP wants no view of what its module made
    log_probs, entropy = log_probs_from_hidden(
        hidden,
        weight,
        inputs.labels,
        shard=VocabShard(weight.shape[0]),
        rows=inputs.trained,
        temperature=ctx.get("temperature", 1.0),
        entropy=ctx.get("entropy", "none"),
        rule=rule,
    )
    return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
