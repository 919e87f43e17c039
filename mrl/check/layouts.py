"""Chooses the layouts of a check: words such as `tp2+sp` or `pp2xvpp2`, or a config's own layout, made smaller."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

from mrl.config.checks import parallel_dims, smallest_world
from mrl.config.schema import ParallelConfig
from mrl.errors import ConfigError, UserError, quoted
from mrl.parallel import ParallelDims

AXES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
_WORD = re.compile(rf"({'|'.join(sorted(AXES, key=len, reverse=True))})(\d{{1,4}})(\+sp)?x?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Holds degrees of parallelism on a number of processes."""

    parallel: ParallelConfig
    processes: int

    @property
    def dims(self) -> ParallelDims:
        return parallel_dims(self.parallel, self.processes)

    def __str__(self) -> str:
        """Returns a word for `named`, with the experts' degree if ep alone would give another one."""
        dims = self.dims
        text = dims.describe()
        return text.replace(f"ep{dims.ep}", f"ep{dims.ep}xetp{dims.etp}") if dims.ep > 1 < dims.etp == dims.tp else text


ONE = Layout(ParallelConfig(sp=False), 1)


def named(words: str, own: ParallelConfig) -> list[Layout]:
    """Returns the layouts of a list such as "tp2,pp2xvpp2".

    own: of the config; it decides if tp comes with sequence parallelism when the word does not.
    """
    layouts = [_named(word.strip(), own) for word in words.split(",")]
    return list(dict.fromkeys(layouts))


def _named(word: str, own: ParallelConfig) -> Layout:
    degrees: dict[str, int] = {}
    sp: bool | str = own.sp
    at = 0
    while at < len(word) and (match := _WORD.match(word, at)):
        name, degree, with_sp = match.groups()
        if name in degrees or int(degree) < 1 or (with_sp and name != "tp"):
            break
        degrees[name], at = int(degree), match.end()
        sp = True if with_sp else sp
    if not word or at < len(word) or word.endswith("x"):
        fix = f"write degrees of {', '.join(AXES)}, as in tp2, pp2xvpp2, tp2+sp or ep2xdp4; or auto"
        raise UserError("--layouts", quoted(word), "is no layout", fix)
    return _layout(degrees, sp)


def _layout(degrees: dict[str, int], sp: bool | str) -> Layout:
    """Returns the layout of some degrees, on the fewest processes that have them."""
    of_model = {name: degree for name, degree in degrees.items() if name != "dp"}
    parallel = ParallelConfig(**of_model, sp=bool(sp) and of_model.get("tp", 1) > 1)
    smallest = smallest_world(parallel)
    processes = parallel.tp * parallel.cp * parallel.pp * degrees["dp"] if "dp" in degrees else smallest
    layout = Layout(parallel, processes)
    try:
        layout.dims  # noqa: B018 - for what it refuses
    except ConfigError as error:
        raise UserError("--layouts", why=error.why, fix=error.fix) from None
    return layout


def of_config(own: ParallelConfig, *, most: int, fits: Callable[[Layout], bool]) -> list[Layout]:
    """Returns one process, each axis of a config's own layout alone, data parallelism, and what fits of them together.

    A degree comes down to its smallest divisor that `fits` the model. most: processes at a time.
    """
    axes = _reduced(own, fits)
    alone = [axes[name] for name in axes]
    layouts = [ONE, *(_layout(degrees, own.sp) for degrees in alone), _layout({"dp": 2}, own.sp)]
    layouts.append(_together(alone, own, most=most, fits=fits))
    return list(dict.fromkeys(layout for layout in layouts if layout.processes <= most and fits(layout)))


def _reduced(own: ParallelConfig, fits: Callable[[Layout], bool]) -> dict[str, dict[str, int]]:
    """Returns axis -> its smallest degrees, for each axis in use by a config."""
    layouts: dict[str, dict[str, int]] = {}
    for name in ("tp", "cp", "pp", "ep"):
        for degree in _divisors(getattr(own, name)):
            degrees = {name: degree}
            if name == "pp" and own.vpp > 1:
                degrees["vpp"] = 2
            if name == "tp" and own.etp in (1, own.tp):
                degrees["etp"] = 1 if own.etp == 1 else degree
            if fits(_layout(degrees, own.sp)):
                layouts[name] = degrees
                break
    if own.etp is not None and own.etp not in (1, own.tp):
        degree = _divisors(own.etp)[0]
        if fits(_layout({"etp": degree}, own.sp)):
            layouts["etp"] = {"etp": degree}
    return layouts


def _together(
    alone: Sequence[dict[str, int]], own: ParallelConfig, *, most: int, fits: Callable[[Layout], bool]
) -> Layout:
    """Returns the largest combination of the axes, and dp, that fits; of equally many the first."""
    for count in range(len(alone), 0, -1):
        for chosen in itertools.combinations(alone, count):
            degrees = {name: degree for degrees in chosen for name, degree in degrees.items()}
            smallest = _layout(degrees, own.sp)
            replicated = smallest if smallest.dims.dp > 1 else _layout({**degrees, "dp": 2}, own.sp)
            for layout in (replicated, smallest):
                if layout.processes <= most and fits(layout):
                    return layout
    return ONE


def _divisors(degree: int) -> list[int]:
    """Returns the divisors of a degree above 1, the smallest first."""
    return [n for n in range(2, degree + 1) if degree % n == 0]
