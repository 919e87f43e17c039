"""CUDA graphs on a CPU: a capture notes each operator that is called, and a replay calls them again on the same tensors.

A capture's results are undone, as on a GPU, where it computes nothing. Numbers that the host reads in a capture stay as they were then,
so a replay on other rows shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = []

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            new = _tensors(_call(func, args, kwargs))
            for tensor, value in zip(made, new, strict=True) if made else ():
                tensor.data.copy_(value)


def _call(func: Any, args: tuple, kwargs: dict) -> Any:
    """Calls an operator. A collective is done then: gloo's sum over ranks moves its result in `wait`, by operators."""
    out = func(*args, **kwargs)
    for one in tree_leaves(out) if func.namespace == "c10d" else ():
        if not isinstance(one, torch.Tensor):
            one.wait()
    return out


class _Notes(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of storages that are written, as bytes
        self.own: dict[int, torch.UntypedStorage] = {}  # that the capture has made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in {*self.own, *self.before}:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.before[storage._cdata] = whole, whole.clone()
        out = _call(func, args, kwargs)
        if func.is_view:
            return out
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}  # an _unsafe_view shares its own
        made = [] if written else [t for t in _tensors(out) if t.untyped_storage()._cdata not in given]
        self.own |= {t.untyped_storage()._cdata: t.untyped_storage() for t in made}
        self.graph.calls.append((func, args, kwargs, made))
        return out

    @torch.no_grad()
    def undo(self) -> None:
        """Leaves what was written as it was, and no numbers in what a replay makes."""
        for whole, value in self.before.values():
            whole.copy_(value)
        for tensor in (tensor for *_, made in self.graph.calls for tensor in made if tensor.is_floating_point()):
            tensor.data.fill_(torch.nan)  # no change that autograd knows of


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    if func.namespace == "c10d":  # their schemas say of some results that they are new
        return _tensors((args, kwargs))
    return _tensors([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def installed(fails: bool = False) -> Iterator[list[int]]:
    """Graphs are these inside. Yields how often one was replayed. fails: the second capture, of a backward pass, ends in an error:
    all ranks then have had their collectives, which a GPU's captures do not wait for."""
    count, captures = [0], [0]

    class Counted(Graph):
        def replay(self) -> None:
            count[0] += 1
            super().replay()

    @contextlib.contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        notes = _Notes(graph)
        with notes, mock.patch.object(dist.Work, "wait", lambda *_: True):
            yield
        notes.undo()
        captures[0] += 1
        if fails and captures[0] == 2:
            raise RuntimeError("out of graphs")

    with mock.patch.multiple(torch.cuda, CUDAGraph=Counted, graph=capture, graph_pool_handle=object):
        yield count
