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


@contextlib.contextmanager
def made(number):
    """Yields the names of so many hosts, on one bridge."""

    def ip(*arguments, check=True):
        processes.run(["ip", *arguments], 60, check, tensorflow=0)

    names = [f"tfx{os.getpid() % 10000}n{r}" for r in range(number)]
    bridge = f"tfx{os.getpid() % 10000}b"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for rank, name in enumerate(names):
            ip("netns", "add", name)
            ip(
                *("link", "add", f"{name}v", "type", "veth"),
                *("peer", "name"),
                f"{name}p",
            )
            ip("link", "set", f"{name}v", "master", bridge, "up")
            ip("link", "set", f"{name}p", "netns", name, "name", "eth0")
            at = ("-n", name)
            ip(*at, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            ip(*at, "link", "set", "eth0", "up")
            ip(*at, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
        ip("link", "del", bridge, check=False)


def are_allowed():
    """Whether this user may make them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    try:
        with made(1):
            return True
    except AssertionError:
        return False
