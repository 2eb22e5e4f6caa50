"""What engines say in environment variables, and how processes connect."""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from concurrent import futures

import pytest

import tf_xshard
from tests.support import processes
from tf_xshard.distribute import engines
from tf_xshard.multi_worker import connect
from tf_xshard.multi_worker import exchange
from tf_xshard.multi_worker import local_cluster

SLURM = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=9"
    " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[07-08,11],m3"
)
TORCHRUN = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500"
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"
    " OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n7-1@1"
)
PMI = "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2"
_KUBEFLOW = (
    "PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=b PET_MASTER_PORT=4000"
    " PET_NPROC_PER_NODE=auto"
)
_KUBERNETES = "JOB_COMPLETION_INDEX=1 HOSTNAME=train-1"
_SAGEMAKER = 'SM_HOSTS=["algo-2","algo-1"] SM_CURRENT_HOST=algo-2'
_TWO_HOSTS = f"{OPEN_MPI} OMPI_COMM_WORLD_LOCAL_SIZE=2"
# Variables, and the engine, the rank, the size, the leader and the port that
# they tell; *: any port.
_PLACES = [
    ("", None),
    # A batch script runs once, whatever the job's size.
    ("SLURM_NTASKS=4 SLURM_PROCID=0", None),
    ("RANK=3", None),
    ("RANK= WORLD_SIZE= MASTER_ADDR= MASTER_PORT=", None),
    (SLURM, "Slurm 2 4 n07 *"),
    (f"{SLURM} SLURM_STEP_RESV_PORTS=12345-12348", "Slurm 2 4 n07 12345"),
    (f"{SLURM} SLURM_STEP_NODELIST=m3", "Slurm 2 4 m3 *"),
    (f"{SLURM} SLURM_STEP_NODELIST=r[1-2]n[03,4],m", "Slurm 2 4 r1n03 *"),
    # srun --mpi=pmi2.
    (f"{SLURM} PMI_RANK=2 PMI_SIZE=4", "Slurm 2 4 n07 *"),
    (TORCHRUN, "torchrun 1 2 a 29500"),
    (f"{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True", "torchrun 1 2 a 29501"),
    (_KUBEFLOW, "torchrun 1 2 b 4000"),
    ("RANK=0 WORLD_SIZE=2", "torchrun 0 2 None None"),
    # Kubeflow names the first node otherwise; torchrun inside knows better.
    (f"{TORCHRUN} PET_NNODES=1:4 PET_NODE_RANK=0", "torchrun 1 2 a 29500"),
    (f"{TORCHRUN} JOB_COMPLETION_INDEX=1", "torchrun 1 2 a 29500"),
    (OPEN_MPI, "Open MPI 3 4 127.0.0.1 *"),
    (_TWO_HOSTS, "Open MPI 3 4 None *"),
    (f"{_TWO_HOSTS} MASTER_ADDR=c MASTER_PORT=5000", "Open MPI 3 4 c 5000"),
    # mpiexec starts one daemon per host with srun. The ranks are MPI's.
    (f"{SLURM} {OPEN_MPI}", "Open MPI 3 4 127.0.0.1 *"),
    (PMI, "MPI 0 2 127.0.0.1 *"),
    (_KUBERNETES, "Kubernetes 1 None train-0.net.ns.svc 7777"),
    (_SAGEMAKER, "SageMaker 1 2 algo-1 7777"),
]


def variables(text):
    """Of `NAME=value`, separated by spaces; the last of a name counts."""
    return dict(one.split("=", 1) for one in text.split())


def set_variables(monkeypatch, text):
    for name, value in variables(text).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    """No engine has started this process, on a machine of Kubernetes."""
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.net.ns.svc")
    for text, _ in _PLACES:
        for name in variables(text).keys() - {"HOSTNAME"}:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "text, expected",
    _PLACES,
    ids=[f"{str(e).split()[0]}{i}" for i, (_, e) in enumerate(_PLACES)],
)
def test_places(text, expected):
    place = engines.place(variables(text))
    if place is None:
        assert expected is None
        return
    found = [place.engine, place.rank, place.size, place.leader, place.port]
    *others, port = expected.split(" ")
    assert " ".join(map(str, found[:-1])) == " ".join(others)
    assert place.port if port == "*" else str(place.port) == port


