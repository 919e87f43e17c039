"""Counts the operators that an update dispatches, by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.cuda import order, run
from tests.cuda.cases import Case


def count(case: Case) -> dict[str, int]:
    found: Counter[str] = Counter()
    dispatch = order.Unordered.__torch_dispatch__

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found[func._overloadpacket.__name__] += 1
        return dispatch(self, func, types, args, kwargs)

    order.Unordered.__torch_dispatch__ = counted
    try:
        run.run(case)
    finally:
        order.Unordered.__torch_dispatch__ = dispatch
    return dict(found)
