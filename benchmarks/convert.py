"""`mrl convert` beside `cp`, and beside mbridge, on a generated bf16 checkpoint: seconds and peak memory, in one run.

    python benchmarks/convert.py [--gb 4] [--shards 8] [--rounds 3] [--folder DIR] [--append FILE]
                                 [--mbridge DIR [--make-mbridge]]

Paired: each round copies the Hugging Face folder with `cp -r` and an fsync of what it wrote, imports it, and exports it again,
as a user does, one after the other on the same disk; then the same by mbridge, where it is in DIR (`--make-mbridge` installs
it there, with pip and without its dependencies), and megatron's dist_checkpointing. Every step is a process of its own, whose CPU
seconds and peak resident memory the kernel tells. Start-up is the same command on a model of 1 MB. Files are warm: they were
just written. Writes five times --gb into --folder (default: a temporary one), which is removed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from machine import machine, versions
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
MBRIDGE = ("mbridge==0.15.1", "einops")
LARGE, TINY = (2048, 5632, 64000), (256, 512, 256)  # hidden size, channels of the MLP, vocabulary

COPY = """
import os, subprocess, sys
subprocess.run(["cp", "-r", sys.argv[1], sys.argv[2]], check=True)
for folder, _, names in os.walk(sys.argv[2]):
    for name in names:
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
"""
TIMED = """
import json, resource, subprocess, sys, time
begun = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([time.monotonic() - begun, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20]))
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """Of a process: wall seconds, CPU seconds, peak resident GiB."""

    wall: float
    cpu: float
    peak: float


def make(folder: pathlib.Path, gb: float, shards: int, sizes: tuple[int, int, int]) -> int:
    """Writes a llama of about `gb` GB. Returns its bytes."""
    hidden, ffn, vocab = sizes
    kv = hidden // 4
    of_a_layer = 2 * (hidden * hidden * 2 + hidden * kv * 2 + 3 * hidden * ffn + 2 * hidden)
    layers = max(int((gb * 1e9 - 4 * vocab * hidden) / of_a_layer), 1)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (hidden, hidden), prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden), prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "mlp.gate_proj.weight": (ffn, hidden), prefix + "mlp.up_proj.weight": (ffn, hidden),
            prefix + "mlp.down_proj.weight": (hidden, ffn), prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
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


def measure(*command: object, path: pathlib.Path | None = None) -> Run:
    """Runs a command. path: a folder with more packages."""
    paths = os.pathsep.join(str(p) for p in (ROOT, path) if p is not None)
    timed = [sys.executable, "-c", TIMED, *map(str, command)]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(timed, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(timed[3:])} failed:\n{done.stderr}")
    return Run(*json.loads(done.stdout.splitlines()[-1]))


def one_round(root: pathlib.Path, mbridge: pathlib.Path | None) -> dict[str, Run]:
    """Every step once. What a step leaves is removed as soon as no other needs it."""
    mrl = [sys.executable, "-m", "mrl", "convert"]
    peer = [sys.executable, ROOT / "benchmarks/worker_convert_mbridge.py"]
    hf, tiny = root / "hf", root / "tiny"
    steps = {
        "cp -r and fsync": ([sys.executable, "-c", COPY, hf, root / "copy"], ["copy"]),
        "start-up of an import": ([*mrl, "import", tiny, root / "a"], []),
        "start-up of an export": ([*mrl, "export", root / "a", root / "b"], ["a", "b"]),
        "mrl convert import": ([*mrl, "import", hf, root / "mcore"], []),
        "mrl convert export": ([*mrl, "export", root / "mcore", root / "back"], ["mcore"]),
    }
    if mbridge is not None:
        steps |= {
            "mbridge load, dist_checkpointing.save": ([*peer, "import", hf, root / "mcore"], []),
            "dist_checkpointing.load, mbridge save": ([*peer, "export", hf, root / "mcore", root / "back"], ["mcore"]),
        }
    runs = {}
    for name, (command, remove) in steps.items():
        subprocess.run(["sync"], check=True)
        runs[name] = measure(*command, path=mbridge)
        print(f"{name:40s} {runs[name].wall:7.1f} s", file=sys.stderr, flush=True)
        if (root / "back").exists():
            same_files(hf, root / "back", headers=name.startswith("mrl"))
            shutil.rmtree(root / "back")
        for folder in remove:
            shutil.rmtree(root / folder)
    return runs


def same_files(a: pathlib.Path, b: pathlib.Path, *, headers: bool) -> None:
    """Stops the benchmark where an export is not what was imported. headers: down to the byte; else files by size."""
    for file in sorted(a.glob("*.safetensors")):
        other = b / file.name
        if headers and subprocess.run(["cmp", "-s", file, other]).returncode:
            raise SystemExit(f"{other} differs from {file}")
        if abs(file.stat().st_size - other.stat().st_size) > 2**16:
            raise SystemExit(f"{other} has {other.stat().st_size} bytes")


def report(rounds: list[dict[str, Run]], total: int, options: argparse.Namespace) -> str:
    """The table, in Markdown. Ratios are medians of each round's own."""

    def all_of(name: str, field: str) -> str:
        return " / ".join(f"{getattr(runs[name], field):.{2 if field == 'peak' else 1}f}" for runs in rounds)

    def ratio(name: str, less: str | None = None) -> float:
        copy = "cp -r and fsync"
        return statistics.median(
            (runs[name].wall - (runs[less].wall if less else 0.0)) / runs[copy].wall for runs in rounds
        )

    lines = [
        f"# Convert, {time.strftime('%Y-%m-%d')}", "", f"`python benchmarks/convert.py {' '.join(sys.argv[1:])}`", "", machine(), "",
        versions(sys.executable, ["torch", "transformers", "safetensors", "megatron-core"], "mrl"),
    ]  # fmt: skip
    if options.mbridge is not None:
        lines.append(f"- mbridge: {MBRIDGE[0].partition('==')[2]}")
    lines += [
        "", f"## {total / 1e9:.2f} GB of bf16 in {options.shards} shards, {options.rounds} rounds", "",
        "| | wall s | wall / cp's | without start-up / cp's | CPU s | peak GiB |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in rounds[0]:
        start = {"mrl convert import": "start-up of an import", "mrl convert export": "start-up of an export"}.get(name)
        warm = f"{ratio(name, start):.2f}" if start else ""
        lines.append(
            f"| {name} | {all_of(name, 'wall')} | {ratio(name):.2f} | {warm} | {all_of(name, 'cpu')} | {all_of(name, 'peak')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is added to")
    parser.add_argument("--mbridge", type=pathlib.Path, help="folder that mbridge is installed in")
    parser.add_argument("--make-mbridge", action="store_true", help="install it there")
    options = parser.parse_args()
    if options.make_mbridge:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", options.mbridge, *MBRIDGE]
        subprocess.run(command, check=True)
    root = pathlib.Path(tempfile.mkdtemp(prefix="convert", dir=options.folder))
    try:
        total = make(root / "hf", options.gb, options.shards, LARGE)
        make(root / "tiny", 0.001, 1, TINY)
        text = report([one_round(root, options.mbridge) for _ in range(options.rounds)], total, options)
    finally:
        shutil.rmtree(root)
    print(text)
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
