"""Joins processes and collects their results in a fixed order, for both engines."""

from __future__ import annotations

import datetime
import functools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import patches
from mrl.batch import Batch
from mrl.engine.atomic_checkpoint import ONE_RANK, RankGroup
from mrl.engine.microbatch import shares
from mrl.errors import DataError, UserError
from mrl.words import LAUNCHED_RANK

T = TypeVar("T")
K = TypeVar("K")
Predictions = dict[str, Tensor]
"""Name -> one number per token, in the order of a batch's tokens."""
TensorStream = Iterator[tuple[str, Tensor]]
"""(Name, whole tensor), one at a time."""

TIMEOUT = datetime.timedelta(hours=4)
"""How long a rank waits for another one, in every group.

One process may work for long while the others wait: it copies a checkpoint to a remote, or reads or exports a large
model. Ranks wait over NCCL too: they queue their part of an export ahead of the rank that writes it. Nobody waits so
long for a rank that died: the local launcher and torchrun end all ranks, and so does srun with --kill-on-bad-exit.
"""

JOIN_TIMEOUT = datetime.timedelta(minutes=30)
"""How long the start waits for all processes to appear."""


def join_processes(device_type: str, world: tuple[dist.Store, int, int] | None = None) -> None:
    """Joins the processes of RANK, WORLD_SIZE and MASTER_*, or makes a world of one. Idempotent.

    world: store, rank and size of another world than that.
    CPU tensors (checkpoints, metadata) always go over gloo, those on a GPU over NCCL.
    """
    if dist.is_initialized():
        return
    share_device()
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    if world is not None:
        store, rank, world_size = world
    elif "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)


def split_world(last: int, device_type: str) -> tuple[bool, dist.Store]:
    """Makes a world of the last ranks of RANK and WORLD_SIZE, and one of the others. Joins the one of this rank.

    RANK and WORLD_SIZE are those of its world afterwards. Returns whether it is one of the last, and the store of all.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=JOIN_TIMEOUT))
    first = size - last
    is_last = rank >= first
    own_rank, own_size = (rank - first, last) if is_last else (rank, first)
    os.environ |= {LAUNCHED_RANK: str(rank), "RANK": str(own_rank), "WORLD_SIZE": str(own_size)}
    prefix = "last" if is_last else "first"
    join_processes(device_type, world=(dist.PrefixStore(prefix, store), own_rank, own_size))
    return is_last, store


def wait_for_all() -> None:
    """Waits for all processes on the host. A barrier over NCCL would occupy the GPUs too."""
    all_ranks().gather(None)


def is_main() -> bool:
    """Returns whether this process logs and writes for all. Exactly one does, also before the processes have joined."""
    return int(os.environ.get("RANK", "0")) == 0 if not dist.is_initialized() else dist.get_rank() == 0


OnMain = Callable[[Callable[[], Any]], Any]
"""Calls a function as `on_main` does; an engine and a group of roles have one too."""


def on_main(fn: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Calls `fn` on the main process only and returns its result on every rank, after it is done.

    A UserError that `fn` raises is raised on every rank. So all ranks act on what the main process finds in a folder.
    group: all ranks, over the host. Only the main thread may use the default one.
    """
    if not dist.is_initialized():
        return fn()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = fn()
        except UserError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)  # over gloo, because GPUs would spin while `fn` runs
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def call_here(fn: Callable[[], T]) -> T:
    """Calls `fn`: the `OnMain` of what runs on the main process alone."""
    return fn()


class OnMainInThread:
    """Calls functions as `on_main` does, for a thread beside the main thread. It is the `Exchange` of
    mrl/data/streamed.py.

    It has a process group of its own, so its messages do not mix with those of training. Every call first compares the
    errors and left-out rows of all ranks since the last call. A rank that cannot continue calls `agree` with its error
    instead of its next call. Then all ranks raise the error, so no rank waits for one that has ended.
    """

    def __init__(self, device_type: str) -> None:
        """Joins the processes first. Collective."""
        join_processes(device_type)
        self._size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if self._size > 1 else None
        self._known: UserError | None = None  # the last error that all ranks have raised
        self._left_out: list[str] = []  # the reason for each row since the last call

    def __call__(self, fn: Callable[[], T]) -> T:
        """Does what `on_main` does.

        Raises as `agree` does, if another rank has called `agree` instead or has left out other rows.
        """
        if self._group is None:
            return fn()
        self.agree(None)
        try:
            return on_main(fn, group=self._group)
        except UserError as error:
            self._known = error
            raise

    def leave_out(self, why: str) -> None:
        """Records a row that this rank leaves out; see `agree`. why: begins with its file and line."""
        if self._group is not None:
            self._left_out.append(why)

    def agree(self, error: UserError | None) -> None:
        """Raises the same error on every rank if a rank has one, or if ranks have left out different rows since the
        last call.

        Different rows would make different batches. Returns if neither is so. Collective. error: this rank's, or None.
        An error that this object has already raised on all ranks is raised again.
        """
        if error is not None and (error is self._known or self._group is None):
            raise error
        if self._group is None:
            return
        everyone: list[tuple[UserError | None, list[str]]] = [(None, [])] * self._size
        dist.all_gather_object(everyone, (error, self._left_out), group=self._group)
        self._left_out = []
        found = _first_error([one for one, _ in everyone]) or _first_difference([rows for _, rows in everyone])
        if found is not None:
            self._known = found
            raise found


