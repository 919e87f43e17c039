"""`mrl check`: one batch through each layout of a config, held against Hugging Face."""

from __future__ import annotations

from typing import Any

from mrl.commands import CONFIG, EXIT_USER_ERROR, JSON, OVERRIDES, Command, Option


def run(as_json: bool, **given: Any) -> int:
    from mrl.check.report import run_and_show

    return 0 if run_and_show(as_json=as_json, **given) else EXIT_USER_ERROR


def _choice(name: str, default: str, other: str, text: str) -> Option:
    return Option(names=name, choices=lambda: (default, other), default=default, help=text)


COMMAND = Command(
    help="""Prove that layouts of your config compute the same: one optimizer step on a batch of its data.

    Each layout runs as real processes on this machine, and is compared with transformers and plain PyTorch on one
    process: loss, log-probs, the gradient of every parameter, its norm, and the weights after the step. CONFIG is the
    file of a command that trains. Exit code 2 where something differs.
    """,
    examples="""
        mrl check sft.yaml
        mrl check sft.yaml --layouts tp2,pp2xvpp2,dp2
        mrl check dpo.yaml --layouts tp2,dp2
        mrl check grpo.yaml --layouts tp2 --cut layers=4,width=256
        mrl check sft.yaml engine.backend=fsdp --against first --json
        mrl check sft.yaml --save check.json""",
    run=run,
    params=(
        CONFIG,
        OVERRIDES,
        Option(
            names="--layouts", metavar="LIST", default="auto",
            help="Layouts with commas, as in tp2,pp2xvpp2,tp2+sp,cp2,ep2,dp2; auto is one process, each axis that the "
            "config uses alone, dp2, and all that fits of them together.",
        ),
        _choice(
            "--against", "hf", "first",
            "What layouts are compared with: transformers on one process, or the first of them.",
        ),
        Option(
            names="--cut", metavar="SIZES", default="auto",
            help="Check a smaller model of the same family with random weights, as in layers=4,width=256; none is the "
            "whole model, auto cuts where this machine's memory asks for it.",
        ),
        _choice(
            "--dtype", "float32", "bfloat16",
            "What layouts compute in, whatever the config says; bounds of bfloat16 are wide.",
        ),
        Option(
            names="--nproc", kind="number", minimum=1,
            help="Processes at a time, at most; default: the GPUs, else 8.",
        ),
        Option(
            names="--tokens", kind="number", minimum=16,
            help="Tokens of the batch, about; default: some seconds' worth.",
        ),
        Option(
            names="--save", kind="path", metavar="FILE",
            help="Also write the machine, versions, numbers and verdicts to FILE, to attach to an issue.",
        ),
        JSON,
    ),
)  # fmt: skip
