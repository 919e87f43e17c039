"""Parameters of a transformers model and the tensors of its files: the same, but for experts, held fused in memory.

In memory an MoE layer has `experts.gate_up_proj` [E, 2F, H] (gate above up) and `experts.down_proj` [E, H, F]; its
file has three matrices for each expert. One function tells which tensors a parameter is made of, for both directions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from mrl.engine.saving import starting_weights
from mrl.engine.stored_weights import Read
from mrl.weights.rules import expected_hf_names
from mrl.weights.table import Family, HFConfig

STATE = "state.pt"
"""The file of a checkpoint that has what is no sharded tensor."""

Rows = Callable[[str, int, int], Tensor]
"""(parameter or buffer, start, stop) -> its rows `start` to `stop` of dimension 0."""

_FUSED = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.gate_up_proj|experts\.down_proj|gate\.weight)")


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of the files: `parameter[expert][start:stop]`, or the whole parameter where expert is None."""

    name: str
    expert: int | None = None
    start: int = 0
    stop: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        return parameter if self.expert is None else parameter[self.expert][self.start : self.stop]


def file_tensors(name: str, shape: Sequence[int], *, family: Family, head: str) -> list[FileTensor]:
    """Returns the file tensors that parameter `name` of `shape` holds, in order. head: "lm", or "value" for a score."""
    if head == "value" and name == "lm_head.weight":
        return [FileTensor("score.weight")]
    match = _FUSED.fullmatch(name)
    stacked = match is not None and any(stack.stored.format(l=match[1]) == name for stack in family.stacks)
    if match is None or not family.sparse or stacked:  # stacked experts are in the files as in memory
        return [FileTensor(family.in_files(name))]
    layer = int(match[1])
    if match[2] == "gate.weight":
        (router,) = (entry for entry in family.sparse if entry.mcore.endswith("router.weight"))
        return [FileTensor(family.in_files(router.hf[0][0].format(l=layer)))]
    fc = "linear_fc1.weight" if match[2] == "experts.gate_up_proj" else "linear_fc2.weight"
    (matrices,) = (entry.hf for entry in family.sparse if entry.of_expert and entry.mcore.endswith(fc))
    rows = shape[1] // len(matrices)
    return [
        FileTensor(family.in_files(hf.format(l=layer, e=expert)), expert, i * rows, (i + 1) * rows)
        for expert in range(shape[0])
        for i, (hf, _) in enumerate(matrices)
    ]


def read_rows(of: Sequence[FileTensor], read: Read, start: int, stop: int) -> Tensor:
    """Reads rows `start` to `stop` of dimension 0 of a parameter, and no more than they need. start < stop.

    read: gives a tensor, or a lazy slice of a file's, by name.
    """
    if of[0].expert is None:
        return read(of[0].name)[start:stop]
    matrices: dict[int, list[Tensor]] = {}
    for part in of:
        if part.expert is not None and start <= part.expert < stop:
            matrices.setdefault(part.expert, []).append(read(part.name)[:])
    return torch.stack([torch.cat(parts) for parts in matrices.values()])


class TableFiles:
    """Knows the files of a model whose family has a table in mrl. hf: it, on the meta device. head: lm or value.

    shapes: of every tensor of the files, by name, in model order. state: the parameters and buffers that they hold.
    """

    def __init__(self, hf: nn.Module, family: Family, hf_config: HFConfig, head: str) -> None:
        self.family, self.hf_config, self.head = family, hf_config, head
        self.shapes = expected_hf_names(family, hf_config, head=head)
        whole = hf.state_dict(keep_vars=True)
        buffers = {name: t for name, t in hf.named_buffers() if name in whole}
        self.state = dict(hf.named_parameters()) | buffers
        in_files = {part.name for name in self.state for part in self._file_tensors(name)}
        odd = sorted(in_files ^ self.shapes.keys())
        assert not odd, f"transformers' model and the table of {family.model_type} do not agree about {odd}"

    def _file_tensors(self, name: str) -> list[FileTensor]:
        return file_tensors(name, self.state[name].shape, family=self.family, head=self.head)

    def groups(self) -> list[list[str]]:
        """Returns the names of parameters and buffers, each alone: no tensor of a file needs two."""
        return [[name] for name in self.state]

    def written(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields (file name, tensor) of one of `groups`."""
        for name, whole in tensors.items():
            for part in self._file_tensors(name):
                yield part.name, part.of(whole)

    @contextlib.contextmanager
    def opened(self, path: str, *, trained: bool) -> Iterator[Rows]:
        """Gives the weights of the folder `path`, all accounted for. trained: a missing value head starts at zero."""
        with starting_weights(path, self.family, self.hf_config, head=self.head, trained=trained) as read:
            yield self.rows_by(read)

    def rows_by(self, read: Read) -> Rows:
        """Returns a function that reads rows of parameters and buffers. read: as in `read_rows`."""

        def rows(name: str, start: int, stop: int) -> Tensor:
            return read_rows(self._file_tensors(name), read, start, stop)

        return rows
