"""Unit tests as a reward, and the limits that code written by a model meets."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pathlib
import platform
import re
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from mrl.config.rewards import CodeReward
from mrl.rewards.code import code, python_block
from mrl.rewards.sandbox import Limits, run_python
from mrl.rewards.sandbox_child import REFUSED, SYSCALLS, build_filter

LIMITS = Limits(time_s=30, memory_mb=512, file_mb=4)
SHORT = dataclasses.replace(LIMITS, time_s=1)  # for what does not end by itself
HAS_SECCOMP = sys.platform == "linux" and platform.machine() in SYSCALLS
GOOD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]


@pytest.mark.parametrize(
    ("completion", "block"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\ntext\n``` python3 \nb\n```", "b\n"),
        ("```python\na\n```\nprints\n```\nout\n```", "a\n"),
        ("```\na\n```\n```json\n{}\n```", "a\n"),
        ("```bash\nls\n```", ""),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("```Python\ns = '```'\n```", "s = '```'\n"),
        ("", ""),
    ],
)
def test_python_block(completion, block):
    assert python_block(completion) == block


@pytest.mark.parametrize(
    ("completion", "tests", "score", "expected"),
    [
        (GOOD, TESTS, "fraction", 1),
        (WRONG, TESTS, "fraction", 0.25),
        (WRONG, TESTS, "all", 0),
        (GOOD, "assert add(1, 2) == 3", "fraction", 1),
        ("```python\ndef add(:\n```", TESTS, "fraction", 0),
        ("", TESTS, "fraction", 0),
        ("```python\nimport os\nos._exit(0)\n```", TESTS, "fraction", 0),
        ("```python\nraise SystemExit(0)\n```", TESTS, "fraction", 0),
        ("```python\nprint(int(input()) * 2)\n```", [{"input": "2\n", "output": "4"}, {"input": "3", "output": "7"}], "fraction", 0.5),
        ("```python\nimport sys\nif __name__ == '__main__':\n    print('a  ')\n    sys.exit(0)\n```", [{"input": "", "output": "a\n\n"}], "all", 1),
        ("```python\nprint('a')\nraise SystemExit(1)\n```", [{"input": "", "output": "a"}], "all", 0),
    ],
)  # fmt: skip
def test_score(completion, tests, score, expected):
    assert code("q", completion, {"tests": tests}, CodeReward(score=score)) == expected


def test_a_row_of_humaneval():
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert code("q", GOOD, {"test": test, "entry_point": "add"}, CodeReward(field="test")) == 1
    assert code("q", WRONG, {"test": test, "entry_point": "add"}, CodeReward(field="test")) == 0


@pytest.mark.parametrize("tests", [[], 3, [3], [{"input": "x"}], {"a": 1}])
def test_a_row_without_tests_is_an_error(tests):
    with pytest.raises(ValueError, match="the row's tests is no Python text"):
        code("q", GOOD, {"tests": tests}, CodeReward())


def test_total_time_ends_the_tests():
    start = time.monotonic()
    slow = "```python\nimport time\ntime.sleep(30)\n```"
    assert code("q", slow, {"tests": ["pass"] * 50}, CodeReward(time_s=0.5, total_s=1.5)) == 0
    assert time.monotonic() - start < 15  # 50 tests of 0.5 s, and the starts of 50 processes


@pytest.fixture(params=["seccomp", "audit hook"])
def run(request):
    if request.param == "seccomp" and not HAS_SECCOMP:
        pytest.skip("no seccomp filter for this system")
    return lambda program, limits=LIMITS: run_python(program, limits=limits, no_seccomp=request.param == "audit hook")


@pytest.mark.parametrize(
    "program",
    [
        "x = sum(range(1000)); assert x == 499500",
        "import numpy; assert (numpy.eye(3) @ numpy.ones(3)).sum() == 3",
        "open('here.txt', 'w').write('x'); assert open('here.txt').read() == 'x'",
    ],
)
def test_ordinary_code_runs(run, program):
    assert run(program).finished


@pytest.mark.parametrize("program", ["while True: pass", "import os, time\nos.close(4)\ntime.sleep(60)"])
def test_an_endless_loop_ends(program):
    """By either clock, also where the pipe to the parent is closed."""
    start = time.monotonic()
    assert not run_python(program, limits=SHORT).finished
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "program",
    ["import os\nwhile True: os.fork()", "import subprocess\nsubprocess.run(['sleep', '61.73'])", "import os\nos.system('sleep 61.73 &')\nassert os.path.exists('x')", "import multiprocessing as m\nm.Process(target=print).start()"],
)  # fmt: skip
def test_no_child_process_is_made(run, program):
    assert not run(program).finished
    assert not [p for p in psutil.process_iter(["cmdline"]) if "61.73" in (p.info["cmdline"] or [])]


def test_a_large_allocation_fails(run):
    assert not run("x = bytearray(4 << 30)").finished
    assert run("try:\n    bytearray(4 << 30)\nexcept MemoryError:\n    pass").finished


def test_a_large_file_fails(run):
    assert not run("open('x', 'wb').write(bytes(8 << 20))").finished
    assert len(run("while True: print('x' * 1000)").output) <= LIMITS.file_mb << 20


def test_no_socket_is_opened(run):
    """A listener on this machine, to which code without the limits would connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        subprocess.run([sys.executable, "-c", program], check=True)
        server.accept()[0].close()
        assert not run(program).finished
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_processes_get_no_signal(run):
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not run(f"import os\nos.kill({other.pid}, 9)").finished
        assert other.poll() is None
        other.kill()


