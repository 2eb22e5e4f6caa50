"""Tells every process of a job the addresses of all, through rank 0.

Rank 0 listens, and each other process sends it one line of JSON and gets one
back. Nothing that arrives is run or unpickled. A line without the job's token
gets no answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tf_xshard.distribute import engines
from tf_xshard.multi_worker import local_cluster

_MAX_BYTES = 16 << 20
_SECONDS_BETWEEN_TRIES = 0.2
# For one attempt to connect, and for a peer to send its line.
_SECONDS_PER_TRY = 3.0
_GRACE_SECONDS = 3.0
# Programs that have connected and not sent a line yet.
_MAX_UNREAD = 256
# Others wait longer than rank 0, so that it can tell them what was missing.
_MARGIN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Member:
    """Describes a process of a job, as rank 0 tells all processes.

    Attributes:
      address: `host:port`, where TensorFlow will listen.
      host: The name of the machine.
      cores: The numbers of the cores that the process may use.
    """

    address: str
    host: str
    cores: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Hello:
    """Describes a process to rank 0, as a line of JSON."""

    token: str
    rank: int
    size: int
    # The addresses of all processes, if they are known from the start.
    addresses: list[str] | None
    port: int
    host: str
    cores: list[int]


class JobError(RuntimeError):
    """Says that the processes of the job did not find each other."""


def exchange(
    place: engines.Place,
    timeout_seconds: float,
    addresses: Sequence[str] | None = None,
) -> list[Member]:
    """Returns all processes of a job, in the order of their ranks.

    Args:
      place: This process's place, with a size, a leader and a port.
      timeout_seconds: The seconds to wait for the other processes.
      addresses: `host:port` of all processes. By default, each takes a free
        port.

    Raises:
      JobError: In all processes that take part, if a process does not connect
        in time or contradicts another process.
    """
    deadline = time.monotonic() + timeout_seconds
    with socket.socket() as reserved:
        # The port stays bound until all processes have answered, so that two
        # processes of a machine do not choose the same port.
        reserved.bind(("", 0))
        token = f"{place.engine} {place.job}".encode()
        own = _Hello(
            hashlib.sha256(token).hexdigest(),
            place.rank,
            place.size or 1,
            None if addresses is None else list(addresses),
            reserved.getsockname()[1],
            socket.gethostname(),
            sorted(local_cluster.cores()),
        )
        if place.rank == 0:
            answer = _lead(place, own, deadline, timeout_seconds)
        else:
            answer = _follow(place, own, deadline, timeout_seconds)
    if "error" in answer:
        raise JobError(answer["error"])
    return [
        Member(address, host, tuple(cores))
        for address, host, cores in answer["members"]
    ]


def _where(place: engines.Place) -> str:
    return f"{place.leader}:{place.port}"


def _lead(
    place: engines.Place, own: _Hello, deadline: float, timeout_seconds: float
) -> dict[str, Any]:
    """Collects all processes as rank 0, and answers them."""
    try:
        both = socket.has_dualstack_ipv6()
        server = socket.create_server(
            ("", place.port or 0),
            family=socket.AF_INET6 if both else socket.AF_INET,
            dualstack_ipv6=both,
            backlog=1024,
        )
    except OSError as error:
        return _taken(place, own, error)
    peers: dict[int, _Peer] = {}
    waiting: list[socket.socket] = []
    num_strangers = 0
    problem: str | None = None
    with _Door(server) as door:
        while not _are_complete(peers, own.size):
            # Programs that keep connecting must not extend the deadline.
            left = deadline - time.monotonic()
            if left <= 0:
                problem = problem or _missing(
                    place, peers, num_strangers, timeout_seconds
                )
                break
            came = door.next_line(left)
            if came is None:
                continue
            connection, line = came
            hello = _hello_of(line)
            if hello is None or hello.token != own.token:
                num_strangers += 1
                connection.close()
                continue
            waiting.append(connection)
            if found := _contradiction(own, hello, peers):
                # Processes that connect a little later also get the answer.
                problem = problem or found
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            else:
                with contextlib.suppress(OSError):  # It may have left.
                    peers[hello.rank] = _Peer(
                        hello,
                        connection,
                        _plain(connection.getpeername()[0]),
                        _plain(connection.getsockname()[0]),
                    )
        answer: dict[str, Any] = (
            {"error": problem} if problem else {"members": _members(own, peers)}
        )
        for connection in waiting:
            _send(connection, answer | {"token": own.token})
    return answer


class _Door:
    """Reads a line from each program that connects, from all at once.

    A silent program delays no other. It is sent away after _SECONDS_PER_TRY, or
    as the oldest of more than _MAX_UNREAD. A process of the job tries again.
    """

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._open = contextlib.ExitStack()
        # What has come of a line, and until when it may come; oldest first.
        self._unread: dict[socket.socket, tuple[bytearray, float]] = {}

    def __enter__(self) -> _Door:
        self._open.enter_context(self._server)
        self._open.enter_context(self._selector)
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def next_line(self, seconds: float) -> tuple[socket.socket, bytes] | None:
        """Waits for something to happen; returns a line if one is complete.

        What a program has sent that is no line counts as one.
        """
        now = time.monotonic()
        for connection, (line, until) in self._unread.items():
            if until <= now or len(self._unread) > _MAX_UNREAD:
                return self._finished(connection, line)
            seconds = min(seconds, until - now)
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
                continue
            program = key.fileobj
            assert isinstance(program, socket.socket)
            line, _ = self._unread[program]
            try:
                part = program.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                part = b""
            line += part
            if not part or b"\n" in part or len(line) > _MAX_BYTES:
                return self._finished(program, line)
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # The program has left.
            return
        self._open.enter_context(connection)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        until = time.monotonic() + _SECONDS_PER_TRY
        self._unread[connection] = bytearray(), until

    def _finished(
        self, connection: socket.socket, line: bytearray
    ) -> tuple[socket.socket, bytes]:
        del self._unread[connection]
        self._selector.unregister(connection)
        return connection, bytes(line)


@dataclasses.dataclass(frozen=True)
class _Peer:
    """Holds a process that waits for rank 0's answer.

    `address` is the process's address, and `here` is the address at which it
    found rank 0.
    """

    hello: _Hello
    connection: socket.socket
    address: str
    here: str

    def has_left(self) -> bool:
        """Returns True if the process has ended, or no longer waits."""
        try:
            self.connection.setblocking(False)
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _are_complete(peers: dict[int, _Peer], size: int) -> bool:
    """Returns True if all peers wait; drops peers that do not wait."""
    if len(peers) < size - 1:
        return False
    for rank in [rank for rank, peer in peers.items() if peer.has_left()]:
        del peers[rank]
    return len(peers) == size - 1


def _plain(host: str) -> str:
    # A server for both versions of IP sees IPv4 addresses as IPv6.
    return host.removeprefix("::ffff:")


def _contradiction(
    own: _Hello, other: _Hello, peers: Mapping[int, _Peer]
) -> str | None:
    """Says why a process does not fit the processes that connected before."""
    if other.size != own.size:
        return (
            f"rank {other.rank} on {other.host} was started as one of"
            f" {other.size} processes, but rank 0 on {own.host} as one of"
            f" {own.size}. Start all ranks with the same number of processes."
        )
    peer = peers.get(other.rank)
    # The process may have been started again.
    is_twice = peer is not None and not peer.has_left()
    if other.rank == 0 or is_twice:
        first = peer.hello if peer is not None else own
        return (
            f"two processes have rank {other.rank}: on {first.host} and on"
            f" {other.host}. Give each process its own rank."
        )
    if other.addresses != own.addresses:
        return (
            f"rank {other.rank} on {other.host} was given the addresses"
            f" {other.addresses}, but rank 0 on {own.host} was given"
            f" {own.addresses}. Pass the same addresses to all processes."
        )
    return None


def _missing(
    place: engines.Place,
    peers: Mapping[int, _Peer],
    num_strangers: int,
    timeout_seconds: float,
) -> str:
    """Says which ranks did not connect."""
    size = place.size or 1
    here = {rank: one for rank, one in peers.items() if not one.has_left()}
    missing = [rank for rank in range(1, size) if rank not in here]
    came = [
        f"{rank} from {peer.address} ({peer.hello.host})"
        for rank, peer in sorted(here.items())
    ]
    if num_strangers:
        came.append(f"{num_strangers} connections of other programs")
    text = (
        f"ranks {missing} of {size} did not connect to rank 0 ({_where(place)})"
        f" within {timeout_seconds:g} s; came: {', '.join(came) or 'none'}."
        " Start all ranks, and check that they can reach rank 0's address."
    )
    if not _is_here(place.leader or ""):
        text += (
            f" This machine, {socket.gethostname()}, does not have the address"
            f" {place.leader}. Check that it is rank 0's address."
        )
    return text


def _is_here(host: str) -> bool:
    """Returns False if a host's address does not belong to this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0)[0]
        with socket.socket(family) as one:
            one.bind(address)
    except OSError:
        return False
    return True


