"""Requests that cannot work: exit code 2, one message, and nothing written or submitted."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable

import pytest
import yaml

from mrl.launch.slurm import jobs
from tests.bad_input.mistakes import CONFIG, MODEL, PPO_CONFIG, Workspace
from tests.slurm import slurm_site

CPU = ("--gpus-per-node", "0", "--processes-per-node", "2")
VLLM = ("rollout.backend=vllm",)


def render(*args: str, config: str = "config.yaml", command: str = "sft", **fields) -> dict:
    """args: after `mrl slurm`. edit: of the workspace. profile: content of the --profile file."""
    return {"args": ("render", command, config, *args), **fields}


def ppo(*args: str, **fields) -> dict:
    return render(*args, config="ppo.yaml", command="ppo", **fields)


def copy_of(name: str) -> Callable[[Workspace], None]:
    """A user's own template, made of one of the package."""
    return lambda workspace: workspace.write("my.sbatch", slurm_site.invoke("template", name).stdout)


def write(name: str, text: str) -> Callable[[Workspace], None]:
    return lambda workspace: workspace.write(name, text)


TEMPLATE = ("--template", "my.sbatch")
CASES = {
    # What is asked of Slurm.
    "no processes": (("slurm.gpus_per_node: value null", "--processes-per-node"), render()),
    "no processes on CPUs": (("slurm.gpus_per_node: value 0",), render("--gpus-per-node", "0")),
    "no nodes": (("slurm.nodes: value 0", "at least 1"), render(*CPU, "--nodes", "0")),
    "more processes than GPUs": (("slurm.processes_per_node: value 4 is above the 2 GPUs",), render("--gpus-per-node", "2", "--processes-per-node", "4")),
    "GPUs for a CPU": (("slurm.gpus_per_node: value 8", "engine.device cpu"), render("--gpus-per-node", "8")),
    "no GPU for cuda": (("gives no GPU to engine.device cuda",), render(*CPU, "engine.device=cuda")),
    "time is none": (('slurm.time: value "soon" is no time limit',), render(*CPU, "--time", "soon")),
    "time is shorter than the signal": (('slurm.time: value "1" is not longer than the 120 s',), render(*CPU, "--time", "1")),
    "a line break": (("slurm.account", "has a line break"), render(*CPU, "--account", "a\n#SBATCH --qos=b")),
    "an empty value": (("slurm.partition", "is empty"), render(*CPU, "--partition", " ")),
    "a name of no variable": (("slurm.env", "no name of a variable"), render(*CPU, "--env", "A-B=1")),
    "a variable without value": (("--env", "NAME=VALUE"), render(*CPU, "--env", "A")),
    "an extra line that is none": (("slurm.sbatch", "does not begin with -"), render(*CPU, "--sbatch", "exclusive")),
    "an extra line of ours": (("slurm.sbatch", "--nodes=7", "is an option that mrl writes"), render(*CPU, "--nodes", "2", "--sbatch", "--nodes=7")),
    "two in a line, one of ours": (("slurm.sbatch", "--signal of the line"), render(*CPU, "--sbatch", "--exclusive --signal USR2@5")),
    "a rendezvous of another launcher": (('slurm.rendezvous: value "c10d"', "--launcher torchrun"), render(*CPU, "--launcher", "srun", "--rendezvous", "c10d")),
    "array ids are none": (('slurm.array: value "all"',), render(*CPU, "--array", "all")),
    "output_dir of a task": (("output_dir: value with %a is not needed",), render(*CPU, "--array", "0-1", "output_dir=run_%a")),
    # The config against it.
    "layout does not fit": (("tp*pp*cp (3*1*1 = 3)", "(2 nodes of 2)"), render(*CPU, "--nodes", "2", "engine.parallel.tp=3")),
    "a run that no restart goes on with": (('checkpoint.resume: value "never"', "3 times", "set it to auto, or give --max-restarts 0"), render(*CPU, "checkpoint.resume=never")),
    "a command that does not train": (("'config' is not one of 'sft', 'ppo'",), render(*CPU, command="config")),
    # Profiles.
    "no such profile": (("nowhere.yaml: the config file does not exist",), render(*CPU, "--profile", "nowhere.yaml")),
    "an unknown key in the profile": (("slurm.partitoin", "did you mean slurm.partition?"), render(*CPU, profile={"slurm": {"partitoin": "gpu"}})),
    "a time that YAML makes a number": (("slurm.time: value 14400", "give text"), render(*CPU, profile="slurm: {time: 4:00:00}")),
    "a profile of something else": (("sbatch", "unknown key"), render(*CPU, profile={"sbatch": {"time": "10"}})),
    # Templates.
    "no such template": (("nope: the template nope does not exist",), render(*CPU, "--template", "nope")),
    "a variable that is missing": (("my.sbatch", "'nodess' is undefined"), render(*CPU, *TEMPLATE, edit=write("my.sbatch", "#SBATCH --nodes={{ nodess }}"))),
    "a template with a mistake": (("my.sbatch: the template is wrong in line 2",), render(*CPU, *TEMPLATE, edit=write("my.sbatch", "#!/bin/bash\n{% if %}"))),
    "a container without an image": (("slurm.image: is missing",), render(*CPU, "--template", "container")),
    "an image that a copy does not use": (('slurm.image: value "a.sif" is not used by the template my.sbatch',), render(*CPU, *TEMPLATE, "--image", "a.sif", edit=copy_of("bare"))),
    "a folder that cannot be mounted": (("output_dir", "has a character in it"), render(*CPU, "--template", "container", "--image", "x", "output_dir=a:b")),
    "a mount that is none": (("slurm.mounts", "absolute paths"), render(*CPU, "--template", "container", "--image", "x", "--mounts", "data")),
    # Servers.
    "servers for sft": (('slurm.template: value "hetero"',), render(*CPU, "--template", "hetero", "--servers-nodes", "1")),
    "servers of a copy for sft": (('slurm.template: value "my.sbatch" starts inference servers',), render(*CPU, *TEMPLATE, edit=copy_of("hetero"))),
    "no servers": (("slurm.servers.nodes: value 0",), ppo(*CPU, *VLLM, "--template", "hetero")),
    "servers that are not used": (("slurm.servers.nodes: value 1 is not used",), ppo(*CPU, *VLLM, "--servers-nodes", "1")),
    "a server's option without servers": (('slurm.servers.python: value "python9" is not used by the template bare',), render(*CPU, "--servers-python", "python9")),
    "a reward that does not load": (("rewards.functions[0].function", "missing.py"), ppo(*CPU, "rewards.functions=[{function: 'missing.py:score'}]")),
    # Jobs.
    "logs of a folder without a job": (("model: no job was submitted",), {"args": ("logs", "model")}),
}  # fmt: skip


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    made = Workspace(tmp_path)
    made.make()
    made.write("config.yaml", yaml.safe_dump(CONFIG | {"checkpoint": {"every": 1}}))
    made.write("ppo.yaml", yaml.safe_dump(PPO_CONFIG | {"checkpoint": {"every": 1}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


def refused(workspace: Workspace, *args: str) -> str:
    """The one message of a request that is refused."""
    before = workspace.snapshot()
    done = slurm_site.invoke(*args)
    assert done.exit_code == 2, done.output
    messages = [
        line
        for line in done.stderr.splitlines()
        if line.startswith(("mrl: ", "Error: ")) and "mrl: warning: " not in line
    ]
    assert len(messages) == 1 and "Traceback" not in done.output, done.output
    assert workspace.snapshot() == before
    return messages[0]


@pytest.mark.parametrize("name", CASES)
def test_bad_requests(workspace, name):
    says, case = CASES[name]
    args = case["args"]
    if "edit" in case:
        case["edit"](workspace)
    if profile := case.get("profile"):
        workspace.write("site.yaml", profile if isinstance(profile, str) else yaml.safe_dump(profile))
        args = (*args, "--profile", "site.yaml")
    message = refused(workspace, *args)
    assert all(text in message for text in says), message


def test_render_reads_no_rows_and_submit_misses_them(workspace):
    words = ("sft", "config.yaml", *CPU, "data.train=missing.jsonl")
    assert slurm_site.invoke("render", *words).exit_code == 0
    refused = slurm_site.invoke("submit", *words)
    assert refused.exit_code == 2 and "data.train: value 'missing.jsonl' does not exist" in refused.stderr


def test_a_job_has_what_its_nodes_have(workspace):
    """GPUs, and perhaps an image with transformer-engine: this machine has neither."""
    on_gpus = ("--gpus-per-node", "2", "engine.device=cuda", "engine.layer_spec=te", "model.dtype=bfloat16")
    done = slurm_site.invoke("render", "sft", "config.yaml", *on_gpus)
    assert done.exit_code == 0 and "#SBATCH --gpus-per-node=2" in done.stdout, done.output
    in_fp32 = (*on_gpus[:-1], "model.dtype=float32", "engine.parallel.cp=2")
    message = refused(workspace, "render", "sft", "config.yaml", *in_fp32)  # te's kernels under cp are of 16 bits
    assert 'engine.layer_spec: value "te" does not work here: ' in message and "float32" in message


@pytest.mark.parametrize(
    "args", [("submit", "sft", "config.yaml", *CPU), ("status", "12"), ("status",), ("logs",), ("cancel", "12")]
)
def test_where_there_is_no_slurm(workspace, monkeypatch, args):
    monkeypatch.setenv("PATH", str(workspace.root))
    assert "is not on the PATH" in refused(workspace, *args)


def test_what_slurm_refuses_is_shown_whole(workspace, monkeypatch):
    fake = workspace.root / "sbatch"
    fake.write_text("#!/bin/sh\necho 'sbatch: error: first' >&2\necho 'sbatch: error: second' >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{workspace.root}:/bin")
    message = refused(workspace, "submit", "sft", "config.yaml", *CPU)
    assert message == "mrl: sbatch: sbatch: error: first sbatch: error: second"


def fake_command(workspace: Workspace, monkeypatch, name: str, script: str) -> None:
    """Puts a shell script in the place of a command of Slurm."""
    fake = workspace.root / "bin" / name
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")


@pytest.mark.nightly
def test_a_job_that_does_not_fit_its_gpus_is_submitted_by_force_alone(workspace, monkeypatch):
    """One model on GPUs of two sizes: an optimizer's state of 0.6 GB beside 4 GiB that are kept free."""
    model = MODEL | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64}
    workspace.write("model/config.json", json.dumps(model))
    fake_command(workspace, monkeypatch, "sbatch", "echo 8")
    fake_command(workspace, monkeypatch, "scontrol", "exit 1")
    job = ("submit", "sft", "config.yaml", "--gpus-per-node", "1", "engine.device=auto")
    before = workspace.snapshot()
    refusal = slurm_site.invoke(*job, "--gpu", "h100-80gb,GB=5")
    plan, line = [line for line in refusal.stderr.splitlines() if "warning: " not in line]
    assert (refusal.exit_code, refusal.stdout) == (2, "") and workspace.snapshot() == before
    assert plan.startswith("mrl: plan: does not fit: ") and line == (
        'mrl: slurm.gpu: value "h100-80gb,GB=5" has too little memory for this job; give more nodes, other degrees '
        "(mrl plan --suggest), or --force to submit it all the same"
    )
    fits = slurm_site.invoke(*job, "--gpu", "h100-80gb")
    assert fits.exit_code == 0 and "mrl: plan: fits: " in fits.stderr and fits.stdout.startswith("submitted job 8: "), (
        fits
    )
    forced = slurm_site.invoke(*job, "--gpu", "h100-80gb,GB=5", "--force", "output_dir=other")
    assert forced.exit_code == 0 and "plan: " not in forced.stderr and forced.stdout.startswith("submitted job 8: "), (
        forced
    )


def test_a_folder_that_looks_like_fields_of_scontrol_is_found_by_the_job_s_id(workspace, monkeypatch):
    folder = workspace.root / "a JobState=FAILED JobId=9"
    workspace.write(f"{folder.name}/slurm/jobs.jsonl", '{"job": "7", "array": null}\n')
    lines = [
        "JobId=7 JobName=mrl-sft-a JobState=FAILED JobId=9",
        "   JobState=RUNNING Reason=None Dependency=(null)",
        "   RunTime=00:00:05 TimeLimit=00:10:00 TimeMin=N/A",
        f"   Command={folder}/slurm/x.sbatch",
        f"   WorkDir={workspace.root}",
        f"   StdOut={folder}/slurm/7.log",
    ]
    (workspace.root / "shown").write_text("\n".join(lines) + "\n\n")
    fake_command(workspace, monkeypatch, "scontrol", f'cat "{workspace.root}/shown"')
    done = slurm_site.invoke("status", "7")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == ["job 7  RUNNING  00:00:05 of 00:10:00  restarts 0", f"  {folder}: no step yet"]


@pytest.mark.parametrize(
    ("dependency", "job_id", "waits"),
    [("afterany:7", "7", True), ("afterok:77", "7_2", False), ("after:7", "7", False)],
)
def test_a_second_job_of_a_run_waits_for_the_end_of_the_first(workspace, monkeypatch, dependency, job_id, waits):
    """The first job's script is asked for by its id, as squeue would show it."""
    workspace.write("run/slurm/jobs.jsonl", '{"job": "7", "array": null}\n')
    task = " ArrayJobId=7 ArrayTaskId=2" if "_" in job_id else ""
    log = workspace.root / "run" / "slurm" / "7.log"
    shown = f"JobId=7{task} JobName=x\n   JobState=RUNNING Reason=None\n   StdOut={log}\n"
    (workspace.root / "shown").write_text(shown)
    fake_command(workspace, monkeypatch, "scontrol", f'cat "{workspace.root}/shown"')
    fake_command(workspace, monkeypatch, "sbatch", "echo 8")
    args = ("submit", "sft", "config.yaml", *CPU, "--dependency", dependency)
    if waits:
        assert slurm_site.invoke(*args).exit_code == 0
    else:
        assert f"has job {job_id} in the queue (RUNNING)" in refused(workspace, *args)


@pytest.mark.parametrize(("text", "says"), [("", "has no record of a job"), ("{\n", ":1: is no record of a job")])
def test_records_that_cannot_be_read(workspace, text, says):
    workspace.write("run/slurm/jobs.jsonl", text)
    assert says in refused(workspace, "logs", "run")


def test_a_signature_in_a_job_is_its_owners_alone_to_read(workspace, monkeypatch):
    """In the config of a job, and in the script where an override that each task of an array reads has it."""
    fake_command(workspace, monkeypatch, "sbatch", "echo 8")
    fake_command(workspace, monkeypatch, "scontrol", "exit 1")
    rows = ("data.stream=true", "train.steps=2", "train.epochs=null")
    submit = ("submit", "sft", "config.yaml", *CPU, *rows)
    for more in (
        ("data.train=https://host/a.jsonl?key=x",),
        ("output_dir=other", "--array", "0-1", "data.train=https://host/%a.jsonl?key=x"),
    ):
        done = slurm_site.invoke(*submit, *more)
        assert done.exit_code == 0, done.output
    written = [path for path in workspace.root.glob("*/slurm/*") if b"key=x" in path.read_bytes()]
    assert sorted(path.suffix for path in written) == [".sbatch", ".yaml"]  # of the array, and of the other job
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}


def test_a_job_of_another_folder_is_none_of_a_copy(workspace, monkeypatch):
    """The copy has the records of the first folder's jobs, one of which runs; so has a run whose job's id was given again."""
    for name in ("run", "a%b"):
        workspace.write(f"{name}/slurm/jobs.jsonl", '{"job": "7", "array": null}\n')
    workspace.write("run/slurm/7.log", "copied\n")
    (workspace.root / "link").symlink_to("a%b")
    (workspace.root / "shown").write_text(
        f"JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   StdOut={workspace.root}/a%%b/slurm/7.log\n"
    )
    fake_command(workspace, monkeypatch, "scontrol", f'cat "{workspace.root}/shown"')
    fake_command(workspace, monkeypatch, "sbatch", "echo 8")
    fake_command(workspace, monkeypatch, "scancel", f'echo "$@" >> "{workspace.root}/cancelled"')
    whose = f"job 7 is none of this folder (Slurm's job 7 is of {workspace.root}/a%b); there is nothing to cancel"
    assert whose in refused(workspace, "cancel", "run") and whose in refused(workspace, "cancel", "run", "--save")
    assert "RUNNING" not in slurm_site.invoke("status", "run").stdout
    assert slurm_site.invoke("logs", "run", "-f").stdout == "copied\n"  # and does not wait for the other's end
    assert slurm_site.invoke("submit", "sft", "config.yaml", *CPU).exit_code == 0
    for own in ("a%b", "link"):
        assert "has job 7 in the queue" in refused(workspace, "submit", "sft", "config.yaml", *CPU, f"output_dir={own}")
        assert slurm_site.invoke("status", own).stdout.startswith("job 7  RUNNING")
    assert slurm_site.invoke("cancel", "link").exit_code == 0
    assert (workspace.root / "cancelled").read_text() == "7\n"
    (workspace.root / "a%b").rename(workspace.root / "moved")
    assert "there is nothing to cancel" in refused(workspace, "cancel", "moved")


def test_a_job_whose_log_a_template_puts_elsewhere_is_known_by_its_script(workspace, monkeypatch):
    workspace.write("run/slurm/jobs.jsonl", '{"job": "7", "array": null}\n')
    script = workspace.root / "run" / "slurm" / "x.sbatch"
    shown = f"JobId=7 JobName=x\n   JobState=RUNNING Reason=None\n   Command={script}\n   StdOut=/tmp/7.log\n"
    (workspace.root / "shown").write_text(shown)
    fake_command(workspace, monkeypatch, "scontrol", f'cat "{workspace.root}/shown"')
    for what in ("run", "7"):
        assert slurm_site.invoke("status", what).stdout.startswith("job 7  RUNNING")


def test_an_interrupt_ends_the_command_and_no_job(workspace, monkeypatch):
    monkeypatch.setattr(jobs, "targets", lambda what: (_ for _ in ()).throw(KeyboardInterrupt()))
    done = slurm_site.invoke("logs", "run", "-f")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == "mrl: interrupted: jobs go on, or end as they were told to before\n"


def test_a_cut_line_of_the_records_is_left_out(workspace, monkeypatch):
    fake_command(workspace, monkeypatch, "scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    fake_command(workspace, monkeypatch, "sbatch", "echo 8")
    workspace.write("run/slurm/jobs.jsonl", '{"job": "7", "array": null}\n{"job": "8", "arr')
    assert slurm_site.invoke("status", "run").stdout.startswith("job 7  ended")
    assert slurm_site.invoke("submit", "sft", "config.yaml", *CPU).exit_code == 0
    assert [one["job"] for one in jobs.records(workspace.root / "run" / "slurm")] == ["7", "8"]


def test_variables_of_sbatch_in_the_shell_are_not_over_the_options(workspace, monkeypatch):
    fake_command(workspace, monkeypatch, "sbatch", f'env > "{workspace.root}/environ"; echo 7')
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    done = slurm_site.invoke("submit", "sft", "config.yaml", *CPU, "--partition", "gpu")
    assert done.exit_code == 0 and done.stdout.startswith("submitted job 7: "), done.output
    environ = (workspace.root / "environ").read_text()
    assert "HOME=" in environ and "SBATCH_" not in environ


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpus-per-node", "4", "--nodes", "2", "engine.parallel.tp=8", "engine.device=auto"), "engine.parallel.tp: groups of 8 do not fit into the 4"),
        (CPU, "slurm.cpus_per_task: is not given"),
        ((*CPU, "checkpoint.every=null"), "checkpoint.every: is null"),
        ((*CPU, "--time", "10", "checkpoint.every=100", "train.steps=1000"), "checkpoint.every: value 100 is 16 min 40 s at 10 s a step"),
        ((*CPU, "--time", "10", "checkpoint.every=55", "train.steps=1000"), "checkpoint.every: value 55 is 9 min 10 s at 10 s a step"),
        ((*CPU, "--signal-s", "5"), "slurm.signal_s: value 5 is shorter than a step of this run (10 s)"),
    ],
)  # fmt: skip
def test_what_may_go_wrong_is_warned_of(workspace, args, says):
    workspace.write("run/metrics.jsonl", "".join(f'{{"step": {i}, "perf/step_s": 10.0}}\n' for i in range(1, 4)))
    done = slurm_site.invoke("render", "sft", "config.yaml", "train.global_batch_size=8", *args)
    assert done.exit_code == 0, done.output
    assert f"mrl: warning: {says}" in done.stderr, done.stderr


