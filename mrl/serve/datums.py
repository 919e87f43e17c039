"""Turns a client's data into a batch of the engine, and the engine's predictions into the client's answer.

Position `i` of a datum's input predicts its `target_tokens[i]`: the client has shifted, as `mrl.batch` does.

Dimensions: `N` positions of a datum, `K` target tokens of a position, `T` positions of all data end to end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from mrl.algorithms.sums import DENOMINATOR, LOSSES, Loss
from mrl.batch import Batch
from mrl.data.files import BadRow
from mrl.data.images import Image
from mrl.data.vision import Vision
from mrl.errors import UserError
from mrl.serve import messages
from mrl.serve.requests import check_numbers

_DTYPES = {messages.FLOAT32: np.dtype("<f4"), messages.INT64: np.dtype("<i8"), messages.INT32: np.dtype("<i4")}
_TARGETS = "target_tokens"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The bounds that a datum must keep."""

    vocab_size: int
    length: int  # positions
    vision: Vision | None = None  # None if the model reads no images


@dataclasses.dataclass(frozen=True)
class PassRequest:
    """A `forward_backward` of a client, or a `forward`."""

    model: str
    number: int  # its seq_id among the calls of the model
    loss: str
    given: Mapping[str, Any]  # options of the loss; `options_of` reads them
    forward_only: bool
    data: Sequence[Any]  # protobuf's; `batch_of` reads them


def read_call(body: bytes) -> PassRequest:
    """Returns the request of a body. Raises UserError if it is no such message."""
    try:
        sent = messages.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        why = "is no protobuf ForwardBackwardRequest"
        raise UserError("forward_backward", why=why, fix="use the tinker client") from None
    given: dict[str, Any] = dict(sent.loss_fn_config)
    for key, value in sent.loss_fn_config_v2.items():
        given[key] = value.number if value.WhichOneof("value") == "number" else value.text
    return PassRequest(sent.model_id, sent.seq_id, sent.loss_fn, given, sent.forward_only, sent.data)


def _loss_of(call: PassRequest) -> Loss:
    if call.loss not in LOSSES:
        fix = "use importance_sampling" if call.loss == "stable_reinforce" else f"use one of {', '.join(LOSSES)}"
        why = "has no public formula" if call.loss == "stable_reinforce" else "is not known here"
        raise UserError("loss_fn", call.loss, why, fix)
    return LOSSES[call.loss]


def options_of(call: PassRequest) -> dict[str, float]:
    """Returns all options of the loss; one that the client left out has its default. Raises UserError."""
    known = _loss_of(call).options
    for key, value in call.given.items():
        if key not in known:
            what = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(f"loss_fn_config.{key}", value, f"is no option of {call.loss}", what)
        if not isinstance(value, float) or not np.isfinite(value):
            raise UserError(f"loss_fn_config.{key}", value, "is no finite number", "give one")
    return {**known, **call.given}


def batch_of(call: PassRequest, limits: Limits) -> Batch:
    """Returns the data of a call. Their loss is not divided by anything.

    Raises UserError naming the datum if it does not fit the model, the loss or the other data.
    """
    fields = _loss_of(call).fields
    if not call.data:
        raise UserError("data", why="is empty", fix="send at least one datum")
    sent = [tensor for datum in call.data for tensor in datum.loss_fn_inputs.values()]
    sparse = [math.prod(map(abs, one.shape)) for one in sent if one.WhichOneof("value") == "sparse_csr"]
    check_numbers("data", sum(sparse))
    tokens: list[Tensor] = []
    images: list[Mapping[str, Tensor]] = []
    labels: list[Tensor] = []
    columns: dict[str, list[Tensor]] = {name: [] for name in fields}
    for i, datum in enumerate(call.data):
        ids, of_images = read_input(datum.model_input, f"data[{i}].model_input", limits)
        inputs = _inputs(datum, i, (_TARGETS, *fields))
        targets = inputs[_TARGETS]
        _check_targets(targets, len(ids), i, limits, call)
        if labels and targets.shape[1:] != labels[0].shape[1:]:
            why = f"has targets {_columns(targets)} and data[0] {_columns(labels[0])}"
            raise UserError(f"data[{i}]", why=why, fix="send them in calls of their own")
        for name in fields:
            if inputs[name].shape != targets.shape:
                shapes = f"{list(inputs[name].shape)} and {_TARGETS} {list(targets.shape)}"
                raise UserError(
                    f"data[{i}].loss_fn_inputs.{name}", why=f"has the shape {shapes}", fix="send equal ones"
                )
            columns[name].append(inputs[name].to(torch.float32))
        tokens.append(ids)
        images.append(of_images)
        labels.append(targets.to(torch.int64))
    joined = torch.cat(tokens)
    return Batch(
        tokens=joined, labels=torch.cat(labels), loss_mask=torch.ones(len(joined)),
        lengths=torch.tensor([len(ids) for ids in tokens]),
        token_fields={name: torch.cat(parts) for name, parts in columns.items()},
        multi_modal_inputs=tuple(images) if any(images) else (),
        denominators={DENOMINATOR: 1.0, "tokens": float(len(joined)), "sequences": float(len(tokens))},
    )  # fmt: skip


