"""Network interfaces, and which of them gloo will take."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, fault, note, ok


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
    """Yields a finding on the interface that GLOO_SOCKET_IFNAME chooses. names: of all interfaces here."""
    here = ", ".join(names) or "none"
    gloo = environment.get("GLOO_SOCKET_IFNAME")
    if gloo and not set(gloo.split(",")) <= set(names):
        what = f"GLOO_SOCKET_IFNAME is {gloo}, and interfaces here are {here}: gloo fails, and every run"
        yield fault("network.gloo", what, "unset GLOO_SOCKET_IFNAME: mrl finds the interface")
    elif gloo:
        yield note("network.gloo", f"gloo uses {gloo}, as GLOO_SOCKET_IFNAME says")
