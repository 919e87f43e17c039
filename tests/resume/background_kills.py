"""SIGKILL at a chosen point of a checkpoint that a thread writes, with training already some steps further on.

A kill names the save and a point within it (POINTS). At that save the thread is held until training has begun the steps
of the kill, so what is written differs from what the parameters are by then; then it goes on to its point, and the
process, or all of them, are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, filesystem

from mrl.config.load import from_dict
from mrl.engine import atomic_checkpoint
from mrl.engine.megatron import dist_checkpoint
from mrl.engine.torch_dist.data_files import ItemFile
from mrl.trainers import sft
from tests.trainers.cases import before, before_step

EVERY = 3
"""Steps from save to save; a thread can be held for fewer, because the next save waits for it."""
SAVES = (3, 6, 9, 12)
STEPS = 14

POINTS: Mapping[str, str] = {
    "copied": "the state is on the host, and no folder is there",
    "first tensor": "the rank's data file is empty",
    "later tensor": "a part of the data file is written",
    "index": "all data files are written, and the list of what is in them is not",
    "on disk": "some of the files are on disk",
    "marker": "all files are on disk, and COMPLETE is not there",
    "marked": "COMPLETE is there, and the folder has a temporary name",
    "renamed": "the folder has its name, and latest that of the one before",
    "deleting": "latest is moved, and the checkpoint before is half deleted",
    "after": "all is done, and training goes on",
}
OF_MAIN = ("index", "marker", "marked", "renamed", "deleting")
"""Points that rank 0 alone comes to."""
SEVERAL = ("later tensor", "on disk")
"""Points that a save comes to more than once."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """save: its step. steps: how many training has begun since. nth: how often the point is passed first. everyone: all
    ranks are killed, else the one that comes to the point alone."""

    point: str
    save: int
    steps: int
    nth: int
    rank: int
    everyone: bool

    def leaves(self, whole: Sequence[int]) -> list[int]:
        """Steps of the whole checkpoints that are there after it, of a run that keeps one. whole: those before its start."""
        made = range(max(whole, default=0) + EVERY, self.save, EVERY)
        kept = [made[-1]] if made else list(whole)
        place = tuple(POINTS).index(self.point)
        if place >= tuple(POINTS).index("deleting"):
            return [self.save]
        return kept + ([self.save] if place >= tuple(POINTS).index("marked") else [])


def draw(seed: str, counts: Mapping[str, int], worlds: Mapping[str, int]) -> dict[str, list[Kill]]:
    """Returns the kills of each run, in the order they come in. Between them the runs have every point once.

    counts: of how many kills each run has, len(POINTS) in all. worlds: processes of each.
    """
    random_ = random.Random(seed)
    assert sum(counts.values()) == len(POINTS)
    while True:
        points = random_.sample(list(POINTS), len(POINTS))
        found: dict[str, list[Kill]] = {}
        for name, count in counts.items():
            saves = sorted(random_.sample(SAVES, count))
            found[name] = [_draw(random_, points.pop(), save, worlds[name]) for save in saves]
        if all(kill.point != "deleting" or kill.save > EVERY for of in found.values() for kill in of):
            return found  # the first save has none before it to delete


def _draw(random_: random.Random, point: str, save: int, world: int) -> Kill:
    rank = 0 if point in OF_MAIN else random_.randrange(world)
    nth = random_.randint(1, 2) if point in SEVERAL else 0
    return Kill(point, save, random_.randint(1, EVERY - 1), nth, rank, random_.random() < 0.5)


def train_until(config: Mapping[str, Any], kill: Kill, killed: str) -> None:
    """The trainer, in a rank, until the kill. The file `killed` says which step training was in."""
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    now = {"step": 0}
    begun = threading.Event()

    def note_step(_: Any, step: int) -> None:
        now["step"] = step
        if step >= kill.save + kill.steps:
            begun.set()
            if kill.point == "after":
                _join()
                die()

    def die() -> None:
        if dist.get_rank() != kill.rank:
            return
        pathlib.Path(killed).write_text(json.dumps(now))
        own = pids[kill.rank]
        for pid in [pid for pid in pids if kill.everyone and pid != own] + [own]:
            os.kill(pid, signal.SIGKILL)

    with before_step(note_step), _at_point(kill, begun, die):
        sft.run(from_dict(config))


def _join() -> None:
    """Waits until the thread of the save has ended."""
    for thread in threading.enumerate():
        if thread.name == "mrl-checkpoint":
            thread.join()


@contextlib.contextmanager
def _at_point(kill: Kill, begun: threading.Event, die: Callable[[], None]) -> Iterator[None]:
    """Holds the thread of the save until `begun`, and calls `die` where it comes to the point."""
    at_save, inside, left = [False], [False], [kill.nth]

    def in_thread(fn: Callable[..., None]) -> Callable[..., None]:
        def of_save(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread().name == "mrl-checkpoint" and (at_save[0] or fn is begin):
                fn(*args, **kwargs)

        return of_save

    def begin(root: str, step: int, **_: Any) -> None:
        at_save[0] = step == kill.save
        if at_save[0]:
            assert begun.wait(timeout=60), "training did not go on while the checkpoint was held"
            come("copied")()

    def come(*points: str) -> Callable[..., None]:
        """What is called at each of some calls, `kill.nth` of which pass."""

        def called(*_: Any, **__: Any) -> None:
            if kill.point in points:
                left[0] -= 1
                if left[0] < 0:
                    die()

        return called

    def settle(*_: Any) -> None:
        inside[0] = True

    def mark(*_: Any, **__: Any) -> None:
        inside[0] = False
        come("marker")()

    def replace(path: str, _: bytes) -> None:
        if os.path.basename(path) == atomic_checkpoint.LATEST:
            come("renamed")()

    def delete(path: str, **_: Any) -> None:
        if os.path.basename(path).startswith(atomic_checkpoint.TRASH):
            if kill.point == "deleting":
                os.remove(next(each for each in pathlib.Path(path).rglob("*") if each.is_file()))
            come("deleting")()

    tensor, on_disk = come("first tensor", "later tensor"), come("on disk")
    hooks: Sequence[tuple[Any, str, Callable[..., None]]] = (
        (atomic_checkpoint, "writing", begin),
        (ItemFile, "tensor", tensor), (filesystem, "_write_item", tensor),
        (dist_checkpoint, "write_index", come("index")), (FileSystemWriter, "finish", come("index")),
        (atomic_checkpoint, "_settle", settle), (atomic_checkpoint, "fsync_path", lambda _: inside[0] and on_disk()),
        (atomic_checkpoint, "write_marker", mark), (atomic_checkpoint, "_publish", come("marked")),
        (atomic_checkpoint, "_replace_file", replace), (shutil, "rmtree", delete),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, first in hooks:
            stack.enter_context(before(owner, name, in_thread(first)))
        yield