_OF_JOBS = {
    "SLURM_RESTART_COUNT": SLURM,
    "SLURM_STEP_ID": SLURM,
    "PMIX_NAMESPACE": OPEN_MPI,
    "TORCHELASTIC_RESTART_COUNT": TORCHRUN,
    "MASTER_PORT": TORCHRUN,
}


@pytest.mark.parametrize("name", _OF_JOBS)
def test_jobs_differ(name):
    jobs = {
        engines.place(variables(f"{_OF_JOBS[name]} {own}")).job
        for own in ("", f"{name}=3")
    }
    assert len(jobs) == 2


# The exchange.


@pytest.fixture
def port():
    [port] = local_cluster.free_ports(1)
    return port


@pytest.fixture
def join(port):
    """A function that lets a process join the exchange, and does not wait."""
    with futures.ThreadPoolExecutor(8) as pool:

        def join(rank, size, seconds=60.0, addresses=None, **others):
            named = {"leader": "127.0.0.1", "job": "job", **others}
            place = engines.Place("engine", rank, size, port=port, **named)
            return pool.submit(exchange.exchange, place, seconds, addresses)

        yield join


def _error(process):
    with pytest.raises(exchange.JobError) as info:
        process.result()
    return str(info.value)


def _hello(**fields):
    """What a process says to rank 0."""
    token = hashlib.sha256(b"engine job").hexdigest()
    own = {"token": token, "rank": 1, "size": 2, "addresses": None}
    own |= {"port": 4000, "host": "a", "cores": [0], **fields}
    return json.dumps(own).encode() + b"\n"


