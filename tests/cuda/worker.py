"""A process that believes in a GPU, with a fork of it for each call, so that none changes anything for the next.

with Worker() as worker:
    worker.call("tests.cuda.run:run", Case(...))        what the function returns there; its error is raised here
"""

from __future__ import annotations

import base64
import importlib
import os
import pickle
import subprocess
import sys
import traceback
import warnings
from typing import Any

from tests.cuda import guard


class Worker:
    """capability: of the GPU that is believed in. te: with transformer-engine's Python modules (te.py). apex: with
    names of NVIDIA's apex (apex.py). plans: it believes in no GPU, and makes its models of tensors without memory
    (mrl.engine.megatron.meta)."""

    def __init__(
        self, capability: tuple[int, int] = (9, 0), *, te: bool = False, apex: bool = False, plans: bool = False
    ) -> None:
        guard.build()  # here, where its failure is a test's
        kind = [*["te"] * te, *["apex"] * apex, *["plans"] * plans]
        command = [sys.executable, "-m", "tests.cuda.worker", *map(str, capability), *kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Returns what "module:function" returns in a fork of the process. Raises AssertionError with its traceback."""
        self._process.stdin.write(_packed((function, args, kwargs)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        result, error = pickle.loads(base64.b64decode(line))
        if error:
            raise AssertionError(error)
        return result


OF_PLANS = ("tests.plan.planned", "mrl.cli", "mrl.commands.plan", "mrl.commands.sft", "mrl.commands.ppo", "mrl.launch.planning", "mrl.plan.planner",
            "mrl.launch.preflight", "click.testing", "yaml")  # fmt: skip
OF_RANKS = ("tests.cuda.run", "tests.cuda.decoding")
"""What calls import: half a second of each otherwise."""


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def main() -> None:
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no result
    major, minor, *kind = sys.argv[1:]
    if kind == ["plans"]:
        from mrl.engine.megatron import meta

        meta.prepare()
    else:
        from tests.cuda import fake

        fake.install((int(major), int(minor)))
    if kind == ["te"]:
        from tests.cuda.te import boot

        boot()
    if kind == ["apex"]:
        from tests.cuda import apex

        apex.boot()
    import mrl.engine.megatron.engine  # noqa: F401  once for all forks
    from tests.cuda import models

    models.read_all()
    for name in OF_PLANS if kind == ["plans"] else OF_RANKS:  # once, too
        importlib.import_module(name)
    import tests.frozen  # noqa: F401

    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            with os.fdopen(write, "w") as to_parent:
                to_parent.write(_answer(line))
                to_parent.flush()
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as from_child:
            answer = from_child.read()
        _, status = os.waitpid(child, 0)
        print(answer or _packed((None, f"the process ended with {status}")), file=out, flush=True)


def _answer(line: str) -> str:
    try:
        function, args, kwargs = pickle.loads(base64.b64decode(line))
        module, _, name = function.partition(":")
        return _packed((getattr(importlib.import_module(module), name)(*args, **kwargs), None))
    except BaseException:
        return _packed((None, traceback.format_exc()))


if __name__ == "__main__":
    main()
