"""Wrappers in wrappers, in every order, against NumPy.

A stack is either right on every replica or refused when it is made.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import mutants
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import steps
from tests.support import versions

full = replicas.in_full


class _Traced:
    """A stack whose step has been traced, to be run with many gradients.

    Args:
      stack: See `stacks`.
      num_replicas: The number of replicas.
      dtype: Of the weights and gradients.
      kind: The strategy.
      normalization: `loss_normalization`, which decides what arrives for g_r.
    """

    def __init__(
        self, stack, num_replicas, dtype, kind="mirrored", normalization=None
    ):
        self._strategy = replicas.STRATEGIES[kind](num_replicas)
        self._divisor = 1 if normalization == "replica" else num_replicas
        with self._strategy.scope():
            self._weight = weight = keras.Variable(
                np.zeros(stacks.SIZE), dtype=dtype, autocast=False
            )
            optimizer = stacks.optimizer_of(
                stack, loss_normalization=normalization
            )
            optimizer.build([weight])

        def on_replica(arriving):
            gradient = arriving[replicas.replica_id_tensor()]
            # As a loss times its scale has it.
            scale = tf.cast(optimizer.scale_loss(1.0), gradient.dtype)
            optimizer.apply([gradient * scale], [weight])

        self._step = tf.function(
            lambda arriving: self._strategy.run(on_replica, args=(arriving,)),
            autograph=False,
        )
        self._variables = [weight, *optimizer.variables]
        self._initial = [one.numpy() for one in self._variables]

    def run(self, gradients):
        """Every replica's weights after a few steps from the initial state.

        Args:
          gradients: g_r, an array of shape [steps, replicas, stacks.SIZE].
        """
        for variable, value in zip(self._variables, self._initial, strict=True):
            variable.assign(value)
        for arriving in gradients / self._divisor:
            self._step(tf.constant(arriving))
        return np.stack(replicas.values(self._strategy, self._weight))


def _random_cases(seed, number, kind):
    """Any stack on 2 to 6 replicas, with several sequences of gradients.

    float64 is held to 1e-12: no factor may lose its digits in float32.
    """
    rng = np.random.default_rng(seed)
    is_tpu = kind != "mirrored"
    num_replicas = int(rng.choice([4] if is_tpu else [2, 3, 4, 6]))
    stack = random_stacks.random_stack(rng, num_replicas)
    dtype = "float32" if is_tpu else str(rng.choice(["float32", "float64"]))
    traced = _Traced(
        stack, num_replicas, dtype, kind, rng.choice([None, "replica"])
    )
    for index in range(number):
        gradients = random_stacks.random_gradients(
            rng,
            int(rng.integers(1, 7)),
            num_replicas,
            dtype,
            overflows="scale" in stacks.names(stack) and rng.random() < 0.5,
        )
        got = traced.run(gradients)
        stacks.check(got, stack, gradients, f"seed {seed}, sequence {index}")


@pytest.mark.parametrize(
    "kind, seeds, number",
    [
        ("mirrored", range(8), 15),
        ("mirrored", range(8, 15), 15),
        # 22_040 has a loss scale and a sharded update of one group.
        ("tpu", (21_000, 22_040), 5),
        ("tpu_permuted", (22_040, 21_011), 5),
        *(
            pytest.param("mirrored", range(first, first + 50), 100, marks=full)
            for first in range(1_000, 1_400, 100)
        ),
        *(
            pytest.param(kind, range(22_000, 22_050), 5, marks=full)
            for kind in replicas.TPUS
        ),
    ],
)
def test_random_cases(kind, seeds, number):
    for seed in seeds:
        _random_cases(seed, number, kind)


# Every order of two and three wrappers; `scale_at` is the number of wrappers
# inside a LossScaleOptimizer, None for none.
ORDERS = [
    (order, scale_at)
    for number in (2, 3)
    for order in itertools.product(stacks.WRAPPERS, repeat=number)
    for scale_at in (None, *range(number + 1))
]


def _is_refused(order, scale_at):
    """AGNOptimizer reduces by itself and takes no loss scale; a
    LossScaleOptimizer around all would look at one replica only."""
    return (
        "agn" in order[:-1]
        or scale_at == len(order)
        or (scale_at == 0 and order[-1] == "agn")
    )


def _stack(order, scale_at, groups, accumulation):
    stack = ("sgd", {"rate": 0.5, "accumulation": accumulation})
    for depth, name in enumerate(reversed(order)):
        if depth == scale_at:
            stack = ("scale", {}, stack)
        options = {"groups": groups, "num_towers": 2, "period": 2}
        # The reduction that a tower adds has to follow these groups.
        stack = (name, options, stack)
    return ("scale", {}, stack) if scale_at == len(order) else stack


def _places_in_turn(cases):
    """Every order of wrappers, with one of the places of a loss scale."""
    result = []
    for number, order in enumerate(dict(cases)):
        places = [place for other, place in cases if other == order]
        result.append((order, places[number % len(places)]))
    return result


@pytest.mark.parametrize(
    "order, scale_at",
    _places_in_turn([one for one in ORDERS if _is_refused(*one)]),
    ids=str,
)
def test_an_order_is_refused_before_a_step(order, scale_at):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        with pytest.raises(ValueError, match="AGN|LossScale"):
            optimizer = stacks.optimizer_of(_stack(order, scale_at, None, None))
            optimizer.build([weight])


ACCEPTED = [one for one in ORDERS if not _is_refused(*one)]
GROUPS = [[0, 3], [1, 2]]


def _check_order(order, scale_at, groups, accumulation, kind):
    rng = np.random.default_rng(7)
    stack = _stack(order, scale_at, groups, accumulation)
    gradients = random_stacks.random_gradients(
        rng, 16, 4, "float32", overflows=scale_at is not None
    )
    got = _Traced(stack, 4, "float32", kind).run(gradients)
    stacks.check(got, stack, gradients, "")


@pytest.mark.parametrize("order, scale_at", _places_in_turn(ACCEPTED), ids=str)
def test_an_order_is_right(order, scale_at):
    _check_order(order, scale_at, GROUPS, None, "mirrored")


@replicas.in_full
@replicas.on_mirrored_and_permuted
def test_every_order_with_every_option_is_right(kind):
    for case, groups, accumulation in itertools.product(
        ACCEPTED, (GROUPS, None), (None, 2)
    ):
        _check_order(*case, groups, accumulation, kind)


@pytest.mark.parametrize(
    "name", ["factor_2", "factor_1_n", "no_reduction", "groups_ignored"]
)
def test_a_wrong_reduction_is_noticed(name):
    gradients = random_stacks.random_gradients(
        np.random.default_rng(1), 4, 4, "float32"
    )
    stack = _stack(("cross", "tower"), None, [[0, 1], [2, 3]], None)
    with mutants.mutant(name, 4), pytest.raises(AssertionError):
        stacks.check(
            _Traced(stack, 4, "float32").run(gradients), stack, gradients, ""
        )


def _multi(make):
    return keras.optimizers.MultiOptimizer(lambda variable: make())


def _cross(inner=None):
    return tf_xshard.CrossShardOptimizer(
        inner or keras.optimizers.SGD(1.0), "mean", [[0, 1], [2, 3]]
    )


def _tower(inner=None):
    return tf_xshard.TowerOptimizer(inner or keras.optimizers.SGD(1.0), 1)


@pytest.mark.parametrize(
    "make, expected",
    [
        # They neither undo 1/N again nor mix what the groups have reduced.
        pytest.param(
            lambda: _tower(_multi(_cross)),
            [-5.5, -5.5, -550, -550],
            marks=versions.needs_multi_optimizer,
        ),
        # A tower that is loaded still follows the groups around it.
        (
            lambda: tf_xshard.CrossShardOptimizer.from_config(
                _cross(_tower()).get_config()
            ),
            [-5.5, -5.5, -550, -550],
        ),
        # Nothing around them reduces: the sum must not be left out twice.
        pytest.param(
            lambda: _tower(_multi(_tower)),
            [-277.75] * 4,
            marks=versions.needs_multi_optimizer,
        ),
    ],
)
def test_wrappers_that_others_make(make, expected):
    made = []
    [weights] = steps.stepped(
        lambda: made.append(make()) or made[0],
        lambda r: [tf.constant(10.0**r / 4)],
    )
    assert weights == expected
    state = tf_xshard.GroupState({"optimizer": made[0]})
    assert state.num_groups == len(set(expected))
