"""`mrl convert` beside `cp` on a generated bf16 checkpoint: seconds and peak memory, in one run.

    python benchmarks/convert.py [--gb 4] [--shards 8] [--rounds 2] [--folder DIR]

Paired: each round copies the Hugging Face folder with `cp -r` and an fsync of what it wrote, imports it, and exports it again,
one after the other on the same disk. Every step is a process of its own, whose peak resident memory the kernel tells. Files
are warm: they were just written. Writes into --folder (default: a temporary one), which is removed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import torch
from safetensors.torch import save_file

HIDDEN, LAYER_FFN, VOCAB = 2048, 5632, 64000
LAYER_BYTES = 2 * (HIDDEN * HIDDEN * 2 + HIDDEN * 512 * 2 + 3 * HIDDEN * LAYER_FFN + 2 * HIDDEN)

COPY = """
import os, subprocess, sys
subprocess.run(["cp", "-r", sys.argv[1], sys.argv[2]], check=True)
for folder, _, names in os.walk(sys.argv[2]):
    for name in names:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
"""
IMPORT = "import sys; from mrl.convert.importing import import_hf; import_hf(sys.argv[1], sys.argv[2])"
EXPORT = "import sys; from mrl.convert.exporting import export_hf; export_hf(sys.argv[1], sys.argv[2])"
NOTHING = "import sys; import mrl.convert.importing, mrl.convert.exporting"
TIMED = "import resource, subprocess, sys, time; begun = time.monotonic(); subprocess.run(sys.argv[1:], check=True); print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"  # fmt: skip


def make(folder: pathlib.Path, gb: float, shards: int) -> int:
    """Writes a llama of about `gb` GB. Returns its bytes."""
    layers = max(int((gb * 1e9 - 4 * VOCAB * HIDDEN) / LAYER_BYTES), 1)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": LAYER_FFN,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN), prefix + "self_attn.k_proj.weight": (512, HIDDEN),
            prefix + "self_attn.v_proj.weight": (512, HIDDEN), prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": (LAYER_FFN, HIDDEN), prefix + "mlp.up_proj.weight": (LAYER_FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, LAYER_FFN), prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    total = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    weight_map, held, filled, number = {}, {}, 0, 1
    for i, (name, shape) in enumerate(shapes.items()):
        held[name] = torch.randint(-(2**14), 2**14, shape, dtype=torch.int16).view(torch.bfloat16)
        filled += 2 * held[name].numel()
        if filled >= total / shards * number or i == len(shapes) - 1:
            file = f"model-{number:05d}-of-{shards:05d}.safetensors"
            save_file(held, folder / file, {"format": "pt"})
            weight_map |= dict.fromkeys(held, file)
            held, number = {}, number + 1
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def measure(code: str, *arguments: object) -> tuple[float, float]:
    """(seconds, peak resident GiB) of a Python process."""
    command = [sys.executable, "-c", TIMED, sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, kilobytes = map(float, done.stdout.split()[-2:])
    return seconds, kilobytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    root = pathlib.Path(tempfile.mkdtemp(prefix="convert", dir=options.folder))
    try:
        total = make(root / "hf", options.gb, options.shards)
        print(f"{total / 1e9:.2f} GB of bf16 in {options.shards} shards; torch {torch.__version__}")
        started, base = measure(NOTHING)
        print(f"{'start-up (imports)':20s} {started:7.1f} s  {base:5.2f} GiB")
        for _ in range(options.rounds):
            steps = {
                "cp -r and fsync": (COPY, "hf", "copy"),
                "import": (IMPORT, "hf", "mcore"),
                "export": (EXPORT, "mcore", "back"),
            }
            for name, (code, source, target) in steps.items():
                shutil.rmtree(root / target, ignore_errors=True)
                subprocess.run(["sync"], check=True)
                begun = time.monotonic()
                seconds, peak = measure(code, root / source, root / target)
                assert time.monotonic() >= begun
                print(f"{name:20s} {seconds:7.1f} s  {peak:5.2f} GiB  {total / seconds / 1e6:6.0f} MB/s", flush=True)
                shutil.rmtree(root / "copy", ignore_errors=True)
            shutil.rmtree(root / "mcore"), shutil.rmtree(root / "back")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
