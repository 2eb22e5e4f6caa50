"""What engines say in environment variables, and how processes connect."""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest

import tf_xshard
from tests.support import mpiexec
from tests.support import processes as processes_lib
from tf_xshard.distribute import engines
from tf_xshard.multi_worker import connect
from tf_xshard.multi_worker import exchange
from tf_xshard.multi_worker import local_cluster


def _variables(text):
    """Of `NAME=value`, separated by spaces."""
    return dict(one.split("=", 1) for one in text.split())


SLURM = _variables(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=9"
    " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NODELIST=n[07-08,11],m3"
)
TORCHRUN = _variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500")
OPEN_MPI = _variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"
    " OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=prterun-n7-1@1"
)
PMI = _variables("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2")
KUBERNETES = _variables("JOB_COMPLETION_INDEX=1 HOSTNAME=train-1")
SAGEMAKER = _variables('SM_HOSTS=["algo-2","algo-1"] SM_CURRENT_HOST=algo-2')
_TWO_HOSTS = "OMPI_COMM_WORLD_LOCAL_SIZE=2"
# Variables of an engine and others, then engine, rank, size, leader and port
# (None: any).
_ROWS = [
    ({}, "", None),
    ({}, "SLURM_NTASKS=4 SLURM_PROCID=0", None),
    ({}, "RANK=3", None),
    ({}, "RANK= WORLD_SIZE= MASTER_ADDR= MASTER_PORT=", None),
    (SLURM, "", ("Slurm", 2, 4, "n07", None)),
    (
        SLURM,
        "SLURM_STEP_RESV_PORTS=12345-12348",
        ("Slurm", 2, 4, "n07", 12345),
    ),
    (SLURM, "SLURM_STEP_NODELIST=m3", ("Slurm", 2, 4, "m3", None)),
    (
        SLURM,
        "SLURM_STEP_NODELIST=rack[1-2]n[03,4],m",
        ("Slurm", 2, 4, "rack1n03", None),
    ),
    # srun --mpi=pmi2.
    (SLURM, "PMI_RANK=2 PMI_SIZE=4", ("Slurm", 2, 4, "n07", None)),
    (TORCHRUN, "", ("torchrun", 1, 2, "a", 29500)),
    (
        TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE=True",
        ("torchrun", 1, 2, "a", 29501),
    ),
    (
        {},
        "PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=b PET_MASTER_PORT=4000"
        " PET_NPROC_PER_NODE=auto",
        ("torchrun", 1, 2, "b", 4000),
    ),
    ({}, "RANK=0 WORLD_SIZE=2", ("torchrun", 0, 2, None, None)),
    # Kubeflow names the first node otherwise; torchrun inside knows better.
    (
        TORCHRUN,
        "PET_NNODES=1:4 PET_NODE_RANK=0",
        ("torchrun", 1, 2, "a", 29500),
    ),
    (TORCHRUN, "JOB_COMPLETION_INDEX=1", ("torchrun", 1, 2, "a", 29500)),
    (OPEN_MPI, "", ("Open MPI", 3, 4, "127.0.0.1", None)),
    (OPEN_MPI, _TWO_HOSTS, ("Open MPI", 3, 4, None, None)),
    (
        OPEN_MPI,
        f"{_TWO_HOSTS} MASTER_ADDR=c MASTER_PORT=5000",
        ("Open MPI", 3, 4, "c", 5000),
    ),
    # mpiexec starts one daemon per host with srun. The ranks are MPI's.
    ({**SLURM, **OPEN_MPI}, "", ("Open MPI", 3, 4, "127.0.0.1", None)),
    (PMI, "", ("MPI", 0, 2, "127.0.0.1", None)),
    (KUBERNETES, "", ("Kubernetes", 1, None, "train-0.net.ns.svc", 7777)),
    (SAGEMAKER, "", ("SageMaker", 1, 2, "algo-1", 7777)),
]
PLACES = [
    ({**engine, **_variables(others)}, expected)
    for engine, others, expected in _ROWS
]