def test_the_environment_of_the_trainer_is_not_seen(run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run("import os\nassert 'WANDB_API_KEY' not in os.environ\nassert os.getcwd() == os.environ['HOME']").finished


@pytest.mark.skipif(not HAS_SECCOMP, reason="no seccomp filter for this system")
def test_c_code_meets_the_filter_too():
    assert run_python("import ctypes\nassert ctypes.CDLL(None).socket(2, 1, 0) == -1", limits=LIMITS).finished
    assert run_python("import ctypes\nassert ctypes.CDLL(None).fork() == -1", limits=LIMITS).finished


HAS_LANDLOCK = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
OF_PARENT = """
import os
for name in ("mem", "environ", "maps", "fd/0", "cwd/x", "root/etc/passwd"):
    try:
        open(f"/proc/{os.getppid()}/{name}", "rb")
    except PermissionError:
        continue
    raise SystemExit(name)
"""


@pytest.mark.skipif(not HAS_SECCOMP, reason="no seccomp filter for this system")
@pytest.mark.skipif(not HAS_LANDLOCK and os.getuid() != 0, reason="a user's processes see each other without Landlock")
def test_the_trainers_memory_and_environment_are_not_read():
    assert subprocess.run([sys.executable, "-c", OF_PARENT], stderr=subprocess.PIPE, check=False).returncode == 1
    assert run_python(OF_PARENT, limits=LIMITS).finished


@pytest.mark.skipif(not HAS_LANDLOCK, reason="the kernel has no Landlock")
def test_code_writes_in_its_folder_alone(tmp_path):
    inside = "open('a', 'w').write('x'); os.mkdir('d'); os.rename('a', 'b'); os.symlink('b', 'c'); os.truncate('b', 0); os.remove('b')"
    own = "open('/dev/null', 'w').write('x'); open('/dev/stdout', 'w').write('said'); tempfile.NamedTemporaryFile()"
    ran = run_python(f"import os, tempfile\n{inside}\n{own}", limits=LIMITS)
    assert ran.finished and ran.output == "said"
    (tmp_path / "mine").write_text("mine")
    for call in ("open(p, 'w')", "open(p + '2', 'w')", "os.remove(p)", "os.truncate(p, 0)", "os.symlink('x', p + '3')",
                 "os.rename(p, 'x')", "os.mkdir(p + '4')", "open('/dev/shm/mrl-test', 'w')"):  # fmt: skip
        program = f"import os\np = {str(tmp_path / 'mine')!r}\ntry:\n    {call}\nexcept OSError:\n    pass\nelse:\n    raise SystemExit(1)"
        assert run_python(program, limits=LIMITS).finished, call
    assert (tmp_path / "mine").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


REFUSED_CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
assert "0" * 16 in next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
for name, args in [
    ("mount", (b"none", b"/mnt", b"tmpfs", 0, None)), ("umount2", (b"/proc", 0)), ("chroot", (b"/",)),
    ("sethostname", (b"x", 1)), ("memfd_create", (b"x", 0)), ("shmget", (0, 4096, 0o1600)), ("msgget", (0, 0o1600)),
    ("semget", (0, 1, 0o1600)), ("unshare", (0x10000000,)), ("acct", (None,)), ("ptrace", (0, 0, 0, 0)),
    ("swapoff", (b"/x",)),
]:
    ctypes.set_errno(0)
    assert getattr(libc, name)(*args) == -1 and ctypes.get_errno() == errno.EPERM, name
"""


@pytest.mark.skipif(not HAS_SECCOMP, reason="no seccomp filter for this system")
def test_the_machine_is_left_as_it_is_and_memory_is_the_process_own():
    assert run_python(REFUSED_CALLS, limits=LIMITS).finished


@pytest.mark.parametrize(("header", "column"), [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)])
def test_numbers_of_refused_calls_are_the_kernels(header, column):
    """ARM64 has the generic numbers."""
    path = pathlib.Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"{path} is not here: apt-get install linux-libc-dev")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
    for name, numbers in REFUSED.items():
        assert str(numbers[column]) == found.get(name, "None"), name
    assert len(SYSCALLS["x86_64"].denied) == len(REFUSED) and len(SYSCALLS["aarch64"].denied) == len(REFUSED) - 4


@pytest.mark.parametrize("machine", SYSCALLS)
def test_the_jumps_of_the_filter_stay_inside(machine):
    program = build_filter(machine, 1234)
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    assert steps[-1] == bytes.fromhex("060000000000ff7f"), "the last instruction allows"
    for i, step in enumerate(steps):
        if step[0] & 7 == 5:
            assert i + 1 + max(step[2], step[3]) < len(steps)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fds = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    threads, children = threading.active_count(), psutil.Process().children()
    run_python("open('x', 'w').write('y')\nwhile True: pass", limits=SHORT)
    assert not list(pathlib.Path(tmp_path).iterdir())
    assert psutil.Process().children() == children
    assert threading.active_count() == threads
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == fds
