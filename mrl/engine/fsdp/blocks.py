"""The blocks of a model, found from the model itself. FSDP gathers one at a time, and recomputes one at a time.

A block is a member of a list of modules (`nn.ModuleList`). It is in no other block, it has modules of its own, and its
class repeats in the list. So the layers of a decoder are blocks, and those of a vision tower. Experts are lists inside
of blocks. No names of classes are needed; `_no_split_modules` of transformers decides for a
list of one layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn


def block_lists(hf: nn.Module) -> list[list[nn.Module]]:
    """Returns the blocks of each list of `hf`, in the order of the model."""
    named = frozenset(hf._no_split_modules or ())
    return [blocks for blocks in (_blocks_of(found, named) for found in _outermost(hf)) if blocks]


def blocks_of(hf: nn.Module) -> list[nn.Module]:
    """Returns all blocks of `hf`, in the order of the model."""
    return [block for blocks in block_lists(hf) for block in blocks]


def _outermost(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the lists that no other list contains."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost(child)


def _blocks_of(found: nn.ModuleList, named: frozenset[str]) -> list[nn.Module]:
    count = Counter(type(member) for member in found)
    return [
        member
        for member in dict.fromkeys(found)
        if (count[type(member)] > 1 or type(member).__name__ in named)
        and any(True for _ in member.children())
        and any(True for _ in member.parameters())
    ]


def embedding_of(hf: nn.Module) -> nn.Module | None:
    """Returns the input embedding if it is worth gathering alone: no other module has its weights."""
    embedding = hf.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None
    own = {id(p) for p in embedding.parameters()}
    others = (p for module in hf.modules() if module is not embedding for p in module.parameters(recurse=False))
    return None if own & {id(p) for p in others} else embedding
