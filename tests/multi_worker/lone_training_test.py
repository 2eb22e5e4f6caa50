"""One of several processes does not train alone, unless the user wants it."""

import json

import keras
import pytest
import tensorflow as tf

import tf_xshard
from tests.multi_worker import engines_test
from tests.support import replicas
from tf_xshard.multi_worker import local_cluster

_ALONE = [
    (engines_test.TORCHRUN, "2 processes .torchrun."),
    (engines_test.SLURM, "4 processes .Slurm."),
    (engines_test.PMI, "2 processes .MPI."),
    (engines_test.OPEN_MPI, "4 processes .Open MPI."),
    (
        {"TF_CONFIG": local_cluster.tf_config(["a:1", "b:2"], 1)},
        "2 processes .TF_CONFIG.",
    ),
    (
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"chief": ["a:1"], "worker": ["b:2"]},
                    "task": {"type": "chief", "index": 0},
                }
            )
        },
        "2 processes .TF_CONFIG.",
    ),
]
_EVALUATOR = json.dumps(
    {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "evaluator", "index": 0},
    }
)


def _dense():
    return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])


def _model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(keras.optimizers.SGD(0.1)), "mse"
        )
    return model


def _fit(model, callbacks=()):
    x = tf.ones([4, 2])
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[*callbacks])


def _fit_plain():
    """An optimizer of Keras, inside multi_worker_fit."""
    model = _dense()
    model.compile("sgd", "mse")
    with tf_xshard.multi_worker_fit():
        _fit(model)


def _save(directory):
    weight = keras.Variable(1.0)
    tf_xshard.GroupState([weight]).save(directory)


def _checkpoint(directory):
    model = _dense()
    model.compile("sgd", "mse")
    _fit(model, [tf_xshard.GroupCheckpoint(directory)])


@pytest.fixture
def calls(tmp_path):
    """What would train alone, and how its error begins."""
    strategy = replicas.mirrored(2)
    model = _model(strategy)
    return {
        "CrossShardOptimizer applies gradients": lambda: _fit(model),
        "multi_worker_fit trains": _fit_plain,
        "GroupState saves": lambda: _save(tmp_path),
        "GroupCheckpoint saves": lambda: _checkpoint(tmp_path),
        r"rank\(\) is called": lambda: tf_xshard.rank(strategy),
        r"barrier\(\) is called": lambda: tf_xshard.barrier(strategy),
    }


@pytest.mark.parametrize(
    "variables, who", _ALONE, ids=lambda one: str(one)[:20]
)
def test_training_alone_is_refused(
    variables, who, calls, monkeypatch, tmp_path
):
    """Unless the user wants it; nothing is written or changed before."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for what, call in calls.items():
        with pytest.raises(
            RuntimeError, match=f"{what} in one of {who}"
        ) as info:
            call()
        assert "tf_xshard.connect(alone=True)" in str(info.value)
        assert "set TF_XSHARD_ALONE=1" in str(info.value)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TF_XSHARD_ALONE", "0")
    tf_xshard.connect(alone=True)
    for call in calls.values():
        call()


def test_an_evaluator_is_not_the_chief(calls, monkeypatch, tmp_path):
    monkeypatch.setenv("TF_CONFIG", _EVALUATOR)
    assert not tf_xshard.is_chief()
    for what, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{what} in an evaluator"):
            call()
    assert not list(tmp_path.iterdir())
    model = _model(replicas.mirrored(2))
    with tf_xshard.multi_worker_fit():
        assert model.evaluate(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0) >= 0


def test_a_job_s_variables_are_not_a_step_s(calls, monkeypatch):
    """A batch script's Python runs once, whatever the job's size."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    for call in calls.values():
        call()