def _first_error(errors: Sequence[UserError | None]) -> UserError | None:
    """Returns the error of the first rank that has one. errors: of every rank.

    A bad row that another rank can use may not be skipped: their batches would differ.
    """
    rank, found = next(((rank, error) for rank, error in enumerate(errors) if error is not None), (0, None))
    if found is None:
        return None
    other = next((i for i, error in enumerate(errors) if error is None or error.key != found.key), None)
    if isinstance(found, DataError) and found.may_be_skipped and other is not None:
        found = _one_rank_alone(str(found), rank, other)
    found.rank = rank
    return found


def _first_difference(left_out: Sequence[Sequence[str]]) -> UserError | None:
    """Returns the error of the first row that some ranks leave out and others do not. left_out: of every rank."""
    places = [{_place(why) for why in rows} for rows in left_out]
    for rank, rows in enumerate(left_out):
        for why in rows:
            other = next((i for i, others in enumerate(places) if _place(why) not in others), None)
            if other is not None:
                return _one_rank_alone(why, rank, other)
    return None


def _place(why: str) -> str:
    """Returns the file and line that it begins with."""
    return why.partition(": ")[0]


def _one_rank_alone(why: str, rank: int, other: int) -> DataError:
    return DataError(
        f"{why}; rank {rank} cannot use this row and rank {other} can: give both the same files and packages, or "
        "remove the row"
    )


def error_of_all(error: UserError | None) -> UserError | None:
    """Returns on every rank the error of the first rank that has one. error: of this rank. Collective."""
    return _first_error(all_ranks().gather(error))


def call_on_every_rank(fn: Callable[[], T]) -> T:
    """Calls `fn` on every rank and returns its result there. Collective.

    If some ranks raise a UserError, all ranks raise the one of the first such rank, with that rank's number.
    """
    result, wrong = None, None
    try:
        result = fn()
    except UserError as error:
        wrong = error
    if found := error_of_all(wrong):
        raise found
    return cast(T, result)


def gather_on_main(value: T) -> list[T]:
    """Returns the values of all ranks, in order, on the main process, and none on others. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size() if is_main() else []
    dist.gather_object(value, everyone or None)
    return everyone


def node_ids() -> list[int]:
    """Returns the node of each rank, numbered from 0 in the order of ranks; the same list on every rank."""
    names = all_ranks().gather(socket.gethostname())
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def all_ranks() -> RankGroup:
    """Returns the processes of the world, or this one before they have joined. They communicate over gloo."""
    if not dist.is_initialized():
        return ONE_RANK

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone

    return RankGroup(dist.get_rank(), dist.get_world_size(), gather)


def max_over_ranks(device: torch.device, *values: float) -> list[float]:
    """Returns the largest of each value over all ranks, the same on every rank. device: for the communication."""
    if not dist.is_initialized():
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def from_main(
    found: dict[str, Tensor], infos: Mapping[str, tuple[Sequence[int], torch.dtype]], device: torch.device
) -> TensorStream:
    """Yields on every rank the tensors of `infos` (name -> shape, dtype), one at a time, from rank 0.

    found: the tensors on rank 0; each is removed when it is sent. device: the one that the ranks communicate with.
    """
    for name, (shape, dtype) in infos.items():
        if is_main():
            tensor = found.pop(name).to(device).contiguous()
        else:
            tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        yield name, tensor
        del tensor  # frees its memory before the next


def denominator_of(batch: Batch, name: str) -> float:
    """Returns the divisor of a mini-batch's loss sums: `batch.denominators[name]`, or 1 if nothing in it counts."""
    assert name in batch.denominators, f"the batch has the denominators {sorted(batch.denominators)}, not {name!r}"
    return float(batch.denominators[name]) or 1.0


