"""Qwen3.5 on real vLLM servers on the CPU (nightly): the text class and the composite, whole weights and adapters.

vLLM 0.32.0 computes gated delta nets on a CPU in bfloat16 alone, and not for heads of 32. So log-probs of server and
trainer differ by rounding. What a weight sync brings is exact: with the weights of its start a server says what it said.
It imports torchvision, which `make vllm-venv` leaves out, and calls none of it for text: `torchvision_names` has the names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError
from mrl.rollout.adapters import AdapterTraining
from mrl.rollout.fleet import Probe
from tests.engine import tiny, tiny_composite
from tests.engine.contract import loss_fn, train
from tests.engine.harness import run_case
from tests.rollout.real_vllm import FIRST_REQUEST_S, LINKED, MAX_LENGTH, ROOT, RealServer, own_log_probs, sampler_of

pytestmark = pytest.mark.nightly

TEXT = [5, 9, 40, 41, 77, 12, *range(3, 60)]
BOUND = 0.03
"""Nats a token in the mean: bfloat16 has 3 digits, and both round at each layer."""
HEADS = {
    "head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "initializer_range": 0.06, "max_position_embeddings": MAX_LENGTH,
    "rope_parameters": tiny_composite.MROPE | {"mrope_section": [6, 5, 5]},
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LINEAR = (
    "q_proj", "o_proj", "in_proj_qkv", "in_proj_a", "in_proj_b", "out_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
REFUSED = "in_proj_z"
"""vLLM 0.32.0 has it in one matrix with in_proj_qkv, and takes no adapter of it alone."""


def make(folder: pathlib.Path, kind: str, *, text: bool) -> str:
    """A bfloat16 folder with the files of a tokenizer and of an image processor, which a server of the composite reads."""
    tiny_composite.make_composite(str(folder), kind, **HEADS, **(EXPERTS if "moe" in kind else {}))
    load = AutoModelForCausalLM if text else AutoModelForImageTextToText
    model = load.from_pretrained(folder, dtype=torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, tiny_composite.VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    about = {
        "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64, "longest_edge": 4096}, "processor_class": "Qwen3VLProcessor",
    }  # fmt: skip
    for name, kinds in (
        ("preprocessor_config", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(about | kinds))
    return str(folder)


@contextlib.contextmanager
def serving(folder: str, log: pathlib.Path, *flags: str):
    paths = os.pathsep.join([str(ROOT), str(pathlib.Path(__file__).parent / "torchvision_names")])
    server = RealServer(
        folder, log, "--dtype", "bfloat16", "--language-model-only", *flags, PYTHONPATH=paths,
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
    )  # fmt: skip
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def distance(found: list[float], expected: list[float]) -> float:
    return float((torch.tensor(found) - torch.tensor(expected)).abs().mean())


def follows(config: RoleConfig, url: str, weights_dir: str, handovers: list[str], adapters: bool) -> None:
    """A server's log-probs are those of the actor, before and after it trains; then those of its start again."""
    engine = build_engine(config)
    engine.init_model()
    engine.set_loss_fn(loss_fn)
    own = functools.partial(own_log_probs, engine)
    adapted = AdapterTraining(config.model.path, config.model.lora) if adapters else None
    weights = engine.adapter_weights if adapters else engine.hf_weights
    for handover in handovers:
        sampler = sampler_of(
            [url], weights_dir, probe=Probe(TEXT, own, 1.0), adapted=adapted, handover=handover
        )  # fmt: skip
        with contextlib.closing(sampler):
            start = list(weights())
            sampler.update_weights(iter(start))
            before = sampler.log_probs(TEXT)[0]
            assert distance(before, own(TEXT)) < BOUND, (before, own(TEXT))
            train(engine, 8)
            sampler.update_weights(weights())
            after = sampler.log_probs(TEXT)[0]
            assert distance(after, own(TEXT)) < BOUND < distance(after, before) / 3, (after, own(TEXT), before)
            sampler.update_weights(iter(start))
            assert sampler.log_probs(TEXT)[0] == before


@pytest.mark.parametrize(("kind", "text"), [("qwen3_5", False), ("qwen3_5_moe", True)])
def test_log_probs_are_those_of_the_actor(kind, text, tmp_path):
    folder = make(tmp_path / "model", kind, text=text)
    optimizer = tiny.OPTIMIZER
    config = tiny.role(folder, backend="megatron", dtype="bfloat16", optimizer=optimizer)
    with serving(folder, tmp_path / "log", *LINKED) as server:
        run_case(
            1, "tests.rollout.test_qwen3_5:follows", timeout_s=FIRST_REQUEST_S, config=config, url=server.url,
            weights_dir=str(tmp_path / "weights"), handovers=["disk", "broadcast"], adapters=False,
        )  # fmt: skip


def refuses(model: str, url: str, weights_dir: str) -> None:
    lora = LoraConfig(rank=4, alpha=32, target_modules=("q_proj", REFUSED))
    with pytest.raises(ConfigError, match=f"cannot be with the adapters of {REFUSED} "):
        sampler_of([url], weights_dir, adapted=AdapterTraining(model, lora))


def test_adapters_alone_follow_the_actor(tmp_path):
    folder = make(tmp_path / "model", "qwen3_5", text=True)
    lora = LoraConfig(rank=4, alpha=32, target_modules=LINEAR)
    config = tiny.role(folder, backend="megatron", dtype="bfloat16", model={"lora": lora})
    with serving(folder, tmp_path / "log", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2") as server:
        run_case(
            1, "tests.rollout.test_qwen3_5:follows", timeout_s=FIRST_REQUEST_S, config=config, url=server.url,
            weights_dir=str(tmp_path / "weights"), handovers=["auto"], adapters=True,
        )  # fmt: skip
        refuses(folder, server.url, str(tmp_path / "refused"))