@pytest.fixture(autouse=True)
def pod_name(monkeypatch):
    def getfqdn(name):
        return f"{name}.net.ns.svc"

    monkeypatch.setattr(socket, "getfqdn", getfqdn)


@pytest.mark.parametrize(
    "variables, expected",
    PLACES,
    ids=[f"{(e or ['none'])[0]}{i}" for i, (_, e) in enumerate(PLACES)],
)
def test_places(variables, expected):
    place = engines.place(variables)
    if expected is None:
        assert place is None
        return
    *others, port = expected
    assert [place.engine, place.rank, place.size, place.leader] == others
    assert port == place.port if port else place.port != 0


@pytest.mark.parametrize(
    "variables, name",
    [
        (SLURM, "SLURM_RESTART_COUNT"),
        (SLURM, "SLURM_STEP_ID"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
        (TORCHRUN, "TORCHELASTIC_RESTART_COUNT"),
        (TORCHRUN, "MASTER_PORT"),
    ],
)
def test_jobs_differ(variables, name):
    other = engines.place({**variables, name: "3"})
    assert engines.place(variables).job != other.job


@pytest.mark.parametrize(
    "variables, message",
    [
        ({**TORCHRUN, "RANK": "first"}, "RANK must be an integer, got 'first'"),
        ({**SLURM, "SLURM_PROCID": "4"}, "rank 4 of 4, but ranks are from 0"),
    ],
)
def test_variables_that_can_not_be(variables, message):
    with pytest.raises(ValueError, match=message):
        engines.place(variables)


# The exchange.


def _place(rank, size, port, job="job"):
    return engines.Place("engine", rank, size, "127.0.0.1", port, job)


@pytest.fixture
def port():
    [port] = local_cluster.free_ports(1)
    return port


def _exchanged(places, timeout=60.0, addresses=None):
    """What each process gets, or the text of its error; and the seconds."""

    def of(place, own):
        try:
            return exchange.exchange(place, timeout, own)
        except exchange.JobError as error:
            return str(error)

    start = time.monotonic()
    given = addresses or [None] * len(places)
    with futures.ThreadPoolExecutor(len(places)) as pool:
        results = list(pool.map(of, places, given))
    return results, time.monotonic() - start


def test_all_get_the_same_addresses(port):
    places = [_place(rank, 4, port) for rank in (3, 0, 2, 1)]
    results, seconds = _exchanged(places)
    assert seconds < 30
    assert all(members == results[0] for members in results)
    addresses = [member.address for member in results[0]]
    assert len(set(addresses)) == 4
    assert all(one.startswith("127.0.0.1:") for one in addresses)
    assert {one.host for one in results[0]} == {socket.gethostname()}


def test_addresses_are_in_the_order_of_ranks(port):
    """Whoever comes first: TensorFlow takes the order for the ranks."""
    with futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(exchange.exchange, _place(0, 4, port), 30.0)
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(_connected(port)) for _ in range(3)]
            for rank, peer in zip((3, 1, 2), peers, strict=True):
                own = {"rank": rank, "size": 4, "port": 4000 + rank}
                own |= {"host": f"host{rank}", "cores": [rank]}
                peer.sendall(json.dumps(_HELLO | own).encode() + b"\n")
            answers = [json.loads(peer.recv(1 << 16)) for peer in peers]
        members = leader.result()
    assert members[1:] == [
        exchange.Member(f"127.0.0.1:{4000 + r}", f"host{r}", (r,))
        for r in (1, 2, 3)
    ]
    told = [[one.address, one.host, [*one.cores]] for one in members]
    assert [answer["members"] for answer in answers] == [told] * 3


