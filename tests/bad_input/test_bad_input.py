"""Every mistake in the tables: exit code 2, one line that names the key or file:line, nothing written but a log.

A mistake that a dry run sees is a case of config_cases.py (of `mrl ppo` of ppo_cases.py). One for which the trainer has to look
is a case of trainer_cases.py. Dry runs are made in this process. Trainers run in forks of a process that
has imported torch, the engines and the trainers. A few cases have a process of their own, which is what a user starts.
"""

from __future__ import annotations

import functools
import pathlib
import shutil

import pytest

from tests.bad_input import config_cases, ppo_cases, trainer_cases
from tests.bad_input.mistakes import Case, Workspace, check, dry_run, run_forked, run_mrl
from tests.tiers import slow_but
from tests.trainers.tiny_runs import make_inputs

NO_GPU = "no gpu"
"""Where megatron has been imported without a GPU, torch counts one: this case needs a process of its own."""
DRY = {"config": [case for case in config_cases.CASES if case.name != NO_GPU]}
DRY_PPO = {"ppo": ppo_cases.CASES}
WARM = {"data": trainer_cases.DATA, "model": trainer_cases.MODEL, "checkpoint": trainer_cases.CHECKPOINT}


def table(tables: dict[str, list[Case]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=f"{name}: {case.name}") for name, cases in tables.items() for case in cases]
    )


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    made = Workspace(tmp_path)
    made.make()
    return made


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    """A model with weights, and a run of one step that shows that the workspace of the warm tables works."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    root = tmp_path_factory.mktemp("whole")
    Workspace(root).make(folder)
    code, _, err = run_forked(Workspace(root), "train.steps=1", "output_dir=earlier")
    assert (code, err) == (0, "")
    shutil.copytree(root / "earlier", folder / "earlier")
    return folder


@table(DRY)
def test_is_refused(case: Case, workspace: Workspace):
    """By a dry run: before any process starts."""
    check(case, workspace, dry_run)


@pytest.mark.parametrize("name", slow_but([NO_GPU], [NO_GPU, "unknown key"]))
def test_is_refused_in_a_process_of_its_own(name: str, workspace: Workspace):
    """A dry run alone goes on where there is no GPU."""
    (case,) = (case for case in config_cases.CASES if case.name == name)
    dry = () if name == NO_GPU else ("--dry-run",)
    check(case, workspace, lambda workspace, *args: run_mrl(workspace, *args, *dry))


@table(WARM)
def test_is_refused_by_the_trainer(case: Case, inputs, tmp_path):
    workspace = Workspace(tmp_path)
    workspace.make(inputs)
    if case in trainer_cases.CHECKPOINT:
        shutil.copytree(inputs / "earlier", tmp_path / "earlier")
    check(case, workspace, run_forked)


OF_COMMANDS = {  # command -> the name of its config, and cases
    "dpo": ("dpo.yaml", trainer_cases.DPO), "rm": ("rm.yaml", trainer_cases.RM), "sft": ("config.yaml", trainer_cases.SFT),
}  # fmt: skip
QUICK = [
    ("dpo", "one row to evaluate kto on"), ("sft", "epochs that fill no batch"), ("sft", "teacher that no row may name"),
]  # fmt: skip


@pytest.mark.parametrize(
    "command, name",
    slow_but(QUICK, [(command, case.name) for command, (_, cases) in OF_COMMANDS.items() for case in cases]),
)
def test_is_refused_of_answers_teachers_and_sources(command: str, name: str, inputs, tmp_path):
    """By the trainers of `mrl dpo`, `mrl rm` and `mrl sft`."""
    config, cases = OF_COMMANDS[command]
    (case,) = (case for case in cases if case.name == name)
    workspace = Workspace(tmp_path)
    workspace.make(inputs)
    check(case, workspace, functools.partial(run_forked, command=command, config=config))


PPO = {"command": "ppo", "config": "ppo.yaml"}


@table(DRY_PPO)
def test_is_refused_of_ppo(case: Case, workspace: Workspace):
    check(case, workspace, functools.partial(dry_run, **PPO))


@pytest.mark.slow
@table({"ppo": ppo_cases.COLD_CASES})
def test_is_refused_of_ppo_in_a_process_of_its_own(case: Case, workspace: Workspace):
    check(case, workspace, lambda workspace, *args: run_mrl(workspace, *args, **PPO))


def test_names_are_unique():
    for cases in (DRY | WARM | DRY_PPO).values():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "given, says", [({}, "# layout: dp1 on 1 process"), (PPO, "# actor: megatron dp1 on 1 process")]
)
def test_what_the_cases_break_works(workspace: Workspace, given, says):
    before = workspace.snapshot()
    code, out, err = dry_run(workspace, **given)
    assert (code, err) == (0, "") and says in out
    assert workspace.snapshot() == before
