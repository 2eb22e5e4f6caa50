"""The same as moving_test.py, with tf.train.Checkpoint."""

import warnings

import numpy as np
import pytest

import tf_xshard
from tests.support import moving
from tests.support.versions import needs_multi_optimizer

O = moving.O  # noqa: E741


@moving.between_all
def test_a_checkpoint_of_tensorflow(source, target):
    """Before and after the optimizer is built."""
    _, checkpoint, expected = moving.saved_after_training(source)
    moved = moving.target(target)
    unbuilt = moving.start_with(moving.OPTIMIZERS[target], 2, is_built=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moving.checkpoint_of(moved).restore(checkpoint).expect_partial()
        moving.checkpoint_of(unbuilt).restore(checkpoint).expect_partial()
        with unbuilt.distribute_strategy.scope():
            unbuilt.optimizer.build(unbuilt.trainable_variables)
    moving.check_equal(unbuilt.optimizer.variables, moved.optimizer.variables)
    moving.check_it_goes_on(moved, expected)


@pytest.mark.parametrize("is_built", [True, False])
def test_an_open_round_in_a_checkpoint(is_built, tmp_path):
    model = moving.open_round()
    path = moving.checkpoint_of(model).save(tmp_path / "state")
    expected = moving.train(model, 1)
    nested = moving.start_with(
        lambda: tf_xshard.CrossShardOptimizer(moving.two_towers()), 1, is_built
    )
    moving.checkpoint_of(nested).restore(path).expect_partial()
    for value, want in zip(moving.train(nested, 1), expected, strict=True):
        np.testing.assert_allclose(value, want, atol=1e-6)

    cross = moving.start_with(moving.OPTIMIZERS["cross"], 1, is_built)
    with pytest.warns(UserWarning, match="no place .*'TowerOptimizer'"):
        moving.checkpoint_of(cross).restore(path).expect_partial()
    cross.optimizer.build(cross.trainable_variables)
    assert moving.iterations(cross) == 1

    path = moving.checkpoint_of(moving.start("plain")).save(tmp_path / "plain")
    towers = moving.start_with(moving.two_towers, 1, is_built)
    with pytest.warns(UserWarning, match="'TowerOptimizer'. start fresh"):
        moving.checkpoint_of(towers).restore(path).expect_partial()
        moving.train(towers, 1)


@pytest.mark.parametrize("is_built", [True, False])
def test_a_checkpoint_into_and_out_of_agn(is_built, tmp_path):
    plain = moving.start("plain")
    moving.train(plain, 3)
    path = moving.checkpoint_of(plain).save(tmp_path / "plain")
    agn = moving.start_with(moving.agn, 1, is_built)
    with pytest.warns(UserWarning, match="'AGNOptimizer'. start fresh"):
        moving.checkpoint_of(agn).restore(path).expect_partial()
        agn.optimizer.build(agn.trainable_variables)
    assert moving.iterations(agn) == 3
    moving.check_equal(
        agn.optimizer.local_optimizer.variables[2:],
        plain.optimizer.variables[2:],
    )
    moving.train(agn, 1)
    path = moving.checkpoint_of(agn).save(tmp_path / "agn")
    again = moving.start_with(moving.agn, 1, is_built)
    moving.checkpoint_of(again).restore(path).expect_partial()
    again.optimizer.build(again.trainable_variables)
    moving.check_equal(again.optimizer.variables, agn.optimizer.variables)
    back = moving.start("plain")
    moving.checkpoint_of(back).restore(path).expect_partial()
    assert moving.iterations(back) == 4


@needs_multi_optimizer
def test_a_checkpoint_of_several_optimizers(tmp_path):
    """tf.train.Checkpoint does not follow a MultiOptimizer; wrappers do."""

    def maker():
        return tf_xshard.CrossShardOptimizer(
            O.MultiOptimizer(lambda _: O.Adam(0.05))
        )

    model = moving.start_with(maker)
    moving.train(model, 3)
    path = moving.checkpoint_of(model).save(tmp_path / "state")
    expected = moving.train(model, 1)
    again = moving.start_with(maker)
    moving.checkpoint_of(again).restore(path).assert_consumed()
    for value, want in zip(moving.train(again, 1), expected, strict=True):
        np.testing.assert_array_equal(value, want)
    # Any wrapper around it has them, so nothing is lost and nothing named.
    towers = moving.start_with(
        lambda: tf_xshard.TowerOptimizer(
            O.MultiOptimizer(lambda _: O.Adam(0.05)), 1
        )
    )
    back = moving.start_with(maker)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moving.checkpoint_of(towers).restore(path).expect_partial()
        path = moving.checkpoint_of(towers).save(tmp_path / "towers")
        moving.checkpoint_of(back).restore(path).expect_partial()
    for moved in (towers, back):
        for value, want in zip(moving.train(moved, 1), expected, strict=True):
            np.testing.assert_array_equal(value, want)
    # Without a wrapper nothing has saved them.
    plain = moving.start_with(lambda: O.MultiOptimizer(lambda _: O.Adam(0.05)))
    path = moving.checkpoint_of(plain).save(tmp_path / "plain")
    with pytest.warns(UserWarning, match="'CrossShardOptimizer'. start fresh"):
        moving.checkpoint_of(moving.start_with(maker)).restore(
            path
        ).expect_partial()
    # Keras' files have them.
    moving.train(plain, 3)
    plain.save_weights(tmp_path / "plain.weights.h5")
    moved = moving.start_with(maker)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.load_weights(tmp_path / "plain.weights.h5")
    for value, want in zip(
        moving.train(moved, 1), moving.train(plain, 1), strict=True
    ):
        np.testing.assert_array_equal(value, want)
