"""A probe of models without a table in mrl: two tiny documents show whether they compute here what they should.

Each document alone, by transformers' own eager attention, gives the right numbers. They are compared with those of the
documents in one micro-batch, packed or padded as in the run. One of them runs again with another neighbour, and its
numbers must not change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mrl.batch import make_batch
from mrl.engine.fsdp import attention, forward
from mrl.engine.fsdp.output import hidden_states
from mrl.engine.fsdp.ulysses import NO_CONTEXT_PARALLEL, Ulysses
from mrl.errors import ModelError

DOCUMENTS = ([7, 3, 5, 11, 2, 13], [4, 9, 6, 8])
EDITED = [12, 10, 5, 14, 3, 9]
DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""What rounding may make of the numbers that a document's tokens end in, as a part of their size."""
LEAK = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""The same of a document beside another one: experts meet their tokens in other numbers and sum in another order."""


def choose_attention(hf: nn.Module, *, packed: bool, device: torch.device, ulysses: Ulysses) -> None:
    """Runs `check`. If it fails, sequences are padded and each rank has its own, the model gets its own attention."""
    try:
        check(hf, packed=packed, device=device, ulysses=ulysses)
    except ModelError:
        if packed or ulysses.size > 1 or hf.config._attn_implementation != attention.NAME:
            raise
        hf.set_attn_implementation("eager")
        check(hf, packed=packed, device=device)


def check(hf: nn.Module, *, packed: bool, device: torch.device, ulysses: Ulysses = NO_CONTEXT_PARALLEL) -> None:
    """Raises ModelError, with what would work, if `hf` does not compute what it should. Its weights are gathered.

    ulysses: the ranks that share sequences. Only attention brings their parts together; a recurrent layer would see
    one part.
    """
    documents = _documents(hf)
    way = "packed" if packed else "padded"
    remedy = "set data.packing to false, or use another model" if packed else "use another model"
    if ulysses.size > 1:
        way, remedy = f"{way} and shared", "set engine.parallel.cp to 1, or use another model"
    with _refusing(hf, f"cannot run {way} sequences here", remedy):
        together = _run(hf, documents[:2], packed=packed, device=device, ulysses=ulysses)
        beside = _run(hf, [documents[2], documents[1]], packed=packed, device=device, ulysses=ulysses)
    with _refusing(hf, "does not run", "use another model"), _own_attention(hf):
        alone = [_alone(hf, document, device) for document in documents[:2]]
        without_end = _alone(hf, documents[0][:-1], device)
    dtype = alone[0].dtype
    if _difference(without_end, alone[0][:-1]) > DIFFERENCE[dtype]:
        raise ModelError(_refused(hf, "lets tokens see those that follow", "use another model"))
    if any(_difference(ours, right) > DIFFERENCE[dtype] for ours, right in zip(together, alone, strict=True)):
        raise ModelError(_refused(hf, f"gives {way} sequences other numbers than each has alone", remedy))
    if _difference(beside[1], together[1]) > LEAK[dtype]:
        raise ModelError(_refused(hf, f"lets {way} sequences see each other", remedy))


def _documents(hf: nn.Module) -> list[list[int]]:
    """Returns the two documents, and the first one edited, in tokens of the model."""
    vocab = hf.get_input_embeddings().weight.shape[0]
    return [[token % vocab for token in document] for document in (*DOCUMENTS, EDITED)]


@contextlib.contextmanager
def _refusing(hf: nn.Module, what: str, remedy: str) -> Iterator[None]:
    """Turns an error of the model's own code into a ModelError of one line."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # whatever a model of another's makes of what it does not know
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ModelError(_refused(hf, f"{what} ({reason})", remedy)) from error


def _refused(hf: nn.Module, what: str, remedy: str) -> str:
    return f"config.json: model_type {hf.config.model_type!r} {what}, on backend fsdp; {remedy}"


@contextlib.contextmanager
def _own_attention(hf: nn.Module) -> Iterator[None]:
    ours = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    try:
        yield
    finally:
        hf.set_attn_implementation(ours)


@torch.no_grad()
def _run(
    hf: nn.Module,
    documents: list[list[int]],
    *,
    packed: bool,
    device: torch.device,
    ulysses: Ulysses = NO_CONTEXT_PARALLEL,
) -> list[Tensor]:
    """Returns [tokens, H] of each document: the input of the output layer. The last label of each is not needed."""
    batch = make_batch(
        [[*document, 0] for document in documents], [[1.0] * (len(document) + 1) for document in documents]
    )
    inputs = forward.prepare(batch, packed=packed, device=device, ulysses=ulysses)
    hidden = inputs.restore(forward.hidden_of(hf, inputs))
    return list(hidden.split(batch.lengths.tolist()))


@torch.no_grad()
def _alone(hf: nn.Module, document: list[int], device: torch.device) -> Tensor:
    """Returns [tokens, H] of one document, with nothing of mrl's: no positions, no lengths."""
    return hidden_states(hf, input_ids=torch.tensor([document], device=device))[0]


def _difference(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
