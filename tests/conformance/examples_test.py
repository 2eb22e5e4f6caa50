"""Every example prints its numbers: after a short epoch, and as users run it.

By default `main` runs in this process: `fit` trains one epoch of few batches,
and two logical CPUs are all replicas, or all workers. With --full each example
is a program.
"""

import importlib
import re
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.support import fitting
from tests.support import paths
from tests.support import processes
from tests.support import replicas
from tests.support import seeds
from tf_xshard import examples
from tf_xshard import testing
from tf_xshard.compat import v1
from tf_xshard.private import names

_FOLDER = paths.ROOT / "tf_xshard" / "examples"
# These have groups of replicas.
_FOUR_REPLICAS = ("ensemble", "from_tf_keras")
_WORKERS = ("many_workers", "from_horovod")
# Of the epoch: enough for an exchange of models, which are 10 steps apart.
_STEPS = {"local_sgd": 12, "int8_gradients": 22, "tf1_script": 22}
_FEWEST_STEPS = 4
# TensorFlow's, of Keras' own fit.
_TENSORFLOWS_OWN = ("All log messages before absl", "GeneratorDatasetOp")


def _is_ensemble(*numbers):
    *accuracies, ensemble, best, alone, shown = numbers
    most = max(accuracies)
    return (
        len(set(accuracies)) > 1
        and accuracies[int(best)] == most
        and alone == pytest.approx(most, abs=1e-3)
        and shown == pytest.approx(ensemble, abs=1e-3)
    )


# What an example prints, and whether its numbers are right; rounding differs
# between machines.
_DIFFERS = "Group {} differs from one device by (.*)\n"
_SENT = "{}: accuracy .*, (.*) MB sent"
_WORKER = (r"(\d) replicas: accuracy .*", lambda size: size == 2)
_EXAMPLES = {
    "one_device_numbers": (
        r"plain Keras differs by .*\nCrossShardOptimizer differs by (.*)",
        lambda wrapped: wrapped < 1e-6,
    ),
    "custom_loop": (
        r"One.*\n.*loss (.*)\n.*loss (.*)\nFour.*\n.*loss (.*)\n.*loss (.*)\n"
        r"The weights differ by (.*)",
        # Two losses of one replica, and of four.
        lambda *n: n[:2] == n[2:4] and n[0] > n[1] and n[4] < 1e-6,
    ),
    "from_tf_keras": (
        _DIFFERS.format(0) + _DIFFERS.format(1) + "(?s:.*)",
        lambda first, second: max(first, second) < 1e-6,
    ),
    "padded_text": (
        r"Keras's loss differs from one device by (.*)\n"
        r"GlobalMean differs from one device by (.*)",
        lambda plain, wrapped: plain > 1e-3 and wrapped < 2e-6,
    ),
    "sharded_adamw": (
        r"The weights differ by (.*)\n"
        r"A replica holds (.*) numbers of AdamW's state instead of (.*)",
        # On two replicas, or on four. The last shard of a variable is padded.
        lambda difference, sharded, whole: (
            difference < 1e-6 and round(whole / sharded, 1) in (2, 4)
        ),
    ),
    "muon": (
        r"The weights differ by (.*)\n"
        r"A replica holds (.*) kB of Muon's state instead of (.*) kB\n"
        r".* has ([\d.]+) times the mean.*",
        lambda difference, sharded, whole, most: (
            difference < 1e-5 and whole / sharded > 1.5 and 1 <= most < 1.3
        ),
    ),
    "ensemble": (
        r"group.*\n" + r"\d +(\S+).*\n" * 4 + r"ensemble +(\S+).*\n"
        r"model (\d) alone: (.*), ensemble: (.*)",
        _is_ensemble,
    ),
    "local_sgd": (
        "\n".join(map(_SENT.format, ("every.*", "local.*"))),
        # Each tenth step, or one of 12.
        lambda every, local: 1 / 13 < local / every < 1 / 9,
    ),
    "int8_gradients": (
        "\n".join(map(_SENT.format, ("float32", "bfloat16", "int8"))),
        lambda whole, half, quarter: (
            [half, quarter] == pytest.approx([whole / 2, whole * 0.26], abs=0.1)
        ),
    ),
    "many_workers": _WORKER,
    "from_horovod": _WORKER,
    "tf1_script": (
        r"8 shards: accuracy (.*)",
        lambda accuracy: accuracy > 0.5,
    ),
    "tpu_without_hardware": (
        r"group.*\n0 +(\S+).*\n1 +(\S+).*\nensemble(?s:.*)",
        lambda first, second: first != second,
    ),
}


def _check(name, printed):
    pattern, check = _EXAMPLES[name]
    found = re.fullmatch(re.sub(" +", " +", pattern), printed.strip())
    assert found, printed
    numbers = [float(one.replace(",", "")) for one in found.groups()]
    assert check(*numbers), printed


def test_every_example_is_named():
    found = {path.stem for path in _FOLDER.glob("[a-z]*.py")}
    assert found == set(_EXAMPLES)
    for name in found:
        assert f"- `{name}`: " in examples.__doc__
        assert len((_FOLDER / f"{name}.py").read_text().splitlines()) < 80


def _one_epoch(real, trained, steps):
    """A `fit` of one short epoch; a later one of the model does nothing."""

    def fit(model, x, y=None, batch_size=None, **options):
        if any(model is one for one in trained):
            return None
        trained.append(model)
        data = x if y is None else fitting.batches(x, y, batch_size)
        options = {**options, "epochs": 1, "shuffle": False}
        return real(model, data.take(steps), **options)

    return fit


