"""`mrl eval`: accuracy and pass@k of a model on a task, and of two models beside each other."""

from __future__ import annotations

from typing import Any

from mrl.commands import NPROC, OVERRIDES, Argument, Command, Option
from mrl.commands.generate import BACKEND, MODEL, SAMPLING, sampling_keys
from mrl.config.inference import EvalKeys


def evaluate(model: str, task: str, overrides: tuple[str, ...], nproc: int | None, **given: Any) -> int | None:
    from mrl.launch import inference

    options = sampling_keys(given)
    return inference.evaluate(model, task, overrides, nproc=nproc, options=options, **given)


COMMAND = Command(
    help="""Measure how often MODEL is right on TASK, with 95 % confidence intervals.

    MODEL is what `mrl generate` takes. TASK is a file of rows with prompts and answers, whose --reward says what is
    right, or a YAML file that says both. One greedy completion of each prompt gives the accuracy, as eval/accuracy of
    `mrl ppo`; --samples K gives pass@1 to pass@K.
    """,
    examples="""
        mrl eval runs/demo rows.jsonl --reward exact_match
        mrl eval runs/demo rows.jsonl --reward my_rewards.py:score --samples 8 --temperature 0.8 --out after.json
        mrl eval runs/demo task.yaml --limit 100 --against path/to/hf-model
        mrl eval runs/demo task.yaml --against before.json --json""",
    run=evaluate,
    root=EvalKeys,
    params=(
        MODEL,
        Argument(name="task", kind="path", metavar="TASK"),
        OVERRIDES,
        Option(names="--reward", metavar="NAME", help="What is right: gsm8k or another name, or path.py:name."),
        Option(names="--samples", kind="number", minimum=1, metavar="K", help="Completions of each prompt; 1: greedy."),
        Option(names="--limit", kind="number", minimum=1, metavar="N", help="The first N prompts alone."),
        Option(
            names="--against", kind="path", metavar="MODEL|JSON",
            help="Another model, or the result of one on the same rows, to compare with in pairs.",
        ),
        Option(names="--system", metavar="TEXT", help="A system message before every prompt."),
        *SAMPLING,
        Option(names="--out", kind="path", metavar="FILE", help="Write the result as JSON, row by row."),
        Option(names="--json", into="as_json", kind="flag", help="Print that JSON in place of the table."),
        BACKEND,
        NPROC,
    ),
)  # fmt: skip
