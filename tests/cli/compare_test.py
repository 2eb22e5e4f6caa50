"""`compare` tells scripts that train as on one device from others."""

import dataclasses
import re
import subprocess

import keras
import pytest

from tests.support import processes
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import script as script_lib
from tf_xshard.cli.compare import verdict

NUM_REPLICAS = 2
NUM_STEPS = 2
DATA = """\
import keras, numpy as np, sys, tensorflow as tf, tf_xshard
L = keras.layers
strategy = tf.distribute.MirroredStrategy()
N = strategy.num_replicas_in_sync
x = np.random.default_rng(0).normal(size=(37, 3)).astype("float32")
y = x[:, :1] * x[:, 1:2]
def dense():
    return keras.Sequential([L.Input((3,)), L.Dense(4, "gelu"), L.Dense(1)])
def optimizer():
    return keras.optimizers.Adam(1e-2, global_clipnorm=0.1)
"""
FIT = """\
with strategy.scope():
    model = {model}
    model.compile({optimizer}, {loss})
model.fit(x[:{rows}], y[:{rows}], batch_size=16, epochs=3)
"""
LOOP = """\
with strategy.scope():
    model = dense()
    one = {optimizer}
    one.build(model.trainable_variables)
def on_replica(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y)) {divided}
    one.apply(
        tape.gradient(loss, [v.value for v in model.trainable_variables]),
        model.trainable_variables,
    )
@tf.function
def step(batch):
    strategy.run(on_replica, args=batch)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16 * N, drop_remainder=True)
for batch in strategy.experimental_distribute_dataset(data.repeat()):
    step(batch)
"""
WRAPPED = "tf_xshard.CrossShardOptimizer(optimizer())"
BATCH_NORM = "keras.Sequential([L.Input((3,)), L.Dense(4), {}, L.Dense(1)])"


def fit(model="dense()", optimizer=WRAPPED, loss="'mse'", rows=32):
    return FIT.format(model=model, optimizer=optimizer, loss=loss, rows=rows)


def loop(optimizer=WRAPPED, divided="/ 2"):
    return LOOP.format(optimizer=optimizer, divided=divided)


RIGHT = {
    "wrapped": fit(),
    "ragged_global_mean": fit(loss="tf_xshard.GlobalMean('mse')", rows=37),
    "loop": loop(divided="/ strategy.num_replicas_in_sync"),
    "batch_norm": fit(
        BATCH_NORM.format("L.BatchNormalization(synchronized=True)")
    ),
}
# With what helps.
WRONG = {
    "plain": (fit(optimizer="optimizer()"), "wrapper"),
    "undivided": (loop(divided=""), "undivided loss"),
    "ragged": (fit(rows=37), "global mean"),
    "batch_norm": (
        fit(BATCH_NORM.format("L.BatchNormalization()")),
        "batch normalization",
    ),
    "one_number": (
        fit(
            optimizer="keras.optimizers.SGD(0.1)",
            loss="lambda y, p: tf.reduce_mean((y - p) ** 2)",
        ),
        "scalar loss",
    ),
}
DEFAULT = ("wrapped", "loop", "plain", "undivided", "ragged")


def _cases(table):
    return [
        pytest.param(
            name, marks=() if name in DEFAULT else pytest.mark.full, id=name
        )
        for name in table
    ]


@pytest.fixture
def trained(tmp_path):
    """A function that runs a script in this process, in float64."""
    keras.config.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")

    def run(text, num_replicas, **changes):
        path = tmp_path / "train.py"
        path.write_text(DATA + text)
        keras.utils.set_random_seed(0)
        return script_lib.trained(
            dataclasses.replace(
                recording_lib.Settings(
                    str(path),
                    num_replicas=num_replicas,
                    seen_replicas=NUM_REPLICAS,
                    num_steps=NUM_STEPS,
                ),
                **changes,
            )
        )

    yield run
    keras.config.set_floatx("float32")


