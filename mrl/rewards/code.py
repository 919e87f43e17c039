"""The reward of unit tests: the completion's Python block is run against the tests in the row.

The row's field holds one of

    Python text                         one test; if the row has `entry_point`, as HumanEval's, check(entry_point) is
                                        called
    a list of Python texts              a test each, as MBPP's `test_list`: "assert add(1, 2) == 3"
    a list of {input, output}           a program that reads stdin: its stdout must equal `output`, but for white space
                                        at the ends of lines and of the text

Each test runs in a process of its own, with the limits of `mrl.rewards.sandbox`. That module says what they do not keep
out. Code and test share an interpreter: a completion that looks for it can forge its own success with Python texts, but
not with {input, output}.
"""

from __future__ import annotations

import re
import time
from typing import Any

from mrl.config.rewards import CodeReward
from mrl.rewards.sandbox import START_S, Limits, run_python
from mrl.rewards.text import Prompt, Row, row_field

_BLOCK = re.compile(r"^[ \t]*```[ \t]*(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.M | re.S)


def python_block(completion: str) -> str:
    """Returns the last block fenced as python (or py, python3), else the last fenced without a language.

    A text without a fence is returned whole. A block that the completion does not close goes to its end. "" if there is
    none.
    """
    blocks = [(m["language"].lower(), m["code"]) for m in _BLOCK.finditer(completion)]
    for languages in (("python", "py", "python3"), ("",)):
        fitting = [code for language, code in blocks if language in languages]
        if fitting:
            return fitting[-1]
    return "" if blocks else completion


def code(prompt: Prompt, completion: str, row: Row, options: CodeReward) -> float:
    """Returns the fraction of tests that pass; with score `all`, 1 if every one does, else 0.

    Tests that are not reached within `total_s` fail.
    """
    tests = _tests(row, options.field)
    program = python_block(completion)
    if not program.strip():
        return 0.0
    deadline = time.monotonic() + options.total_s
    passed = 0
    for test in tests:
        time_s = min(options.time_s, deadline - time.monotonic() - START_S)
        ok = time_s > 0 and _passes(
            program, test, Limits(time_s=time_s, memory_mb=options.memory_mb, file_mb=options.file_mb)
        )
        passed += ok
        if not ok and (options.score == "all" or time_s <= 0):
            break
    return float(passed == len(tests)) if options.score == "all" else passed / len(tests)


def _tests(row: Row, field: str) -> list[Any]:
    value = row_field(row, field)
    if isinstance(value, str):
        call = f"\ncheck({row['entry_point']})" if isinstance(row.get("entry_point"), str) else ""
        return [value + call]
    fits = isinstance(value, list) and value and all(isinstance(t, str) or _is_input_output(t) for t in value)
    if not fits:
        raise ValueError(
            f"the row's {field} is no Python text, list of them, or list of {{input, output}}: {value!r:.60}"
        )
    return value


def _is_input_output(test: Any) -> bool:
    return isinstance(test, dict) and all(isinstance(test.get(name), str) for name in ("input", "output"))


def _passes(program: str, test: Any, limits: Limits) -> bool:
    if isinstance(test, str):
        return run_python(program, test=test, limits=limits).finished
    ran = run_python(program, input=test["input"], limits=limits)
    return ran.finished and _lines(ran.output) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
