"""The processes that call rewards: order, faults, what is left of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from mrl.config.rewards import FunctionReward
from mrl.errors import ConfigError
from mrl.rewards.calls import Sample
from mrl.rewards.pool import Outcome, Retries, RewardPool, Task
from tests.rewards.reward_files import processes_with, write_functions
from tests.tiers import nightly_but

NAMES = (
    "script", "async_script", "size", "shout", "messages", "own_loop", "judge", "takes_from_row",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_functions(tmp_path_factory.mktemp("functions"))


def gave(value):
    return Outcome((value,))


def value(outcome):
    """Of a call for one sample; None where it failed."""
    return None if outcome.values is None else outcome.values[0]


def make(path, *, workers=2, timeout_s=1.5, names=NAMES, concurrency=8, retries=None):
    rewards = [(f"rewards.functions[{i}]", FunctionReward(function=f"{path}:{name}")) for i, name in enumerate(names)]
    return RewardPool(rewards, workers=workers, timeout_s=timeout_s, concurrency=concurrency, retries=retries)


@pytest.fixture(scope="module")
def pool(path):
    with contextlib.closing(make(path)) as pool:
        yield pool


def call(name, completion="", prompt="q", row=None):
    return Task(NAMES.index(name), (Sample(prompt, completion, row or {}),))


def scripts(*completions, name="script"):
    return [call(name, completion) for completion in completions]


def test_a_function_that_changes_its_row_changes_that_of_no_other_call(pool):
    row = {"nested": {"value": 1.0}}
    assert pool.run([call("takes_from_row", row=row) for _ in range(100)]) == [gave(1.0)] * 100


def test_results_come_in_the_order_of_the_tasks(pool):
    lengths = [(7 * i) % 50 for i in range(300)]
    tasks = [call("size", "x" * n) if n % 3 else call("async_script", f"give {n}") for n in lengths]
    assert pool.run(tasks) == [gave(float(n)) for n in lengths]
    assert pool.run([]) == []


def test_what_functions_get(pool):
    messages = [{"role": "user", "content": "é\n"}, {"role": "assistant", "content": ""}]
    shouts = [call("shout", "LOUD"), call("shout", "soft")]
    tasks = [call("messages", prompt=messages), *shouts, call("own_loop"), call("judge")]
    assert [value(o) for o in pool.run(tasks)] == [2, 1, 0, 2, 3]


def test_signals_that_stop_a_run_do_not_end_scoring(pool):
    """srun sends them to every process of a job."""
    signals = ", ".join(f"os.kill(os.getpid(), {number:d})" for number in (signal.SIGUSR1, signal.SIGTERM))
    assert pool.run(scripts(f"give ({signals}, 3.0)[-1]")) == [gave(3.0)]


@pytest.mark.parametrize("name", ["script", "async_script"])
@pytest.mark.parametrize(
    ("completion", "fault"),
    [
        ("give None", r"returned None \(NoneType\), which is no number"),
        ("give 10 ** 400", "int too large"),
        ("raise x", r"raised KeyError: 'x' \(my_rewards.py:\d+\)"),
        ("leave", r"raised SystemExit: 0 \(my_rewards.py:\d+\)"),
        ("exit", r"ended its process \(exit status 7\)"),
        ("segfault", r"ended its process \(signal 11, SIGSEGV\)"),
    ],
)
def test_faults(pool, name, completion, fault):
    before, bad, after = pool.run(scripts("give 1", completion, "give 2", name=name))
    assert (before, after) == (gave(1.0), gave(2.0))
    assert bad.values is None and not bad.timed_out and re.match(fault, bad.fault), bad


def test_a_crash_in_a_library_says_which_lines_called_it(path, capfd):
    with contextlib.closing(make(path)) as pool:
        pool.run(scripts("segfault"))
    assert re.search(r"Fatal Python error: Segmentation fault.*my_rewards.py.* in script", capfd.readouterr().err, re.S)


@pytest.mark.parametrize(
    ("name", "completion"),
    nightly_but(
        [("script", "hang_in_c"), ("async_script", "stubborn")],
        [("script", "hang_in_c"), ("async_script", "stubborn"), ("script", "ignore_signals"), ("async_script", "hang")],
    ),
)
def test_a_call_that_hangs_is_alone_at_fault(pool, name, completion):
    start = time.monotonic()
    outcomes = pool.run(
        scripts("give 1", completion, "sleep 0.1" if name == "async_script" else "give 3", "give 4", name=name)
    )
    assert outcomes[1] == Outcome(None, "took longer than 1.5 s", timed_out=True)
    assert [o.values is None for o in outcomes] == [False, True, False, False]
    assert time.monotonic() - start < 40
    assert len(pool.pids) <= 2 and pool.run(scripts("give 5")) == [gave(5.0)]


def test_calls_beside_one_that_ends_a_process_are_made_once(path, tmp_path):
    after = tmp_path / "after"
    with contextlib.closing(make(path, workers=1, timeout_s=1)) as pool:
        outcomes = pool.run(scripts("give 1", "exit", *[f"note {after}"] * 20))
    assert [i for i, o in enumerate(outcomes) if o.fault] == [1] and len(after.read_text()) == 20


def test_a_call_that_failed_is_made_again_after_a_pause(path, tmp_path):
    tries, start = [tmp_path / "a", tmp_path / "b", tmp_path / "c"], time.monotonic()
    tasks = scripts(*(f"busy {file}" for file in tries[:2]), "hang") + scripts(f"busy {tries[2]}", name="async_script")
    with contextlib.closing(make(path, timeout_s=0.3, retries=Retries(2, 0.1))) as pool:
        outcomes = pool.run(tasks)
        assert len(pool.made_again) == 8 and {f.split(" (")[0] for f in pool.made_again} == {
            "raised ConnectionError: busy", "took longer than 0.3 s",
        }  # fmt: skip
    assert outcomes == [gave(1.0), gave(1.0), Outcome(None, "took longer than 0.3 s", timed_out=True), gave(1.0)]
    assert [file.read_text() for file in tries] == ["xxx"] * 3
    assert time.monotonic() - start > 3 * 0.3 + 0.5 * (0.1 + 0.2)
    assert [Retries(9, 1.0).pause_s(n, 7) / Retries(9, 1.0).pause_s(0, 7) for n in (1, 3, 100)] == [2, 8, 60]


def test_async_calls_run_together(path):
    with contextlib.closing(make(path, workers=1, names=NAMES, timeout_s=5)) as pool:
        pool.run(scripts("give 1", name="async_script"))
        start = time.monotonic()
        assert [value(o) for o in pool.run(scripts(*["sleep 0.5"] * 16, name="async_script"))] == [1.0] * 16
        assert 1.0 <= time.monotonic() - start < 5  # 16 calls, 8 at a time, and not 8 s
        assert pool.run(scripts("same loop", "same loop", name="async_script")) == [gave(1.0)] * 2


def test_the_first_fatal_fault_is_always_the_same(pool):
    tasks = scripts("give 1", "give None", "give 2", "raise x", *["sleep 0.05"] * 500)
    for _ in range(2):
        outcomes = pool.run(tasks, fatal=lambda task, outcome: "raised" in outcome.fault)
        assert [value(o) for o in outcomes[:3]] == [1, None, 2]
        assert outcomes[3].fault.startswith("raised KeyError")
        assert outcomes[-1] is None, "tasks after a fatal fault are not started"


def test_answers_of_an_earlier_run_are_not_taken(pool):
    tasks = scripts("give None", *["sleep 0.3"] * 20, name="async_script")
    pool.run(tasks, fatal=lambda task, outcome: True)
    assert pool.run(scripts(*[f"give {i}" for i in range(20)], name="async_script")) == [
        gave(float(i)) for i in range(20)
    ]


def test_a_process_that_died_between_calls_is_replaced(pool):
    assert pool.run(scripts("later")) == [gave(1.0)]
    time.sleep(0.3)
    assert pool.run(scripts("give 1", "x" * 3_000_000, "give 3"))[::2] == [gave(1.0), gave(3.0)]


def test_closing_leaves_no_process_and_no_descriptor(path):
    fds = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    pool = make(path, names=("script",), timeout_s=0.5)
    pids = pool.pids
    pool.run(scripts("hang"))
    pids += pool.pids
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([])


def test_what_a_function_started_is_killed_with_it(pool):
    """Also in a session of its own."""
    mark = f"62.{os.getpid()}"
    assert pool.run(scripts(f"setsid {mark}"))[0].timed_out
    assert not processes_with(mark)


def test_a_file_that_ends_its_process_is_a_config_error(tmp_path):
    (tmp_path / "bad.py").write_text("import os; os._exit(3)", encoding="utf-8")
    children = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"bad.py:f: loading ended the process \(exit status 3\); import"):
        RewardPool([("rewards.functions[0]", FunctionReward(function=f"{tmp_path}/bad.py:f"))], workers=2, timeout_s=1)
    assert psutil.Process().children() == children


def test_processes_do_not_load_torch(path):
    with contextlib.closing(make(path, names=("script",), workers=1)) as pool:
        assert pool.run(scripts("give 'torch' in sys.modules or 'mrl.rewards' not in sys.modules")) == [gave(0.0)]


SCRIPT = """
import sys, time
from mrl.config.rewards import FunctionReward
from mrl.rewards.calls import Sample
from mrl.rewards.pool import RewardPool, Task
print("main", flush=True)
pool = RewardPool([("rewards.functions[0]", FunctionReward(function=sys.argv[1] + ":script"))], workers=2, timeout_s=100)
print(pool.run([Task(0, (Sample("q", "give 4", {}),))])[0].values[0], *pool.pids, flush=True)
if len(sys.argv) > 2: pool.run([Task(0, (Sample("q", sys.argv[2], {}),))] * 2)
"""


def run_script(tmp_path, path, *more):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, str(script), path, *more], stdout=subprocess.PIPE, text=True, env=env)


def gone(pids, within_s=5.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_script_needs_no_main_guard_and_leaves_nothing(tmp_path, path):
    process = run_script(tmp_path, path)
    out, _ = process.communicate(timeout=30)
    lines = out.splitlines()
    assert process.returncode == 0 and lines[0] == "main" and len(lines) == 2
    value, *pids = lines[1].split()
    assert value == "4.0" and len(pids) == 2 and gone(map(int, pids), 0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on the pipe is Linux's")
def test_processes_die_with_the_one_that_holds_the_pool(tmp_path, path):
    process = run_script(tmp_path, path, "hang_in_c")
    assert process.stdout.readline() == "main\n"
    _, *pids = process.stdout.readline().split()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert gone([int(p) for p in pids])
