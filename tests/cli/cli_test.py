"""The commands, as a person runs them, but in this process."""

import argparse
import dataclasses
import os
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.support import mutants
from tests.support import processes
from tests.support import replicas
from tests.support import seeds
from tf_xshard import __main__ as cli
from tf_xshard.cli import checks
from tf_xshard.cli import demo
from tf_xshard.cli import doctor
from tf_xshard.cli import evidence
from tf_xshard.cli import logical_devices
from tf_xshard.cli import numbers
from tf_xshard.cli.demo import agn
from tf_xshard.cli.demo import digits
from tf_xshard.cli.demo import training


@pytest.fixture
def run(monkeypatch, capfd):
    """Runs a command in this process: its exit code and output."""
    # There are enough.
    cpus = lambda count: [f"CPU:{index}" for index in range(count)]
    monkeypatch.setattr(logical_devices, "use_logical_cpus", cpus)
    # The demo and the evidence set TensorFlow's seed; see `seeds`.
    monkeypatch.setattr("keras.utils.set_random_seed", seeds.seed)

    def run_command(text, *arguments):
        code = cli.main([*text.split(), *map(str, arguments)])
        return code, capfd.readouterr().out

    # The doctor tells its children that they are no workers of a job.
    with mock.patch.dict(os.environ):
        yield run_command


def _few(whole):
    return dataclasses.replace(
        whole, x=whole.x[:256], y=whole.y[:256], steps_per_epoch=4
    )


def test_digits_of_replicas_and_towers():
    """The rows that some replicas of three get, and batches in parts."""
    rows = np.arange(24)
    whole = digits.Digits(rows, rows, rows, rows, 2, batch_size=12)
    some = whole.of_shards([0, 2], 3)
    expected = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23]
    assert some.x.tolist() == some.y.tolist() == expected
    assert some.batch_size == 8 and some.steps_per_epoch == 2
    parts = whole.in_parts(3)
    assert (parts.batch_size, parts.steps_per_epoch) == (4, 6)


def test_demo(run, monkeypatch):
    """One epoch of four batches; a wrong reduction is found."""
    load = digits.load
    monkeypatch.setattr(digits, "load", lambda *args: _few(load(*args)))
    code, output = run(
        "demo --epochs 1 --optimizer sgd --replicas 2 --groups 1"
    )
    assert code == 0, output[-3000:]
    assert "All promises hold." in output
    for row in (
        "CrossShardOptimizer, all.*equal",
        "group 0, on its shards.*equal",
        r"a wrong reduction \(on purpose\).*WRONG",
    ):
        assert re.search(f"^{row}", output, re.M), row


def _trained(weights):
    """Stands for a training that ended with a weight on each replica."""
    model = mock.Mock()
    model.optimizer.iterations = tf.constant(4)
    model.optimizer.exchanges = tf.constant(1)
    weights = [[np.array([float(one)])] for one in weights]
    return numbers.Trained(model, [np.zeros(1)], weights, {})


def _runs(weights):
    """Stands for the demo's trainings: each has the weights of its title."""

    def run(title, *_, **__):
        [found] = [w for t, w in weights.items() if title.startswith(t)]
        return _trained(found)

    options = argparse.Namespace(
        groups=2, towers=4, period=5, epochs=1, plot=None, shard_update=None
    )
    runs = mock.Mock(on_one_device=run, replicated=run, options=options)
    runs.digits = _few(digits.load(1, 0))
    runs.strategy, runs.tolerance = replicas.mirrored(4), numbers.TOLERANCE
    runs.accuracy.return_value = 1.0
    return runs


@pytest.mark.parametrize(
    "difference, right",
    [(0.0, True), (1.0, True), (1e-12, False), (1.0, False)],
)
def test_promises_are_the_exit_code(difference, right, capsys):
    made = training.Promises("nothing", _runs({}))
    made.check("a run", _trained([0.0, difference]), [np.zeros(1)], right=right)
    holds = (difference <= numbers.TOLERANCE) == right
    assert made.exit_code() == (0 if holds else 1)
    assert ("FAILED: a run: " in capsys.readouterr().out) == (not holds)


ZEROS, ONES, OFF = [0] * 4, [1] * 4, [9] * 4
TRAINED = {
    "cross_shard": {
        "One device, the same": ZEROS,
        "Plain Keras": ONES,
        "CrossShardOptimizer over": ZEROS,
        "CrossShardOptimizer in": [1, 2, 1, 2],
        "One device on the shards of group 0": ONES,
        "One device on the shards of group 1": [2],
        "A wrong": ONES,
    },
    "tower": {
        "One device": ZEROS,
        "TowerOptimizer": ZEROS,
        "tower_train_step": ZEROS,
        "Without": ONES,
        "Plain Keras": ONES,
    },
    "agn": {
        "One device": ZEROS,
        "AGNOptimizer with an": ZEROS,
        "AGNOptimizer as": ONES,
        "The same in groups": ZEROS,
        "AGNOptimizer with its": OFF,
    },
}
WRONG = [
    *(("cross_shard", f"CrossShardOptimizer {how}") for how in ("over", "in")),
    *(("tower", title) for title in ("TowerOptimizer", "tower_train_step")),
    *(("agn", f"AGNOptimizer {how}") for how in ("with an", "as")),
]


@pytest.mark.parametrize(
    "wrapper, off", [*((wrapper, None) for wrapper in TRAINED), *WRONG]
)
def test_demo_compares_each_run(wrapper, off, monkeypatch):
    """If one of them is off, the exit code is 1."""
    average = [np.array([1.0])]
    monkeypatch.setattr(agn, "_replicas_one_by_one", lambda *_, **__: average)
    weights = TRAINED[wrapper] | ({off: OFF} if off else {})
    found = demo.WRAPPERS[wrapper](_runs(weights))
    assert found.exit_code() == (1 if off else 0)


