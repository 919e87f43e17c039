"""Runs the `mrl` command in a fork of this process for each line of stdin: [folder, where output goes, arguments].

Answers each with the exit code. What takes seconds to import is imported here, once.
"""

from __future__ import annotations

import json
import os
import sys

import mrl.cli
import mrl.engine.fsdp.engine  # noqa: F401
import mrl.engine.megatron.engine  # noqa: F401
import mrl.trainers.sft  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        folder, output, arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(folder, output, arguments)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(code, flush=True)


def run(folder: str, output: str, arguments: list[str]) -> None:
    """Becomes `mrl ARGUMENTS`; does not return."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(output, name), os.O_WRONLY | os.O_CREAT, 0o600), fd)
    os.chdir(folder)
    sys.argv = ["mrl", *arguments]
    code = 1
    try:
        mrl.cli.main(arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
