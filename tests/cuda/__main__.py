"""Prints what an update takes on GPUs of published models, one rank each, as tensors without memory tell it.

python -m tests.cuda
"""

from tests.cuda.cases import CORNERS, HEADER, OF_EACH_FAMILY, as_shown, row
from tests.cuda.worker import Worker

if __name__ == "__main__":
    print(HEADER)
    with Worker() as worker:
        for case in map(as_shown, (*OF_EACH_FAMILY, *CORNERS)):
            print(row(case, worker.call("tests.cuda.run:run", case)), flush=True)
