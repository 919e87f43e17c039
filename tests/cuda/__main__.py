"""Prints what an update takes on GPUs of published models, one rank each, as tensors without memory tell it.

python -m tests.cuda
"""

from __future__ import annotations

import dataclasses

from tests.cuda.cases import CORNERS, OF_EACH_FAMILY
from tests.cuda.worker import Worker

if __name__ == "__main__":
    print("| model, layers, layout, rank | parameters | peak, GiB | waits a micro-batch |")
    print("|---|---|---|---|")
    with Worker() as worker:
        for case in (*OF_EACH_FAMILY, *CORNERS):
            case = dataclasses.replace(case, micro_batches=max(4, case.pp))  # as many as fill the stages
            found = worker.call("tests.cuda.run:run", case)
            waits = sum(found.syncs.values())
            print(
                f"| {case}, {case.layers} layers | {found.parameters / 2**30:.2f} | {found.peak / 2**30:.2f} | {waits:g} |",
                flush=True,
            )