def sum_in_rank_order(sums: Mapping[K, float], group: dist.ProcessGroup | None) -> dict[K, float]:
    """Sums of all ranks of `group`, added in rank order (the same float on each), whatever names each of them has."""
    if dist.get_world_size(group) == 1:
        return dict(sums)
    everyone: list[dict[K, float]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(sums), group=group)
    result: dict[K, float] = {}
    for part in everyone:
        for name, value in part.items():
            result[name] = result.get(name, 0.0) + value
    return result


def to_batch_order(parts: Sequence[Predictions], order: Sequence[Sequence[int]], batch: Batch) -> Predictions:
    """Joins token-aligned predictions of parts of `batch`, in its order. order: the sequences of each part."""
    starts = batch.cu_seqlens.tolist()
    where = [torch.arange(starts[i], starts[i + 1]) for indices in order for i in indices]
    at = torch.cat(where) if where else torch.zeros(0, dtype=torch.int64)
    result = {}
    for name in {name: None for part in parts for name in part}:
        values = torch.cat([part[name] for part in parts if name in part])
        assert values.shape[0] == batch.num_tokens, f"{name}: {values.shape[0]} values for {batch.num_tokens} tokens"
        whole = torch.empty_like(values)
        whole[at.to(values.device)] = values
        result[name] = whole
    return result


def share_of(batch: Batch, dp_rank: int, dp_size: int) -> Batch:
    """Returns the sequences of a global mini-batch that a data-parallel rank has, balanced by tokens."""
    return batch.select(shares(batch.lengths.tolist(), dp_size, batch.group)[dp_rank])


def join_shares(predictions: Predictions, batch: Batch, group: dist.ProcessGroup | None) -> Predictions:
    """Joins the predictions of all data-parallel ranks, in the order of the global batch. It undoes `share_of`."""
    order = shares(batch.lengths.tolist(), dist.get_world_size(group), batch.group)
    if len(order) == 1:
        return to_batch_order([predictions], order, batch)
    device = next((t.device for t in predictions.values()), torch.device("cpu"))
    everyone: list[dict[str, Tensor]] = [{}] * len(order)
    dist.all_gather_object(everyone, {name: t.cpu() for name, t in predictions.items()}, group=group)
    whole = to_batch_order([p for p, share in zip(everyone, order, strict=True) if share], order, batch)
    return {name: t.to(device) for name, t in whole.items()}


_devices: list = []


def share_device() -> None:
    """Makes later gloo groups share the device of the first. Idempotent.

    By default torch gives every gloo group a device of its own. Its thread wakes up a hundred times a second even if
    nothing is sent (3 % of a core for 40 groups). A layout has tens of groups, and each role has a layout. Groups with
    one device share its thread.

    torch chooses the first one as usual: by GLOO_SOCKET_IFNAME, or by the address of the host's name.
    """
    gloo = dist.ProcessGroupGloo
    own_init = gloo.__init__
    if hasattr(own_init, "__wrapped__"):
        return

    @functools.wraps(own_init)
    def init(self: Any, store: Any, rank: int, size: int, timeout: Any = dist.default_pg_timeout) -> None:
        if isinstance(timeout, gloo._Options):
            own_init(self, store, rank, size, timeout)
        elif not _devices:
            own_init(self, store, rank, size, timeout)
            _devices.extend(self.options._devices)
        else:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = _devices, 2 * len(_devices), timeout
            own_init(self, store, rank, size, options)

    patches.replace({"torch.distributed:ProcessGroupGloo.__init__": init})


SMALL, SMALL_TIMES = 4, 50
LARGE_REPEATS = 5


def time_all_reduce(device: torch.device, large: int) -> Iterator[tuple[int, float]]:
    """Yields (bytes, median seconds) of an all-reduce of one number and of one with `large` bytes, on joined processes.

    The trial of gloo and NCCL in `mrl doctor --collectives`. Raises ArithmeticError if a sum is wrong. Collective.
    """
    for size, times in ((SMALL, SMALL_TIMES), (large, LARGE_REPEATS)):
        yield size, statistics.median(_seconds_of_sum(device, size) for _ in range(times + 1))


def _seconds_of_sum(device: torch.device, size: int) -> float:
    ranks = dist.get_world_size()
    tensor = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    passed = time.perf_counter() - begun
    expected = ranks * (ranks + 1) / 2
    if not bool((tensor == expected).all()):
        raise ArithmeticError(f"the sum of {ranks} ranks is {float(tensor[0])} and not {expected}")
    return passed


def destroy_process_groups() -> None:
    """Destroys the process groups of this process."""
    dist.destroy_process_group()
