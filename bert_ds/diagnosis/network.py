"""Whether the ranks will find each other: the host's name, the meeting point, the interfaces that are named."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence

from bert_ds.cli.launcher import DEFAULT_PORT, meeting_point, process_place
from bert_ds.diagnosis.finding import Finding, Settings
from bert_ds.errors import ConfigError

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
    if os.environ.get("NUM_NODES", "1") != "1":
        return True
    try:
        place = process_place(os.environ)
    except ConfigError:  # told beside the port
        return False
    return place.world_size > place.local_world_size


def _port() -> Finding:
    """Whether the address where ranks meet resolves and, where it is this machine's, the port is free."""
    try:
        host, chosen = meeting_point(os.environ, process_place(os.environ))
    except ConfigError as error:
        [problem] = error.problems
        return Finding(check="port", verdict="problem", found=f"{problem.setting}={problem.value}: {problem.reason}",
                       repair=problem.repair)
    port = DEFAULT_PORT if chosen is None else chosen
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Finding(check="port", verdict="problem", found=f"{host}, where ranks meet, does not resolve "
                       f"({error.strerror}): ranks would wait for it until their limit",
                       repair="set MASTER_ADDR to a name or an address that every machine knows")
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
