"""Prints what an update takes on GPUs of published models, one rank each, as tensors without memory tell it; and of some
what it takes with transformer-engine's modules.

python -m tests.cuda
"""

import dataclasses

from tests.cuda.cases import CORNERS, HEADER, OF_EACH_FAMILY, as_shown, row
from tests.cuda.te_cases import UNDER_BOTH
from tests.cuda.worker import Worker

if __name__ == "__main__":
    print(HEADER)
    with Worker() as worker:
        for case in map(as_shown, (*OF_EACH_FAMILY, *CORNERS)):
            print(row(case, worker.call("tests.cuda.run:run", case)), flush=True)
    with Worker(te=True) as worker:
        for case in UNDER_BOTH:
            under_te = dataclasses.replace(as_shown(case), spec="te")
            print(row(under_te, worker.call("tests.cuda.te_update:update", under_te, (9, 0)).result), flush=True)
