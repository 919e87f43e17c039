"""Scripts of every template: equal to the files in golden/, right for bash and shellcheck, as Slurm reads them.

`python -m tests.slurm.test_render` writes golden/ anew; the difference is for a person to read.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
import shutil
import subprocess

import pytest

from mrl import __version__
from mrl.commands.ppo import COMMAND as PPO_COMMAND
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.launch.slurm.options import TEMPLATE_NAMES, ServersConfig, SlurmConfig
from mrl.launch.slurm.render import Job, render, template_text
from mrl.launch.slurm.servers import server_command
from tests.bad_input.mistakes import PPO_CONFIG
from tests.slurm import slurm_site

GOLDEN = pathlib.Path(__file__).parent / "golden"
ODD = '/data/it\'s a "run" $HOME `x` \\ 100%'

SITE = SlurmConfig(
    nodes=2, gpus_per_node=8, cpus_per_task=64, mem="0", time="1-12", partition="gpu", account="lab", qos="high",
    mail_type="END,FAIL", mail_user="me@example.org", sbatch=("--exclusive",), python="/opt/venv/bin/python",
    setup=("module load cuda/12.8",), env={"NCCL_DEBUG": "WARN", "HF_HOME": "/data/my cache"},
)  # fmt: skip
TASK = Job("sft", "/home/me/my run/slurm/job.yaml", (), "/home/me/my run", "/home/me/work dir")
SWEEP = ("seed=%a", "data.columns={a: 'it'}", "optimizer.lr=1e-%a")
PPO = dataclasses.replace(TASK, command="ppo")


def jobs() -> dict[str, tuple[Job, SlurmConfig]]:
    """Name of a golden file -> what it is made of."""
    image = {"image": "/images/mrl train.sqsh", "mounts": ("/data:/data",), "python": "python3", "setup": ()}
    change = lambda **fields: dataclasses.replace(SITE, **fields)  # noqa: E731
    servers = ServersConfig(nodes=2, gpus_per_node=4, cpus_per_task=32, setup=("module load vllm",))
    config = from_dict(PPO_CONFIG | {"rollout": PPO_CONFIG["rollout"] | {"backend": "vllm"}}, PPOConfig)
    hetero = change(template="hetero", servers=servers)
    return {
        "bare": (TASK, SITE),
        "bare_srun_array": (
            dataclasses.replace(TASK, overrides=SWEEP),
            SlurmConfig(
                processes_per_node=4,
                nodes=1,
                launcher="srun",
                array="0-3",
                interface="ib0",
                python="/opt/venv/bin/python",
            ),
        ),
        "bare_c10d": (TASK, change(rendezvous="c10d")),
        "container": (TASK, change(template="container", **image)),
        "apptainer": (TASK, change(template="apptainer", **image)),
        "hetero": (dataclasses.replace(PPO, server_command=server_command(PPO_COMMAND.server(config), hetero)), hetero),
    }


def rendered(name: str) -> str:
    return render(*jobs()[name]).replace(f"mrl {__version__};", "mrl VERSION;")


@pytest.mark.parametrize("name", jobs())
def test_scripts_are_as_read_by_a_person_before(name):
    assert rendered(name) == (GOLDEN / f"{name}.sbatch").read_text(), "python -m tests.slurm.test_render"


def inner_scripts(script: str) -> list[str]:
    """The scripts that a script writes."""
    found = re.findall(r"<<'(\w+)'\n(.*?\n)\1\n", script, re.DOTALL)
    assert found, script
    return [text for _, text in found]


def test_bash_and_shellcheck_find_nothing(tmp_path):
    """Of each script, and of those that it writes."""
    scripts = [rendered(name) for name in jobs()]
    paths = []
    for number, text in enumerate({*scripts, *itertools.chain.from_iterable(map(inner_scripts, scripts))}):
        paths.append(tmp_path / f"{number}.sh")
        paths[-1].write_text(text)
        subprocess.run(["bash", "-n", paths[-1]], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: apt-get install -y --no-install-recommends shellcheck")
    done = subprocess.run(["shellcheck", "--severity=style", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["bare", "bare_srun_array", "bare_c10d", "container", "apptainer"])
def test_odd_paths_and_values_reach_the_training_whole(name, tmp_path):
    """The step's script is run with an interpreter that prints its arguments, the srun line with one that prints them."""
    job, options = jobs()[name]
    argument = "data.columns={'a b': \"$HOME\"}"
    job = Job("sft", f"{ODD}/c.yaml", (argument,), ODD, ODD)
    options = dataclasses.replace(options, python=str(tmp_path / "an odd python"), env={"ODD": ODD}, setup=())
    fake = tmp_path / "an odd python"
    fake.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    script = render(job, options)
    [step] = inner_scripts(script)
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "MRL_ADDRESSES": "n1 n2 ", "SLURM_ARRAY_TASK_ID": "2"}  # fmt: skip
    done = subprocess.run(["bash", "-c", step], env=environ, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    start = words.index("sft")
    assert words[start : start + 3] == ["sft", f"{ODD}/c.yaml", argument]
    variable = re.search(r"^export ODD=.*$", script, re.MULTILINE)[0]
    done = subprocess.run(["bash", "-c", variable + '; echo "$ODD"'], capture_output=True, text=True, check=True)
    assert done.stdout == ODD + "\n"
    run_dir = re.search(r"^run_dir=.*$", script, re.MULTILINE)[0]
    expected = f"{ODD}/task_2" if options.array else ODD
    done = subprocess.run(["bash", "-c", run_dir + '; echo "$run_dir"'], env=environ, capture_output=True, text=True)
    assert done.stdout == expected + "\n"


def test_what_an_earlier_start_has_left_goes(tmp_path):
    """On the node of a task; not what belongs to other tasks of this start, or to other jobs."""
    for name in ("mrl-7.0.aa a", "mrl-7.1.bbb", "mrl-7.2.ccc", "mrl-77.0.ddd"):
        (tmp_path / name).mkdir()
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho "$TMPDIR"\n')
    fake.chmod(0o755)
    [step] = inner_scripts(render(TASK, dataclasses.replace(SITE, python=str(fake), setup=())))
    environ = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "SLURM_TMPDIR": str(tmp_path)}  # fmt: skip
    done = subprocess.run(["bash", "-c", step], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{tmp_path}/mrl-7.2.")
    assert {path.name for path in tmp_path.iterdir()} == {"python", "mrl-7.2.ccc", "mrl-77.0.ddd"}


def test_the_last_words_of_a_server_name_the_cause(tmp_path):
    """Its last line does not: it says that the cause is above. tests/rollout/test_vllm_start.py has a real server."""
    cause = "(EngineCore pid=7) ERROR safetensors_rust.SafetensorError: Error while deserializing header"
    noise = ["INFO begins", "WARNING error: x", cause, "", "RuntimeError: Engine core initialization failed. See above", "srun: error: n2"]  # fmt: skip
    function = re.search(r"^last_words\(\) \{\n.*?^\}\n", rendered("hetero"), re.DOTALL | re.MULTILINE)[0]
    for lines, said in ((noise, f": {cause}\n"), (noise[:1], ": INFO begins\n"), ([], "")):
        (tmp_path / "servers.log").write_text("".join(f"{line}\n" for line in lines))
        bash = ["bash", "-c", f'attempt_dir="$1"; {function} last_words', "bash", str(tmp_path)]
        assert subprocess.run(bash, capture_output=True, text=True).stdout == said


def test_slurm_reads_what_the_directives_say(running_cluster, tmp_path):
    """Of every directive that has a value with odd characters, as scontrol shows the job."""
    folder = tmp_path / 'it\'s a "run" $HOME 100%'
    (folder / "slurm").mkdir(parents=True)
    options = SlurmConfig(
        nodes=2, processes_per_node=2, cpus_per_task=1, mem="100M", time="1-02:03:00", nodelist="n[1-2]", job_name="a 'name' \"x\"",
        sbatch=("--hold", '--comment="of mine"'),
    )  # fmt: skip
    script = folder / "job.sbatch"
    script.write_text(render(Job("sft", str(folder / "c.yaml"), (), str(folder), str(folder)), options))
    job_id = subprocess.run(["sbatch", "--parsable", script], capture_output=True, text=True, check=True).stdout.strip()
    text = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", job_id], check=True)
    shown = {line.strip() for line in text.splitlines()}
    assert f"WorkDir={folder}" in shown
    assert f"StdOut={folder}/slurm/{job_id}.log".replace("%", "%%") in shown, text
    assert "Comment=of mine" in shown
    for part in ("JobName=a 'name' \"x\"", "TimeLimit=1-02:03:00", "NumNodes=2", "NumTasks=2", "CPUs/Task=1", "Requeue=1", "MinMemoryNode=100M"):  # fmt: skip
        assert part in text, f"{part}\n{text}"


def test_a_template_of_ones_own(tmp_path, monkeypatch):
    """Made from `mrl slurm template`: blocks of base, variables of one's own, and every template of the package by name."""
    own = tmp_path / "my.sbatch"
    own.write_text(
        '{% extends "bare.sbatch" %}\n{% block setup %}\nmodule load {{ variables.module }}\n{% endblock %}\n'
    )
    script = render(TASK, dataclasses.replace(SITE, template=str(own), variables={"module": "cuda/13"}))
    assert script == render(TASK, dataclasses.replace(SITE, setup=())).replace(
        "# ---- The environment of the training.\n", "# ---- The environment of the training.\nmodule load cuda/13\n"
    )
    for name in TEMPLATE_NAMES:
        own.write_text(slurm_site.invoke("template", name).stdout)
        assert own.read_text() == template_text(name)
        job, options = jobs()[name]
        assert render(job, dataclasses.replace(options, template=str(own))) == render(job, options)


if __name__ == "__main__":
    for name in jobs():
        (GOLDEN / f"{name}.sbatch").write_text(rendered(name))
