"""Runs Python code that a model wrote, in a child process with limits.

Limited: wall and CPU time, address space, size of each file, open files, no core dumps.

On Linux (x86-64, ARM64) a seccomp filter refuses:

- other processes (fork, and exec of children; threads are allowed)
- sockets of every kind
- signals to and tracing of other processes
- memory outside of the limits, and changes to the machine

Root's capabilities are dropped. Landlock (Linux 5.13 and newer) refuses writes outside of the working directory, and
the memory, environment and open files of other processes. Elsewhere Python's audit hook does what it can. The child
gets an empty working directory, which is removed, and an environment without the trainer's variables. It is killed with
its group.

This is no security boundary. The child runs as the same user, so it reads every file that the user may. The number of
its files is not limited, and faults of the kernel or of the interpreter are not guarded against. It keeps a model's
mistakes (endless loops, fork bombs, huge allocations, downloads) from harming a run. Against malice, run the whole
trainer in a container or virtual machine that has nothing to lose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time

CHILD = pathlib.Path(__file__).with_name("sandbox_child.py")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
START_S = 1.0  # for starting the interpreter, beyond the limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a program in the sandbox."""

    time_s: float  # wall time, besides START_S, and CPU time rounded up to whole seconds
    memory_mb: int  # address space
    file_mb: int  # for one file


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """The end of a program in the sandbox."""

    finished: bool  # whether code and test ran to their end
    status: int | None  # exit status, negative for a signal, None where time ran out
    output: str


def run_python(
    code: str, *, limits: Limits, test: str = "", input: str | None = None, no_seccomp: bool = False
) -> ProgramResult:
    """Executes `code`, then `test` in the same names.

    With `input` the code is a program: it is __main__, reads `input` and may call sys.exit(0). Without, it is a module
    with no input and must not exit. Its stdout is returned; stderr is dropped. no_seccomp: as on a system that has
    none.
    """
    nonce = secrets.token_hex(16)
    job = {"code": code, "test": test, "nonce": nonce, "limits": dataclasses.asdict(limits), "parent": os.getpid()}
    job |= {"module": "completion" if input is None else "__main__", "may_exit": input is not None}
    job |= {"no_seccomp": no_seccomp}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mrl-code-", ignore_cleanup_errors=True))
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        job_file, stdin, stdout = files
        job_file.write(json.dumps(job).encode())
        stdin.write((input or "").encode("utf-8", "replace"))
        for file in (job_file, stdin):
            file.seek(0)
        read_end, write_end = os.pipe()
        stack.callback(os.close, read_end)
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(CHILD), str(job_file.fileno()), str(write_end)],
                stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True,
                env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}, pass_fds=(job_file.fileno(), write_end),
            )  # fmt: skip
        finally:
            os.close(write_end)
        status, written = _wait(child, read_end, limits.time_s)
        stdout.seek(0)
        output = stdout.read().decode("utf-8", "replace")
    return ProgramResult(written == nonce.encode() and status == 0, status, output)


def _wait(child: subprocess.Popen[bytes], results: int, time_s: float) -> tuple[int | None, bytes]:
    """Returns the exit status (None: time ran out) and what the child wrote to `results`. Its group is dead then."""
    deadline = time.monotonic() + time_s + START_S
    written = b""
    status: int | None = None
    try:
        while len(written) < 64 and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([results], [], [], left)
            chunk = os.read(results, 64) if ready else b""
            if not chunk:  # closed: it ended, or closed the pipe itself
                break
            written += chunk
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(max(0.0, deadline - time.monotonic()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return status, written