def test_a_run_that_may_not_go_on_is_for_a_job_that_starts_once(workspace):
    """Of which Slurm is told too: it puts jobs back itself after a failed node."""
    done = slurm_site.invoke("render", "sft", "config.yaml", *CPU, "checkpoint.resume=never", "--max-restarts", "0")
    assert done.exit_code == 0, done.output
    assert "#SBATCH --no-requeue" in done.stdout.splitlines() and "--requeue" not in done.stdout


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (("--nodes", "2", "--time", "4:00:00", "engine.parallel.tp=2"), {"#SBATCH --time=4:00:00"}),
        (("--time", "0", "--env", "A=", "--sbatch", "--exclusive --comment=a"), {"#SBATCH --time=0", "export A=''", "#SBATCH --exclusive --comment=a"}),
    ],
)  # fmt: skip
def test_a_request_without_anything_to_warn_of_is_silent(workspace, args, lines):
    """No limit and an empty variable are legitimate."""
    done = slurm_site.invoke("render", "sft", "config.yaml", *CPU, "--cpus-per-task", "8", *args)
    assert (done.exit_code, done.stderr) == (0, "") and lines <= set(done.stdout.splitlines())


def test_the_command_line_is_over_the_profile(workspace):
    """Lists and mappings are added to the profile's."""
    site = {
        "partition": "gpu",
        "nodes": 4,
        "sbatch": ["--exclusive"],
        "env": {"A": "1", "B": "1"},
        "processes_per_node": 2,
    }
    workspace.write(".config/mrl/slurm.yaml", yaml.safe_dump({"slurm": {**site, "gpus_per_node": 0}}))
    args = ("--nodes", "2", "--sbatch", "--comment=x", "--env", "B=2")
    script = slurm_site.invoke("render", "sft", "config.yaml", *args).stdout
    for line in ("#SBATCH --partition=gpu", "#SBATCH --nodes=2", "#SBATCH --exclusive", "#SBATCH --comment=x", "export A=1", "export B=2"):  # fmt: skip
        assert line in script.splitlines()
