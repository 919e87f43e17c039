"""`mrl serve` through the tinker client, beside the engine alone.

    python benchmarks/serve.py
    python benchmarks/serve.py --append benchmarks/results/my-machine.md

Server and engine take turns, each in fresh processes with one thread. See README.md for what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import measure
import psutil
import workload
from machine import machine, versions

os.environ["TINKER_TELEMETRY"] = "0"
LR, NEW_TOKENS, CALLS = 1e-4, 64, 200
WAITING = (1, 8, 64)
MODELS = {"adapters of rank 16": {"rank": 16, "alpha": 32}, "all weights": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each subject")
    parser.add_argument("--steps", type=int, default=12, help="of a run")
    parser.add_argument("--warmup", type=int, default=3, help="of which so many are not counted")
    parser.add_argument("--append", type=pathlib.Path, help="file that the report is added to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_") as name:
        folder = pathlib.Path(name)
        workload.make(folder, steps=1)
        workload.make_model(folder / "model", 0, end_drawn=False)  # every completion has all its tokens
        steps = {what: training(folder, what, arguments) for what in MODELS}
        sampled, latency = sampling(folder, arguments)
    text = report(steps, sampled, latency, arguments)
    print("\n" + text)
    if arguments.append is not None:
        with arguments.append.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def write_config(folder: pathlib.Path, lora: dict[str, Any] | None) -> pathlib.Path:
    config = {
        "output_dir": str(folder / "run"), "model": {"path": str(folder / "model"), "dtype": "float32", "lora": lora},
        "engine": {"device": "cpu"}, "serve": {"max_length": workload.ROW, "port": 0}, "log": {"console": "plain"},
    }  # fmt: skip
    path = folder / "serve.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


@contextlib.contextmanager
def serving(folder: pathlib.Path, config: pathlib.Path) -> Iterator[tuple[str, psutil.Process]]:
    """(url, process) of a server of its own directory, which ends with the block."""
    log, run = folder / "serve.log", tempfile.mkdtemp(dir=folder)
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", "mrl", "serve", str(config), f"output_dir={run}", "--nproc", "1"], stdout=file, stderr=file,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield found[1], psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait()


class Timer:
    """Wall seconds, and CPU seconds of another process, of each step."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def step(self, do: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), self._cpu()
        done = do()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(self._cpu() - cpu)
        return done

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


# -- steps -------------------------------------------------------------------------------------------------------------


