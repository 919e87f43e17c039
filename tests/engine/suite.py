"""The engine contract, against an engine that an installed package registers: `python -m tests.engine.suite NAME`.

    python -m tests.engine.suite NAME                       on one process and data-parallel on two
    python -m tests.engine.suite NAME --layout 4:tp=2,pp=2  and on 4 processes with these degrees of engine.parallel
    python -m tests.engine.suite NAME -k resume -x          other arguments are pytest's

From the root of a checkout of mrl, with the package installed beside it. docs/backends.md says what the tests ask.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import pytest

from mrl.engine.registry import engine_class
from mrl.errors import ConfigError
from tests.engine import layouts

HERE = pathlib.Path(__file__).parent
FILES = ("test_contract.py", "test_generation.py", "test_offload.py", "test_fsdp_parity.py")


def degrees(text: str) -> tuple[str, tuple[int, dict[str, int]]]:
    """`4:tp=2,pp=2` -> its name, and what it says."""
    processes, _, pairs = text.partition(":")
    parallel = {name: int(value) for name, value in (pair.split("=") for pair in pairs.split(",") if pair)}
    return " ".join([*(f"{n}{v}" for n, v in parallel.items()), f"on {processes}"]), (int(processes), parallel)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="what engine.backend would be")
    parser.add_argument(
        "--layout", action="append", default=[], type=degrees, help="PROCESSES:DEGREE=N,...; may be repeated"
    )
    parser.add_argument("-k", default="", help="of these tests, those that match, as pytest has it")
    asked, others = parser.parse_known_args(arguments)
    try:
        engine_class(layouts.available(asked.name))
    except ConfigError as error:
        parser.error(str(error))
    layouts.choose_external(asked.name, dict(asked.layout))
    chosen = f"(external or {asked.name})" + (f" and ({asked.k})" if asked.k else "")
    return pytest.main([*(str(HERE / name) for name in FILES), "-k", chosen, *others])


if __name__ == "__main__":
    sys.exit(main())
