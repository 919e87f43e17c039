"""What goes wrong where torch.distributed.checkpoint reads: apart, because importing that takes half a second."""

from __future__ import annotations

import pickle

from torch.distributed.checkpoint.api import CheckpointException

from mrl.errors import CheckpointError

LOAD_ERRORS = (CheckpointException, RuntimeError, KeyError, OSError, EOFError, pickle.UnpicklingError)
"""What torch and its distributed.checkpoint raise where they cannot read what they find; the first is no Exception."""


def cannot_load(path: str, error: BaseException) -> CheckpointError:
    """One line for one of LOAD_ERRORS; what ranks met is inside a CheckpointException."""
    if isinstance(error, CheckpointException):
        error = next((failure[0] for failure in error.failures.values()), error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return CheckpointError(path, why=f"cannot be loaded ({reason})", fix="use another checkpoint")
