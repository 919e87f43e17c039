"""Checks of streamed rows, whose number is not known: arithmetic, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.rows import RowsConfig, StreamedRowsConfig
from mrl.config.schema import TrainConfig
from mrl.config.sources import Share, StreamedShare
from mrl.errors import ConfigError, Shown


def streamed_keys(data: RowsConfig) -> list[str]:
    """Returns the keys of the paths of data.train whose rows are read while training."""
    return [key for key, of in _paths(data) if _is_streamed(data, of)]


def check_stream(data: StreamedRowsConfig, train: TrainConfig) -> None:
    """Raises ConfigError for keys that need the number of rows, and for keys without use for streamed rows."""
    streamed = streamed_keys(data)
    _check_buffers(data, streamed)
    if not streamed:
        return
    if train.epochs is not None:
        why = f"counts rows, and those of {streamed[0]} are streamed: their number is not known"
        raise ConfigError("train.epochs", Shown(f"{train.epochs:g}"), why, "give train.steps in its place")
    if train.steps is None:
        why = f"is missing, and the rows of {streamed[0]} are streamed: their number is not known"
        raise ConfigError("train.steps", why=why, fix="give the steps of the run")
    for key, share in _paths(data):
        if share is None:
            continue
        if share.weight is None:
            why = (
                f"is missing, and the rows of {streamed[0]} are streamed: their number, which would be it, is not known"
            )
            raise ConfigError(f"{key.removesuffix('.path')}.weight", why=why, fix="give a weight to every source")
        if _is_streamed(data, share) and share.epochs is not None and share.epochs % 1:
            why, fix = "is no whole number, and the rows are streamed: their number is not known", "give whole passes"
            raise ConfigError(f"{key.removesuffix('.path')}.epochs", Shown(f"{share.epochs:g}"), why, fix)


def check_cache(data: RowsConfig, key: str, cache: bool) -> None:
    """Raises ConfigError for a cache of streamed rows, because it is computed over all rows first.

    key: of a role's `cache`.
    """
    streamed = streamed_keys(data)
    if cache and streamed:
        why = f"reads all rows before the first step, and those of {streamed[0]} are streamed"
        raise ConfigError(key, True, why, "set it to false, or leave stream out")


def _paths(data: RowsConfig) -> Iterator[tuple[str, Share | None]]:
    """Yields the key of each path of data.train, with its source where there is a list of them."""
    if isinstance(data.train, str):
        yield "data.train", None
        return
    yield from ((f"data.train[{i}].path", source) for i, source in enumerate(data.train))


def _is_streamed(data: RowsConfig, source: Share | None) -> bool:
    if not isinstance(data, StreamedRowsConfig):
        return False
    own = source.stream if isinstance(source, StreamedShare) else None
    return data.stream if own is None else own


def _check_buffers(data: StreamedRowsConfig, streamed: list[str]) -> None:
    """Raises ConfigError for a shuffle_buffer without streamed and shuffled rows."""
    given = [("data.shuffle_buffer", data.shuffle_buffer, bool(streamed))]
    for key, share in _paths(data):
        if isinstance(share, StreamedShare):
            name = f"{key.removesuffix('.path')}.shuffle_buffer"
            given.append((name, share.shuffle_buffer, _is_streamed(data, share)))
    for key, value, is_used in given:
        if value is None:
            continue
        if not is_used:
            fix = "set stream to true, or leave it out"
            raise ConfigError(key, value, "is not used by rows that are not streamed", fix)
        if not data.shuffle and value:
            raise ConfigError(key, value, "is not used with data.shuffle false", "leave it out, or shuffle")
