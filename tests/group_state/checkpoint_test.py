"""Saved and restored to the bit, whole at every instant, or refused."""

import contextlib
import hashlib
import itertools
import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas
from tf_xshard.group_state.checkpoint import files

SGD = keras.optimizers.SGD


def _values(state):
    """Every replica's value of every variable."""
    every = range(state.group_assignment.num_replicas)
    variables = [one.variable for one in state.variables()]
    return list(state.replicas.gather(variables, every))


def test_what_replicas_share_is_saved_once(tmp_path):
    model = group_training.filled(replicas.mirrored(4))
    tf_xshard.GroupState(model).save(tmp_path)
    manifest = files.read_manifest(str(tmp_path))
    owners = {one["name"]: one["owners"] for one in manifest["variables"]}
    for variable in model.variables:
        expected = [0, 1, 0, 1] if variable.trainable else [0, 0, 0, 0]
        if "moving" in variable.path:
            expected = [0, 1, 2, 3]
        assert owners[variable.path] == expected
    # JSON, and TensorFlow's checkpoint format.
    suffixes = {"".join(path.suffixes) for path in tmp_path.iterdir()}
    assert suffixes == {".json", ".index", ".data-00000-of-00001"}


def test_every_type(tmp_path):
    """nan, minus zero and the largest integers, on every replica."""
    contents = {
        "float32": [np.nan, -0.0, np.inf, 1e-45],
        "float64": [np.nan, -0.0, np.inf, 5e-324],
        "bfloat16": [np.nan, -0.0, np.inf, 1.0],
        "int32": [-(2**31), 2**31 - 1, 0, 1],
        "int64": [-(2**63), 2**63 - 1, 0, 1],
        "bool": [True, False, True, True],
    }
    with replicas.mirrored(2).scope():
        variables = {
            name: tf.Variable(tf.zeros([4], name)) for name in contents
        }
        variables["scalar"] = tf.Variable(1.0)
        variables["empty"] = tf.Variable(tf.zeros([0, 3]))
    state = tf_xshard.GroupState(variables, [[0], [1]])
    for name, content in contents.items():
        values = np.array(content).astype(tf.as_dtype(name).as_numpy_dtype)
        state.assign(variables[name], [values, values[::-1]])
    state.assign(variables["scalar"], [3.0, 4.0])
    saved = _values(state)
    state.save(tmp_path)
    for variable in variables.values():
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    # Groups in another order are the same groups.
    state = tf_xshard.GroupState(variables, [[1], [0]])
    state.restore(tmp_path)
    group_training.assert_same(_values(state), saved)


@pytest.fixture(scope="module")
def small():
    """Variables of two groups, of several kinds."""
    with replicas.mirrored(4).scope():
        parts = {
            "weight": [keras.Variable(np.arange(6.0)), keras.Variable(2.0)],
            "count": keras.Variable(1, dtype="int64"),
        }
    state = tf_xshard.GroupState(parts, [[0, 2], [1, 3]])
    state.assign(parts["weight"][0], [np.arange(6.0), np.arange(6.0) * 3])
    return state


def test_every_byte_counts(small, tmp_path):
    small.save(tmp_path)
    before = _values(small)
    for path in tmp_path.iterdir():
        whole = path.read_bytes()
        flipped = (
            whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :]
            for i in range(len(whole))
        )
        for content in (*flipped, whole[:-40]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=path.name):
                small.restore(tmp_path)
        path.unlink()
        with pytest.raises((ValueError, OSError), match=path.name):
            small.restore(tmp_path)
        path.write_bytes(whole)
    group_training.assert_same(_values(small), before)
    small.restore(tmp_path)


def _manifest(format="tf_xshard group state", version=2, **content):
    """A manifest's text, with the checksum that its content has."""
    inner = json.dumps({"format": format, "version": version, **content})
    checksum = hashlib.sha256(inner.encode()).hexdigest()
    return json.dumps({"sha256": checksum, "manifest": inner})


@pytest.mark.parametrize(
    "content, text",
    [
        ("[1, 2]", "not a group state's manifest"),
        ("not json", "not a group state's manifest"),
        (_manifest("other"), "not a group state's manifest"),
        (_manifest(version=99), "has version 99, but .* version 2"),
        # Paths out of the directory are not read, though the checksum is right.
        (_manifest(files={"../secret.index": "0"}), "names .*which no save"),
        (_manifest(files={"x.index": "0"}), "names the file .*which no save"),
    ],
)
def test_foreign_directories_are_refused(content, text, tmp_path):
    for read in (tf_xshard.GroupState.position, files.read_manifest):
        with pytest.raises(FileNotFoundError, match="holds no saved group"):
            read(str(tmp_path))
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        files.read_values(str(tmp_path), files.read_manifest(str(tmp_path)), [])


