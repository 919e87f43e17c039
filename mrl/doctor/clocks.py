"""Clocks, and the encoding of text."""

from __future__ import annotations

import locale
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

import mrl
from mrl.doctor.ask import program
from mrl.doctor.findings import Finding, note, ok, warning

DRIFT = 0.05
"""Share of a moment by which two clocks may differ."""
FILES_DRIFT_S, OFFSET_S, DAY_S = 2.0, 1.0, 86_400.0
"""Seconds by which a file server's clock may be off, and this one's."""
LIMIT_S = 5.0

MOMENT_S, TRIES = 0.05, 5


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield from _ticking()
    yield from _files()
    yield synchronised()
    yield _text(environment)


def _ticking() -> Iterator[Finding]:
    """The two clocks of this machine against each other, and against the files of mrl."""
    for _ in range(TRIES):  # this process may have been interrupted between two readings
        before, wall = time.monotonic(), time.time()
        time.sleep(MOMENT_S)
        passed, of_day = time.monotonic() - before, time.time() - wall
        if passed >= MOMENT_S * (1 - DRIFT) and abs(passed - of_day) <= DRIFT * passed:
            break
    else:
        what = f"clocks disagree: in {passed:.3f} s the time of day moved by {of_day:.3f} s; measured times are wrong"
        fix = "see whether something sets the clock (chronyd, ntpd, a virtual machine's host)"
        yield warning("clock.ticks", what, fix, passed=passed, of_day=of_day)
    if time.time() < pathlib.Path(mrl.__file__).stat().st_mtime - DAY_S:
        day = time.strftime("%Y-%m-%d", time.gmtime())
        what = f"it is {day} here, before mrl's files were written: certificates and logins do not hold"
        yield warning("clock.day", what, "set the clock")


def _files() -> Iterator[Finding]:
    """The clock that files in the current folder get their times from, of a file server mostly."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".mrl-", dir=".") as file:
            file.write(b"x")
            file.flush()
            off = os.stat(file.name).st_mtime - time.time()
    except OSError:
        return  # disks.py says that nothing can be written
    if abs(off) > FILES_DRIFT_S:
        side = "ahead of" if off > 0 else "behind"
        what = f"files in the current folder are dated {abs(off):.0f} s {side} this machine's clock"
        yield warning("clock.files", what, "synchronise this clock and the file server's (chrony)", off=off)


def synchronised() -> Finding:
    """Asks chrony, else systemd; a container has neither mostly."""
    fix = "start chronyd or systemd-timesyncd, and see `chronyc sources` or `timedatectl`"
    apart = "logs of several machines cannot be compared, and logins may fail"
    tracking = program("chronyc", "-n", "tracking", limit_s=LIMIT_S)
    if tracking is not None and tracking.ok:
        offset = re.search(r"System time\s*:\s*([\d.]+) seconds", tracking.out)
        seconds = float(offset[1]) if offset else 0.0
        if "Not synchronised" in tracking.out:
            return warning("clock", f"the clock is not synchronised (chrony): {apart}", fix)
        if seconds > OFFSET_S:
            return warning("clock", f"the clock is {seconds:.1f} s off (chrony): {apart}", fix, offset=seconds)
        return ok("clock", f"the clock is synchronised (chrony: {seconds * 1e3:.3f} ms off)", offset=seconds)
    shown = program("timedatectl", "show", "--property=NTPSynchronized", "--value", limit_s=LIMIT_S)
    if shown is not None and shown.ok and shown.out.strip() == "yes":
        return ok("clock", "the clock is synchronised (timedatectl)")
    if shown is not None and shown.ok and shown.out.strip() == "no":
        return warning("clock", f"the clock is not synchronised (timedatectl): {apart}", fix)
    return note("clock", "whether the clock is synchronised cannot be seen: neither chronyc nor timedatectl answers")


def _text(environment: Mapping[str, str]) -> Finding:
    names = {"files": sys.getfilesystemencoding(), "text": locale.getpreferredencoding(False)}
    wrong = {of: name for of, name in names.items() if name.lower().replace("-", "") != "utf8"}
    if not wrong:
        return ok("text", "text is UTF-8", **names)
    found = ", ".join(f"{of}: {name}" for of, name in wrong.items())
    variable = next(
        (f"{n}={environment[n]}" for n in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(n)), "no locale"
    )
    what = f"text is not UTF-8 ({found}; {variable}): code of yours that opens files without an encoding breaks"
    return warning("text", what, "export LC_ALL=C.UTF-8, or PYTHONUTF8=1", **names)