def _members(
    own: _Hello, peers: Mapping[int, _Peer]
) -> list[tuple[str, str, list[int]]]:
    """Returns the address, host and cores of every rank."""
    in_order = [peers[rank] for rank in sorted(peers)]
    hellos = [own, *(peer.hello for peer in in_order)]
    if own.addresses is not None:
        addresses = own.addresses
    else:
        # Use addresses at which other machines can find the processes.
        # Processes of this machine may connect through the loopback interface,
        # which other machines can't reach.
        others = [one for one in in_order if not _is_loopback(one.address)]
        here = others[0].here if others else "127.0.0.1"
        hosts = [here] + [
            here if _is_loopback(one.address) else one.address
            for one in in_order
        ]
        addresses = [
            f"[{host}]:{hello.port}" if ":" in host else f"{host}:{hello.port}"
            for host, hello in zip(hosts, hellos, strict=True)
        ]
    return [
        (address, hello.host, hello.cores)
        for address, hello in zip(addresses, hellos, strict=True)
    ]


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _taken(place: engines.Place, own: _Hello, error: OSError) -> dict[str, Any]:
    """Answers for a rank 0 that can't listen."""
    # A second process with rank 0 on this machine gets the first one's answer.
    with contextlib.suppress(OSError):
        if answer := _asked(place, own, _MARGIN_SECONDS):
            return answer
    return {
        "error": f"rank 0 can't listen at {_where(place)}: {error.strerror}."
        " If another program has the port, choose another port with"
        " connect(port=...) or MASTER_PORT, the same in all processes."
    }


