"""Scripts as users write them: two replicas train as one device."""

import numpy as np
import pytest

import tf_xshard
from tests.support import replicas
from tests.support import scripts
from tests.support import transformer_scripts

# Of what training changes in a variable.
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "script",
    [
        scripts.ResidualNetwork,
        pytest.param(transformer_scripts.Bert, marks=replicas.in_full),
    ],
)
def test_two_replicas_train_as_one_device(script):
    wrap = tf_xshard.CrossShardOptimizer
    reference = script().train(
        wrap if script.reference_is_wrapped else lambda optimizer: optimizer
    )
    strategy = replicas.mirrored(2)
    with strategy.scope():
        trained = script().train(wrap)
    changes = []
    for start, theirs, variable in zip(
        script().seeded_model().variables,
        reference.variables,
        trained.variables,
        strict=True,
    ):
        if "seed" in variable.path:
            continue
        change = np.abs(theirs.numpy() - start.numpy()).max()
        if variable.trainable:
            changes.append(change)
        # A gradient that counts twice, or not at all, is far outside.
        np.testing.assert_allclose(
            replicas.values(strategy, variable),
            np.stack([theirs.numpy()] * 2),
            atol=TOLERANCE * max(change, 1e-2),
            rtol=1e-5,
            err_msg=variable.path,
        )
    assert max(changes) > 1e-2 and min(changes) > 0
