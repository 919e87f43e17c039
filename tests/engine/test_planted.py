"""No file of a checkpoint runs code: a pickle in every file of every engine's, and calls of mrl that would run one."""

import ast
import pathlib

import pytest

from mrl.config.schema import LoraConfig
from tests.engine.harness import run_case
from tests.engine.layouts import world_and_role
from tests.test_floors import FILES, PACKAGE
from tests.tiers import slow_but

NOT_READ = {"common.pt", "metadata.json"}  # megatron's own notes


@pytest.mark.parametrize(("layout", "lora"), [("fsdp", None), ("megatron", LoraConfig(rank=2)), ("external", None)])
def test_no_file_of_a_checkpoint_runs_code(folder, tmp_path, layout, lora):
    world, config = world_and_role(layout, folder("llama"), model={"lora": lora})
    unread = run_case(world, "tests.engine.planted:loads_no_code", config=config, folder=str(tmp_path))
    names = {pathlib.PurePath(file).name for file in unread}
    assert names <= NOT_READ | {name for name in names if name.endswith("_1.distcp")}, unread  # of no tensor


@pytest.mark.parametrize("layout", slow_but(["fsdp dp2"], ["fsdp dp2", "megatron dp2"]))
def test_a_file_of_one_rank_that_is_refused_is_refused_on_all(folder, tmp_path, layout):
    world, config = world_and_role(layout, folder("llama"))
    said = run_case(world, "tests.engine.planted:refuses_on_all_ranks", config=config, folder=str(tmp_path))
    assert world == 2 and len(set(said)) == 1 and "1.pt: cannot be read" in said[0], said


PLACES = {
    "weights/pt_file.py": {"torch.load"},  # the one for all others, with weights_only
    "config/yaml_text.py": {"yaml.load"},  # with a subclass of the safe loader
    "check/measure.py": {"torch.load", "weights_only=False"},  # of a folder that `mrl check` made itself
    "check/run.py": {"torch.load", "weights_only=False"},
}
RUN_CODE = {
    "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "dcp.load", "dcp.state_dict_loader",
    "dcp.load_state_dict", "FileSystemReader", "dcp.FileSystemReader", "joblib.load", "marshal.load", "marshal.loads",
    "shelve.open", "dill.load", "cloudpickle.load", "pd.read_pickle", "dist_checkpointing.load", "jit.load",
    "torch.jit.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip


def calls_that_may_run_code(tree):
    """Names of RUN_CODE that a module calls, and arguments that allow it to."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RUN_CODE or name.rpartition(".")[2] in ("FileSystemReader", "read_pickle"):
            found.add(name)
        found |= {f"{k.arg}=False" for k in node.keywords if k.arg == "weights_only" and ast.unparse(k.value) != "True"}
        found |= {
            "allow_pickle" for k in node.keywords if k.arg == "allow_pickle" and name.startswith(("np.", "numpy."))
        }
    return found


def test_what_may_run_code_is_called_in_known_places_alone():
    found = {}
    for path in FILES:
        if names := calls_that_may_run_code(ast.parse(path.read_text(encoding="utf-8"))):
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == PLACES