def _evaluate(real, trained):
    """Returns what `fit` has measured; a model that was loaded is evaluated."""

    def evaluate(model, *args, **options):
        has_trained = any(model is one for one in trained)
        if not has_trained or "return_dict" in options:
            return real(model, *args, **options)
        measured = model.history.history
        return measured["loss"][-1], measured["accuracy"][-1]

    return evaluate


def _strategies(num_devices):
    """Strategies that leave out devices, or whose workers are logical CPUs."""

    class Mirrored(tf.distribute.MirroredStrategy):
        def __init__(self, devices):
            super().__init__(devices[:num_devices])

    class MultiWorker(tf.distribute.MultiWorkerMirroredStrategy):
        def __init__(self):
            super().__init__()
            self.extended._initialize_local(
                tf.distribute.cluster_resolver.TFConfigClusterResolver(),
                devices=[f"/device:CPU:{i}" for i in range(num_devices)],
            )

    return Mirrored, MultiWorker


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs an example; returns its models and its output."""

    def run_(name, num_devices=2):
        trained = []
        steps = _STEPS.get(name, _FEWEST_STEPS)
        mirrored, multi_worker = _strategies(
            4 if name in _FOUR_REPLICAS else num_devices
        )
        estimator = v1.TPUEstimator
        train, evaluate = estimator.train, estimator.evaluate
        tpu = replicas.mirrored(4)
        instead = {
            (tf.config, "set_logical_device_configuration"): lambda *_: None,
            (tf.distribute, "MirroredStrategy"): mirrored,
            (tf.distribute, "MultiWorkerMirroredStrategy"): multi_worker,
            (testing, "simulated_tpu_strategy"): lambda _: tpu,
            # compile_for_tpu_test.py has its tests.
            (testing, "compile_for_tpu"): mock.create_autospec(
                testing.compile_for_tpu
            ),
            (estimator, "train"): lambda self, input_fn, max_steps: train(
                self, input_fn, max_steps=steps
            ),
            (estimator, "evaluate"): lambda self, input_fn: evaluate(
                self, input_fn, steps=steps
            ),
            (keras.Model, "evaluate"): _evaluate(keras.Model.evaluate, trained),
            (sys, "argv"): [name],
        }
        for library in (keras, tf_keras):
            # Where `multi_worker_fit` replaces it, too.
            owner = names.defining_class(library.Model, "fit")
            fit = _one_epoch(library.Model.fit, trained, steps)
            instead[owner, "fit"] = fit
            instead[library.utils, "set_random_seed"] = seeds.seed
        with monkeypatch.context() as patched:
            for (owner, attribute), value in instead.items():
                patched.setattr(owner, attribute, value)
            importlib.import_module(f"tf_xshard.examples.{name}").main()
        return trained, capsys.readouterr().out

    return run_


@pytest.mark.parametrize("name", _EXAMPLES)
def test_one_epoch(name, run):
    trained, printed = run(name)
    _check(name, printed)
    if name not in _WORKERS:
        return
    [model] = trained
    for weight in model.trainable_variables:
        one, other = replicas.values(model.distribute_strategy, weight)
        np.testing.assert_array_equal(one, other)
    if name == "many_workers":
        [alone], _ = run(name, num_devices=1)
        pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", _EXAMPLES)
def test_as_users_run_it(name, tmp_path):
    """It prints its numbers, which are good ones, and no warning."""
    if name == "tpu_without_hardware":
        pytest.importorskip("libtpu", reason="for Linux on x86-64 only")
    command = [f"tf_xshard.examples.{name}"]
    picture = tmp_path / "curves.png"
    if name == "one_device_numbers":
        command += ["--plot", str(picture)]
    if name in _WORKERS:
        command = ["tf_xshard", "launch", "--workers", "2", "-m", *command]
    ended = processes.run(
        processes.python("-m", *command),
        check=True,
        tensorflow=1 + (name in _WORKERS),
    )
    warnings = re.findall(
        r".*warning.*|^W\d{4} .*", ended.stderr, re.IGNORECASE | re.MULTILINE
    )
    of_others = re.compile("|".join(_TENSORFLOWS_OWN))
    assert not [line for line in warnings if not of_others.search(line)]
    printed = re.sub(r"^.*?(?=\d replicas)", "", ended.stdout)
    _check(name, printed)
    for accuracy in re.findall(
        r"(?:accuracy|^ensemble) +([\d.]+)", printed, re.M
    ):
        assert float(accuracy) > 0.8, printed
    if name == "tpu_without_hardware":
        assert "Compiled for TPU (did not run): v5e:2x2" in printed
        assert "groups [[0, 1], [2, 3]]" in printed
    if name == "one_device_numbers":
        assert picture.stat().st_size > 10_000
        # README's first table; rounding differs between machines.
        shown = r"\| (?:plain Keras|CrossShardOptimizer) \| (\S+) \|"
        shown = re.findall(shown, (paths.ROOT / "README.md").read_text())
        plain, wrapped = map(float, re.findall("differs by (.*)", printed))
        assert plain == pytest.approx(float(shown[0]), rel=0.1)
        assert float(shown[1]) / 5 < wrapped < float(shown[1]) * 5
