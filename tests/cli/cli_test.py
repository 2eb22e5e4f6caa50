"""The commands, as a person runs them, but in this process."""

import re
import types

import numpy as np
import pytest

from tests.support import mutants
from tests.support import processes
from tests.support import replicas
from tests.support import seeds
from tf_xshard import __main__ as cli
from tf_xshard.cli import doctor
from tf_xshard.cli import evidence
from tf_xshard.cli import logical_devices
from tf_xshard.cli.demo import training


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a command in this process: its exit code and output."""
    monkeypatch.setattr(
        logical_devices,
        "use_logical_cpus",  # There are enough.
        lambda count: [f"CPU:{index}" for index in range(count)],
    )
    # The demo and the evidence set TensorFlow's seed; see `seeds`.
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.seed)

    def run_command(text, *arguments):
        code = cli.main([*text.split(), *map(str, arguments)])
        return code, capfd.readouterr().out

    return run_command


DEMO = "demo --epochs 1 --optimizer sgd --optimizer-wrapper"


@pytest.mark.parametrize(
    "options, wrong, equal",
    [
        (
            "cross_shard --replicas 2 --groups 1",
            "a wrong reduction",
            ["CrossShardOptimizer, all", "group 0, on its shards"],
        ),
        pytest.param(
            "cross_shard --replicas 4 --optimizer clipped --shard-update",
            "a wrong reduction",
            ["group 0, on its shards", "group 1, sharded update"],
            marks=replicas.in_full,
        ),
        pytest.param(
            *("tower --replicas 2", "no accumulation"),
            ["TowerOptimizer", "tower_train_step"],
            marks=replicas.in_full,
        ),
        pytest.param(
            *("agn --replicas 2", "never averaged"),
            ["AGN, period 1", "local SGD, period 5"],
            marks=replicas.in_full,
        ),
    ],
    ids=["cross_shard", "sharded", "tower", "agn"],
)
def test_demo(options, wrong, equal, run, tmp_path):
    """One epoch, for which CI has time."""
    plot = tmp_path / "groups.png"
    plots = ("--plot", plot) if "4" in options else ()
    code, output = run(f"{DEMO} {options}", *plots)
    assert code == 0, output[-3000:]
    assert "All promises hold." in output
    rows = output[output.index("max |dw|") :].splitlines()
    for title in equal:
        assert [r for r in rows if r.startswith(title) and "equal" in r], title
    wrong = f"{wrong} (on purpose)"
    assert [r for r in rows if r.startswith(wrong) and "WRONG" in r]
    if plots:
        assert re.search(r"\d+ numbers instead of \d+", output)
        assert plot.stat().st_size > 10_000


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("difference", [0.0, 1e-5, 1.0])
def test_promises_are_the_exit_code(difference, right, capsys):
    trained = types.SimpleNamespace(
        weights=[[np.zeros(2)], [np.array([0.0, difference])]],
        accuracy=lambda replica_id: 1.0,
        moved=lambda replica_id: 1.0,
    )
    made = training.Promises("nothing")
    made.check("a run", trained, [np.zeros(2)], 1e-4, right=right)
    holds = (difference <= 1e-4) == right
    assert made.exit_code() == (0 if holds else 1)
    assert ("FAILED: a run: " in capsys.readouterr().out) == (not holds)


@replicas.in_full
@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_defaults(command):
    """As a user runs it: eight replicas, or four processes."""
    ended = processes.run(
        processes.python("-m", "tf_xshard", command),
        1500,
        tensorflow=5 if command == "doctor" else 1,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    if command == "doctor":
        assert "MultiWorkerMirroredStrategy: 4 processes" in ended.stdout
        assert "FAIL" not in ended.stdout


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=replicas.in_full)]
)
def test_evidence(is_whole, run, tmp_path, monkeypatch):
    """By default without trainings and times of steps."""
    path = tmp_path / "report.md"
    if not is_whole:
        differences = dict.fromkeys("abcd", 1e-7) | {"plain Keras": 1.0}
        monkeypatch.setattr(evidence, "differences", lambda _: differences)
        monkeypatch.setattr(evidence, "_times", lambda *args: "")
    code, _ = run(
        "evidence --replicas 2 --width 8 --megabytes 1 --seconds 0.01 --output",
        path,
    )
    text = path.read_text()
    assert code == 0, text
    assert "MirroredStrategy over 2 logical CPUs" in text.splitlines()[0]
    assert "All numbers are right." in text and "FAIL" not in text
    found = dict(re.findall(r"^\| (.+) \| (\d\.\de[-+]\d\d) \|$", text, re.M))
    assert float(found.pop("plain Keras")) > 1e-3
    assert len(found) == 4 and max(map(float, found.values())) < 1e-5
    ratios = re.findall(r"\| ([\d.]+) \([\d.]+ to [\d.]+\) \|$", text, re.M)
    assert len(ratios) == 1 + 4 * is_whole
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "difference, sums, right",
    [(0.0, True, True), (1e-3, True, False), (0.0, False, False)],
)
def test_evidence_notices_wrong_numbers(difference, sums, right, monkeypatch):
    found = {"plain Keras": 1.0, "CrossShardOptimizer": difference}
    monkeypatch.setattr(evidence, "differences", lambda strategy: found)
    monkeypatch.setattr(doctor, "check_strategy", lambda *args: sums)
    for slow in ("_times", "_sums"):
        monkeypatch.setattr(evidence, slow, lambda *args: "")
    is_right, text = evidence.report(replicas.mirrored(4), 8, [1], 0.01)
    assert is_right == right
    assert ("SOME NUMBERS ARE WRONG" in text) == (not right)


@pytest.mark.parametrize(
    "command, message",
    [
        ("demo --replicas 1", "must be at least 2"),
        ("demo --replicas 6", "divide the batch of 64"),
        ("demo --groups 3", "divide the 8 replicas"),
        ("demo --towers 3", "divide the 8 rows of a replica's batch"),
        ("demo --period 0", "must be at least 1"),
        ("demo --epochs 0", "must be at least 1"),
        ("demo --plot x --optimizer-wrapper agn", "only cross_shard has"),
        ("demo --optimizer nonsense", "invalid choice"),
        ("evidence --width 0", "must be positive"),
        ("evidence --replicas 1", "must be at least 2"),
        ("evidence --split-gpu 0", "needs a GPU and a positive number"),
        ("plan missing.py", "there is no script"),
        ("plan --gigabytes-per-second=fast x.py", "must be a number, or two"),
    ],
)
def test_refusals(command, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_logical_cpus_are_made_before_tensorflow_runs():
    with pytest.raises(RuntimeError, match="before TensorFlow runs"):
        logical_devices.use_logical_cpus(3)


def test_doctor(run, monkeypatch):
    codes = [0, 0, 0, 0]
    monkeypatch.setattr(
        doctor.local_cluster,
        "start",
        lambda *args: [
            types.SimpleNamespace(
                wait=lambda code=code, **_: code, kill=lambda: None
            )
            for code in codes
        ],
    )
    code, output = run("doctor")
    assert code == 0, output[-3000:]
    lines = output.splitlines()
    pairs = doctor.rotated_groups(4)[0]
    assert not [line for line in lines if line.startswith("FAIL")]
    for path in (
        f"tf.function, {pairs}: subgroup collectives",
        f"eager, {pairs}: sum per group in merge_call",
        "MultiWorkerMirroredStrategy: 4 processes",
        "tf_xshard.ScalarLoss",
    ):
        assert [line for line in lines if path in line], path
    codes[2] = 1
    assert not doctor._check_processes(measures=False)


@pytest.mark.parametrize(
    "wrong",
    [
        "groups_ignored",
        "rows_as_columns",
        pytest.param("contiguous", marks=replicas.in_full),
        pytest.param("strided", marks=replicas.in_full),
    ],
)
def test_doctor_finds_a_wrong_sum(wrong, capsys, monkeypatch):
    pairs = doctor.rotated_groups(4)[:1]
    monkeypatch.setattr(doctor, "rotated_groups", lambda number: pairs)
    with mutants.mutant(wrong):
        assert not doctor.check_strategy("broken", replicas.mirrored(4))
    assert "FAIL  broken, tf.function, [[" in capsys.readouterr().out


def test_bandwidth(monkeypatch, capsys):
    """Each operation on each path: its name, its time and what it sends."""
    monkeypatch.setattr(doctor, "MEGABYTES", (1,))
    doctor.measure("here", replicas.mirrored(2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "here, 2 replicas"
    rows = [line.split(maxsplit=5) for line in lines[-6:]]
    assert [row[:3] for row in rows] == [
        ["tf.function", "all-reduce", "1"],
        ["tf.function", "reduce-scatter", "1"],
        ["tf.function", "all-gather", "1"],
        ["eager", "all-reduce", "1"],
        ["eager", "all-reduce", "1"],
        ["eager", "all-gather", "1"],
    ]
    for _, operation, _, milliseconds, speed, path in rows:
        # Two replicas: an all-reduce sends the whole, the others a half.
        sent = 1.0 if operation == "all-reduce" else 0.5
        # Both are rounded to two digits.
        longest, shortest = (
            float(milliseconds) + error for error in (0.0051, -0.0051)
        )
        assert sent / longest - 0.0051 < float(speed)
        assert float(speed) < sent / shortest + 0.0051
        assert path.startswith(("subgroup", "sum per group"))


_COMPILES = """
import sys
import keras, tensorflow as tf, tf_xshard
[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((8,)),
                              keras.layers.Dense(int(sys.argv[1]))])
    try:
        model.compile(tf_xshard.CrossShardOptimizer(keras.optimizers.SGD()))
    except Exception:
        pass
