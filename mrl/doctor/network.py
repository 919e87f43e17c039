"""Network interfaces, and which of them gloo and NCCL will take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import Finding, fault, note, ok, warning

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    found = interfaces()
    words = ", ".join(f"{name} {address}" for name, address in found.items() if address is not None)
    yield ok("network.interfaces", f"interfaces: {words or 'none has an IPv4 address'}", interfaces=found)
    yield from _loopback()
    yield from chosen(environment, list(found))


def interfaces() -> dict[str, str | None]:
    """Returns name -> IPv4 address of each network interface; None where it has none."""
    found: dict[str, str | None] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            found[name] = None
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name[:15].encode())
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return found


def _loopback() -> Iterator[Finding]:
    """Yields a fault if processes cannot meet on 127.0.0.1, as those of a run on one machine do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        what = (
            f"processes of this machine cannot meet on 127.0.0.1 ({error.strerror or error}): no run of several starts"
        )
        yield fault("network.loopback", what, "ip link set lo up; look for a firewall, or a sandbox without network")


def chosen(environment: Mapping[str, str], names: Sequence[str]) -> Iterator[Finding]:
    """Yields findings on the interfaces that variables choose. names: of all interfaces here."""
    here = ", ".join(names) or "none"
    if gloo := environment.get("GLOO_SOCKET_IFNAME"):
        missing = ", ".join(name for name in gloo.split(",") if name not in names)
        if missing:
            what = f"GLOO_SOCKET_IFNAME names {missing}, and interfaces here are {here}: gloo fails, and every run"
            yield fault("network.gloo", what, "unset GLOO_SOCKET_IFNAME: mrl finds the interface")
        else:
            yield note("network.gloo", f"gloo uses {gloo}, as GLOO_SOCKET_IFNAME says")
    if nccl := environment.get("NCCL_SOCKET_IFNAME"):
        if fits := matching(nccl, names):
            yield note("network.nccl", f"NCCL uses {', '.join(fits)}, as NCCL_SOCKET_IFNAME ({nccl}) says")
        else:
            what = f"NCCL_SOCKET_IFNAME is {nccl}, and interfaces here are {here}: NCCL fails between machines"
            yield warning("network.nccl", what, "unset it, or name the interface between the machines")


def matching(wanted: str, names: Sequence[str]) -> list[str]:
    """Returns the interfaces that NCCL_SOCKET_IFNAME allows: prefixes, `=` before exact names, `^` before what is not
    to be taken."""
    excluded, wanted = wanted.startswith("^"), wanted.removeprefix("^")
    exact, wanted = wanted.startswith("="), wanted.removeprefix("=")
    listed = [part for part in wanted.split(",") if part]
    fits = [
        name for name in names if any(name == one.split(":")[0] if exact else name.startswith(one) for one in listed)
    ]
    return [name for name in names if name not in fits] if excluded else fits
