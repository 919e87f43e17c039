"""Why mrl has none of the thirteen silent bugs of Megatron-LM's issue 7452; docs/evidence/megatron-bugs.md has a row for each.

Tests of other files that belong to it:

    3    tests/engine/test_mtp.py: gradients of MTP layers against one process, on unequal data-parallel ranks
    4, 5, 13    test_traps_megatron.py (trap 27): two engines of different layouts in one process
    8, 11    test_traps_megatron.py (traps 10 and 11): gpt_oss and qwen3_5
    9    test_traps_megatron.py (traps 2 to 4): factors, and the parity rows with one trained token
    10   tests/engine/test_router_losses.py: padded rows under tp2+sp
    12   tests/engine/test_contract.py: a checkpoint of one layout goes on in another
"""

from __future__ import annotations

import ast
import pathlib
from unittest import mock

import pytest
import torch

import mrl
from mrl.config.schema import RoleConfig
from mrl.mcore_models.build import transformer_config
from mrl.mcore_models.megatron_fields import SET_BY_MRL
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import read_hf_config
from tests.engine import tiny
from tests.engine.contract import make_engine, train
from tests.engine.harness import run_case
from tests.engine.parity import Row

from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip  after the engine, which prepares its import
from megatron.core.tensor_parallel import cross_entropy  # isort: skip

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


def imported_names() -> dict[str, str]:
    """Returns parts of the names that mrl imports of megatron -> a file that does."""
    found: dict[str, str] = {}
    for path in sorted(pathlib.Path(mrl.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if "megatron" in text else "")):
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


def trains_without_megatrons_loss(config: RoleConfig) -> None:
    """1, 2: a step calls neither megatron's cross entropy nor its loss of labels."""
    engine = make_engine(config)
    called = AssertionError("megatron's own loss was called")
    with (
        mock.patch.object(GPTModel, "compute_language_model_loss", side_effect=called),
        mock.patch.object(cross_entropy._VocabParallelCrossEntropy, "apply", side_effect=called),
    ):
        assert train(engine, 1)


def test_1_and_2_the_loss_is_none_of_megatrons(folder):
    run_case(2, f"{__name__}:trains_without_megatrons_loss", config=config_of(folder("llama"), "tp2"))


def test_4_saved_activations_are_whole(folder):
    """`distribute_saved_activations` is off, and a config cannot set it."""
    assert "distribute_saved_activations" in SET_BY_MRL
    hf, dims = read_hf_config(folder("llama")), ParallelDims(2, tp=2, sp=True)
    assert not transformer_config(hf, dims, dtype=torch.float32, recompute="full").distribute_saved_activations