def _columns(targets: Tensor) -> str:
    return "[N]" if targets.dim() == 1 else f"[N, {targets.shape[1]}]"


def read_input(chunks: Sequence[Any], where: str, limits: Limits) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the token ids of a model input, [N] int64, and the tensors of its images.

    The ids include those that stand for images. Raises UserError for anything that the model lacks.
    """
    parts: list[Any] = []
    images: list[Mapping[str, Tensor]] = []
    for i, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("value")
        if kind == "image":
            ids, of_image = _read_image(chunk.image, f"{where}[{i}]", limits.vision)
            parts.append(np.array(ids))
            images.append(of_image)
            continue
        if kind != "encoded_text":
            raise UserError(where, why=f"has a chunk of kind {kind or 'unknown'}", fix="send encoded_text")
        parts.append(_array(chunk.encoded_text.tokens, messages.INT32, where))
        if limits.vision is not None and limits.vision.count(parts[-1].tolist()):
            why = f"has a token in its text that stands for an image ({limits.vision.image_token})"
            raise UserError(f"{where}[{i}]", why=why, fix="send the image as a chunk of its own")
    ids = torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(0, dtype=torch.int64)
    check_length(len(ids), where, limits)
    check_vocabulary(ids, where, limits)
    return ids, {name: torch.cat([one[name] for one in images]) for name in images[0]} if images else {}


def _read_image(sent: Any, where: str, vision: Vision | None) -> tuple[list[int], dict[str, Tensor]]:
    if vision is None:
        raise UserError(where, why="is an image, and this model reads text alone", fix="send encoded_text")
    try:
        ids, of_image = vision.read(Image(where, data=sent.data))
    except BadRow as error:
        raise UserError(str(error)) from None
    if sent.HasField("expected_tokens") and sent.expected_tokens != len(ids):
        fix = f"expect {len(ids)}, or send it in another size"
        raise UserError(f"{where}.expected_tokens", sent.expected_tokens, f"is not the {len(ids)} that it takes", fix)
    return ids, of_image


def check_ids(ids: Sequence[int], where: str, limits: Limits) -> None:
    """Raises UserError if there are no tokens or too many, or one is not in the vocabulary."""
    check_length(len(ids), where, limits)  # first: a tensor of millions holds the interpreter's lock
    check_vocabulary(torch.tensor(ids, dtype=torch.int64), where, limits)


def check_length(count: int, where: str, limits: Limits) -> None:
    """Raises UserError if there are no tokens or too many."""
    if not count:
        raise UserError(where, why="has no token", fix="send at least one")
    if count > limits.length:
        fix = f"send at most {limits.length}, or raise serve.max_length"
        raise UserError(where, why=f"has {count} tokens", fix=fix)


def check_vocabulary(ids: Tensor, where: str, limits: Limits) -> None:
    """Raises UserError if a token is not in the vocabulary."""
    outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(outside):
        fix = f"the model has the tokens 0 to {limits.vocab_size - 1}: use its tokenizer"
        raise UserError(where, int(outside[0]), "is no token of the model", fix)


def _check_targets(targets: Tensor, length: int, i: int, limits: Limits, call: PassRequest) -> None:
    where = f"data[{i}].loss_fn_inputs.{_TARGETS}"
    if targets.dtype.is_floating_point:
        raise UserError(where, why="has floating-point numbers", fix="send int64")
    most = 2 if call.loss == "cross_entropy" else 1
    if targets.dim() not in (1, most) or targets.shape[0] != length or not targets.numel():
        shapes = f"[{length}] or [{length}, K]" if most == 2 else f"[{length}]"
        raise UserError(where, why=f"has the shape {list(targets.shape)}", fix=f"send {shapes} for {length} positions")
    check_vocabulary(targets.flatten(), where, limits)


def _inputs(datum: Any, i: int, names: Sequence[str]) -> dict[str, Tensor]:
    where = f"data[{i}].loss_fn_inputs"
    lacking = [name for name in names if name not in datum.loss_fn_inputs]
    if lacking:
        raise UserError(where, why=f"has no {lacking[0]}", fix=f"send {', '.join(names)}")
    unread = [name for name in datum.loss_fn_inputs if name not in names]
    if unread:
        raise UserError(f"{where}.{unread[0]}", why="is not read by this loss", fix=f"send {', '.join(names)} alone")
    return {name: _tensor(datum.loss_fn_inputs[name], f"{where}.{name}") for name in names}


def _tensor(sent: Any, where: str) -> Tensor:
    """Returns a tensor of the client, dense or compressed by rows."""
    shape = list(sent.shape)
    if any(size < 0 for size in shape) or len(shape) not in (1, 2):
        raise UserError(where, why=f"has the shape {shape}", fix="send one or two dimensions")
    if sent.WhichOneof("value") == "sparse_csr":
        return _of_rows(sent, shape, where)
    values = _array(sent.dense, sent.dtype, where)
    if values.size != math.prod(shape):
        raise UserError(where, why=f"has {values.size} numbers for the shape {shape}", fix="send as many as it has")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UserError(where, why="has a number that is not finite", fix="send finite ones")
    return torch.from_numpy(values.reshape(shape).copy())


def _of_rows(sent: Any, shape: Sequence[int], where: str) -> Tensor:
    """Returns the dense form of a tensor that is compressed by rows (CSR)."""
    values = _array(sent.sparse_csr.values, sent.dtype, where)
    starts, columns = (
        _array(part, messages.INT64, where) for part in (sent.sparse_csr.crow_indices, sent.sparse_csr.col_indices)
    )
    rows, width = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
    whole = (
        len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == len(values) == len(columns)
        and (np.diff(starts) >= 0).all() and ((columns >= 0) & (columns < width)).all()
    )  # fmt: skip
    if not whole or not np.isfinite(values).all():
        raise UserError(where, why=f"is no sparse tensor of the shape {list(shape)}", fix="send it dense")
    dense = np.zeros((rows, width), dtype=values.dtype)
    np.add.at(dense, (np.repeat(np.arange(rows), np.diff(starts)), columns), values)
    return torch.from_numpy(dense.reshape(shape))


def _array(data: bytes, dtype: int, where: str) -> Any:
    if dtype == messages.BFLOAT16:
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float().numpy() if data else np.zeros(0, "f4")
    if dtype not in _DTYPES:
        raise UserError(where, why=f"has the unknown dtype {dtype}", fix="send float32, bfloat16, int64 or int32")
    if len(data) % _DTYPES[dtype].itemsize:
        raise UserError(where, why=f"has {len(data)} bytes, which is no whole number of items", fix="send whole items")
    return np.frombuffer(data, dtype=_DTYPES[dtype])


def answer(batch: Batch, log_probs: Tensor, metrics: Mapping[str, float]) -> bytes:
    """Returns a `ForwardBackwardOutput` with the log-probs of all positions, in the order of the data.

    log_probs: [T] or [T, K] fp32. metrics: name -> a sum.
    """
    out = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = out.loss_fn_outputs.add(num_datums=batch.num_sequences)
    trailing = list(log_probs.shape[1:])
    width = 4 * (trailing[0] if trailing else 1)
    field = record.fields["logprobs"]
    field.data = log_probs.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4").tobytes()
    field.offsets = (batch.cu_seqlens.long() * width).numpy().astype("<i8").tobytes()
    field.dtype = messages.FLOAT32
    field.trailing_shape.extend(trailing)
    for name, value in metrics.items():
        out.metrics[f"{name}:sum"] = value
    return out.SerializeToString()
