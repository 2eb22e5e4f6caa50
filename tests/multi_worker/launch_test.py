"""`python -m tf_xshard launch`: processes, output, signals, exit codes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.support import processes
from tf_xshard import __main__ as cli
from tf_xshard.multi_worker import launch as launcher
from tf_xshard.multi_worker import local_cluster

# Without TensorFlow, which a worker need not import to be started and ended.
# Workers end by themselves after a while, so that a launch that does not end
# them fails its test soon.
_SCRIPT = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
rank = config["task"]["index"]
restart = int(os.environ["TF_XSHARD_RESTART"])
case, *rest = sys.argv[1:]
names = "TF_NUM_INTRAOP_THREADS MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_"
print("started", rank, restart, json.dumps(config["cluster"]), rest)
print("settings", *(os.environ.get(name) for name in names.split()))
print("to stderr", file=sys.stderr)
if case == "fail" and rank == 1:
    raise ValueError("the cause")
print("at", time.time())
if case == "fail_first" and not restart:
    sys.exit(3)
if case == "fails_late" and not restart:
    time.sleep(2)
    print("fails", time.time())
    sys.exit(3)
if case == "killed" and rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if case == "child":
    if not (child := os.fork()):
        time.sleep(99)
    print("child", child)
if case == "told":
    def told(number, frame):
        print("told", number)
        sys.exit(0)
    signal.signal(signal.SIGINT, told)
    signal.signal(signal.SIGUSR1, lambda *_: print("asked"))
    print("ready")
if case == "saves":
    def save(number, frame):
        if rank == 0:
            sys.exit(1)
        time.sleep(3)
        print("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("ready")
if case == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready")
if case == "much":
    for number in range(250):
        print("line", number, "x" * 200, end="\\r" if number % 2 else "\\n")
    print("the end", end="")
    open(f"{sys.argv[0]}.{rank}", "w").close()
    # The failure of worker 1 ends the others.
    while rank and not os.path.exists(f"{sys.argv[0]}.0"):
        time.sleep(0.01)
    sys.exit(7 if rank else 0)
if case == "held":
    if not os.fork():
        os.setsid()
        time.sleep(20)
        os._exit(0)
    time.sleep(2)
    print("the end")
if case == "hangup":
    os.kill(os.getppid(), signal.SIGHUP)
if case not in "end fail_first fails_late child hangup held".split():
    time.sleep(30)
"""
_HOSTS = "--hosts a:1,b:1"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script with spaces; $(false).py"
    path.write_text(_SCRIPT)
    return str(path)


