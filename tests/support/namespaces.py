"""Hosts with a network of their own, on this machine: network namespaces."""

import contextlib
import os
import shutil

from tests.support import processes


def address(rank):
    """The address of a host."""
    return f"10.77.0.{rank + 1}"


def inside(name):
    """What precedes a command that runs on a host."""
    return ("ip", "netns", "exec", name)


def _ip(command, check=True):
    processes.run(["ip", *command.split()], 60, check, tensorflow=0)


@contextlib.contextmanager
def made(number):
    """Yields the names of so many hosts, on one bridge."""
    names = [f"tfx{os.getpid() % 10000}n{r}" for r in range(number)]
    bridge = f"tfx{os.getpid() % 10000}b"
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"link set {bridge} up")
        for rank, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {name}v type veth peer name {name}p")
            _ip(f"link set {name}v master {bridge} up")
            _ip(f"link set {name}p netns {name} name eth0")
            _ip(f"-n {name} addr add {address(rank)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            _ip(f"netns del {name}", check=False)
        _ip(f"link del {bridge}", check=False)


def are_allowed():
    """Whether this user may make them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    try:
        with made(1):
            return True
    except AssertionError:
        return False
