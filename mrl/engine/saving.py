"""Saves and loads a checkpoint of all ranks: its folder (engine/atomic_checkpoint.py) and its copy at a URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator

from mrl.engine import atomic_checkpoint, background, checkpoint_remote
from mrl.engine.collective import all_ranks, on_main, wait_for_all
from mrl.engine.stored_weights import Read, stored_weights
from mrl.weights.mcore_weights import is_imported
from mrl.weights.table import Family, HFConfig


def save(
    root: str,
    step: int,
    write: Callable[[str], None],
    *,
    backend: str,
    remote: str | None = None,
    keep: int | None = None,
    protect: Collection[str] = (),
) -> str:
    """Saves `root/step_XXXXXXXX`, whole or not at all, with a copy at the URL `remote`. Collective. Returns the folder.

    write: every rank writes its part into the given folder. backend: the engine that writes. keep, protect: as in
    `atomic_checkpoint.writing`.
    """
    with atomic_checkpoint.writing(
        root, step, backend=backend, ranks=all_ranks(), keep=keep, protect=protect
    ) as folder:
        write(folder)
    saved = os.path.join(root, atomic_checkpoint.step_name(step))
    if remote is not None:
        on_main(lambda: checkpoint_remote.upload(saved, remote, keep=keep, protect=protect))
    return saved


def save_in_background(
    saver: background.BackgroundSaver,
    root: str,
    step: int,
    write: background.Write,
    *,
    backend: str,
    remote: str | None,
    keep: int | None,
    protect: Collection[str],
    then: Callable[[], None],
) -> None:
    """Begins what `save` does, in a thread of each rank. Collective.

    write: writes the copied state. then: is called on the main process when the checkpoint is whole.
    """

    def work(ranks: atomic_checkpoint.RankGroup) -> None:
        with atomic_checkpoint.writing(root, step, backend=backend, ranks=ranks, keep=keep, protect=protect) as folder:
            write(folder, ranks)

        if ranks.rank == 0:
            if remote is not None:
                saved = os.path.join(root, atomic_checkpoint.step_name(step))
                checkpoint_remote.upload(saved, remote, keep=keep, protect=protect)
            then()
        ranks.gather(None)

    saver.begin(work)


@contextlib.contextmanager
def checkpoint_to_load(path: str, *, backend: str, remote: str | None, delete_local: bool = False) -> Iterator[str]:
    """Returns the folder to read: the newest whole checkpoint of `path`, or `path`, or the one of `remote`. Collective.

    Every file has been read and found whole. Raises CheckpointError on every rank if there is none, it is damaged, or
    it is of another backend. delete_local: it is deleted when all ranks have read it.
    """
    found = on_main(lambda: checkpoint_remote.locate(path, remote, backend=backend))
    atomic_checkpoint.verify(found, all_ranks())
    yield found
    wait_for_all()
    if delete_local:
        on_main(lambda: atomic_checkpoint.delete(found))


@contextlib.contextmanager
def starting_weights(
    path: str, family: Family, hf_config: HFConfig, *, head: str, trained: bool, mtp: int = 0
) -> Iterator[Read]:
    """Gives `stored_weights`, after comparing the checksums of an imported folder's files. Collective.

    Raises CheckpointError on every rank if one of them is damaged.
    """
    if on_main(lambda: is_imported(path)):
        atomic_checkpoint.verify(path, all_ranks())
    with stored_weights(path, family, hf_config, head=head, trained=trained, mtp=mtp) as read:
        yield read
