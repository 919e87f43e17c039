"""Every test here runs kernels on CPU tensors, by Triton's interpreter; tests/conftest.py sets TRITON_INTERPRET."""

import pytest
import torch

from mrl.kernels import operators


@pytest.fixture(autouse=True)
def interpreted():
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the CPU build of torch has no triton")
    convert = interpreter._convert_float

    def rounded(numbers, source, target, mode):
        """Rounds to the nearest bfloat16, as a GPU does. The interpreter of triton 3.7 cuts the last bits off."""
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(numbers, source, target, mode)
        return torch.tensor(numbers).to(torch.bfloat16).view(torch.uint16).numpy()

    # a patch of its own: `monkeypatch` would be undone after the context ends, and a test's changes of it with it
    with pytest.MonkeyPatch.context() as patch, operators.interpreted():
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
