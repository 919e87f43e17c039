"""The process that runs one test of a completion: sets its own limits, then executes. `mrl.rewards.sandbox` starts it.

Run as `python -I sandbox_child.py JOB_FD RESULT_FD`; imports nothing outside the standard library. It writes the job's
nonce to RESULT_FD when code and test have run to their end, so that leaving early is no success.

The filter of system calls is assembled here, as nothing that is everywhere takes sockets and processes away: bwrap
needs user namespaces, which containers and clusters often refuse, and prlimit sets what Python's `resource` sets.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x00010000
NR, ARCH, ARG0 = 0, 4, 16  # offsets in struct seccomp_data; ARG0: its low half (little endian)
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


class SystemCalls:
    """Numbers of system calls on a machine. audit: the machine, as a filter sees it. denied: other processes, sockets
    and ways around a filter. own: kill, tgkill and prlimit64, for this process alone (or 0, the same to prlimit64).
    """

    def __init__(self, *, audit: int, clone: int, denied: tuple[int, ...], own: tuple[int, int, int]) -> None:
        self.audit, self.clone, self.denied, self.own = audit, clone, denied, own


SYSCALLS = {
    "x86_64": SystemCalls(
        audit=0xC000003E,
        clone=56,
        # socket, socketpair, fork, vfork, ptrace, setpgid, setsid, process_vm_readv/writev, rt_(tg)sigqueueinfo, tkill,
        # pidfd_send_signal, io_uring_setup, pidfd_open, unshare, setns
        denied=(41, 53, 57, 58, 101, 109, 112, 310, 311, 129, 297, 200, 424, 425, 434, 272, 308),
        own=(62, 234, 302),
    ),
    "aarch64": SystemCalls(
        audit=0xC00000B7,
        clone=220,
        denied=(198, 199, 117, 154, 157, 270, 271, 138, 240, 130, 424, 425, 434, 97, 268),
        own=(129, 131, 261),
    ),
}
CLONE3 = 435


def build_filter(machine: str, pid: int) -> bytes:
    """Returns a seccomp program (BPF): calls of SYSCALLS fail with EPERM; threads are allowed, processes are not."""
    table = SYSCALLS[machine]
    program = []

    def op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> None:
        program.append(struct.pack("HBBI", code, jump_true, jump_false, k))

    op(LOAD, ARCH)
    op(EQUAL, table.audit, 1, 0)
    op(RETURN, ERRNO | EPERM)
    op(LOAD, NR)
    if machine == "x86_64":  # the x32 numbers, which name the same calls
        op(AT_LEAST, 0x40000000, 0, 1)
        op(RETURN, ERRNO | EPERM)
    for number in table.denied:
        op(EQUAL, number, 0, 1)
        op(RETURN, ERRNO | EPERM)
    op(EQUAL, CLONE3, 0, 1)  # its flags lie in memory, which a filter cannot read; libc falls back to clone
    op(RETURN, ERRNO | ENOSYS)
    op(EQUAL, table.clone, 0, 4)
    op(LOAD, ARG0)
    op(ANY_BIT, CLONE_THREAD, 1, 0)
    op(RETURN, ERRNO | EPERM)
    op(RETURN, ALLOW)
    for number in table.own:
        op(EQUAL, number, 0, 5)
        op(LOAD, ARG0)
        op(EQUAL, pid, 2, 0)
        op(EQUAL, 0 if number == table.own[2] else pid, 1, 0)
        op(RETURN, ERRNO | EPERM)
        op(RETURN, ALLOW)
    op(RETURN, ALLOW)
    return b"".join(program)


def install_filter() -> bool:
    """Returns whether the kernel took the filter (Linux on x86-64 or ARM64, with seccomp)."""
    if sys.platform != "linux" or platform.machine() not in SYSCALLS:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    program = build_filter(platform.machine(), os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(code)))
    zero = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) != 0:
        return False
    return libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header, zero, zero) == 0


def install_audit_hook() -> None:
    """The best effort where there is no seccomp: Python's own events of sockets and processes raise. Code that calls C
    (ctypes, an extension) gets around it."""
    blocked = (
        "socket.",
        "os.fork",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "os.kill",
        "subprocess.",
        "pty.",
    )

    def hook(event: str, args: tuple) -> None:
        if event.startswith(blocked):
            raise PermissionError(1, f"{event} is not allowed here")

    sys.addaudithook(hook)


def set_limits(limits: dict) -> None:
    """Resource limits, hard ones, which also hold for what this process might become."""
    cpu_s = max(1, int(-(-limits["time_s"] // 1)))
    memory = limits["memory_mb"] << 20
    file = limits["file_mb"] << 20
    wanted = {"CPU": cpu_s, "AS": memory, "FSIZE": file, "NOFILE": 64, "CORE": 0}
    for name, value in wanted.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit raises OSError


def main() -> None:
    job_fd, result_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != job["parent"]:
            os._exit(1)
    set_limits(job["limits"])
    if job["no_seccomp"] or not install_filter():
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no process, on Linux no thread either; does not bind root
        install_audit_hook()
    namespace = {"__name__": job["module"], "__builtins__": __builtins__}
    nonce = job.pop("nonce").encode()
    sys.argv = ["completion.py"]
    try:
        exec(compile(job["code"], "completion.py", "exec"), namespace)
        exec(compile(job["test"], "test.py", "exec"), namespace)
    except SystemExit as stop:
        if stop.code not in (None, 0) or not job["may_exit"]:
            raise
    sys.stdout.flush()
    os.write(result_fd, nonce)


if __name__ == "__main__":
    main()