def _difference(one, many):
    assert one.status == many.status == recording_lib.TRAINED, (one, many)
    assert len(one.steps) == len(many.steps) == NUM_STEPS
    assert verdict.not_comparable(one, many, 2, 1e-7) is None
    found = verdict.differences(one, many)
    assert all(each.moved > 1e-3 for each in found)
    return verdict.worst(found)


@pytest.mark.parametrize("name", _cases(RIGHT))
def test_a_right_script_is_equal(trained, name):
    runs = [trained(RIGHT[name], number) for number in (1, NUM_REPLICAS)]
    assert _difference(*runs) < verdict.TOLERANCE / 1000


@pytest.mark.parametrize("name", _cases(WRONG))
def test_a_wrong_script_is_different_until_it_is_cured(trained, name):
    text, cure = WRONG[name]
    one = trained(text, 1)
    assert _difference(one, trained(text, NUM_REPLICAS)) > 1e-3
    cured = trained(text, NUM_REPLICAS, cures=(cure,))
    assert _difference(one, cured) < verdict.TOLERANCE / 1000


def test_a_learning_rate_times_the_replicas_is_the_same_in_both(trained):
    text = fit(optimizer="keras.optimizers.SGD(1e-2 * N)")
    for number in (1, NUM_REPLICAS):
        step = trained(text, number).steps[-1]
        assert step.states[0].learning_rates == [pytest.approx(2e-2)]


REFUSED = {
    "random": (
        fit(BATCH_NORM.format("L.GaussianNoise(1.0)")),
        "draws random numbers: .*Random",
    ),
    "groups": (
        fit(
            optimizer="tf_xshard.CrossShardOptimizer(optimizer(),"
            " group_assignment=[[0], [1]])"
        ),
        "several groups",
    ),
    "period": (
        fit(optimizer="tf_xshard.AGNOptimizer(keras.optimizers.SGD(1.0))"),
        "communication_period=10",
    ),
    "wire": (
        fit(
            optimizer="tf_xshard.CrossShardOptimizer(optimizer(),"
            " communication=tf_xshard.Communication(dtype='bfloat16'))"
        ),
        "8 or 16 bits",
    ),
    "tpu": ("tf.distribute.cluster_resolver.TPUClusterResolver()", "a TPU"),
    "nothing": ("print(N)", "no Keras optimizer has made an update"),
    "processes": (
        "import subprocess\nsubprocess.run([sys.executable, '-c', ''])",
        "starts processes",
    ),
}


@pytest.mark.parametrize("text, why", REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_compared_is_refused(trained, text, why):
    recording = trained(text, NUM_REPLICAS)
    assert recording.status == recording_lib.REFUSED, recording
    assert re.search(why, recording.message), recording.message


def test_dropout_and_callbacks_that_write_are_named(trained, tmp_path):
    text = fit(BATCH_NORM.format("L.Dropout(0.5)")).replace(
        "epochs=3",
        f"callbacks=[keras.callbacks.CSVLogger(r'{tmp_path / 'log.csv'}')]",
    )
    notes = trained(text, 1).notes
    assert "Dropout with rate 0 instead of 0.5" in notes
    assert "without the callback CSVLogger" in notes
    assert not (tmp_path / "log.csv").exists()


def _command(folder, text, *options):
    (folder / "train.py").write_text(DATA + text)
    return processes.run(
        processes.python("-m", "tf_xshard", "compare", *options, "train.py"),
        tensorflow=3,
        cwd=folder,
        stderr=subprocess.STDOUT,
    )


def test_the_command_names_the_cause_and_leaves_the_folder(tmp_path):
    text = fit(optimizer="optimizer()")
    (tmp_path / "kept.txt").write_text("as it was")
    text += "\nopen('written.txt', 'w').write('x')\n"
    ended = _command(tmp_path, text, "--replicas", "2", "--steps", "1")
    assert ended.returncode == 1, ended.stdout
    assert "tf_xshard.CrossShardOptimizer(optimizer)" in ended.stdout
    assert {one.name for one in tmp_path.iterdir()} == {"train.py", "kept.txt"}
