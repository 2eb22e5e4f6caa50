"""Scripts as users write them: two replicas train as one device."""

import numpy as np
import pytest

import tf_xshard
from tests.support import own_step_scripts
from tests.support import replicas
from tests.support import scripts
from tests.support import transformer_scripts
from tests.support.versions import needs_multi_optimizer

NUM_REPLICAS = 2
# Of what training changes in a variable.
TOLERANCE = 1e-4
# A custom loop, a `train_step` of two optimizers, and `fit`.
BY_DEFAULT = ("ResidualNetwork",)


def _all():
    for module in (scripts, own_step_scripts, transformer_scripts):
        for name, one in vars(module).items():
            if isinstance(one, type) and one.__module__ == module.__name__:
                if issubclass(one, scripts.Script) and hasattr(one, "model"):
                    marks = [] if name in BY_DEFAULT else [replicas.in_full]
                    if name == "WideAndDeep":
                        marks.append(needs_multi_optimizer)
                    yield pytest.param(one, marks=marks, id=name)


def _at_start(script):
    """A list to which come a model's values when `fit` is called first."""
    start, fit = [], script.fit

    def recorded(model):
        if not start:
            start.extend(variable.numpy() for variable in model.variables)
        fit(model)

    script.fit = recorded
    return start


@pytest.mark.parametrize("script", [*_all()])
def test_two_replicas_train_as_one_device(script):
    wrap = tf_xshard.CrossShardOptimizer
    reference = script().train(
        wrap if script.reference_is_wrapped else lambda optimizer: optimizer
    )
    strategy = replicas.mirrored(NUM_REPLICAS)
    with strategy.scope():
        distributed = script()
        start = _at_start(distributed)
        trained = distributed.train(wrap)
    changes = []
    for first, mine, theirs, variable in zip(
        start,
        [replicas.values(strategy, v) for v in trained.variables],
        reference.variables,
        trained.variables,
        strict=True,
    ):
        if "seed" in variable.path:
            continue
        assert len(mine) == NUM_REPLICAS
        change = np.abs(theirs.numpy() - first).max()
        if variable.trainable:
            changes.append(change)
        for value in mine:
            # A gradient that counts twice, or not at all, is far outside.
            np.testing.assert_allclose(
                value,
                theirs.numpy(),
                atol=TOLERANCE * max(change, 1e-2),
                rtol=1e-5,
                err_msg=variable.path,
            )
    assert max(changes) > 1e-2 and min(changes) > 0
