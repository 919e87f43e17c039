"""New weights on their way to a vLLM server: every path of `mrl ppo`, beside `cp` and a bare broadcast, in one run.

    python benchmarks/handover.py [--size 250M] [--dtype float32] [--bucket-mb 8 64 512] [--rounds 3] [--append FILE]
                                  [--vllm-venv .venv-vllm] [--device auto] [--backend megatron] [--only TEXT]

The server is a real one, in a venv of its own (`make vllm-venv` for the CPU), and serves for the whole run. Paired: in each
round the actor's engine is built in a fresh process and hands over by every path, one after the other; then the same bytes are
copied with `cp` and fsync into the same folders, and broadcast between two processes by torch.distributed alone. After each path
the server's log-probs have to be the actor's, whose weights are others each time. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import workload
from machine import machine, versions
from measure import free_port, run_worker

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHM = pathlib.Path("/dev/shm")
START_S = 600.0  # longest wait for the server
KV_MB = 256
VOCABULARY = 32768
LARGE = workload.MODEL | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SIZES = {
    "20M": (workload.MODEL, workload.VOCABULARY),
    "250M": (LARGE | {"num_hidden_layers": 14}, VOCABULARY),
    "1B": (
        LARGE | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_hidden_layers": 18}, VOCABULARY
    ),
}  # fmt: skip
ADAPTERS, RANK = "adapters", 16
COPIES = {"cp": "", "cp, fsync": "sync"}

Rounds = list[dict[str, dict[str, Any]]]


def main() -> None:
    options = read_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = measured(options)
    text = "\n".join([*heading(options), "", *tables]) + "\n"
    print("\n" + text)
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def measured(options: argparse.Namespace) -> list[str]:
    """Returns the report's tables, after all rounds. gpu.py has them on its page. Raises SystemExit with what failed."""
    device = options.device
    if not options.folders:
        options.folders = [pathlib.Path(tempfile.gettempdir()), *([SHM] if SHM.is_dir() else [])]
    root = pathlib.Path(tempfile.mkdtemp(prefix="mrl_benchmark_"))
    try:
        sizes, vocabulary = SIZES[options.size]
        more = {"initializer_range": 0.05}  # so that other weights give clearly other log-probs
        workload.make_model(
            root / "model", 0, sizes=sizes | more, vocabulary=vocabulary, end_drawn=False, dtype=options.dtype
        )
        with serving(root, options, device) as (url, pid):
            rounds = [one_round(root, options, device, url, pid) for _ in range(options.rounds)]
        if adapter_subjects(options):  # to a server of their own, which has the base as it was started with
            with serving(root, options, device, "--enable-lora", "--max-lora-rank", str(RANK)) as (url, pid):
                for turns in rounds:
                    turns |= adapters_alone(root, options, device, url, pid)
    finally:
        shutil.rmtree(root)
    return report(rounds, options, device)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="250M", help="parameters of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of actor and server")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("megatron", "fsdp"), default="megatron", help="engine of the actor")
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[8, 64, 512], help="rollout.server.bucket_mb")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each subject")
    parser.add_argument("--handovers", type=int, default=2, help="of a turn, besides the first, in which servers join")
    parser.add_argument("--folders", type=pathlib.Path, nargs="+", help="where files go; default: /tmp and /dev/shm")
    parser.add_argument("--only", default="", help="subjects whose name has this in it")
    parser.add_argument("--vllm-venv", type=pathlib.Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is added to")
    return parser.parse_args(arguments)


# -- the server --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(root: pathlib.Path, options: argparse.Namespace, device: str, *flags: str) -> Iterator[tuple[str, int]]:
    """(url, process id) of a vLLM server of the model, which ends with the block. flags: vLLM's, beside those of all."""
    python = options.vllm_venv.absolute() / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"--vllm-venv: {options.vllm_venv} holds no venv; `make vllm-venv` makes .venv-vllm")
    port, log = free_port(), root / "server.log"
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(root / "model"), "--dtype", options.dtype,
        "--enforce-eager", "--host", "127.0.0.1", "--port", port,
        "--max-model-len", str(workload.ROW), "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(KV_MB << 20),
        "--worker-extension-cls", "benchmarks.worker_handover_vllm.Worker", "--weight-transfer-config", '{"backend": "mrl"}',
        *flags,
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over --kv-cache-memory-bytes
    if device == "cuda":
        command += ["--gpu-memory-utilization", "0.4"]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(server_gpus())
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, cwd=root, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield url, server.pid
    except BaseException:
        print(log.read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def server_gpus() -> list[str]:
    """Returns the GPUs of the server, the trainer's last: it computes on another one where there is one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return [*gpus[1:2], gpus[0]]


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
    return True


# -- one round ---------------------------------------------------------------------------------------------------------


def one_round(
    root: pathlib.Path, options: argparse.Namespace, device: str, url: str, pid: int
) -> dict[str, dict[str, Any]]:
    """What was found of every subject, in one turn each."""
    apart = device == "cpu" or torch.cuda.device_count() > 1  # NCCL refuses two processes on one GPU
    subjects = {"gather alone": {"way": "gather"}}
    for folder in options.folders:
        subjects[f"disk, {folder}"] = {"way": "disk", "bucket_mb": max(options.bucket_mb), "folder": str(folder)}
    for way in ("broadcast", "ipc") if apart else ("ipc",):
        subjects |= {f"{way}, {mb} MB": {"way": way, "bucket_mb": mb} for mb in options.bucket_mb}
    spec = spec_of(root, options, device, url, pid)
    spec |= {"subjects": {name: keys for name, keys in subjects.items() if options.only in name}, "adapters": None}
    [found] = run_worker(sys.executable, "worker_handover.py", spec, nproc=1, folder=root)
    turns: dict[str, dict[str, Any]] = found["turns"]
    for name, copy in copies(root, options).items():
        turns[name] = {"walls": [copy]}
    for mb in options.bucket_mb if apart else ():
        if options.only in (name := f"bare broadcast, {mb} MB"):
            bare = {"bytes": found["bytes"], "bucket_bytes": mb << 20, "device": device, "times": options.handovers}
            ends = run_worker(sys.executable, "worker_broadcast.py", bare, nproc=2, folder=root)
            turns[name] = {"walls": ends[0]["walls"]}
    for name, turn in turns.items():
        summed(name, turn, found["bytes"])
    return turns


def adapters_alone(
    root: pathlib.Path, options: argparse.Namespace, device: str, url: str, pid: int
) -> dict[str, dict[str, Any]]:
    """As `one_round`, of adapters (rollout.server.lora), which go as files."""
    spec = spec_of(root, options, device, url, pid) | {"adapters": adapter_subjects(options)}
    [found] = run_worker(sys.executable, "worker_handover.py", spec, nproc=1, folder=root)
    turns: dict[str, dict[str, Any]] = found["turns"]
    for name, turn in turns.items():
        summed(name, turn, turn["bytes"])
    return turns


def adapter_subjects(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns what the worker needs of each hand-over of adapters that was asked for, by name."""
    names = {f"{ADAPTERS}, {folder}": folder for folder in options.folders}
    return {name: {"rank": RANK, "folder": str(folder)} for name, folder in names.items() if options.only in name}


def spec_of(root: pathlib.Path, options: argparse.Namespace, device: str, url: str, pid: int) -> dict[str, Any]:
    return {
        "model": str(root / "model"), "dtype": options.dtype, "device": device, "backend": options.backend, "url": url,
        "server_pid": pid, "handovers": options.handovers,
    }  # fmt: skip


def summed(name: str, turn: dict[str, Any], size: int) -> None:
    """Adds to a turn what the report has of it. size: bytes that went each time."""
    turn["wall"], turn["mb"] = statistics.median(turn["walls"]), size / 1e6
    turn["gb_s"] = size / 1e9 / turn["wall"]
    print(f"{name:30s} {turn['wall']:7.2f} s {turn['gb_s']:7.2f} GB/s", file=sys.stderr, flush=True)


def copies(root: pathlib.Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a `cp` of the model's weights into each folder, without and with an fsync of what was written."""
    found = {}
    for folder in options.folders:
        for how, sync in COPIES.items():
            if options.only not in (name := f"{how}, {folder}"):
                continue
            with tempfile.TemporaryDirectory(prefix="mrl_benchmark_", dir=folder) as out:
                files = sorted((root / "model").glob("*.safetensors"))
                subprocess.run(["sync"], check=True)
                began = time.perf_counter()
                subprocess.run(["cp", *files, out], check=True)
                if sync:
                    subprocess.run(["sync", *(pathlib.Path(out) / file.name for file in files)], check=True)
                found[name] = time.perf_counter() - began
    return found


# -- the report --------------------------------------------------------------------------------------------------------


def heading(options: argparse.Namespace) -> list[str]:
    gpus = [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"] if options.device == "cuda" else []
    return [
        f"# Hand-over of weights, {time.strftime('%Y-%m-%d')}", "", f"`python benchmarks/handover.py {shown(options)}`", "",
        machine(), *gpus, "", versions(sys.executable, ["torch", "megatron-core", "safetensors"], "mrl"),
        of_server(options),
    ]  # fmt: skip


def of_server(options: argparse.Namespace) -> str:
    return versions(str(options.vllm_venv.absolute() / "bin" / "python"), ["torch", vllm_package(options)], "server")


def report(rounds: Rounds, options: argparse.Namespace, device: str) -> list[str]:
    lines = [
        f"## Weights in {options.dtype} ({options.size} parameters, {options.backend}, {device}), one vLLM server, "
        f"{options.rounds} rounds", "",
        "| | MB | GB/s | wall s | first, with joining, s | / cp, fsync | / bare broadcast | CPU s of trainer | of server |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in rounds[0]:
        cells = [
            f"{rounds[0][name]['mb']:.1f}", side(rounds, name, "gb_s", ".2f"), side(rounds, name, "wall", ".2f"), side(rounds, name, "first", ".2f"),
            ratio(rounds, name, None if name.startswith(ADAPTERS) else copy_beside(rounds, name)), ratio(rounds, name, bare_beside(rounds, name)),
            side(rounds, name, "cpu", ".2f"), side(rounds, name, "server_cpu", ".2f"),
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    phases = [name for name in rounds[0] if "phases" in rounds[0][name]]
    if phases:
        heads = list(rounds[0][phases[0]]["phases"])
        lines += [
            "",
            "Where the seconds of a hand-over go (medians; they overlap, so that they may be more than its wall seconds)",
            "",
        ]
        lines += [f"| | {' | '.join(heads)} | wall s |", "|---|" + "---|" * (len(heads) + 1)]
        for name in phases:
            cells = [f"{statistics.median(turns[name]['phases'][head] for turns in rounds):.2f}" for head in heads]
            wall = statistics.median(turns[name]["wall"] for turns in rounds)
            lines.append(f"| {name} | {' | '.join(cells)} | {wall:.2f} |")
    return lines


def shown(options: argparse.Namespace) -> str:
    """The arguments that say what was measured."""
    buckets = " ".join(map(str, options.bucket_mb))
    only = f" --only '{options.only}'" if options.only else ""
    return (
        f"--size {options.size} --dtype {options.dtype} --backend {options.backend} --bucket-mb {buckets} "
        f"--rounds {options.rounds} --handovers {options.handovers}{only}"
    )


def vllm_package(options: argparse.Namespace) -> str:
    found = list((options.vllm_venv / "lib").glob("python*/site-packages/vllm_cpu-*"))
    return "vllm-cpu" if found else "vllm"


def copy_beside(rounds: Rounds, name: str) -> str | None:
    """Returns the `cp` that a path is compared with: into the same folder, or the first one where it uses none."""
    copied = [other for other in rounds[0] if other.startswith("cp, fsync, ")]
    same = [other for other in copied if other.endswith(name.partition(", ")[2]) and name.startswith(("cp", "disk"))]
    return next(iter(same or copied), None)


def bare_beside(rounds: Rounds, name: str) -> str | None:
    """Returns the bare broadcast that a path is compared with: of the same buckets."""
    other = f"bare broadcast, {name.rpartition(', ')[2]}"
    return other if other in rounds[0] and name.startswith(("broadcast", "ipc")) else None


def side(rounds: Rounds, name: str, key: str, form: str) -> str:
    return " / ".join(format(turns[name][key], form) for turns in rounds if key in turns[name])


def ratio(rounds: Rounds, name: str, other: str | None) -> str:
    """The median over the rounds of GB/s as a multiple of the other subject's."""
    of: Callable[[dict[str, Any], str], float] = lambda turns, name: turns[name]["gb_s"]  # noqa: E731
    return "" if other is None else f"{statistics.median(of(turns, name) / of(turns, other) for turns in rounds):.2f}"


if __name__ == "__main__":
    main()
