"""`mrl doctor`: what this machine and this installation have, and what a run will make of it."""

from __future__ import annotations

from mrl.commands import EXIT_USER_ERROR, JSON, Command, Option, echo


def run(collectives: bool, as_json: bool) -> int:
    """Returns 2 where a fault was found."""
    import json

    from mrl.doctor.examine import examine, text

    report = examine(with_collectives=collectives)
    if as_json:
        echo(json.dumps(report.as_json(), indent=2))
    else:
        for line in text(report):
            echo(line)
    return EXIT_USER_ERROR if report.worst == "fault" else 0


COMMAND = Command(
    help="""Say what this machine has, what a run will use of it and why, and what to do about the rest.

    Packages, GPUs, disks, limits, network, environment variables. Packages are imported in processes
    of their own: one that is broken is named, with what it costs, and the rest goes on. Nothing is changed.

    Exit code 2 where there is a fault: something that stops a run, or leaves a GPU unused. Warnings do not count.
    """,
    examples="""
        mrl doctor                           look at everything, in seconds
        mrl doctor --collectives             two processes sum over gloo and, with two GPUs, over NCCL
        mrl doctor --json > doctor.json      for scripts, and for a report of a fault""",
    run=run,
    params=(
        Option(
            names="--collectives", kind="flag",
            help="Also run an all-reduce of two processes over gloo and, with two GPUs, over NCCL, and time it.",
        ),
        JSON,
    ),
)  # fmt: skip
