"""One of several processes does not train alone, unless the user wants it."""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.multi_worker import engines_test
from tests.support import replicas
from tests.support import training


def _config(task, **cluster):
    return json.dumps(
        {"cluster": cluster, "task": {"type": task, "index": 0}},
        # As `engines_test.variables` reads it.
        separators=(",", ":"),
    )


_CHIEF = _config("chief", chief=["a:1"], worker=["b:2"])
_WORKER = _config("worker", worker=["a:1", "b:2"])
_ALONE = {
    "torchrun": (engines_test.TORCHRUN, "2 processes .torchrun."),
    "slurm": (engines_test.SLURM, "4 processes .Slurm."),
    "mpi": (engines_test.PMI, "2 processes .MPI."),
    "open_mpi": (engines_test.OPEN_MPI, "4 processes .Open MPI."),
    "worker": (f"TF_CONFIG={_WORKER}", "2 processes .TF_CONFIG."),
    "chief": (f"TF_CONFIG={_CHIEF}", "2 processes .TF_CONFIG."),
}


class _Calls:
    """What would train alone, and how its error begins."""

    def __init__(self, directory):
        self.saves = str(directory / "saves")
        self.epochs = str(directory / "epochs")
        strategy = replicas.mirrored(2)
        with strategy.scope():
            self.weight = keras.Variable(0.0)
            optimizer = tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(1.0),
                "sum",
                loss_normalization="replica",
            )
            optimizer.build([self.weight])
        self.model = training.model()
        self.model.compile("sgd", "mse")
        self.by_error = {
            "CrossShardOptimizer applies gradients": lambda: (
                replicas.apply_once(
                    strategy,
                    optimizer,
                    lambda r: [tf.constant(10.0**r)],
                    [self.weight],
                )
            ),
            "multi_worker_fit trains": self._fit,
            "GroupState saves": lambda: tf_xshard.GroupState(
                [self.weight]
            ).save(self.saves),
            "GroupCheckpoint saves": lambda: self._train(
                [tf_xshard.GroupCheckpoint(self.epochs)]
            ),
            r"rank\(\) is called": lambda: tf_xshard.rank(strategy),
            r"barrier\(\) is called": lambda: tf_xshard.barrier(strategy),
        }

    def _fit(self):
        """An optimizer of Keras, inside multi_worker_fit."""
        with tf_xshard.multi_worker_fit():
            self._train()

    def _train(self, callbacks=()):
        self.model.fit(*training.data(4), verbose=0, callbacks=[*callbacks])

    def are_refused(self, who):
        """Each with a text that names the escape; nothing has changed."""
        for what, call in self.by_error.items():
            with pytest.raises(RuntimeError, match=f"{what} in {who}") as info:
                call()
            assert "tf_xshard.connect(alone=True)" in str(info.value)
            assert "set TF_XSHARD_ALONE=1" in str(info.value)
        assert replicas.values(replicas.mirrored(2), self.weight) == [0, 0]
        assert int(self.model.optimizer.iterations) == 0
        assert not os.path.exists(self.saves)
        assert not os.path.exists(self.epochs)

    def work(self):
        """Each does its work in this process."""
        results = [call() for call in self.by_error.values()]
        assert results[-2:] == [0, None]
        assert replicas.values(replicas.mirrored(2), self.weight) == [-11, -11]
        assert int(self.model.optimizer.iterations) == 2
        assert os.listdir(self.saves) and os.listdir(self.epochs)


@pytest.fixture
def calls(tmp_path):
    return _Calls(tmp_path)


@pytest.mark.parametrize("name", _ALONE)
def test_training_alone_is_refused(name, calls, monkeypatch):
    variables, who = _ALONE[name]
    engines_test.set_variables(monkeypatch, variables)
    calls.are_refused(f"one of {who}")


def test_a_user_may_want_to_train_alone(calls, monkeypatch):
    engines_test.set_variables(
        monkeypatch, f"{engines_test.TORCHRUN} TF_XSHARD_ALONE=0"
    )
    tf_xshard.connect(alone=True)
    calls.work()


def test_an_evaluator_is_not_the_chief(calls, monkeypatch):
    evaluator = _config("evaluator", worker=["a:1", "b:2"])
    engines_test.set_variables(monkeypatch, f"TF_CONFIG={evaluator}")
    assert not tf_xshard.is_chief()
    calls.are_refused("an evaluator")
    x, y = training.data(4)
    with tf_xshard.multi_worker_fit():
        loss = calls.model.evaluate(x, y, verbose=0)
    outputs = calls.model.predict(x, verbose=0)
    np.testing.assert_allclose(loss, np.mean((outputs - y) ** 2), rtol=1e-5)
