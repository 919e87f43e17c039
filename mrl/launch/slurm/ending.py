"""The first rank that fails, or stops after a save, leaves its exit code and message in a file for the job's script.

srun and torchrun say something of their own of a rank that fails, and kill the others: their exit codes tell less.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from mrl.words import launched_rank

VARIABLE = "MRL_FIRST_END"
MAX_LENGTH = 400
"""Characters of a message that go into the job's history; the log has all of it."""


def record(environ: Mapping[str, str], code: int, message: str, details: str = "") -> bool:
    """Writes a line with `code`, one with rank and message, and `details`, whole or not at all; the first one stays.

    Returns whether a job's script asked for it.
    """
    path = environ.get(VARIABLE)
    if not path:
        return False
    rank = launched_rank(environ)
    partial = f"{path}.{rank}"
    with contextlib.suppress(OSError):  # the message is in the log too
        with open(partial, "w", encoding="utf-8") as out:
            out.write(f"{code}\nrank {rank}: {' '.join(message.split())[:MAX_LENGTH]}\n{details}")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        os.unlink(partial)
    return True