def _follow(
    place: engines.Place, own: _Hello, deadline: float, timeout_seconds: float
) -> dict[str, Any]:
    """Asks rank 0 until it answers."""
    why, other = "no time", "another program listens there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            if answer := _asked(place, own, left + _MARGIN_SECONDS):
                return answer
            why = other
        except OSError as error:
            # A program that does not answer may have ended meanwhile.
            if why != other:
                why = error.strerror or str(error)
        time.sleep(_SECONDS_BETWEEN_TRIES)
    return {
        "error": f"rank {own.rank} of {own.size} did not reach rank 0 at"
        f" {_where(place)} within {timeout_seconds:g} s: {why}. Start rank 0,"
        " and check that this machine can reach its address."
    }


def _asked(
    place: engines.Place, own: _Hello, seconds: float
) -> dict[str, Any] | None:
    """Returns rank 0's answer, or None from another program."""
    assert place.leader is not None and place.port is not None
    with socket.create_connection(
        (place.leader, place.port), min(seconds, _SECONDS_PER_TRY)
    ) as connection:
        connection.sendall(_line(dataclasses.asdict(own)))
        answer = _receive(connection, seconds)
    return answer if _is_answer(answer, own) else None


def _is_answer(answer: dict[str, Any] | None, own: _Hello) -> bool:
    """Returns False for what rank 0 does not send, such as an echo."""
    if answer is None or answer.get("token") != own.token:
        return False
    members = answer.get("members")
    return isinstance(answer.get("error"), str) or (
        isinstance(members, list)
        and len(members) == own.size
        and all(
            isinstance(one, list) and [*map(type, one)] == [str, str, list]
            for one in members
        )
    )


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    # If the peer has ended meanwhile, TensorFlow will report it as missing.
    with contextlib.suppress(OSError):
        connection.settimeout(_SECONDS_PER_TRY)
        connection.sendall(_line(content))


def _receive(
    connection: socket.socket, seconds: float
) -> dict[str, Any] | None:
    """Reads a line of JSON, or returns None for anything else."""
    deadline = time.monotonic() + seconds
    parts: list[bytes] = []
    while not parts or b"\n" not in parts[-1]:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        parts.append(connection.recv(1 << 16))
        if not parts[-1] or sum(map(len, parts)) > _MAX_BYTES:
            return None
    return _parsed(b"".join(parts))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _hello_of(line: bytes) -> _Hello | None:
    """Reads a process's line, or returns None for another program's."""
    content = _parsed(line)
    names = {field.name for field in dataclasses.fields(_Hello)}
    if content is None or set(content) != names:
        return None
    hello = _Hello(**content)
    return hello if _is_valid(hello) else None


def _is_valid(hello: _Hello) -> bool:
    """Returns False if a field has a type or a value that no process sends."""
    lists = hello.cores, hello.addresses or []
    if not all(isinstance(one, list) for one in lists):
        return False
    texts = hello.token, hello.host, *lists[1]
    numbers = hello.rank, hello.size, hello.port, *hello.cores
    return (
        all(isinstance(one, str) for one in texts)
        # A bool is an int as well.
        and all(type(one) is int for one in numbers)
        and 0 <= hello.rank < hello.size
        and 0 < hello.port < 1 << 16
    )