def _connected(port, text=b""):
    """A connection to rank 0, which has got a text."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            one = socket.create_connection(("127.0.0.1", port), 9)
            one.sendall(text)
            return one
        time.sleep(0.05)
    raise AssertionError("rank 0 does not listen")


def test_addresses_are_in_the_order_of_ranks(port, join):
    """Whoever comes first: TensorFlow takes the order for the ranks."""
    leader = join(0, 4)
    with contextlib.ExitStack() as stack:
        peers = []
        for rank in (3, 1, 2):
            own = {"port": 4000 + rank, "host": f"host{rank}", "cores": [rank]}
            hello = _hello(rank=rank, size=4, **own)
            peers.append(stack.enter_context(_connected(port, hello)))
        answers = [json.loads(peer.recv(1 << 16)) for peer in peers]
    members = leader.result()
    assert members[1:] == [
        exchange.Member(f"127.0.0.1:{4000 + r}", f"host{r}", (r,))
        for r in (1, 2, 3)
    ]
    told = [[one.address, one.host, [*one.cores]] for one in members]
    assert [answer["members"] for answer in answers] == [told] * 3


@pytest.mark.parametrize(
    "processes, text",
    [
        pytest.param(
            [(0, 4), (1, 4), (3, 4)],
            "ranks [2] of 4 did not connect to rank 0 (127.0.0.1:{port})"
            " within 3 s; came: 1 from 127.0.0.1 ({host}), 3 from",
            id="missing",
        ),
        *(
            pytest.param(
                [(0, 4), (1, 4), (2, 4), (twice, 4)],
                f"two processes have rank {twice}: on {{host}} and on",
                id=f"twice {twice}",
            )
            for twice in (0, 2)
        ),
        pytest.param(
            [(0, 3), (1, 3), (2, 4)],
            "was started as one of 4 processes, but rank 0",
            id="sizes",
        ),
        pytest.param(
            [(0, 2, 3.0, ["a:1", "b:1"]), (1, 2, 3.0, ["a:1", "c:1"])],
            "was given the addresses ['a:1', 'c:1']",
            id="addresses",
        ),
    ],
)
def test_all_say_what_is_wrong(processes, text, port, join):
    """Soon after the timeout, or at once."""
    start = time.monotonic()
    joined = [join(*(*one, 3.0)[:4]) for one in processes]
    told = text.format(port=port, host=socket.gethostname())
    for process in joined:
        assert told in _error(process)
    assert time.monotonic() - start < 20


def _echo(server):
    """Sends back what has the token: the process itself has told it."""
    server.settimeout(5)
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as connection:
                connection.sendall(connection.recv(1 << 16))


@pytest.mark.parametrize(
    "rank, leader, is_taken, text",
    [
        (1, "127.0.0.1", False, "within 1 s: Connection refused"),
        (1, "127.0.0.1", True, "within 1 s: another program listens there"),
        (0, "127.0.0.1", True, "rank 0 can't listen at 127.0.0.1:{port}: Add"),
        # Rank 0 runs on another machine than the one that all connect to.
        (0, "192.0.2.1", False, "does not have the address 192.0.2.1. Check"),
    ],
    ids=["no leader", "echo", "taken", "elsewhere"],
)
def test_what_a_process_alone_says(rank, leader, is_taken, text, port, join):
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        if is_taken:
            pool = stack.enter_context(futures.ThreadPoolExecutor(1))
            server = socket.create_server(("127.0.0.1", port))
            pool.submit(_echo, stack.enter_context(server))
        said = _error(join(rank, 2, 1.0, leader=leader))
    assert text.format(port=port) in said
    assert time.monotonic() - start < 15


def test_strangers_are_not_answered(port, join):
    """Another job, a program that speaks otherwise, and a silent one."""
    answers = []

    def ask(text):
        # Rank 0 may have ended, if another program could join.
        with contextlib.suppress(OSError, AssertionError):
            with _connected(port, text) as one:
                answers.append(one.recv(99))

    start = time.monotonic()
    leader, other = join(0, 2, 4.0), join(1, 2, 4.0, job="another job")
    texts = [b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"[" * 99999 + b"\n"]
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, [*texts, b""]))
    came = re.search(r"came: (\d+) connections of other", _error(leader))
    assert int(came[1]) >= 4
    assert "another program listens there" in _error(other)
    assert not any(answers)
    # Neither the silent one nor those that come again prolong it.
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [3, exchange._MAX_UNREAD + 20])
def test_silent_programs_delay_nobody(number, port, join):
    leader = join(0, 3)
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(_connected(port))
        start = time.monotonic()
        first, second = join(1, 3), join(2, 3)
        assert first.result() == second.result() == leader.result()
        # A silent program has 3 s; this is less than for two of them.
        assert time.monotonic() - start < 5


_WRONG = (
    *({"rank": rank} for rank in ("1", True, -1, 2, [1])),
    *({"size": None}, {"addresses": "a:1"}, {"addresses": [1, 2]}),
    *({"port": "4000"}, {"port": 1 << 16}, {"host": None}),
    *({"cores": 3}, {"cores": ["0"]}, {"token": ["0"]}),
)


def test_fields_that_no_process_sends():
    """They are another program's text, even with the job's token."""
    assert exchange._hello_of(_hello()) is not None
    for wrong in _WRONG:
        assert exchange._hello_of(_hello(**wrong)) is None, wrong


def test_a_process_that_was_started_again(port, join, monkeypatch):
    """Rank 0 drops the one that has left."""
    # One for each process that rank 0 has heard of.
    heard = threading.Semaphore(0)
    contradiction = exchange._contradiction

    def hears(*args):
        heard.release()
        return contradiction(*args)

    monkeypatch.setattr(exchange, "_contradiction", hears)
    joined = [join(0, 3)]
    with _connected(port, _hello(size=3)):
        assert heard.acquire(timeout=30)
    # The last one comes when rank 0 knows both processes of rank 1.
    for rank in (1, 2):
        joined.append(join(rank, 3))
        assert heard.acquire(timeout=30)
    leader, first, second = (one.result() for one in joined)
    assert leader == first == second


# connect() and `launch --from-env`.

_SHOW = """
import json, os
print(json.dumps([os.environ["TF_CONFIG"],
                  os.environ.get("TF_NUM_INTRAOP_THREADS"),
                  os.environ["MALLOC_TRIM_THRESHOLD_"]]))
