"""Fills the cache of a reference or a teacher: a pass over rows before the first step, which a signal ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from mrl.batch import Batch
from mrl.trainers.common import stop_error
from mrl.trainers.reference import AnswerCache
from mrl.trainers.teacher_cache import TopCache
from mrl.trainers.trainer import Trainer


def fill(
    cache: AnswerCache | TopCache,
    batches: Iterable[Batch],
    build: Callable[[], Callable[[Batch], Any]],
    trainer: Trainer,
    *,
    name: str,
    what: str,
    stale: str,
) -> bool:
    """Asks a frozen model about all rows that a cache lacks. Returns whether there were some. Collective.

    build: builds the model, and returns what asks it. name: of the model. what: its log-probs, in words. stale: why
    files are made again, in words.
    Raises Stopped after a signal, once what is known is written.
    """
    dispatch, console = trainer.dispatch, trainer.console
    missing = cache.lacks(batches)
    first = next(missing, None)
    if first is None:
        console.say(f"{name}: its log-probs of {cache.counted} are in {cache.place}")
        return False
    if cache.counted:
        console.say(f"{name}: goes on from its log-probs of {cache.counted} in {cache.place}")
    if cache.has_others:
        console.say(f"{name}: {stale}")
    ask = build()
    console.doing(f"computing {what}")
    for batch in itertools.chain([first], missing):
        if trainer.stop_requested:
            saved = dispatch.on_main(cache.write)
            raise stop_error(dispatch, trainer.stop, where=f"while {what} were computed", step=0, saved=saved)
        cache.keep(dispatch, batch, ask(batch))
        console.detail(cache.counted)
    dispatch.on_main(cache.write)
    dispatch.engines.pop(name, None)
    console.say(f"{name}: its log-probs of {cache.counted} are written to {cache.place}")
    return True