print("it goes on")
"""


def test_plan_of_a_script_in_a_new_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_COMPILES)
    ended = processes.run(
        processes.python("-m", "tf_xshard", "plan")
        + ["--gigabytes-per-second=2,1", str(script), "100"],
        check=True,
    )
    lines = ended.stdout.splitlines()
    assert "it goes on" not in lines
    # 8 * 100 + 100 floats; half of an all-reduce's factor 2 with two replicas.
    assert "bytes_per_step: 3.6 kB" in lines
    assert "seconds_per_step: 0.0018 ms" in lines


@pytest.mark.parametrize(
    "layer, option, match",
    [
        ("", "", "ended without compiling a model"),
        ("Dense(1)])\nmodel.compile('sgd')", "", "plans what the optimizers"),
        (
            "Embedding(9, 2)])\nmodel.compile(tf_xshard.CrossShardOptimizer("
            "keras.optimizers.SGD(), group_assignment=[[0]]), 'mse')",
            "--gigabytes-per-second=-1",
            "gigabytes_per_second must be positive",
        ),
    ],
    ids=["none", "plain", "speed"],
)
def test_plan_says_why_a_model_has_no_plan(
    tmp_path, capsys, layer, option, match
):
    """In a sentence, without a traceback."""
    path = tmp_path / "script.py"
    path.write_text(
        "import keras, tf_xshard\nmodel = keras.Sequential("
        f"[keras.layers.Input((1,)), keras.layers.{layer}\n"
        if layer
        else ""
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *option.split(), str(path)])
    assert ended.value.code == 2
    [said] = re.findall(r"error: (.*)", capsys.readouterr().err)
    assert said.startswith(str(path)) and match in said
    assert re.search(r"\. (In a|Call|Compile|Pass|Use) |, got -1", said)