def _of_heads(names=("head_1", "head_2"), inner=SGD, units=6):
    """The state of a model with two layers."""
    x = keras.layers.Input((4,))
    layers = [keras.layers.Dense(units, name=name) for name in names]
    model = keras.Model(x, [layer(x) for layer in layers])
    model.compile(tf_xshard.CrossShardOptimizer(inner()))
    model.optimizer.build(model.trainable_variables)
    return tf_xshard.GroupState(model)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"units": 7}, "another model or optimizer: .* .4, 7., it has"),
        ({"names": ("head_1", "other")}, "instead of 'other/kernel'"),
        ({"names": ("head_2", "head_1")}, "in another order.*'head_2/kernel'"),
        ({"inner": keras.optimizers.Adam}, "optimizers: .*SGD.*model.*Adam"),
        ({"inner": lambda: SGD(momentum=0.9)}, "but this GroupState has 10"),
    ],
)
def test_another_model_is_refused(options, text, tmp_path):
    """Keras' numbers count for nothing; those in names of users' do."""
    _of_heads().save(tmp_path)
    other = _of_heads(**options)
    before = _values(other)
    with pytest.raises(ValueError, match=text):
        other.restore(tmp_path)
    group_training.assert_same(_values(other), before)
    _of_heads().restore(tmp_path)


def test_a_manifest_of_something_else_stays(small, tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "my web app"}')
    with pytest.raises(ValueError, match="no group state wrote"):
        small.save(tmp_path)
    files.remove(str(tmp_path))
    assert "web app" in (tmp_path / "manifest.json").read_text()
    assert os.listdir(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize(
    "regroup, groups, expected",
    [
        ("mean", [[0, 1], [2, 3]], [0.25 * (0 + 4 + 8 + 12)] * 4),
        ("first", [[1], [0]], [4.0, 4.0]),
        ({0: 1, 1: 0}, [[0, 1], [2, 3]], [8.0, 8.0, 4.0, 4.0]),
        ({0: 1, 1: 1}, [[1], [0]], [8.0, 8.0]),
    ],
    ids=["mean", "first", "swapped", "fewer"],
)
def test_regroup(regroup, groups, expected, tmp_path):
    """Saved by [[0, 2], [1, 3]] of values 0, 4, 8, 12 by replica."""
    with replicas.mirrored(4).scope():
        source = keras.Variable(0.0)
    state = tf_xshard.GroupState([source], [[0, 2], [1, 3]])
    state.replicas.assign(source, [0.0, 4.0, 8.0, 12.0])
    state.save(tmp_path)
    strategy = replicas.mirrored(len(expected))
    with strategy.scope():
        target = keras.Variable(7.0)
    state = tf_xshard.GroupState([target], groups)
    with pytest.raises(ValueError, match="was saved with the groups.*regroup"):
        state.restore(tmp_path)
    for wrong in ("last", {0: 0}, {0: 0, 1: 2}, {0: 0, 1: 1, 2: 0}):
        with pytest.raises(ValueError, match="regroup must be"):
            state.restore(tmp_path, regroup=wrong)
    assert replicas.values(strategy, target) == [7.0] * len(expected)
    state.restore(tmp_path, regroup=regroup)
    assert replicas.values(strategy, target) == expected


class _Crash(BaseException):
    """What nothing catches, as a power cut."""


def _crash_points(monkeypatch, at):
    """Makes the `at`-th operation on files the last one."""
    number = itertools.count(1)

    def crashing(function):
        def call(*args, **kwargs):
            if next(number) == at:
                raise _Crash
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (tf.raw_ops, "SaveV2"),
        (tf.io.gfile, "rename"),
        (tf.io.gfile, "remove"),
        (tf.io.gfile, "makedirs"),
        (tf.io.gfile, "GFile"),
        (tf.io.gfile, "listdir"),
        (os, "fsync"),
    ):
        monkeypatch.setattr(owner, name, crashing(getattr(owner, name)))


def test_a_crash_between_any_two_operations(small, tmp_path, monkeypatch):
    """The save before it or the new one, and the next save works."""
    [variable] = [v.variable for v in small.variables() if v.part == "count"]
    found = []
    for at in range(1, 100):
        directory = tmp_path / str(at)
        variable.assign(1)
        small.save(directory, step=1)
        variable.assign(2)
        crashed = True
        with monkeypatch.context() as patch, contextlib.suppress(_Crash):
            _crash_points(patch, at)
            small.save(directory, step=2)
            crashed = False
        step = small.restore(directory).step
        assert int(variable.numpy()) == step
        found.append(step)
        variable.assign(3)
        small.save(directory, step=3)
        assert small.restore(directory).step == 3 == int(variable.numpy())
        assert len(os.listdir(directory)) == 3
        if not crashed:
            break
    assert found[0] == 1 and found[-1] == 2 and len(found) > 12
    assert found == sorted(found)


def test_a_writer_that_does_not_end(small, monkeypatch, tmp_path):
    small.save(tmp_path, step=1)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.2)
    with files.locked(str(tmp_path)):
        with pytest.raises(TimeoutError, match="Another job or thread has"):
            small.save(tmp_path, step=2)
    assert small.restore(tmp_path).step == 1
    small.save(tmp_path, step=3)


def test_without_locks_only_the_replaced_save_is_removed(
    small, monkeypatch, tmp_path
):
    """As in an object store."""
    monkeypatch.setattr(files, "_has_locks", lambda directory: False)
    small.save(tmp_path, step=1)
    # Another job is writing this file.
    other = tmp_path / f"state-{'0' * 16}-00000.index"
    other.touch()
    small.save(tmp_path, step=2)
    assert other.exists() and len(os.listdir(tmp_path)) == 4
    assert small.restore(tmp_path).step == 2
