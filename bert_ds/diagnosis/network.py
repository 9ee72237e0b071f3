"""Whether the ranks will find each other: the host's name, the meeting point, the interfaces that are named."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence

from bert_ds.cli.launcher import process_place
from bert_ds.diagnosis.finding import Finding, Settings

DEFAULT_PORT = 29500
"""Where torchrun and deepspeed meet unless told otherwise."""
SLOW_S = 2.0
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_meeting_point(_settings: Settings) -> Sequence[Finding]:
    """Rows for the host's name, the port, and interfaces that variables name."""
    return [_host_name(socket.gethostname()), _port(), *_interfaces()]


def _host_name(name: str) -> Finding:
    """A name that resolves slowly, not at all, or to the loopback only is where starts hang."""
    started = time.monotonic()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Finding(check="host name", verdict="problem", found=f"{name} does not resolve ({error.strerror})",
                       repair=f"add a line '<address> {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and "
                       "NCCL_SOCKET_IFNAME to the interface")
    seconds = time.monotonic() - started
    text = f"{name} is {', '.join(addresses)}"
    figures = {"addresses": addresses, "seconds": round(seconds, 3)}
    if seconds > SLOW_S:
        return Finding(check="host name", verdict="warning", found=f"{text}, which took {seconds:.1f} s",
                       repair="add it to /etc/hosts: every rank asks for it", figures=figures)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        if _spans_machines():
            return Finding(check="host name", verdict="problem", figures=figures,
                           found=f"{text}: other machines cannot reach it there",
                           repair="give it its network address in /etc/hosts, or set GLOO_SOCKET_IFNAME and "
                           "NCCL_SOCKET_IFNAME to the interface")
        text += " (reachable from this machine only)"
    return Finding(check="host name", verdict="fine", found=text, figures=figures)


def _spans_machines() -> bool:
    place = process_place(os.environ)
    return place.world_size > place.local_world_size or int(os.environ.get("NUM_NODES", "1") or 1) > 1


def _port() -> Finding:
    """Whether the address where ranks meet resolves and, where it is this machine's, the port is free."""
    host = os.environ.get("MASTER_ADDR", "localhost")
    text = os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if not (text.isdecimal() and 0 < int(text) < 2**16):
        return Finding(check="port", verdict="problem", found=f"MASTER_PORT={text} is no port",
                       repair="set it to a number from 1024 to 65535")
    port = int(text)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Finding(check="port", verdict="problem", found=f"MASTER_ADDR={host} does not resolve "
                       f"({error.strerror}): ranks would wait for it until their limit",
                       repair="set it to a name or an address that every machine knows")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Finding(check="port", verdict="fine", found=f"{host}:{port} is held by torchrun", figures={"port": port})
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return _not_bound(host, port, error)
    return Finding(check="port", verdict="fine", found=f"{host}:{port} is free", figures={"port": port})


def _not_bound(host: str, port: int, error: OSError) -> Finding:
    if error.errno == errno.EADDRNOTAVAIL:
        return Finding(check="port", verdict="not applicable", figures={"port": port},
                       found=f"{host}:{port} is on another machine; start this command there for its port")
    return Finding(check="port", verdict="problem", found=f"{host}:{port} cannot be used ({error.strerror})",
                   repair="choose another with --master_port (deepspeed) or --master-port (torchrun)",
                   figures={"port": port})


def _interfaces() -> Iterator[Finding]:
    there = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        named = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
        # NCCL's list may begin with ^ (all but these) or = (exactly these), and names are prefixes.
        if named and not named[0].startswith("^") and not any(
                interface.startswith(name.removeprefix("=")) for name in named for interface in there):
            yield Finding(check="interface", verdict="problem",
                          found=f"{variable}={os.environ[variable]}, and this machine has {', '.join(there)}",
                          repair=f"set {variable} to one of these, or unset it")
