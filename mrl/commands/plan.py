"""`mrl plan`: what a run will take, on as many GPUs as one likes and without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.commands import CONFIG, EXIT_USER_ERROR, JSON, OVERRIDES, Command, Option, echo

EXAMPLES = """
    mrl plan sft.yaml --world-size 64
    mrl plan sft.yaml engine.parallel.tp=4 engine.parallel.pp=4 --world-size 64 --gpu h200
    mrl plan grpo.yaml --world-size 8 --gpu a100-80gb --json
    mrl plan sft.yaml --world-size 32 --suggest
    mrl plan sft.yaml --world-size 64 --calibrate"""


def _run(config_path: str, overrides: Sequence[str], **options: Any) -> int | None:
    from mrl.launch import planning

    fits, lines = planning.run(config_path, overrides, **options)
    for line in lines:
        echo(line)
    return None if fits else EXIT_USER_ERROR


COMMAND = Command(
    help="""Say what a run takes on N GPUs before it is started: memory, communication, pipeline bubble, time.

    CONFIG is the file of any command that trains. The model of every pipeline stage is built and run by the real code,
    on tensors without memory: no GPU, no weights and no data are needed, only the model's config.json.
    """,
    examples=EXAMPLES,
    run=_run,
    params=(
        CONFIG,
        OVERRIDES,
        Option(names="--world-size -n", into="world_size", kind="number", minimum=1, default=8, help="GPUs."),
        Option(
            names="--gpu", metavar="NAME", default="h100-80gb",
            help="a100-40gb, a100-80gb, h100-80gb, h200, b200, gb300, or GB=64; your figures as in h200,TFLOPS=650.",
        ),
        Option(
            names="--efficiency", kind="fraction", metavar="SHARE", default=0.5, minimum=0.001, maximum=1,
            help="Share of the GPU's peak that products reach.",
        ),
        Option(
            names="--reserve", kind="fraction", metavar="GIB", default=4.0, minimum=0,
            help="Memory for CUDA, NCCL and the allocator.",
        ),
        JSON,
        Option(names="--calibrate", kind="flag", help="Time each stage on this machine, beside the estimate."),
        Option(names="--suggest", kind="flag", help="Search layouts for these GPUs, and rank those that fit by time."),
    ),
)  # fmt: skip