@pytest.mark.parametrize(
    "processes, addresses, text",
    [
        pytest.param(
            [(0, 4), (1, 4), (3, 4)],
            None,
            "ranks [2] of 4 did not connect to rank 0 (127.0.0.1:{port})"
            " within 3 s; came: 1 from 127.0.0.1 ({host}), 3 from",
            id="missing",
        ),
        *(
            pytest.param(
                [(0, 4), (1, 4), (2, 4), (twice, 4)],
                None,
                f"two processes have rank {twice}: on {{host}} and on",
                id=f"twice {twice}",
            )
            for twice in (0, 2)
        ),
        pytest.param(
            [(0, 3), (1, 3), (2, 4)],
            None,
            "was started as one of 4 processes, but rank 0",
            id="sizes",
        ),
        pytest.param(
            [(0, 2), (1, 2)],
            [["a:1", "b:1"], ["a:1", "c:1"]],
            "was given the addresses ['a:1', 'c:1']",
            id="addresses",
        ),
    ],
)
def test_all_say_what_is_wrong(processes, addresses, text, port):
    """Soon after the timeout, or at once."""
    results, seconds = _exchanged(
        [_place(*one, port) for one in processes], 3.0, addresses
    )
    assert seconds < 20
    told = text.format(port=port, host=socket.gethostname())
    assert [told in one for one in results] == [True] * len(processes), results


def test_a_leader_that_is_not_there(port):
    [text], seconds = _exchanged([_place(1, 2, port)], 1.0)
    assert 1 <= seconds < 15
    assert (
        f"rank 1 of 2 did not reach rank 0 at 127.0.0.1:{port} within 1 s:"
        " Connection refused"
    ) in text


def test_a_port_that_is_taken(port, monkeypatch):
    monkeypatch.setattr(exchange, "_MARGIN_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", port)):
        [text], seconds = _exchanged([_place(0, 2, port)])
    assert seconds < 30
    assert f"rank 0 can't listen at 127.0.0.1:{port}: Address already" in text


def test_ranks_that_are_swapped(port):
    """Rank 0 runs on another machine than the one that all connect to."""
    place = engines.Place("launch", 0, 2, "192.0.2.1", port, "")
    [text], _ = _exchanged([place], 0.5)
    assert "does not have the address 192.0.2.1. Check that it" in text


def test_strangers_are_not_answered(port):
    """Another job, a program that speaks otherwise, and a silent one."""
    answers = []

    def ask(text):
        # Rank 0 may have ended, if another program could join.
        with contextlib.suppress(OSError, AssertionError):
            with _connected(port) as one:
                one.sendall(text)
                answers.append(one.recv(99))

    texts = [b"GET / HTTP/1.1\r\n\r\n", b'{"rank": 1}\n', b"[" * 99999 + b"\n"]
    texts.append(b"")
    threads = [threading.Thread(target=ask, args=[text]) for text in texts]
    for thread in threads:
        thread.start()
    places = [_place(0, 2, port), _place(1, 2, port, "another job")]
    results, seconds = _exchanged(places, 4.0)
    # Neither the silent one nor those that come again prolong it.
    assert seconds < 30
    for thread in threads:
        thread.join()
    assert re.search(
        r"came: ([4-9]|\d\d) connections of other programs", results[0]
    )
    assert "another program listens there" in results[1]
    assert not any(answers)


@pytest.mark.parametrize("number", [3, exchange._MAX_UNREAD + 20])
def test_silent_programs_delay_nobody(number, port):
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(futures.ThreadPoolExecutor(1))
        leader = pool.submit(exchange.exchange, _place(0, 3, port), 60.0)
        for _ in range(number):
            stack.enter_context(_connected(port))
        start = time.monotonic()
        results, _ = _exchanged([_place(1, 3, port), _place(2, 3, port)])
        # A silent program has 3 s; this is less than for two of them.
        assert time.monotonic() - start < 5
        assert results[0] == results[1] == leader.result()


def _connected(port):
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 9)
        time.sleep(0.05)
    raise AssertionError("rank 0 does not listen")


_HELLO = {
    "token": hashlib.sha256(b"engine job").hexdigest(),
    "rank": 1,
    "size": 2,
    "addresses": None,
    "port": 4000,
    "host": "a",
    "cores": [0],
}


_WRONG = (
    *({"rank": rank} for rank in ("1", True, -1, 2, [1])),
    *({"size": None}, {"addresses": "a:1"}, {"addresses": [1, 2]}),
    *({"port": "4000"}, {"port": 1 << 16}, {"host": None}),
    *({"cores": 3}, {"cores": ["0"]}, {"token": ["0"]}),
)


