"""The commands, as a person runs them."""

import contextlib
import os
import re
import subprocess
import sys
import types

import keras
import numpy as np
import pytest

from tests.support import mutants
from tests.support import paths
from tests.support import replicas
from tests.support import seeds
from tf_xshard import __main__ as cli
from tf_xshard.cli import doctor
from tf_xshard.cli import evidence
from tf_xshard.cli import logical_devices
from tf_xshard.cli.demo import training


def _run(*arguments, module="tf_xshard", timeout_seconds=500):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        cwd=paths.ROOT,
    )


@pytest.fixture
def demo(monkeypatch, capfd):
    """Runs one epoch in this process: its exit code and output."""
    monkeypatch.setattr(
        logical_devices,
        "use_logical_cpus",  # There are enough.
        lambda count: [f"CPU:{index}" for index in range(count)],
    )
    # Each run of the demo sets TensorFlow's seed; see `seeds`.
    monkeypatch.setattr(keras.utils, "set_random_seed", seeds.seed)

    def run(wrapper, num_replicas=2):
        options = (
            f"--optimizer-wrapper={wrapper}",
            f"--replicas={num_replicas}",
            *("--epochs=1", "--optimizer=sgd"),
        )
        code = cli.main(["demo", *options])
        return code, capfd.readouterr().out

    return run


def test_demo(tmp_path):
    """Fewer replicas and epochs than the default, which CI has no time for."""
    picture = os.path.join(tmp_path, "groups.png")
    run = _run(
        *"demo --replicas 4 --epochs 1 --optimizer clipped".split(),
        *("--shard-update", "--plot", picture),
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert "All promises hold." in run.stdout
    rows = {
        line[:30].strip(): line
        for line in run.stdout.splitlines()
        if "max |dw|" not in line and "e-0" in line
    }
    assert "equal" in rows["CrossShardOptimizer, all"]
    assert "equal" in rows["group 0, on its shards"]
    assert "equal" in rows["group 0, sharded update"]
    assert re.search(r"\d+ numbers instead of \d+", run.stdout)
    assert "WRONG" in rows["a wrong reduction (on purpose)"]
    assert os.path.getsize(picture) > 10_000


@pytest.mark.parametrize(
    "wrapper, wrong, equal",
    [
        ("tower", "no accumulation", ["TowerOptimizer", "tower_train_step"]),
        ("agn", "never averaged", ["AGN, period 1", "local SGD, period 5"]),
    ],
    ids=["tower", "agn"],
)
def test_demo_of_the_other_wrappers(wrapper, wrong, equal, demo):
    code, output = demo(wrapper)
    assert code == 0, output[-3000:]
    assert "All promises hold." in output
    rows = output.splitlines()
    for title in equal:
        assert [r for r in rows if r.startswith(title) and "equal" in r], title
    wrong = f"{wrong} (on purpose)"
    assert [r for r in rows if r.startswith(wrong) and "WRONG" in r]


def test_evidence(tmp_path):
    path = tmp_path / "report.md"
    run = _run(
        *("evidence", "--output", str(path)),
        *("--replicas", "2", "--width", "16", "--megabytes", "1", "2"),
        *("--seconds", "0.1"),
    )
    assert run.returncode == 0, run.stdout[-3000:]
    text = path.read_text()
    assert "MirroredStrategy over 2 logical CPUs" in text.splitlines()[0]
    assert "All numbers are right." in text and "FAIL" not in text
    found = dict(re.findall(r"^\| (.+) \| (\d\.\de[-+]\d\d) \|$", text, re.M))
    assert float(found.pop("plain Keras")) > 1e-3
    assert len(found) == 4 and max(map(float, found.values())) < 1e-5
    ratios = re.findall(r"\| ([\d.]+) \([\d.]+ to [\d.]+\) \|$", text, re.M)
    assert len(ratios) == 4 + 2 and float(ratios[0]) == 1.0
    assert str(tmp_path) not in text


@pytest.mark.parametrize("difference", [0.0, 1e-3])
@pytest.mark.parametrize("is_mutant", [False, True])
def test_evidence_notices_wrong_numbers(difference, is_mutant, monkeypatch):
    found = {"plain Keras": 1.0, "CrossShardOptimizer": difference}
    monkeypatch.setattr(evidence, "differences", lambda strategy: found)
    for slow in ("_times", "_sums"):
        monkeypatch.setattr(evidence, slow, lambda *args: "")
    with contextlib.ExitStack() as stack:
        if is_mutant:
            stack.enter_context(mutants.mutant("groups_ignored"))
        right, text = evidence.report(replicas.mirrored(4), 8, [1], 0.01)
    assert right == (not difference and not is_mutant)
    assert ("SOME NUMBERS ARE WRONG" in text) == (not right)
    assert ("FAIL" in text) == is_mutant


def test_demo_notices_a_wrong_reduction(demo):
    """The exit code depends on the numbers."""
    with mutants.mutant("groups_ignored"):
        code, output = demo("cross_shard", num_replicas=4)
    assert code == 1, output[-3000:]
    assert "FAILED: group 0, on its shards" in output


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


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["cross_shard", "tower", "agn"])
def test_demo_defaults(wrapper):
    run = _run("demo", "--optimizer-wrapper", wrapper, timeout_seconds=1500)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--replicas 1", "must be at least 2"),
        ("--replicas 6", "divide the batch of 64"),
        ("--groups 3", "divide the 8 replicas"),
        ("--towers 3", "divide the 8 rows of a replica's batch"),
        ("--period 0", "must be at least 1"),
        ("--epochs 0", "must be at least 1"),
        ("--plot x.png --optimizer-wrapper agn", "only cross_shard has"),
        ("--optimizer nonsense", "invalid choice"),
    ],
)
def test_demo_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--width 0", "must be positive"),
        ("--replicas 1", "must be at least 2"),
        ("--split-gpu 0", "needs a GPU and a positive number"),
    ],
)
def test_evidence_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["evidence", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_logical_cpus_are_made_before_tensorflow_runs():
    with pytest.raises(RuntimeError, match="before TensorFlow runs"):
        logical_devices.use_logical_cpus(3)


def test_doctor():
    run = _run("doctor")
    assert run.returncode == 0, run.stdout[-3000:]
    lines = run.stdout.splitlines()
    pairs = doctor.rotated_groups(4)[0]
    assert not [line for line in lines if line.startswith("FAIL")]
    for path in (
        f"tf.function, {pairs}: subgroup collectives",
        f"eager, {pairs}: sum per group in merge_call",
        f"eager, {pairs}: one-hot stack",
        "MultiWorkerMirroredStrategy: 4 processes",
        "tf_xshard.ScalarLoss",
    ):
        assert [line for line in lines if path in line], path


def test_the_doctor_passes_what_is_right(capsys):
    assert doctor.check_strategy("whole", replicas.mirrored(4))
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", ["groups_ignored", "contiguous", "strided", "rows_as_columns"]
)
def test_doctor_finds_a_wrong_sum(wrong, capsys):
    with mutants.mutant(wrong):
        assert not doctor.check_strategy("broken", replicas.mirrored(4))
    assert "FAIL  broken, tf.function, [[" in capsys.readouterr().out


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


