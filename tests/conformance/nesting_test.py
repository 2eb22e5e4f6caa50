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
from tests.support import versions


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


def _random_cases(seed, number, kind="mirrored"):
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


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_300_random_cases(first):
    for seed in range(first, first + 10):
        _random_cases(seed, 15)


@replicas.in_full
@pytest.mark.parametrize("first", range(1_000, 1_400, 100))
def test_20_000_random_cases(first):
    for seed in range(first, first + 50):
        _random_cases(seed, 100)


@pytest.mark.parametrize("kind", replicas.TPUS)
def test_random_cases_on_a_simulated_tpu(kind):
    # The second has a loss scale and a sharded update of one group.
    for seed in (21_000, 22_040, 21_011):
        _random_cases(seed, 5, kind)


@replicas.in_full
@pytest.mark.parametrize("kind", replicas.TPUS)
def test_more_random_cases_on_a_simulated_tpu(kind):
    for seed in range(22_000, 22_050):
        _random_cases(seed, 5, kind)


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


@pytest.mark.parametrize(
    "order, scale_at", [one for one in ORDERS if _is_refused(*one)], ids=str
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


def _places_in_turn():
    """Two wrappers with every place of a loss scale, three with one each."""
    cases = [one for one in ACCEPTED if len(one[0]) == 2]
    longer = [one for one in ACCEPTED if len(one[0]) == 3]
    for number, order in enumerate(dict(longer)):
        places = [place for other, place in longer if other == order]
        cases.append((order, places[number % len(places)]))
    return cases


@pytest.mark.parametrize("order, scale_at", _places_in_turn(), ids=str)
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


@versions.needs_multi_optimizer
def test_wrappers_that_a_multi_optimizer_makes_are_inner_ones():
    """They neither undo 1/N again nor mix what the groups have reduced."""
    groups = [[0, 1], [2, 3]]
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.TowerOptimizer(
            keras.optimizers.MultiOptimizer(
                lambda variable: tf_xshard.CrossShardOptimizer(
                    keras.optimizers.SGD(1.0), "mean", groups
                )
            ),
            1,
        )
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(10.0**r / 4)], [weight]
    )
    assert replicas.values(strategy, weight) == [-5.5, -5.5, -550, -550]
    state = tf_xshard.GroupState({"w": [weight], "optimizer": optimizer})
    assert state.group_assignment.to_list() == groups


@versions.needs_multi_optimizer
def test_a_reduction_of_some_variables_only_is_refused():
    with pytest.raises(
        ValueError, match="reduce gradients .* do not: .'plain'"
    ):
        tf_xshard.TowerOptimizer(
            keras.optimizers.MultiOptimizer(
                keras.optimizers.OptimizerMap(
                    keras.optimizers.SGD(name="plain"),
                    {
                        "a": tf_xshard.CrossShardOptimizer(
                            keras.optimizers.SGD()
                        )
                    },
                )
            ),
            2,
        )


def test_a_tower_that_is_loaded_still_follows_the_groups_around_it():
    groups = [[0, 1], [2, 3]]
    strategy = replicas.mirrored(4)
    with strategy.scope():
        weight = keras.Variable(0.0)
        made = tf_xshard.CrossShardOptimizer(
            tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 1),
            "mean",
            groups,
        )
        optimizer = tf_xshard.CrossShardOptimizer.from_config(made.get_config())
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(10.0**r / 4)], [weight]
    )
    assert replicas.values(strategy, weight) == [-5.5, -5.5, -550, -550]


@versions.needs_multi_optimizer
def test_towers_that_a_multi_optimizer_makes_reduce():
    """Nothing around them does: the sum must not be left out twice."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = tf_xshard.TowerOptimizer(
            keras.optimizers.MultiOptimizer(
                optimizer_map=lambda variable: tf_xshard.TowerOptimizer(
                    keras.optimizers.SGD(1.0), 1
                )
            ),
            1,
        )
        optimizer.build([weight])
    replicas.apply_once(
        strategy, optimizer, lambda r: [tf.constant(10.0**r) / 2], [weight]
    )
    assert replicas.values(strategy, weight) == [-5.5, -5.5]


def test_a_model_in_groups_loads_outside_its_strategy(tmp_path):
    """To predict with; only a step needs the replicas."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((2,)), keras.layers.Dense(1)]
        )
        model.compile(
            tf_xshard.CrossShardOptimizer(
                keras.optimizers.SGD(), group_assignment=[[0], [1]]
            ),
            "mse",
        )
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    assert loaded.predict(np.ones([1, 2]), verbose=0).shape == (1, 1)
    with pytest.raises(ValueError, match="is for 2 replicas.*compile=False"):
        loaded.fit(np.ones([2, 2]), np.ones([2, 1]), verbose=0)