def test_fields_that_no_process_sends(port):
    """They neither join nor end the job, even with its token."""
    assert exchange._hello_of(json.dumps(_HELLO).encode()) is not None
    with futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(exchange.exchange, _place(0, 2, port), 60.0)
        for wrong in _WRONG:
            with _connected(port) as stranger:
                stranger.sendall(json.dumps(_HELLO | wrong).encode() + b"\n")
                assert stranger.recv(99) == b"", wrong
        results, _ = _exchanged([_place(1, 2, port)])
        assert results == [leader.result()] and len(results[0]) == 2


def test_an_echo_is_no_answer(port):
    """It knows the token, since this process has sent it."""

    def echo(server):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(connection.recv(1 << 16))

    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=echo, args=[server], daemon=True).start()
        [text], _ = _exchanged([_place(1, 2, port)], 1.0)
        server.shutdown(socket.SHUT_RDWR)
    assert "within 1 s: another program listens there" in text


# connect() and `launch --from-env`.

_SHOW = """
import json, os
print(json.dumps([os.environ["TF_CONFIG"],
                  os.environ.get("TF_NUM_INTRAOP_THREADS"),
                  os.environ["MALLOC_TRIM_THRESHOLD_"]]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(_SHOW)
    return str(path)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    for variables, _ in PLACES:
        for name in variables:
            if name != "HOSTNAME":
                monkeypatch.delenv(name, raising=False)


def _from_env(stack, script, variables):
    return stack.enter_context(
        processes_lib.started(
            processes_lib.python(
                *("-m", "tf_xshard", "launch", "--from-env"),
                *("--connect-timeout", "60", script),
            ),
            tensorflow=0,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )


def _of_rank(engine, rank, port):
    """The variables of a job that no other test has."""
    own = {
        "Slurm": f"SLURM_JOB_ID={port} SLURM_PROCID={rank}"
        f" SLURM_STEP_NODELIST=localhost SLURM_STEP_RESV_PORTS={port}-{port}",
        "torchrun": f"RANK={rank} WORLD_SIZE=4 MASTER_ADDR=127.0.0.1"
        f" MASTER_PORT={port}",
        "Open MPI": f"OMPI_COMM_WORLD_RANK={rank} PMIX_NAMESPACE={port}",
    }[engine]
    engines_own = {"Slurm": SLURM, "Open MPI": OPEN_MPI}.get(engine, {})
    return {**engines_own, **_variables(own)}


@pytest.mark.parametrize(
    "engine",
    [
        "torchrun",
        pytest.param("Slurm", marks=pytest.mark.full),
        pytest.param("Open MPI", marks=pytest.mark.full),
    ],
)
def test_four_processes_of_an_engine(engine, script, port):
    """They share this machine's cores."""
    configs = []
    with contextlib.ExitStack() as stack:
        started = [
            _from_env(stack, script, _of_rank(engine, rank, port))
            for rank in range(4)
        ]
        for process in started:
            out, err = process.communicate(timeout=90)
            assert process.returncode == 0, err
            config, threads, trim = json.loads(out)
            assert threads == str(max(1, len(local_cluster.cores()) // 4))
            assert int(trim) > 1 << 30
            configs.append(json.loads(config))
    assert [one["task"]["index"] for one in configs] == [0, 1, 2, 3]
    clusters = [one["cluster"]["worker"] for one in configs]
    assert len(set(clusters[0])) == 4 and clusters == [clusters[0]] * 4


def test_a_process_of_no_engine(script):
    with contextlib.ExitStack() as stack:
        _, err = _from_env(stack, script, {}).communicate(timeout=90)
    assert "this is the only process of its job, so it trains alone" in err
    assert "KeyError: 'TF_CONFIG'" in err


@pytest.mark.parametrize(
    "arguments, variables, message",
    [
        ({"num_workers": 2}, {}, "num_workers=2, but .* no engine"),
        ({"num_workers": 3}, TORCHRUN, "but torchrun started 2 processes"),
        ({}, KUBERNETES, "does not tell a process how many processes"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "where rank 0 is. Set MASTER_"),
        ({"num_workers": 0}, {}, "num_workers must be a positive int"),
        ({"num_workers": 1}, KUBERNETES, "gives this process rank 1"),
        ({"port": 99999}, {}, "port must be from 1 to 65535"),
        ({"timeout_seconds": 0}, {}, "timeout_seconds must be positive"),
    ],
)
def test_connect_refuses(arguments, variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        tf_xshard.connect(**arguments)


@pytest.mark.parametrize(
    "variables",
    [
        {"TF_CONFIG": local_cluster.tf_config(["a:1", "b:2"], 1)},
        # However many the engine started.
        {"TF_XSHARD_ALONE": "1"},
    ],
    ids=["TF_CONFIG", "alone"],
)
def test_connect_leaves_a_process_as_it_is(variables, monkeypatch):
    for name, value in {**TORCHRUN, **variables}.items():
        monkeypatch.setenv(name, value)
    tf_xshard.connect()
    assert os.environ.get("TF_CONFIG") == variables.get("TF_CONFIG")


@pytest.mark.parametrize("rank", [0, 1])
def test_connect_joins_the_engine_s_processes(rank, port, monkeypatch):
    """TF_CONFIG has this process's rank; what the user set is kept."""
    variables = _variables(
        f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
        " TF_NUM_INTRAOP_THREADS=7"
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("TF_CONFIG", "TF_XSHARD_CONNECTED", "TF_XSHARD_RESTART"):
        monkeypatch.setenv(name, "")
    other = engines.place({**variables, "RANK": str(1 - rank)})
    with futures.ThreadPoolExecutor(1) as pool:
        members = pool.submit(exchange.exchange, other, 30.0)
        tf_xshard.connect(timeout_seconds=30.0)
        addresses = [one.address for one in members.result()]
    config = json.loads(os.environ["TF_CONFIG"])
    assert config == {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": rank},
    }
    assert os.environ["TF_NUM_INTRAOP_THREADS"] == "7"
    assert os.environ["TF_XSHARD_CONNECTED"] == str(os.getpid())


def test_a_process_that_was_started_again(port, monkeypatch):
    """Rank 0 drops the one that has left."""
    # One for each process that rank 0 has heard of.
    heard = threading.Semaphore(0)
    contradiction = exchange._contradiction

    def hears(*args):
        heard.release()
        return contradiction(*args)

    monkeypatch.setattr(exchange, "_contradiction", hears)
    with futures.ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(exchange.exchange, _place(0, 3, port), 30.0)]
        with _connected(port) as first:
            own = _HELLO | {"size": 3}
            first.sendall(json.dumps(own).encode() + b"\n")
            assert heard.acquire(timeout=30)
        # The last one comes when rank 0 knows both processes of rank 1.
        for rank in (1, 2):
            place = _place(rank, 3, port)
            ends.append(pool.submit(exchange.exchange, place, 30.0))
            assert heard.acquire(timeout=30)
        assert ends[0].result() == ends[1].result() == ends[2].result()


def test_a_script_between_the_launcher_and_python():
    """The job is that of mpiexec, not of the shell that starts Python."""
    code = (
        "from tf_xshard.distribute import engines;"
        " print(engines.place().job, engines.place().port)"
    )
    # Without TensorFlow, as `launch`.
    code = f"import sys; sys.argv[0] = 'tf-xshard'; {code}"
    command = mpiexec.command(2, "x")[:3]
    script = ["bash", "-c", '"$0" -c "$1"; true', sys.executable, code]
    ended = mpiexec.run_command([*command, *script], tensorflow=0)
    lines = ended.stdout.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1], ended.stderr


def test_arguments_complete_the_place(monkeypatch):
    for name, value in KUBERNETES.items():
        monkeypatch.setenv(name, value)
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
    place = engines.place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})
    found = connect.environment(place, members)
    assert found.get("TF_NUM_INTRAOP_THREADS") == expected
    assert found["TF_XSHARD_RESTART"] == "3"