"""


def _from_env(folder, *texts):
    """Returns each process's output and errors, with some variables."""
    script = folder / "script.py"
    script.write_text(_SHOW)
    command = ("-m", "tf_xshard", "launch", "--from-env", "--connect-timeout")
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                processes.started(
                    processes.python(*command, "60", str(script)),
                    tensorflow=0,
                    env={**os.environ, **variables(text)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            for text in texts
        ]
        return [one.communicate(timeout=90) for one in started]


def test_four_processes_of_an_engine(tmp_path, port):
    """They share this machine's cores."""
    job = f"WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    configs = []
    for out, err in _from_env(tmp_path, *(f"{job} RANK={r}" for r in range(4))):
        assert out, err
        config, threads, trim = json.loads(out)
        assert threads == str(max(1, len(local_cluster.cores()) // 4))
        assert int(trim) > 1 << 30
        configs.append(json.loads(config))
    assert [one["task"]["index"] for one in configs] == [0, 1, 2, 3]
    clusters = [one["cluster"]["worker"] for one in configs]
    assert len(set(clusters[0])) == 4 and clusters == [clusters[0]] * 4


def test_a_process_of_no_engine(tmp_path):
    [(_, err)] = _from_env(tmp_path, "")
    assert "this is the only process of its job, so it trains alone" in err
    assert "KeyError: 'TF_CONFIG'" in err


@pytest.mark.parametrize(
    "arguments, text, message",
    [
        ({}, f"{TORCHRUN} RANK=first", "must be an integer, got 'first'"),
        ({}, f"{SLURM} SLURM_PROCID=4", "rank 4 of 4, but ranks are from 0"),
        ({"num_workers": 2}, "", "num_workers=2, but .* no engine"),
        ({"num_workers": 3}, TORCHRUN, "but torchrun started 2 processes"),
        ({}, _KUBERNETES, "does not tell a process how many processes"),
        ({}, "RANK=0 WORLD_SIZE=2", "where rank 0 is. Set MASTER_"),
        ({"num_workers": 0}, "", "num_workers must be a positive int"),
        ({"num_workers": 1}, _KUBERNETES, "gives this process rank 1"),
        ({"port": 99999}, "", "port must be from 1 to 65535"),
        ({"timeout_seconds": 0}, "", "timeout_seconds must be positive"),
    ],
)
def test_connect_refuses(arguments, text, message, monkeypatch):
    set_variables(monkeypatch, text)
    with pytest.raises(ValueError, match=message):
        tf_xshard.connect(**arguments)


@pytest.mark.parametrize(
    "name, value",
    [
        ("TF_CONFIG", local_cluster.tf_config(["a:1", "b:2"], 1)),
        # However many the engine started.
        ("TF_XSHARD_ALONE", "1"),
    ],
)
def test_connect_leaves_a_process_as_it_is(name, value, monkeypatch):
    set_variables(monkeypatch, TORCHRUN)
    monkeypatch.setenv(name, value)
    before = os.environ.get("TF_CONFIG")
    tf_xshard.connect()
    assert os.environ.get("TF_CONFIG") == before


@pytest.mark.parametrize("rank", [0, 1])
def test_connect_joins_the_engine_s_processes(rank, port, monkeypatch):
    """TF_CONFIG has this process's rank; what the user set is kept."""
    text = f"WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    set_variables(monkeypatch, f"{text} RANK={rank} TF_NUM_INTRAOP_THREADS=7")
    for name in ("TF_CONFIG", "TF_XSHARD_CONNECTED", "TF_XSHARD_RESTART"):
        monkeypatch.setenv(name, "")
    other = engines.place(variables(f"{text} RANK={1 - rank}"))
    with futures.ThreadPoolExecutor(1) as pool:
        members = pool.submit(exchange.exchange, other, 30.0)
        tf_xshard.connect(timeout_seconds=30.0)
        addresses = [one.address for one in members.result()]
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": rank},
    }
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "7"
    assert os.environ["TF_XSHARD_CONNECTED"] == str(os.getpid())


def test_arguments_complete_the_place(monkeypatch):
    set_variables(monkeypatch, _KUBERNETES)
    place = connect.found_place(num_workers=3, leader="b", port=5)
    assert (place.rank, place.size, place.leader, place.port) == (1, 3, "b", 5)


@pytest.mark.parametrize(
    "hosts, cores, expected",
    [
        ("aaaa", [{0, 1, 2, 3}] * 4, "1"),
        ("aabb", [{0, 1, 2, 3}] * 4, "2"),
        # As Slurm does with --cpu-bind.
        ("aaaa", [{0, 1}, {2, 3}] * 2, "2"),
        ("abcd", [{0, 1, 2, 3}] * 4, None),
    ],
    ids=["one host", "two hosts", "bound", "own hosts"],
)
def test_processes_share_a_machine_s_cores(hosts, cores, expected, monkeypatch):
    monkeypatch.setattr(local_cluster, "cores", lambda: {0, 1, 2, 3})
    # Rank 1's.
    members = [
        exchange.Member("a:1", host, tuple(own))
        for host, own in zip(hosts, cores, strict=True)
    ]
    text = f"{TORCHRUN} TORCHELASTIC_RESTART_COUNT=3"
    found = connect.environment(engines.place(variables(text)), members)
    assert found.get("TF_NUM_INTRAOP_THREADS") == expected
    assert found["TF_XSHARD_RESTART"] == "3"
