"""Network interfaces, and which of them gloo and NCCL will take."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, fault, note, ok, warning


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    yield ok("network.interfaces", f"interfaces: {', '.join(names) or 'none'}", interfaces=names)
    yield from _loopback()
    yield from chosen(environment, names)


def _loopback() -> Iterator[Finding]:
    """Yields a fault if processes cannot meet on 127.0.0.1, as those of a run on one machine do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        what = f"processes cannot meet on 127.0.0.1 ({error.strerror or error}): no run of several starts"
        yield fault("network.loopback", what, "ip link set lo up; look for a firewall, or a sandbox without network")


def chosen(environment: Mapping[str, str], names: Sequence[str]) -> Iterator[Finding]:
    """Yields findings on the interfaces that variables choose. names: of all interfaces here."""
    here = ", ".join(names) or "none"
    gloo, nccl = environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")
    if gloo and not set(gloo.split(",")) <= set(names):
        what = f"GLOO_SOCKET_IFNAME is {gloo}, and interfaces here are {here}: gloo fails, and every run"
        yield fault("network.gloo", what, "unset GLOO_SOCKET_IFNAME: mrl finds the interface")
    elif gloo:
        yield note("network.gloo", f"gloo uses {gloo}, as GLOO_SOCKET_IFNAME says")
    fits = matching(nccl, names) if nccl else []
    if fits:
        yield note("network.nccl", f"NCCL uses {', '.join(fits)}, as NCCL_SOCKET_IFNAME ({nccl}) says")
    elif nccl:
        what = f"NCCL_SOCKET_IFNAME is {nccl}, and interfaces here are {here}: NCCL fails between machines"
        yield warning("network.nccl", what, "unset it, or name the interface between the machines")


def matching(wanted: str, names: Sequence[str]) -> list[str]:
    """Returns the interfaces that NCCL_SOCKET_IFNAME allows: prefixes, `=` before exact names, `^` before what is not
    to be taken."""
    excluded, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    listed = [part.split(":")[0] if exact else part for part in wanted.split(",") if part]
    fits = [name for name in names if (name in listed if exact else name.startswith(tuple(listed)))]
    return [name for name in names if name not in fits] if excluded else fits
