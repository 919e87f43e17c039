"""What both engines share that needs no process group."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mrl.batch import make_batch
from mrl.engine.base import BaseEngine
from mrl.engine.collective import denominator_of
from tests.engine.contract import everyone
from tests.engine.harness import run_case


def test_a_denominator_that_the_batch_lacks_is_no_silent_1():
    batch = make_batch([[1, 2, 3], [4, 5]], [[0.0, 1.0, 1.0], [0.0, 1.0]])
    assert (denominator_of(batch, "tokens"), denominator_of(batch, "sequences")) == (3.0, 2.0)
    assert denominator_of(make_batch([[1, 2]], [[0.0, 0.0]]), "tokens") == 1.0  # nothing counts
    with pytest.raises(AssertionError, match="'sequence'"):
        denominator_of(batch, "sequence")
    with pytest.raises(AssertionError, match="'tokens'"):
        denominator_of(dataclasses.replace(batch, denominators={}), "tokens")


PROGRAM = """
    import glob
    import torch
    import torch.distributed as dist
    from mrl.engine import collective
    from mrl.mcore_models import cpu_stand_in

    cpu_stand_in.prepare()
    from megatron.core import parallel_state
    from mrl.engine.megatron.groups import MegatronState
    from mrl.parallel import ParallelDims

    def timeout(group):
        return group._get_backend(torch.device("cpu")).options._timeout

    collective.join_processes("cpu")
    assert timeout(dist.group.WORLD) == collective.TIMEOUT, timeout(dist.group.WORLD)
    with MegatronState(ParallelDims(world_size=1), seed=0).installed():
        for group in (
            parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_group_gloo(),
            parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group(),
        ):
            assert timeout(group) == collective.TIMEOUT, timeout(group)
    threads = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    assert threads.count("gloo_tcp_loop") <= 1, threads  # 0 before the thread has named itself
"""


@pytest.mark.slow
def test_every_group_waits_for_what_one_process_does_alone_and_none_polls_on_its_own():
    """An upload or the checksums of a large save take longer than torch's own 30 or 10 minutes.

    And one thread polls for all groups: one for each took a third of two cores where layouts were many.
    """
    joined = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = os.environ | joined | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def on_main_of_a_gpu_engine():
    """What every rank gets; the device would need another backend than these ranks have."""
    engine = SimpleNamespace(is_main=dist.get_rank() == 0, device=torch.device("cuda", 0))
    return everyone(BaseEngine.on_main(engine, lambda: f"from rank {dist.get_rank()}"))


def test_what_the_main_process_found_travels_over_the_host():
    found = run_case(2, "tests.engine.test_collective:on_main_of_a_gpu_engine")
    assert found == ["from rank 0", "from rank 0"]
