"""The user's mistakes: each is one clear line that names the key or file, the value, and what would work.

The command line turns a `UserError` into that line on stderr and exit code 2, without a traceback.
Everything else that escapes is a fault of ours: a traceback and exit code 1.
"""

from __future__ import annotations

LONGEST = 400
"""Characters of the message of an error about keys, rows or a model: values that users write may be of any length."""


def one_line(text: object, longest: int | None = None) -> str:
    """`text` on one line: what cannot be printed is escaped. Of one with more than `longest` characters, long words (values, then
    paths) lose their middle, and where that does not suffice, the line does. A path that it begins with counts as 60 at most.
    """
    line = " ".join(str(text).split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if longest is None:
        return line
    longest += max(0, min(len(line.partition(" ")[0]), 160) - 60)
    for most in (160, 100, 60, 40):
        if len(line) > min(longest, LONGEST):
            line = " ".join(w if "/" in w and most < 100 else shortened(w, most) for w in line.split(" "))
    if len(line) <= longest:
        return line
    tail = longest * 2 // 5  # what would work stands at the end
    return f"{line[: longest - tail - 5]} ... {line[-tail:]}"


def shortened(text: str, longest: int = 160) -> str:
    """A path or a name as the user wrote it; of a long one, both ends."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2 - 2]}...{text[2 - longest // 2 :]}"


def quoted(text: str, longest: int = 160) -> str:
    """As `shortened`, in quotes."""
    return repr(shortened(text, longest))


class UserError(Exception):
    """Something the user can put right; the message is one line and says how."""

    longest: int | None = None

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(message, self.longest))


class ConfigError(UserError):
    """A config key is unknown, has a wrong value, or does not fit the others: `dotted.key: value ...; what would work`."""

    longest = LONGEST


def unwritable(output_dir: str, at: object, error: OSError) -> ConfigError:
    """The line on an output_dir that cannot be made or written. at: the file or folder that `error` is about."""
    return ConfigError(
        f"output_dir: value {quoted(output_dir)} cannot be written ({shortened(str(at), 80)}: {error.strerror or error}); give a "
        "folder that can"
    )


class DataError(UserError):
    """A data file or row is wrong: `file:line: what is wrong; what would work`."""

    longest = LONGEST


class ModelError(UserError):
    """A Hugging Face model folder is wrong or not supported: names the file, field or tensor."""

    longest = 600  # names of tensors, missing and left over, are a few of each


class CheckpointError(UserError):
    """A checkpoint is damaged, foreign or does not fit this run: names the checkpoint and what is wrong."""


class DamagedCheckpoint(CheckpointError):
    """Files of a checkpoint are not what was saved: nothing of it was loaded, and an older one may be whole."""


class TrainingError(UserError):
    """Training cannot go on (a guard failed, a loss became NaN): names the step and the parameters. No fault of a program
    can be told from a rate that is too high, so it ends as the user's mistakes do."""


class RewardError(UserError):
    """A reward function failed, took too long or gave no number: names the function, the row and the value."""


class ServerError(UserError):
    """An inference server is dead, too slow, not set up for this, or answers wrongly: names its url and what it said.

    status: of HTTP, where that is what was wrong.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Stopped(Exception):
    """A signal asked the run to stop and a checkpoint was saved: exit code 75, "run me again"."""
