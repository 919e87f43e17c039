"""A save and a load need little host memory, however large the state is: on a node with eight GPUs there are eight of them.

mrl once gathered each parameter's state over the data-parallel ranks, all of them on the host of each: 12 bytes a
parameter and process, and megatron's writer took another copy of what a rank wrote. Now both go block by block.
"""

import pytest

from tests.engine import tiny
from tests.engine.harness import run_case

MIB = 2**20
BLOCK_BYTES = MIB // 2
BOUND = 32 * MIB
"""The checksums' four threads read blocks of 4 MiB, the reader of pickles imports modules, and a parameter has 4 MiB; 10 to 21
MiB were seen, the most on a machine with four times as much to do as it has cores."""
WIDE = {"hidden_size": 256, "intermediate_size": 2048, "layers": 6}


@pytest.mark.slow
def test_a_save_and_a_load_at_dp4_hold_a_few_blocks(tmp_path):
    tiny.make_model(str(tmp_path / "model"), "llama", **WIDE)
    config = tiny.role(str(tmp_path / "model"), backend="megatron")
    found = run_case(
        4, "tests.engine.checkpoint_cases:growth_of_save_and_load",
        config=config, folder=str(tmp_path / "checkpoints"), block_bytes=BLOCK_BYTES,
    )  # fmt: skip
    whole = 3 * 4 * 6 * 3 * 256 * 2048  # master weights and moments of the layers' MLPs, in fp32
    assert whole > 3 * BOUND and min(found["own"]) > BOUND
    assert max(found["save"]) < BOUND and max(found["load"]) < BOUND, {
        k: [n // MIB for n in v] for k, v in found.items()
    }
