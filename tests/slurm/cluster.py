"""A private Slurm of two nodes on this machine: munged, slurmctld and two slurmd of Debian's packages, on ports of its own.

No accounting, as on a cluster without slurmdbd. It needs root, as Slurm's daemons do.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import psutil

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
START_S = 60.0
NODE_TIMEOUT_S = 60
"""Seconds after which Slurm gives up a node that does not answer: less than the 300 of a real cluster, and more than a slow one needs."""

GRACE_S = 600
"""Longest time that a job in the partition `scavenge` has left when one in `debug` takes its nodes; it leaves sooner."""

_CONF = """\
ClusterName=mrl
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
ReturnToService=2
SlurmdTimeout={timeout}
SlurmctldTimeout=60
KillWait=5
MinJobAge=300
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=DEFAULT Nodes=n[1-2] MaxTime=INFINITE State=UP
PartitionName=debug Default=YES PriorityTier=2 PreemptMode=OFF
PartitionName=scavenge PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=sudden PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
"""


def missing() -> str | None:
    """Why no Slurm can be started here, in a line; None where it can."""
    absent = [command for command in COMMANDS if shutil.which(command, path=_path()) is None]
    if absent:
        return f"no Slurm here ({', '.join(absent)}): apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


class Cluster:
    """A running Slurm in the folder `root`. `environ`: what Slurm's commands need."""

    def __init__(self, root: pathlib.Path, cpus: int = 2) -> None:
        self.root = root
        self.environ = {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _path()}
        ctld_port, *slurmd_ports = free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=8000 Gres=gpu:8"
            for name, port in zip(NODES, slurmd_ports, strict=True)
        )
        for folder in ("state", "munge", *(f"spool.{name}" for name in NODES)):
            (root / folder).mkdir(parents=True)
        root.chmod(0o755)
        (root / "munge").chmod(0o755)
        conf = _CONF.format(
            host=host, ctld_port=ctld_port, root=root, nodes=nodes, timeout=NODE_TIMEOUT_S, grace=GRACE_S,
            first_job=1 + os.getpid() % 60_000 * 1000,  # jobs name and sweep folders in /tmp, where other clusters' jobs have theirs
        )  # fmt: skip
        (root / "slurm.conf").write_text(conf)
        for i in range(8):  # device files are only counted
            (root / f"gpu{i}").touch()
        (root / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={root}/gpu[0-7]\n")

    def start(self) -> None:
        munge = self.root / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": munge / "socket", "pid-file": munge / "pid", "log-file": munge / "log", "seed-file": munge / "seed"}  # fmt: skip
        self._run("munged", *(f"--{name}={path}" for name, path in files.items()), "--force")
        self._run("slurmctld", "-f", self.environ["SLURM_CONF"])
        for name in NODES:
            self.start_node(name)
        self.wait_for_idle()

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-N", name, "-f", self.environ["SLURM_CONF"])

    def kill_node(self, name: str) -> None:
        """SIGKILL to a node's slurmd, and to the steps and tasks that it has started."""
        psutil.Process(int((self.root / f"slurmd.{name}.pid").read_text())).kill()
        self._kill_tasks(name)

    def _kill_tasks(self, name: str) -> None:
        while tasks := [process for process in psutil.process_iter() if self._is_task_of(process, name)]:
            for process in [*filter(None, map(_step_of, tasks)), *tasks]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(tasks, timeout=1)  # again for what they have started meanwhile

    def _is_task_of(self, process: psutil.Process, name: str) -> bool:
        with contextlib.suppress(psutil.Error):
            environ = process.environ()
            ours = environ.get("SLURM_CONF") == self.environ["SLURM_CONF"]
            return ours and environ.get("SLURMD_NODENAME") == name
        return False

    def wait_for_idle(self) -> None:
        deadline = time.monotonic() + START_S
        while self._run("sinfo", "--noheader", "--format=%D %t").split() != [str(len(NODES)), "idle"]:
            log = (self.root / "slurmctld.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"the nodes are not idle after {START_S} s\n{self._run('sinfo')}\n{log}"
            time.sleep(0.2)

    def stop(self) -> None:
        for path in (
            *(self.root / f"slurmd.{name}.pid" for name in NODES),
            self.root / "slurmctld.pid",
            self.root / "munge" / "pid",
        ):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        for name in NODES:  # jobs outlive the daemons
            self._kill_tasks(name)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=os.environ | self.environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout


@contextlib.contextmanager
def running(root: pathlib.Path) -> Iterator[Cluster]:
    cluster = Cluster(root)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _step_of(task: psutil.Process) -> psutil.Process | None:
    """The daemon of the step that has started a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = task.parent()
        return parent if parent is not None and parent.name().startswith("slurmstepd") else None
    return None


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
