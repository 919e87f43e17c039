"""Network interfaces, and which of them gloo and NCCL will take."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence, Set

from mrl.doctor.findings import Finding, fault, note, ok, warning

NAME_S = 3.0
"""How long the host's own name may take to resolve."""

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def section(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    found = interfaces()
    with_address = {name: address for name, address in found.items() if address is not None}
    words = ", ".join(f"{name} {address}" for name, address in with_address.items())
    yield ok("network.interfaces", f"interfaces: {words or 'none has an IPv4 address'}", interfaces=found)
    yield from _loopback()
    yield from _own_name(set(with_address.values()))
    yield from chosen(environment, list(found))
    yield from _infiniband(environment)


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
    """The processes of a run on one machine meet on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            pass
    except OSError as error:
        what = (
            f"processes of this machine cannot meet on 127.0.0.1 ({error.strerror or error}): no run of several starts"
        )
        yield fault("network.loopback", what, "ip link set lo up; look for a firewall, or a sandbox without network")


def _own_name(addresses: Set[str]) -> Iterator[Finding]:
    """gloo and torch elastic look the host's name up where nothing names an interface."""
    name, found = socket.gethostname(), set[str]()

    def look() -> None:
        with contextlib.suppress(OSError):
            found.update(str(info[4][0]) for info in socket.getaddrinfo(name, None))

    asking = threading.Thread(target=look, daemon=True)  # where a name server is gone it waits for half a minute
    asking.start()
    asking.join(NAME_S)
    what = f"this host's name ({name}) "
    if asking.is_alive() or not found:
        what += f"takes more than {NAME_S:g} s to resolve" if asking.is_alive() else "does not resolve"
        yield note("network.name", f"{what}: mrl names the interface to gloo itself; torchrun wants --rdzv-endpoint")
    elif all(address.startswith("127.") or address == "::1" for address in found):
        what += f"is {', '.join(sorted(found))}, which other machines cannot reach"
        yield note("network.name", f"{what}: mrl names the interface to gloo itself; torchrun wants --rdzv-endpoint")
    elif not any(address in addresses or ":" in address for address in found):
        what += f"is {', '.join(sorted(found))}, an address that no interface here has"
        yield warning("network.name", what, "mend /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME")


def chosen(environment: Mapping[str, str], names: Sequence[str]) -> Iterator[Finding]:
    """The interfaces that variables choose. names: of those that are here."""
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


def _infiniband(environment: Mapping[str, str], root: str = "/") -> Iterator[Finding]:
    ports = []
    for port in sorted(pathlib.Path(root, "sys/class/infiniband").glob("*/ports/*")):
        state, rate, layer = (_read(port / name) for name in ("state", "rate", "link_layer"))
        ports.append({"port": f"{port.parts[-3]}:{port.name}", "state": state, "rate": rate, "layer": layer})
    if not ports:
        return
    active = [port for port in ports if "ACTIVE" in port["state"]]
    words = ", ".join(f"{port['port']} {port['rate']} {port['layer']}" for port in active)
    if not active:
        what = f"RDMA devices, of which no port is active ({len(ports)} ports): NCCL goes over TCP"
        yield warning("network.rdma", what, "see `ibstat`; look at cables, and at the subnet manager", ports=ports)
    elif not any(pathlib.Path(root, "dev/infiniband").glob("uverbs*")):
        what = f"RDMA devices ({words}) without /dev/infiniband/uverbs*: NCCL goes over TCP"
        yield warning("network.rdma", what, "start the container with --device=/dev/infiniband", ports=ports)
    elif environment.get("NCCL_IB_DISABLE") == "1":
        what = f"RDMA devices ({words}) that NCCL does not use, as NCCL_IB_DISABLE is 1"
        yield warning("network.rdma", what, "unset NCCL_IB_DISABLE", ports=ports)
    else:
        yield ok("network.rdma", f"RDMA devices: {words}", ports=ports)


def _read(file: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""