@pytest.fixture
def launch(script, monkeypatch, capfd):
    """A function that launches a case; the last arguments are the script's.

    It returns the exit code, the output, and what came on stderr.
    """
    monkeypatch.setattr(launcher, "GRACE_AFTER_FAILURE_SECONDS", 1.0)

    def run(options, *case):
        program = [script, *case] if case else []
        start = time.monotonic()
        code = cli.main(["launch", *options.split(), *program])
        assert time.monotonic() - start < 20
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def start(script):
    """A function that starts a launch of a case in a process of its own."""
    with contextlib.ExitStack() as stack:

        def started(case, *options):
            command = ("-m", "tf_xshard", "launch", *options, script, case)
            return stack.enter_context(
                processes.started(
                    processes.python(*command),
                    tensorflow=0,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )

        yield started


def _ready(process, text="ready"):
    """Reads until both workers have printed it."""
    seen = 0
    while seen < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        seen += text in line
    return process


def _started(out):
    return [
        (int(rank), int(restart), json.loads(cluster)["worker"], rest)
        for rank, restart, cluster, rest in re.findall(
            r"^\[(\d)\] started \1 (\d) (\{.*?\}) (.*)$", out, re.M
        )
    ]


def test_all_end_well(launch):
    code, out, err = launch("--workers 3", "end", "--flag", "a b")
    assert code == 0
    started = sorted(_started(out))
    addresses = started[0][2]
    assert len(set(addresses)) == 3
    assert started == [
        (rank, 0, addresses, "['--flag', 'a b']") for rank in range(3)
    ]
    for rank in range(3):
        assert f"[{rank}] to stderr" in err


@pytest.mark.parametrize(
    "number, own, threads",
    [
        (2, None, max(1, len(local_cluster.cores()) // 2)),
        (2, "7", 7),
        (1, None, None),
    ],
    ids=["shared", "own", "alone"],
)
def test_workers_share_cores_and_keep_freed_memory(
    number, own, threads, launch, monkeypatch
):
    """Unless the user wants something else, or a worker has all cores."""
    for name in ("TF_NUM_INTRAOP_THREADS", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
        if own:
            monkeypatch.setenv(name, own)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    code, out, _ = launch(f"--workers {number}", "end")
    settings = f"{threads} {32 << 20} {own or 16 << 30}"
    assert code == 0 and f"[0] settings {settings}\n" in out


def test_a_failure_ends_all_and_comes_last(launch):
    code, _, err = launch("--workers 3", "fail")
    assert code == 1
    assert err.splitlines()[-2:] == [
        "[1] ValueError: the cause",
        "tf_xshard launch: worker 1 failed with exit code 1.",
    ]
    told = "launch: worker 1 failed with exit code 1, so workers [0, 2] are"
    assert f"{told} ended\n" in err and "is killed" not in err


def test_restart(launch):
    code, out, err = launch("--workers 2 --max-restarts 2", "fail_first")
    assert code == 0
    started = {(rank, restart) for rank, restart, *_ in _started(out)}
    assert started >= {(0, 1), (1, 1)}
    assert "restart 1 of 2" in err and "restart 2" not in err


def test_restarts_run_out(launch):
    code, out, err = launch("--workers 3 --max-restarts 1", "killed")
    assert code == 128 + signal.SIGKILL
    assert err.count("worker 2 was ended by SIGKILL.\n") == 2
    assert max(restart for _, restart, *_ in _started(out)) == 1


def test_children_end_with_their_worker(launch):
    code, out, _ = launch("--workers 1", "child")
    assert code == 0
    [pid] = re.findall(r"child (\d+)", out)
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split(") ")[1][0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


@pytest.fixture
def ended(start):
    """A function: outputs, errors and exit codes of hosts with these ranks."""

    def run(hosts, cases, *options):
        address = "--hosts", ",".join(hosts), "--rank"
        running = [
            start(case, *address, str(rank), *options)
            for rank, case in cases.items()
        ]
        return [(*p.communicate(timeout=60), p.returncode) for p in running]

    return run


def test_hosts_restart_together(ended):
    """A host's new worker starts after the other host's old one has ended."""
    hosts = local_cluster.local_addresses(2)
    cases = {0: "fail_first", 1: "fails_late"}
    first, second = ended(hosts, cases, "--max-restarts", "1")
    for rank, (out, err, code) in enumerate((first, second)):
        assert code == 0, err
        started = [one[:3] for one in _started(out)]
        assert started == [(rank, restart, hosts) for restart in (0, 1)]
    [late] = re.findall(r"fails (\S+)", second[0])
    again = re.findall(r"at (\S+)", first[0])[-1]
    assert float(again) > float(late)


def test_a_host_that_does_not_start(ended):
    """An error on all others in time, and no restart."""
    hosts = local_cluster.local_addresses(2)
    options = "--connect-timeout", "1", "--max-restarts", "1"
    [(out, err, code)] = ended(hosts, {0: "end"}, *options)
    assert code == 1 and not _started(out)
    text = f"ranks [1] of 2 did not connect to rank 0 ({hosts[0]})"
    assert err.count(text) == 1


@pytest.fixture
def sigint():
    """Not ignored, as it is in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_signals_are_passed_on(start):
    process = _ready(start("told", "--workers", "2"))
    # One that asks for something does not end the job.
    process.send_signal(signal.SIGUSR1)
    _ready(process, "asked")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    for rank in (0, 1):
        assert f"[{rank}] told {int(signal.SIGINT)}" in rest


@pytest.mark.parametrize("grace, saved", [("1", 0), ("30", 1)])
def test_workers_may_save_after_a_signal(start, grace, saved):
    """Also where another one fails of it, at once; then `launch` kills them."""
    process = _ready(start("saves", "--workers", "2", "--grace", grace))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.count("[1] saved") == saved
    said = re.findall(r"^tf_xshard launch: (.*)$", err, re.M)
    assert said[0] == (
        "received SIGTERM and passed it on to workers [0, 1], which will be"
        f" killed if they still run in {grace} s (--grace)"
    )
    killed = "worker 1 is killed, since it still ran 1 s after SIGTERM"
    assert (killed in said) == (not saved)
    assert said[-1] == "worker 0 failed with exit code 1."


def _waiting(start, script):
    """A launch that has written more than a pipe holds; its workers ended."""
    process = start("much", "--workers", "2")
    deadline = time.monotonic() + 30
    while not all(os.path.exists(f"{script}.{r}") for r in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2)
    assert process.poll() is None
    return process


def test_a_slow_reader_gets_all_output(start, script):
    """Progress lines, too, and a last line without an end."""
    process = _waiting(start, script)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    lines = [f"line {number} {'x' * 200}" for number in range(250)]
    for rank in (0, 1):
        own = re.findall(rf"^\[{rank}\] (line \d+ x+|the end)$", out, re.M)
        assert own == [*lines, "the end"]


def test_a_signal_ends_what_waits_for_the_reader(start, script):
    process = _waiting(start, script)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_progress_lines_keep_their_ends(launch):
    code, out, _ = launch("--workers 1", "much")
    assert code == 0 and f"[0] line 1 {'x' * 200}\r[0] line 2 " in out


def test_a_child_that_holds_the_pipe_is_not_waited_for(launch):
    start = time.monotonic()
    code, out, _ = launch("--workers 1", "held")
    assert code == 0 and "[0] the end\n" in out
    assert time.monotonic() - start < 15


@pytest.mark.usefixtures("sigint")
def test_a_second_signal_ends_all_at_once(start):
    process = _ready(start("deaf", "--workers", "2"))
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    assert time.monotonic() - begin < launcher.GRACE_SECONDS / 2


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_nohup(handler, launch):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        code, *_ = launch("--workers 1", "hangup")
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == (0 if handler == signal.SIG_IGN else 128 + signal.SIGHUP)


_IN_A_CLUSTER = {"TF_CONFIG": local_cluster.tf_config(["a:1", "b:1"], 0)}
_OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    "arguments, message, variables",
    [
        ("--workers 0", "must be at least 1", {}),
        ("", "--workers, --hosts or --from-env is required", {}),
        (f"--workers 1 {_HOSTS} --rank 0", "can't be combined with --", {}),
        (f"--from-env {_HOSTS} --rank 0", "not allowed with", {}),
        ("--from-env --max-restarts 1", "the engine restarts", {}),
        ("--workers 1 --connect-timeout 0", "must be positive", {}),
        ("--hosts 127.0.0.2:4,127.0.0.3:4 --rank 0", "its own port", {}),
        ("--workers 2 --rank 1", "--rank needs --hosts", {}),
        ("--hosts a:1,b --rank 0", "'b' is not host:port", {}),
        ("--hosts a:99999 --rank 0", "up to 65535", {}),
        ("--hosts a:1,a:1 --rank 0", "the same address twice", {}),
        (f"{_HOSTS} --rank 2", "a --rank of 0 to 1", {}),
        (_HOSTS, "a --rank of 0 to 1", {}),
        ("--workers 1 --max-restarts -1", "0 or more", {}),
        ("--workers 1 --grace -1", "--grace -1.0: must be 0 or more", {}),
        ("--workers 1 --grace nan", "--grace nan: must be 0 or more", {}),
        ("--workers 1", "'no_such.py' is not a file", {}),
        ("--workers 2", "TF_CONFIG is set already", _IN_A_CLUSTER),
        ("--from-env", "TF_CONFIG is set already", _IN_A_CLUSTER),
        ("--workers 2", "of the 3 processes that torchrun", _OF_TORCHRUN),
        ("--from-env -m", "does not tell where rank 0 is", _OF_TORCHRUN),
    ],
    ids=str,
)
def test_refuses(arguments, message, variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["launch", *arguments.split(), "no_such.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