@replicas.in_full
@pytest.mark.parametrize(
    "command",
    [
        "demo --shard-update --plot FOLDER/groups.png",
        "demo --optimizer-wrapper tower",
        "demo --optimizer-wrapper agn",
        "doctor",
        "evidence --replicas 2 --width 16 --output FOLDER/report.md",
    ],
)
def test_as_a_user_runs_it(command, tmp_path):
    ended = processes.run(
        processes.python("-m", "tf_xshard")
        + command.replace("FOLDER", str(tmp_path)).split(),
        1500,
        tensorflow=5 if command == "doctor" else 1,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "FAIL" not in ended.stdout
    for path in tmp_path.iterdir():
        assert path.stat().st_size > 1000


def _with_differences(monkeypatch, difference):
    """No training and no times of steps, which take long."""
    found = {"plain Keras": 1.0, "CrossShardOptimizer": difference}
    monkeypatch.setattr(evidence, "differences", lambda strategy: found)
    monkeypatch.setattr(evidence, "_times", lambda *args: "")


def test_evidence(run, tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    _with_differences(monkeypatch, 1e-12)
    code, _ = run(
        "evidence --replicas 2 --megabytes 1 --seconds 0.01 --output", path
    )
    text = path.read_text()
    assert code == 0, text
    assert "MirroredStrategy over 2 logical CPUs" in text.splitlines()[0]
    assert "All numbers are right." in text and "FAIL" not in text
    assert "| CrossShardOptimizer | 1.0e-12 |" in text
    assert re.search(
        r"^\| 1 \| .* \| [\d.]+ \([\d.]+ to [\d.]+\) \|$", text, re.M
    )
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    "difference, sums, right",
    [(0.0, True, True), (1e-3, True, False), (0.0, False, False)],
)
def test_evidence_notices_wrong_numbers(difference, sums, right, monkeypatch):
    _with_differences(monkeypatch, difference)
    monkeypatch.setattr(checks, "of_strategy", lambda _: [(sums, "a sum")])
    monkeypatch.setattr(evidence, "_sums", lambda *args: "")
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

    def start(*args):
        for code in codes:
            process = mock.Mock()
            process.wait.return_value = code
            yield process

    monkeypatch.setattr(
        doctor.local_cluster, "start", lambda *args: [*start(*args)]
    )
    code, output = run("doctor")
    assert code == 0, output[-3000:]
    lines = output.splitlines()
    pairs = checks.rotated_groups(4)[0]
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


def test_doctor_finds_a_wrong_sum(capsys, monkeypatch):
    pairs = checks.rotated_groups(4)[:1]
    monkeypatch.setattr(checks, "rotated_groups", lambda number: pairs)
    with mutants.rows_as_columns():
        assert not doctor.check_strategy("broken", replicas.mirrored(4))
    assert "FAIL  broken, tf.function, [[" in capsys.readouterr().out


def test_bandwidth(monkeypatch, capsys):
    """Each operation on each path: its name, its time and what it sends."""
    monkeypatch.setattr(doctor, "MEGABYTES", (1,))
    doctor.measure("here", replicas.mirrored(2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "here, 2 replicas"
    rows = [line.split(maxsplit=5) for line in lines[-6:]]
    assert [" ".join(row[:2]) for row in rows] == [
        "tf.function all-reduce",
        "tf.function reduce-scatter",
        "tf.function all-gather",
        "eager all-reduce",
        "eager all-reduce",
        "eager all-gather",
    ]
    for _, operation, _, milliseconds, speed, path in rows:
        # Two replicas: an all-reduce sends the whole, the others a half.
        sent = 1.0 if operation == "all-reduce" else 0.5
        # Both are rounded to two digits.
        shortest = float(milliseconds) - 0.0051
        slowest = sent / (shortest + 2 * 0.0051) - 0.0051
        assert slowest < float(speed) < sent / shortest + 0.0051
        assert path.startswith(("subgroup", "sum per group"))


_COMPILES = """
import sys
import keras, tensorflow as tf, tf_xshard
from tf_xshard.cli import logical_devices
cpus = logical_devices.use_logical_cpus(2)
with tf.distribute.MirroredStrategy(cpus).scope():
    model = keras.Sequential([keras.layers.Dense(int(sys.argv[1]))])
    model.build((None, 8))
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


_MODEL = """
import keras, tf_xshard
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
sgd = keras.optimizers.SGD()
"""


@pytest.mark.parametrize(
    "script, option, match",
    [
        ("", "", "ended without compiling a model"),
        (f"{_MODEL}model.compile(sgd)", "", "plans what the optimizers"),
        (
            f"{_MODEL}model.compile(tf_xshard.CrossShardOptimizer(sgd))",
            *("--gigabytes-per-second=-1", "gigabytes_per_second must be pos"),
        ),
    ],
    ids=["none", "plain", "speed"],
)
def test_plan_says_why_a_model_has_no_plan(
    script, option, match, tmp_path, capsys
):
    """In a sentence, without a traceback."""
    path = tmp_path / "script.py"
    path.write_text(script)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *option.split(), str(path)])
    assert ended.value.code == 2
    [said] = re.findall(r"error: (.*)", capsys.readouterr().err)
    assert said.startswith(str(path)) and match in said
    assert re.search(r"\. (In a|Call|Compile|Pass|Use) |, got -1", said)
