"""Reads what a start leaves for the next in `suspended/`."""

from __future__ import annotations

import pathlib
from typing import Any

from mrl.config.load import to_dict
from mrl.config.resume import changed_keys
from mrl.config.serve import ServeConfig
from mrl.engine.collective import all_ranks
from mrl.errors import CheckpointError, ConfigError, ModelError, first_line, show
from mrl.serve.ledger import Ledger
from mrl.serve.request_queue import RequestQueue
from mrl.weights.json_file import read_json


def layout_of(config: ServeConfig) -> dict[str, Any]:
    """Returns what must be equal for one start to read another's suspended state: config keys, and processes."""
    engine = config.engine
    keys = {"backend": engine.backend, "parallel": to_dict(engine.parallel), "fsdp": to_dict(engine.fsdp)}
    return {"engine": keys, "model": to_dict(config.model), "processes": all_ranks().size}


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the main rank wrote. Raises CheckpointError if `suspend` did not write that."""
    try:
        state = read_json(folder / "desk.json")
        RequestQueue(max_waiting=1).restore(state["desk"])
        lost = {model: dict(passes) for model, passes in state["lost"].items()}
        return {"layout": state["layout"], "desk": state["desk"], "lost": lost}
    except (ModelError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f"is damaged ({type(error).__name__}: {first_line(error)})"
        raise CheckpointError(folder, why=why) from error


def refuse_other_layout(config: ServeConfig) -> None:
    """Raises ConfigError if suspended models do not fit this start, or the ledger is no file."""
    folder = Ledger(pathlib.Path(config.output_dir)).suspended
    try:
        before = read_state(folder)["layout"]
    except CheckpointError:
        return  # there is none, or it will be put aside
    changed = changed_keys(before, layout_of(config))
    if changed:
        differ = ", ".join(f"{key}={show(was)}, now {show(now)}" for key, (was, now) in changed.items())
        fix = f"start it as it was to go on with them, or remove {folder.name}/ there to go on with what was saved"
        raise ConfigError("output_dir", config.output_dir, f"has models that were suspended with {differ}", fix)
