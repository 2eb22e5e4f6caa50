"""`compare` tells scripts that train as on one device from others."""

import dataclasses
import re

import keras
import numpy as np
import pytest

from tests.support import compared_scripts as scripts
from tests.support import processes
from tf_xshard import __main__ as cli
from tf_xshard.cli.compare import folder as folder_lib
from tf_xshard.cli.compare import known_errors
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import script as script_lib
from tf_xshard.cli.compare import verdict

NUM_REPLICAS = 2
NUM_STEPS = 2
# In this process. With --full, the command runs each script.
RIGHT = ("loop",)
# With the rows of each step; the last step of `fit` is the end of the epoch.
WRONG = {
    "ragged": [16, 5],
    "undivided_loop": [8, 8],
}
BY_COMMAND = ("wrapped_right", "clipped_wrong")


@pytest.fixture
def trained(tmp_path):
    """A function that runs a script in this process, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def run(text, num_replicas, **changes):
        path = tmp_path / "train.py"
        path.write_text(scripts.whole(text))
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


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_equal(trained, name):
    runs = [
        trained(scripts.RIGHT[name], number) for number in (1, NUM_REPLICAS)
    ]
    assert _difference(*runs) < verdict.TOLERANCE / 1000


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_is_different_until_it_is_cured(trained, name):
    text, names = scripts.WRONG[name]
    one = trained(text, 1)
    many = trained(text, NUM_REPLICAS)
    assert _difference(one, many) > 1e-3
    for recording in (one, many):
        assert [step.rows for step in recording.steps] == WRONG[name]
    cured = trained(text, NUM_REPLICAS, cures=names)
    assert _difference(one, cured) < verdict.TOLERANCE / 1000


def test_a_learning_rate_times_the_replicas_is_the_same_in_both(trained):
    text = scripts.fit(optimizer="O.SGD(1e-2 * N)")
    for number in (1, NUM_REPLICAS):
        step = trained(text, number).steps[-1]
        assert step.states[0].learning_rates == [pytest.approx(2e-2)]


def _recording(value, apart=0.0):
    start, end = (
        recording_lib.State(
            step,
            [0.1],
            {"w": recording_lib.Value(np.array([step * 2.0]), apart * step, 1)},
            {},
        )
        for step in (0, value)
    )
    return recording_lib.Recording(
        starts=[start], steps=[recording_lib.Step([end])]
    )


def test_replicas_that_differ_from_each_other_are_different():
    """A fraction of the movement, which is 2, also if replica 0 is right."""
    [found] = verdict.differences(_recording(1), _recording(1, apart=0.5))
    assert (found.ratio, found.moved) == (0.25, 2.0)
    assert found.where() == "w, replica 1 differs from replica 0"
    [found] = verdict.differences(_recording(1), _recording(1.25))
    assert (found.ratio, found.where()) == (0.25, "w")


def test_an_optimizer_that_makes_no_update_is_named(trained):
    text = scripts.gan("wrapped(clipped())", "O.SGD(0.1, name='idle')")
    text = text.replace("in pairs:", "in pairs[:1]:")
    assert trained(text, 1).idle == ["idle"]


def test_batches_are_compared_pass_by_pass():
    def recording(*passes):
        made = _recording(1)
        made.rows = [
            [
                recording_lib.Pass(batches, is_trained)
                for batches, is_trained in passes
            ]
        ]
        return made

    def reason(*passes):
        one = recording(([[1, 2]], True), ([[1, 2], [3]], True))
        return verdict.not_comparable(one, recording(*passes), 4, 1e-7)

    # What `fit` took to build the model, and what was prefetched, is no batch.
    assert (
        reason(([[7, 8]], False), ([[1, 2]], True), ([[1, 2], [3], [4]], True))
        is None
    )
    assert "different data in its two runs, first in batch 2 of epoch 2" in (
        reason(([[1, 2]], True), ([[1, 2], [5]], True))
    )
    assert "batch 1 of epoch 1 has 2 rows on one replica and 1 on 4" in (
        reason(([[1]], True))
    )


def test_the_learning_rates_are_compared():
    other = _recording(1)
    other.steps[0].states[0].learning_rates = [0.1 + 1e-4]
    reason = verdict.not_comparable(_recording(1), other, 4, 1e-7)
    assert "the learning rates of step 1 are [0.1] on one" in reason


def test_new_files_and_folders_are_moved(tmp_path):
    folder, kept = tmp_path / "folder", tmp_path / "kept"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "file").write_text("as it was")
    before = folder_lib.state(folder)
    for name in ("own/new", "logs/a", "logs/train/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").mkdir()
    after = folder_lib.state(folder)
    assert folder_lib.changed(before, after) == []
    moved = folder_lib.move_new(folder, before, after, kept)
    assert moved == ["empty", "logs", "own/new"]
    assert folder_lib.state(folder) == before
    assert (kept / "logs" / "train" / "b").read_text() == "logs/train/b"
    (folder / "own" / "file").write_text("written over")
    assert folder_lib.changed(before, folder_lib.state(folder)) == ["own/file"]


def test_known_errors_are_those_of_the_page():
    error = "Inputs to operation AddN of type AddN must have the same size and"
    known = known_errors.find(f"Error: {error} shape. Input 0")
    assert "drop_remainder=True" in known.advice
    assert known_errors.find("Error: Inputs to operation AddN") is None


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
    "outside of the scope": (
        scripts.fit().replace("with strategy.scope():", "if strategy:"),
        "trains on one device",
    ),
    "tpu": ("tf.distribute.cluster_resolver.TPUClusterResolver()", "a TPU"),
    "nothing": ("print(strategy)", "no Keras optimizer has made an update"),
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


def test_a_model_that_the_first_step_builds_has_its_first_values(trained):
    text = scripts.loop().replace(
        "dense()", "keras.Sequential([L.Dense(4), L.Dense(1)])"
    )
    assert 1e-3 < trained(text, 1).moved() < 0.1


def test_dropout_and_callbacks_that_write_are_named(trained, tmp_path):
    text = scripts.fit("dense(L.Dropout(0.5))").replace(
        "epochs=4",
        f"callbacks=[keras.callbacks.CSVLogger(r'{tmp_path / 'log.csv'}')]",
    )
    notes = trained(text, 1).notes
    assert "Dropout with rate 0 instead of 0.5" in notes
    assert "without the callback CSVLogger" in notes
    assert not (tmp_path / "log.csv").exists()


@pytest.fixture
def compare(tmp_path, monkeypatch, capfd):
    """A function that runs the command, whose runs are processes.

    It returns the exit code, the output, and whether all files are as before.
    """
    monkeypatch.chdir(tmp_path)

    def run(text, *options, num_runs=2):
        processes.count(num_runs)
        (tmp_path / "train.py").write_text(scripts.whole(text))
        before = _contents(tmp_path)
        given = ("--replicas", "2", "--steps", str(NUM_STEPS), *options)
        code = cli.main(["compare", *given, "train.py"])
        output = capfd.readouterr().out
        return code, output, _contents(tmp_path) == before

    return run


def _contents(folder):
    return {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_COMMAND else pytest.mark.full)
        for name in scripts.ALL
    ],
)
def test_the_command_names_the_cause_and_leaves_the_folder(
    compare, tmp_path, name
):
    text, names = scripts.ALL[name]
    (tmp_path / "kept.txt").write_text("as it was")
    code, output, is_as_before = compare(
        f"open('written.txt', 'w').write('x')\n{text}",
        num_runs=2 + len(names),
    )
    assert code == bool(names), output
    assert f"\n{'different' if names else 'equal'}: " in output, output
    assert re.findall(r"^(\w.*?) \* ", output, re.M) == (
        [" + ".join(names)] if names else []
    ), output
    assert len(re.findall("^Cause: ", output, re.M)) == len(names), output
    assert "nknown" not in output
    assert is_as_before


@pytest.mark.full
def test_a_script_that_restores_leaves_its_files(compare, tmp_path):
    (tmp_path / "train.py").write_text(scripts.whole(scripts.RESTORING))
    processes.run(
        processes.python("train.py"), tensorflow=1, cwd=tmp_path, check=True
    )
    assert len(list(tmp_path.iterdir())) > 5
    code, output, is_as_before = compare(scripts.RESTORING)
    assert code == 0, output
    assert "without the callback BackupAndRestore" in output
    assert "without the callback ModelCheckpoint" in output
    assert is_as_before


@pytest.mark.full
def test_a_script_that_writes_over_a_file_runs_in_a_copy(compare, tmp_path):
    (tmp_path / "log.txt").write_text("as it was")
    text = f"open('log.txt', 'a').write('x')\n{scripts.fit()}"
    code, output, is_as_before = compare(text, "--copy")
    assert code == 0, output
    assert is_as_before
    code, output, _ = compare(text)
    assert code == 2, output
    assert "the script changes log.txt" in output


@pytest.mark.full
@pytest.mark.parametrize(
    "text, why",
    [
        ("import time; time.sleep(99)", "within 0.3 minutes.*in <module>"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL.*--rows"),
        ("sys.exit(3)", "exit code 3"),
        ("undefined", "name 'undefined' is not defined"),
    ],
)
def test_a_run_that_ends_otherwise_says_why(compare, text, why):
    code, output, _ = compare(text, "--minutes", "0.3", num_runs=1)
    assert code == 2, output
    assert re.search(f"(?s)\nnot comparable: .*{why}", output), output


@pytest.mark.full
@pytest.mark.parametrize(
    "optimizer, code, verdict_line",
    [
        ("wrapped(clipped())", 0, "no difference above rounding"),
        ("clipped()", 1, "different"),
    ],
)
def test_a_script_with_its_own_dtype(compare, optimizer, code, verdict_line):
    text = scripts.fit(optimizer=optimizer)
    ended, output, _ = compare(f"keras.config.set_floatx('float32')\n{text}")
    assert ended == code, output
    assert f"\n{verdict_line}: " in output
