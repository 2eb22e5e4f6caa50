"""`compare` tells scripts that train as on one device from others."""

import dataclasses
import re
import subprocess

import keras
import pytest

from tests.support import compared_scripts as scripts
from tests.support import processes
from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import script as script_lib
from tf_xshard.cli.compare import verdict

NUM_REPLICAS = 2
NUM_STEPS = 2
DEFAULT_RIGHT = ("wrapped", "loop")
DEFAULT_WRONG = ("clipped", "ragged", "undivided_loop")


def _cases(table, default):
    return [
        pytest.param(
            name, marks=() if name in default else pytest.mark.full, id=name
        )
        for name in table
    ]


@pytest.fixture
def trained(tmp_path):
    """A function that runs a script in this process, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def run(text, num_replicas, **changes):
        path = tmp_path / "train.py"
        path.write_text(scripts.HEAD + text)
        keras.utils.set_random_seed(0)
        settings = recording_lib.Settings(
            str(path),
            num_replicas=num_replicas,
            seen_replicas=NUM_REPLICAS,
            num_steps=NUM_STEPS,
        )
        settings = dataclasses.replace(settings, **changes)
        recording = script_lib.trained(settings)
        if recording.status == recording_lib.NO_STRATEGY:
            return run(text, num_replicas, default_strategy=True, **changes)
        return recording

    yield run
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def _difference(one, many):
    assert one.status == many.status == recording_lib.TRAINED, (one, many)
    assert len(one.steps) == len(many.steps) == NUM_STEPS
    assert verdict.not_comparable(one, many, 2, 1e-7) is None
    found = verdict.differences(one, many)
    assert all(each.moved > 1e-3 for each in found)
    return verdict.worst(found)


@pytest.mark.parametrize("name", _cases(scripts.RIGHT, DEFAULT_RIGHT))
def test_a_right_script_is_equal(trained, name):
    runs = [
        trained(scripts.RIGHT[name], number) for number in (1, NUM_REPLICAS)
    ]
    assert _difference(*runs) < verdict.TOLERANCE / 1000


@pytest.mark.parametrize("name", _cases(scripts.WRONG, DEFAULT_WRONG))
def test_a_wrong_script_is_different_until_it_is_cured(trained, name):
    text, names = scripts.WRONG[name]
    one = trained(text, 1)
    many = trained(text, NUM_REPLICAS)
    failed = many.status == recording_lib.FAILED
    assert failed or _difference(one, many) > 1e-3
    cured = trained(text, NUM_REPLICAS, cures=names)
    if any(cures.CURES[each].on_one_device for each in names):
        one = trained(text, 1, cures=names)
    assert _difference(one, cured) < verdict.TOLERANCE / 1000


def test_a_learning_rate_times_the_replicas_is_the_same_in_both(trained):
    text = scripts.fit(optimizer="O.SGD(1e-2 * N)")
    for number in (1, NUM_REPLICAS):
        step = trained(text, number).steps[-1]
        assert step.states[0].learning_rates == [pytest.approx(2e-2)]


REFUSED = {
    "random": (
        scripts.fit("dense(L.GaussianNoise(1.0))"),
        "draws random numbers: .*Random",
    ),
    "groups": (
        scripts.fit(
            optimizer="wrapped(clipped(), group_assignment=[[0], [1]])"
        ),
        "2 groups, meant to differ",
    ),
    "period": (
        scripts.fit(
            optimizer="tf_xshard.AGNOptimizer(keras.optimizers.SGD(1.0))"
        ),
        "communication_period=10",
    ),
    "wire": (
        scripts.fit(
            optimizer="wrapped(clipped(),"
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
    text = scripts.fit("dense(L.Dropout(0.5))").replace(
        "epochs=4",
        f"callbacks=[keras.callbacks.CSVLogger(r'{tmp_path / 'log.csv'}')]",
    )
    notes = trained(text, 1).notes
    assert "Dropout with rate 0 instead of 0.5" in notes
    assert "without the callback CSVLogger" in notes
    assert not (tmp_path / "log.csv").exists()


def _command(folder, text, *options):
    (folder / "train.py").write_text(scripts.HEAD + text)
    return processes.run(
        processes.python("-m", "tf_xshard", "compare", *options, "train.py"),
        tensorflow=3,
        cwd=folder,
        stderr=subprocess.STDOUT,
    )


def test_the_command_names_the_cause_and_leaves_the_folder(tmp_path):
    text = scripts.fit(optimizer="clipped()")
    (tmp_path / "kept.txt").write_text("as it was")
    text += "\nopen('written.txt', 'w').write('x')\n"
    ended = _command(tmp_path, text, "--replicas", "2", "--steps", "1")
    assert ended.returncode == 1, ended.stdout
    assert "tf_xshard.CrossShardOptimizer(optimizer)" in ended.stdout
    assert {one.name for one in tmp_path.iterdir()} == {"train.py", "kept.txt"}
