"""An update of the Megatron engine with transformer-engine's own Python modules: its kernels are shapes (te_kernels.py)."""

from __future__ import annotations

from tests.cuda import run, te_attention, te_fp8, te_kernels  # before mrl: fake.py says what torch is here
from tests.cuda.cases import Case
from tests.cuda.te_cases import Found

import torch  # isort: skip

from mrl.mcore_models import layer_spec  # isort: skip


def update(case: Case, capability: tuple[int, int]) -> Found:
    te_fp8._be(capability)
    te_attention._be(capability, False, ())
    torch.distributed.is_backend_available = lambda name: True  # nccl, by which userbuffers are made
    layer_spec.te_refusal = lambda *_, **__: None  # transformer-engine itself is asked
    kernels = te_kernels.install()
    return Found(run.run(case), kernels)