def test_plan_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_COMPILES)
    run = _run("plan", "--gigabytes-per-second=2,1", str(script), "100")
    assert run.returncode == 0, run.stdout
    assert "it goes on" not in run.stdout
    lines = run.stdout.splitlines()
    # 8 * 100 + 100 floats; half of an all-reduce's factor 2 with two replicas.
    assert "bytes_per_step: 3.6 kB" in lines
    assert "seconds_per_step: 0.0018 ms" in lines


@pytest.mark.parametrize(
    "script, arguments, match",
    [
        ("", [], "ended without compiling a model"),
        (None, [], "there is no script"),
        ("", ["--gigabytes-per-second=fast"], "must be a number, or two"),
    ],
)
def test_plan_refuses(tmp_path, capsys, script, arguments, match):
    path = tmp_path / "script.py"
    if script is not None:
        path.write_text(script)
    with pytest.raises(SystemExit):
        cli.main(["plan", *arguments, str(path)])
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "layer, arguments, match",
    [
        (
            'Dense(1)])\nmodel.compile("sgd")',
            [],
            "plans what the optimizers of tf_xshard communicate",
        ),
        (
            "Embedding(9, 2)])\nmodel.compile(tf_xshard.CrossShardOptimizer("
            'keras.optimizers.SGD(), group_assignment=[[0]]), "mse")',
            ["--gigabytes-per-second=-1"],
            "gigabytes_per_second must be positive",
        ),
    ],
)
def test_plan_says_why_a_model_has_no_plan(
    tmp_path, capsys, layer, arguments, match
):
    """In a sentence, without a traceback."""
    path = tmp_path / "script.py"
    path.write_text(
        "import keras, tf_xshard\nmodel = keras.Sequential("
        f"[keras.layers.Input((1,)), keras.layers.{layer}\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments, str(path)])
    assert ended.value.code == 2
    [said] = re.findall(r"error: (.*)", capsys.readouterr().err)
    assert said.startswith(f"{path}: ") and match in said
    assert re.search(r"\. (Call|Compile|Pass|Use) |, got -1", said)


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
