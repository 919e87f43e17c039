"""The thirteen silent bugs of Megatron-LM's issue 7452: which the installed megatron-core has, and why mrl has none.

docs/evidence/megatron-bugs.md is the table of both. Tests of other files that belong to it:

    3    tests/engine/test_mtp.py: gradients of MTP layers against one process, on unequal data-parallel ranks
    9    test_traps_megatron.py (traps 2 to 4): factors, and the parity rows with one trained token
    10   tests/engine/test_router_losses.py: padded rows under tp2+sp
    11   the parity rows "qwen3_5 tp2", without sequence parallelism
    12   tests/engine/test_contract.py: a checkpoint of one layout goes on in another
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

import mrl
from mrl.mcore_models.megatron_fields import SET_BY_MRL
from tests.engine import tiny
from tests.engine.contract import make_engine
from tests.engine.harness import run_case
from tests.engine.megatron_bugs import REPRODUCTIONS
from tests.engine.parity import Row

import megatron.core  # isort: skip  after the engine, which prepares its import

PAGE = pathlib.Path(__file__).parents[2] / "docs/evidence/megatron-bugs.md"
PRESENT = {
    "0.16.1": {1, 2, 4, 5, 8, 9, 10, 11},
    "0.19.2": {1, 2, 3, 4, 5, 8, 9, 10, 11},
}
"""The bugs that `REPRODUCTIONS` shows, of the numbers that it has."""

NOT_IMPORTED = {
    "vocab_parallel_cross_entropy": 1,
    "process_mtp_loss": 3,
    "MultiTokenPredictionLayer": 3,
    "CrossAttention": 6,
    "LLaVAModel": 7,
    "gated_delta_net": 11,
    "fsdp": 12,
    "fsdp_dtensor_checkpoint": 12,
}
"""Parts of megatron-core that have a bug, and that mrl does not import -> its number."""


def rows_of_page() -> dict[int, list[str]]:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {int(number): [cell.strip() for cell in cells.split("|")] for number, cells in rows}


@pytest.mark.parametrize("number", REPRODUCTIONS)
def test_the_page_says_which_bugs_the_installed_megatron_has(number):
    """The page has columns for two versions; of a newer one it promises nothing, and only the calls have to work."""
    version = megatron.core.__version__.partition("+")[0]
    pairs = run_case(REPRODUCTIONS[number][0], "tests.engine.megatron_bugs:reproduced", number=number)
    has_it = any(observed != reference for observed, reference in pairs)
    if version in PRESENT:
        assert has_it == (number in PRESENT[version]), pairs
        cell = rows_of_page()[number][2 + list(PRESENT).index(version)]
        assert cell == ("yes" if has_it else "no"), cell


def test_the_page_has_all_thirteen():
    assert sorted(rows_of_page()) == list(range(1, 14))


def imported_names() -> dict[str, str]:
    """Returns parts of the names that mrl imports of megatron -> a file that does."""
    found: dict[str, str] = {}
    for path in sorted(pathlib.Path(mrl.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                names = [part for alias in node.names for part in (*node.module.split("."), alias.name)]
            elif isinstance(node, ast.Import):
                names = [part for a in node.names if a.name.startswith("megatron") for part in a.name.split(".")]
            else:
                continue
            found |= dict.fromkeys(names, path.name)
    return found


def test_mrl_imports_no_part_that_has_a_bug():
    found = imported_names()
    assert "GPTModel" in found and "parallel_state" in found
    assert {name: found[name] for name in NOT_IMPORTED if name in found} == {}


@pytest.fixture(scope="module")
def folder(folder):
    return lambda family, **fields: folder(family, **{"layers": 4, **fields})


def config_of(folder, layout, **options):
    return tiny.role(folder, backend="megatron", parallel=Row("llama", layout).parallel, **{"tokens": 64, **options})


def test_1_and_2_the_loss_is_none_of_megatrons(folder):
    run_case(2, "tests.engine.megatron_bugs:trains_without_megatrons_loss", config=config_of(folder("llama"), "tp2"))


@pytest.mark.parametrize("layouts", [("tp2+spxcp2", "tp4"), ("tp2+spxpp2", "cp2xdp2")], ids=str)
def test_4_5_6_7_13_groups_are_the_engines_own(folder, layouts):
    """An explicit group that differs from the process-wide one is what these bugs need."""
    first = config_of(folder("mixtral"), layouts[0], recompute="full")
    second = config_of(folder("llama"), layouts[1])
    run_case(4, "tests.engine.megatron_bugs:groups_are_the_engines_own", first=first, second=second)


def test_4_saved_activations_are_whole(folder):
    """`distribute_saved_activations` is off, and a config cannot set it."""
    assert "distribute_saved_activations" in SET_BY_MRL
    config = config_of(folder("llama"), "tp2+sp", recompute="full")
    assert run_case(2, f"{__name__}:saved_whole", config=config)


def saved_whole(config) -> bool:
    return not make_engine(config).model.transformer.distribute_saved_activations


def test_8_sinks_are_counted_on_each_rank(folder):
    run_case(2, "tests.engine.traps:split_parameters_say_so", config=config_of(folder("gpt_oss"), "tp2+spxetp1"))


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp"])
def test_11_norms_of_delta_nets_stay_equal(folder, layout):
    run_case(2, "tests.engine.traps:replicas_stay_equal", config=config_of(folder("qwen3_5"), layout))