def training(folder: pathlib.Path, what: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Steps on the packed rows, as many documents, by the engine alone and through the client."""
    import tinker
    from tinker import types

    from mrl.serve import messages

    config = write_config(folder, MODELS[what])
    [rows] = json.loads((folder / "packed.json").read_text())
    documents = [ids for row in rows for ids in row]
    request = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    data = []
    for ids in documents:
        weights = [1.0 / len(documents)] * (len(ids) - 1)
        targets = types.TensorData(data=ids[1:], dtype="int64", shape=[len(ids) - 1])
        given = types.TensorData(data=weights, dtype="float32", shape=[len(weights)])
        inputs = {"target_tokens": targets, "weights": given}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        fill(request.data.add(), ids, weights)
    (folder / "request.bin").write_bytes(request.SerializeToString())
    spec = {
        "config": str(config), "what": "steps", "request": str(folder / "request.bin"), "lr": LR,
        "steps": arguments.steps, "vocabulary": workload.VOCABULARY,
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {"engine alone": [], "through the client": []}
    for number in range(arguments.rounds):
        [rank] = measure.run_worker(sys.executable, "worker_serve.py", spec, nproc=1, folder=folder)
        found["engine alone"].append(steady(rank["wall"], rank["cpu"], arguments.warmup) | {"loss": rank["losses"][-1]})
        with serving(folder, config) as (url, process):
            service = tinker.ServiceClient(base_url=url, api_key="tml-local")
            made = service.create_lora_training_client(base_model=str(folder / "model"), rank=16)
            client, timer = made.result() if hasattr(made, "result") else made, Timer(process)
            adam = types.AdamParams(learning_rate=LR)

            def step(client: Any = client, adam: Any = adam) -> float:
                passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
                stepped.result()
                return passed.result().metrics["loss:sum"]

            losses = [timer.step(step) for _ in range(arguments.steps)]
            found["through the client"].append(steady(timer.wall, timer.cpu, arguments.warmup) | {"loss": losses[-1]})
        print(f"{what}, round {number + 1}: {found}", file=sys.stderr)
    ends = [run["loss"] for of in found.values() for run in of]
    if max(ends) - min(ends) > 1e-3:
        raise SystemExit(f"{what}: the last losses differ: {ends}")
    return found


def fill(datum: Any, ids: list[int], weights: list[float]) -> None:
    """The same datum, as the client sends it."""
    import numpy as np

    from mrl.serve import messages

    datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], "<i4").tobytes()
    of = datum.loss_fn_inputs
    of["target_tokens"].dense, of["target_tokens"].dtype = np.array(ids[1:], "<i8").tobytes(), messages.INT64
    of["weights"].dense, of["weights"].dtype = np.array(weights, "<f4").tobytes(), messages.FLOAT32
    for tensor in of.values():
        tensor.shape.append(len(ids) - 1)


def steady(wall: list[float], cpu: list[float], warmup: int) -> dict[str, float]:
    return {"wall_s": statistics.median(wall[warmup:]), "cpu_s": statistics.median(cpu[warmup:])}


# -- samples -----------------------------------------------------------------------------------------------------------


def sampling(folder: pathlib.Path, arguments: argparse.Namespace) -> tuple[dict[str, list[dict]], dict[str, float]]:
    """Samples a second of 128 prompts, so many of them waiting at once; and milliseconds of calls that do nothing."""
    import random

    import tinker

    config, numbers = write_config(folder, {"rank": 16}), random.Random(0)
    prompts = [workload.document(numbers.randint(20, 30), numbers) for _ in range(2 * max(WAITING))]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    found: dict[str, list[dict]] = {}
    latency: dict[str, float] = {}
    for waiting in WAITING:
        some = prompts[: max(8, min(len(prompts), 2 * waiting))]
        (folder / "some.json").write_text(json.dumps(some))
        spec = {
            "config": str(config), "what": "samples", "prompts": str(folder / "some.json"), "at_once": waiting,
            "steps": 3, "new_tokens": NEW_TOKENS,
        }  # fmt: skip
        for number in range(arguments.rounds):
            [rank] = measure.run_worker(sys.executable, "worker_serve.py", spec, nproc=1, folder=folder)
            alone = len(some) / statistics.median(rank["wall"][1:])
            with serving(folder, config) as (url, _):
                service = tinker.ServiceClient(base_url=url, api_key="tml-local")
                made = service.create_sampling_client(base_model=str(folder / "model"))
                client = made.result() if hasattr(made, "result") else made
                walls = [drawn_in(client, some, waiting) for _ in range(3)]
                latency = latencies(url)
            served = len(some) / statistics.median(walls[1:])
            found.setdefault(f"{waiting} waiting", []).append({"alone": alone, "served": served})
            print(f"{waiting} waiting, round {number + 1}: {alone:.2f} and {served:.2f} a second", file=sys.stderr)
    return found, latency


def drawn_in(client: Any, prompts: list[list[int]], waiting: int) -> float:
    """Seconds until all are drawn, by so many threads each of which waits for its own."""
    from tinker import types

    params, left, lock = types.SamplingParams(max_tokens=NEW_TOKENS, stop=[]), list(prompts), threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                if not left:
                    return
                ids = left.pop()
            drawn = client.sample(types.ModelInput.from_ints(ids), 1, params).result()
            assert len(drawn.sequences[0].tokens) == NEW_TOKENS

    began = time.perf_counter()
    threads = [threading.Thread(target=ask) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def latencies(url: str) -> dict[str, float]:
    """Median milliseconds of a request, and of a call that the ranks answer without any work: sent and fetched."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", f"/api/v1/{path}", json.dumps(body))
        return json.loads(connection.getresponse().read())

    session = ask("create_session", {"sdk_version": "0.38.0"})["session_id"]
    model = ask("create_model", {"session_id": session, "model_seq_id": 0, "lora_config": {"rank": 16}})
    ask("retrieve_future", {"request_id": model["request_id"]})
    request, promise = [], []
    for number in range(1, CALLS + 1):
        began = time.perf_counter()
        ask("session_heartbeat", {"session_id": session})
        request.append(time.perf_counter() - began)
        began = time.perf_counter()
        asked = ask("optim_step", {"model_id": model["model_id"], "seq_id": number})  # there is no gradient
        ask("retrieve_future", {"request_id": asked["request_id"]})
        promise.append(time.perf_counter() - began)
    return {"a request": 1000 * statistics.median(request), "a promise": 1000 * statistics.median(promise)}


# -- the report --------------------------------------------------------------------------------------------------------


def report(
    steps: dict[str, dict[str, list[dict[str, float]]]], sampled: dict[str, list[dict]], latency: dict[str, float],
    arguments: argparse.Namespace,
) -> str:  # fmt: skip
    command = (
        f"python benchmarks/serve.py --rounds {arguments.rounds} --steps {arguments.steps} --warmup {arguments.warmup}"
    )
    lines = [
        f"# Serving, {datetime.date.today()}", "", f"`{command}`", "", machine(), "",
        versions(sys.executable, ["torch", "megatron-core", "tinker", "starlette", "uvicorn"], "mrl"), "",
        "## A step of 2,048 tokens, 20 M parameters", "", "| | wall s | CPU s |", "|---|---|---|",
    ]  # fmt: skip
    for what, of in steps.items():
        lines += [f"| {what}: {name} | {side(of[name], 'wall_s')} | {side(of[name], 'cpu_s')} |" for name in of]
    lines += ["", "## Samples a second, of 64 tokens", "", "| | engine alone | through clients | ratio (goal 0.9) |", "|---|---|---|---|"]  # fmt: skip
    for what, runs in sampled.items():
        ratio = mean(runs, "served") / mean(runs, "alone")
        lines.append(f"| {what} | {side(runs, 'alone', '.2f')} | {side(runs, 'served', '.2f')} | {ratio:.2f} |")
    lines += ["", "## Ratios", "", "| | | goal |", "|---|---|---|", *overheads(steps)]
    lines += [f"| latency of {what} that needs no work | {ms:.1f} ms | under 20 ms |" for what, ms in latency.items()]
    return "\n".join(lines) + "\n"


def overheads(steps: dict[str, dict[str, list[dict[str, float]]]]) -> Iterable[str]:
    for what, of in steps.items():
        alone, served = of.values()
        for key, name in (("wall_s", "wall"), ("cpu_s", "CPU")):
            ratio = mean(served, key) / mean(alone, key)
            yield f"| {name} seconds of a step, {what}: through the client / engine alone | {ratio:.3f} | at most 1.05 |"


def side(runs: list[dict[str, float]], key: str, form: str = ".3f") -> str:
    return " / ".join(format(run[key], form) for run in runs)


def mean(runs: list[dict[str, float]], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


if __name__ == "__main__":
    main()
