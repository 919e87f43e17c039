"""Runs cases on one GPU, in several processes at a time, and prints a line for each.

    python -m tests.gpu [--only WORDS] [--jobs N] [--limit SECONDS] [--out FILE.json]

Exit code 1 where one failed. --only: cases whose names have each of these words and none behind a `!`; or, with `,` between them,
each of those. Cases of several ranks, as `2 ranks`, share the GPU (tests/engine/harness.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a case")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds after which no case begins")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--worker", type=int, help="of a process that cases are sent to: where its answers go")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.worker)
    from tests.gpu.cases import CASES

    has_te = importlib.util.find_spec("transformer_engine") is not None
    sets = [part.split() for part in arguments.only.split(",")]
    named = [c for c in CASES if any(all(has(c.name, word) for word in words) for words in sets)]
    chosen = [c.name for c in named if has_te or not c.needs_te]
    if not chosen or arguments.jobs < 1:
        parser.error(
            f"--only {arguments.only!r} names none of {len(CASES)} cases" if not chosen else "--jobs is at least 1"
        )
    print(f"{len(chosen)} cases" + ("" if has_te else "; transformer-engine is not installed: its cases are left out"))
    began, found = time.monotonic(), run_all(chosen, arguments)
    wrong = [name for name, result in found.items() if result["problems"]]
    print(f"{len(wrong)} of {len(found)} failed, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def has(name: str, word: str) -> bool:
    return word[1:] not in name if word.startswith("!") else word in name


def run_all(names: list[str], arguments: argparse.Namespace) -> Results:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    began, found, lock = time.monotonic(), {}, threading.Lock()

    def serve() -> None:
        worker: Worker | None = None
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                if time.monotonic() - began > arguments.until:
                    result = {"problems": ["not begun"], "seconds": 0.0}
                else:
                    worker = worker if worker is not None and worker.is_alive else Worker()
                    result = worker.run(name, arguments.limit)
                with lock:
                    found[name] = result
                    print(line(name, result), flush=True)
                    if arguments.out:
                        arguments.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve) for _ in range(min(arguments.jobs, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Worker:
    """A process that runs one case after the other. It ends with the first that raises: CUDA may be of no use after it."""

    def __init__(self) -> None:
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - as long as the process
        self.answers, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu", "--worker", str(theirs)], stdin=subprocess.PIPE, stdout=self.log,
            stderr=self.log, pass_fds=[theirs], text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        os.close(theirs)
        self.is_alive = True

    def run(self, name: str, limit: float) -> dict[str, Any]:
        began, answer = time.monotonic(), b""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(name, file=self.process.stdin, flush=True)
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self.answers], [], [], max(0.0, began + limit - time.monotonic()))
            more = os.read(self.answers, 1 << 16) if ready else b""
            if not more:
                return self._lost("ended" if ready else f"longer than {limit:.0f} s") | {
                    "seconds": time.monotonic() - began
                }
            answer += more
        result = json.loads(answer)
        if "said" in result:
            self.end()
        return result | {"seconds": time.monotonic() - began}

    def _lost(self, why: str) -> dict[str, Any]:
        self.process.kill()
        self.end()
        self.log.seek(0)
        said = self.log.read()[-3000:]
        return {"problems": [f"{why}: {(said.strip().splitlines() or ['it said nothing'])[-1][:300]}"], "said": said}

    def end(self) -> None:
        self.is_alive = False
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def work(answers: int) -> int:
    """Runs the cases whose names come through stdin, until there is no other or one raises."""
    from mrl.mcore_models import platform

    platform.hide_what_does_not_load()  # as an engine does before it imports megatron-core
    from tests.gpu import measures
    from tests.gpu.cases import CASES

    cases = {case.name: case for case in CASES}
    for name in sys.stdin:
        case = cases[name.rstrip("\n")]
        try:
            result = getattr(measures, case.run)(**case.arguments)
        except Exception as error:  # whatever it is, the table has it
            said = (str(error).strip().splitlines() or [""])[0][:300]
            result = {"problems": [f"{type(error).__name__}: {said}"], "said": traceback.format_exc()[-5000:]}
        os.write(answers, json.dumps(result).encode() + b"\n")
        if "said" in result:
            os._exit(1)  # what CUDA holds after a fault may wait for ever at an orderly end
    return 0


def line(name: str, result: dict[str, Any]) -> str:
    figures = [
        f"{key} {value:.2g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in result.items()
        if key not in ("problems", "seconds", "said", "lines") and value is not None
    ]
    verdict = "FAILED: " + "; ".join(result["problems"]) if result["problems"] else "ok"
    return f"{name} | {result['seconds']:.0f} s | {', '.join(figures)} | {verdict}"


if __name__ == "__main__":
    sys.exit(main())
