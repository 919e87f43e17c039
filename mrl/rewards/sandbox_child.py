"""The process that runs one test of a completion: sets its own limits, then executes. `mrl.rewards.sandbox` starts it.

Run as `python -I sandbox_child.py JOB_FD RESULT_FD`; imports nothing outside the standard library. It writes the job's
nonce to RESULT_FD when code and test have run to their end, so leaving early is no success.

Landlock, if the kernel has it, lets it write in its own folder alone, and keeps it out of the memory and environment of
other processes. The filter of system calls is assembled here, because nothing else refuses sockets and processes on all
machines: bwrap needs user namespaces, and containers and clusters often refuse those.
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
    """Numbers of system calls on a machine.

    audit: the machine, as a filter sees it. column: of the machine in REFUSED. own: the numbers of kill, tgkill and
    prlimit64, which are allowed on this process alone. prlimit64 may name it as 0.
    """

    def __init__(self, *, audit: int, clone: int, column: int, own: tuple[int, int, int]) -> None:
        self.audit, self.clone, self.own = audit, clone, own
        self.denied = tuple(n for numbers in REFUSED.values() if (n := numbers[column]) is not None)


REFUSED = {
    # sockets, other processes, and ways around a filter
    "socket": (41, 198), "socketpair": (53, 199), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "setpgid": (109, 154), "setsid": (112, 157), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "move_pages": (279, 239), "migrate_pages": (256, 238),
    # memory that RLIMIT_AS does not count, or outliving the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # the machine, which root may change
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "sethostname": (170, 161),
    "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112), "reboot": (169, 142),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "iopl": (172, None), "ioperm": (173, None), "syslog": (103, 116), "vhangup": (153, 58),
}  # fmt: skip
"""Name -> number on x86-64 and on ARM64. Others stay allowed: a libc that uses one more would fail right code."""

SYSCALLS = {
    "x86_64": SystemCalls(audit=0xC000003E, clone=56, column=0, own=(62, 234, 302)),
    "aarch64": SystemCalls(audit=0xC00000B7, clone=220, column=1, own=(129, 131, 261)),
}
CLONE3 = 435
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # on every machine
LANDLOCK_VERSION, LANDLOCK_PATH = 1, 1
PR_CAPBSET_DROP, CAPABILITIES, CAPABILITY_VERSION_3 = 24, 64, 0x20080522


def build_filter(machine: str, pid: int) -> bytes:
    """Returns a seccomp program (BPF): refused calls fail with EPERM; threads are allowed, processes are not."""
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


def forgo_privileges() -> None:
    """Drops every capability that root has: it can then neither trace other processes of root nor mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero)
    for number in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), zero, zero, zero)
    libc.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))


def install_landlock(folder: str) -> bool:
    """Returns whether the kernel took a Landlock rule (Linux 5.13 and newer, if it is on).

    It keeps this process to writing in `folder`, and out of the memory and environment of processes that it has not
    started.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(LANDLOCK_VERSION))
    if version < 1:
        return False
    # write, remove and make files of each kind; then what later versions know: refer, truncate, ioctl of devices
    writes = 0b1111111110010 | 1 << 13 if version > 1 else 0b1111111110010
    of_file = 0b10
    for number, since in ((14, 3), (15, 5)):
        if version >= since:
            writes, of_file = writes | 1 << number, of_file | 1 << number
    scoped = 0b11 if version >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("QQQ", writes, 0, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if rules < 0:
        return False
    for path, access in ((folder, writes), ("/dev/null", of_file), ("/dev/fd/1", of_file), ("/dev/fd/2", of_file)):
        place = os.open(path, os.O_PATH)
        libc.syscall(LANDLOCK_ADD, rules, LANDLOCK_PATH, struct.pack("=Qi", access, place), ctypes.c_uint32(0))
        os.close(place)
    done = libc.syscall(LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)) == 0
    os.close(rules)
    return done


def install_audit_hook() -> None:
    """Makes Python's own events of sockets and processes raise: the best effort without seccomp.

    Code that calls C (ctypes, an extension) gets around it.
    """
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
    """Sets resource limits, hard ones: they also hold for what this process might become."""
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
    if sys.platform == "linux" and not job["no_seccomp"]:
        forgo_privileges()
        install_landlock(os.getcwd())
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
