"""An update of the Megatron engine with transformer-engine's own Python modules: its kernels are shapes (te_kernels.py)."""

from __future__ import annotations

from tests.cuda import run, te_attention, te_fp8, te_kernels  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case
from tests.cuda.te_cases import Found, Kernels

import torch  # isort: skip

from mrl.mcore_models import layer_spec  # isort: skip


def prepare(capability: tuple[int, int]) -> Kernels:
    """transformer-engine's kernels are shapes from now on. Returns what will be called of them."""
    te_fp8._be(capability)
    te_attention._be(capability, False, ())
    torch.distributed.is_backend_available = lambda name: True  # nccl, by which userbuffers are made
    layer_spec.te_refusal = lambda *_, **__: None  # transformer-engine itself is asked
    return te_kernels.install()


def update(case: Case, capability: tuple[int, int]) -> Found:
    kernels = prepare(capability)
    return Found(run.run(case), kernels)
