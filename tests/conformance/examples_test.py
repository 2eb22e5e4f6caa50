"""Examples run as users run them, and print the numbers that pages show."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support import paths
from tf_xshard import examples

_FOLDER = paths.ROOT / "tf_xshard" / "examples"
NAMES = sorted(path.stem for path in _FOLDER.glob("[a-z]*.py"))
# TensorFlow's, of Keras' own fit.
_TENSORFLOWS_OWN = ("All log messages before absl", "GeneratorDatasetOp")


def _run(*command):
    """Returns what a command prints; it must not warn."""
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    lines = re.findall(r".*warning.*|^W\d{4} .*", ended.stderr, re.I | re.M)
    assert not [
        line
        for line in lines
        if not any(own in line for own in _TENSORFLOWS_OWN)
    ]
    return ended.stdout


def _example(name, *arguments):
    return _run(f"tf_xshard.examples.{name}", *arguments)


def _numbers(text):
    return [
        float(one.replace(",", ""))
        for one in re.findall(r"\d[\d,]*\.?\d*(?:e-\d+)?", text)
    ]


def test_every_example_is_named():
    assert len(NAMES) == 13
    for name in NAMES:
        assert f"- `{name}`: " in examples.__doc__
        assert len((_FOLDER / f"{name}.py").read_text().splitlines()) < 80


def test_one_device_numbers(tmp_path):
    """README's first table."""
    picture = tmp_path / "curves.png"
    out = _example("one_device_numbers", "--plot", str(picture))
    plain, wrapped = (_numbers(line)[-1] for line in out.splitlines())
    readme = (paths.ROOT / "README.md").read_text()
    [shown_plain] = re.findall(r"\| plain Keras \| (\S+) \|", readme)
    [shown] = re.findall(r"\| CrossShardOptimizer \| (\S+) \|", readme)
    assert plain == pytest.approx(float(shown_plain), rel=0.1)
    # Rounding differs between machines.
    assert float(shown) / 5 < wrapped < float(shown) * 5
    assert picture.stat().st_size > 10_000


def test_custom_loop():
    out = _example("custom_loop")
    losses = re.findall(r"loss ([\d.]+)", out)
    assert losses[:2] == losses[2:] and float(losses[1]) < float(losses[0])
    assert _numbers(out)[-1] < 1e-6


def test_from_tf_keras():
    first, second, plan, *_ = _example("from_tf_keras").splitlines()
    assert _numbers(first)[-1] < 1e-6 and _numbers(second)[-1] < 1e-6


def test_padded_text():
    plain, wrapped = (
        _numbers(line)[-1] for line in _example("padded_text").splitlines()
    )
    assert plain > 1e-2 and wrapped < 2e-6


def test_sharded_adamw():
    out = _example("sharded_adamw")
    difference, sharded, whole = _numbers(out.replace("AdamW's", ""))
    assert difference < 1e-6
    # The last shard of a variable is padded.
    assert whole / 4 <= sharded < whole / 4 + 8


def test_muon():
    out = _example("muon")
    difference, sharded, whole = _numbers(out.partition("\nupdate")[0])
    assert difference < 1e-5
    assert whole / 4 <= sharded < 1.3 * whole / 4
    [most] = re.findall(r"has ([\d.]+) times the mean", out)
    assert 1 <= float(most) < 1.3


def test_ensemble():
    table, _, last = _example("ensemble").rpartition("model ")
    accuracies = [
        float(line.split()[1]) for line in table.strip().splitlines()[1:]
    ]
    best, alone, ensemble = _numbers(last)
    assert len(accuracies) == 5 and len(set(accuracies[:4])) > 1
    assert alone == pytest.approx(max(accuracies[:4]), abs=1e-3)
    assert ensemble == pytest.approx(accuracies[4], abs=1e-3)
    assert accuracies[int(best)] == max(accuracies[:4])
    assert min(accuracies) > 0.7


@pytest.mark.parametrize(
    "name, fractions",
    [("local_sgd", [1, 0.1]), ("int8_gradients", [1, 0.5, 0.26])],
)
def test_fewer_bytes(name, fractions):
    lines = _example(name).splitlines()
    found = [
        re.fullmatch(r".*: accuracy ([\d.]+), ([\d.]+) MB sent", line)
        for line in lines
    ]
    accuracies, sent = np.float64([one.groups() for one in found]).T
    assert min(accuracies) > 0.85
    for one, fraction in zip(sent, fractions, strict=True):
        assert one == pytest.approx(sent[0] * fraction, rel=0.05)


@pytest.mark.parametrize("name", ["many_workers", "from_horovod"])
def test_two_workers(name):
    """Starts two processes by `launch`."""
    launch = ("tf_xshard", "launch", "--workers", "2", "-m")
    out = _run(*launch, f"tf_xshard.examples.{name}")
    [accuracy] = re.findall(r"2 replicas: accuracy ([\d.]+)", out)
    assert float(accuracy) > 0.9


def test_tf1_script():
    shards, accuracy = _numbers(_example("tf1_script"))
    assert shards == 8 and accuracy > 0.9


def test_tpu_without_hardware():
    pytest.importorskip("libtpu", reason="for Linux on x86-64 only")
    out = _example("tpu_without_hardware")
    assert "ensemble" in out
    assert "Compiled for TPU (did not run): v5e:2x2" in out
    assert "groups [[0, 1], [2, 3]]" in out
