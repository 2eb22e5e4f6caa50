"""Wrappers in wrappers, in every order, against NumPy.

A stack is either right on every replica or refused before it changes anything.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks
from tests.support import steps
from tests.support import traced

GROUPS = [[0, 3], [1, 2]]


def _traced(stack, num_replicas, dtype, kind, normalization=None):
    return traced.Traced(
        lambda: stacks.optimizer_of(stack, loss_normalization=normalization),
        [np.zeros(stacks.SIZE)],
        kind,
        num_replicas,
        dtype,
    )


@pytest.mark.parametrize(
    "kind, seed",
    [
        ("mirrored", 7),
        # These have a loss scale and a sharded update of one group.
        ("tpu", 22_030),
        ("multi_worker", 22_030),
        ("tpu_permuted", 21_004),
        *(
            pytest.param(kind, seed, marks=replicas.in_full)
            for kind in replicas.STRATEGIES
            for seed in range(22_000, 22_080 if kind == "mirrored" else 22_015)
        ),
    ],
)
def test_random_cases(kind, seed):
    """Any stack on 2 to 6 replicas, with several sequences of gradients.

    float64 is held to 1e-12: no factor may lose its digits in float32.
    """
    rng = np.random.default_rng(seed)
    is_mirrored = kind == "mirrored"
    num_replicas = int(rng.choice([2, 3, 4, 6] if is_mirrored else [4]))
    stack = random_stacks.random_stack(rng, num_replicas)
    dtype = str(rng.choice(["float32", "float64"][: 1 + is_mirrored]))
    normalization = rng.choice([None, "replica"])
    step = _traced(stack, num_replicas, dtype, kind, normalization)
    divisor = 1 if normalization == "replica" else num_replicas
    for index in range(15 if is_mirrored else 5):
        gradients = random_stacks.random_gradients(
            rng,
            int(rng.integers(1, 7)),
            num_replicas,
            dtype,
            overflows="scale" in stacks.names(stack) and rng.random() < 0.5,
        )
        [got] = step.run(gradients / divisor)
        stacks.check(got, stack, gradients, f"sequence {index}")


# Every order of two and three wrappers, the outermost first, with and without
# a LossScaleOptimizer somewhere.
ORDERS = [
    order
    for number in (2, 3)
    for wrappers in itertools.product(stacks.WRAPPERS, repeat=number)
    for order in (
        wrappers,
        *((*wrappers[:i], "scale", *wrappers[i:]) for i in range(number + 1)),
    )
]


def _refusal(order):
    """What the error of an order says, or None if the order is accepted."""
    between = "contains a LossScaleOptimizer that contains .*Optimizer"
    wrappers = [name for name in order if name != "scale"]
    if "agn" in wrappers[:-1] or order[-2:] == ("agn", "scale"):
        return f"inside AGNOptimizer, which|AGNOptimizer does not|{between}"
    if "scale" in order[1:-1]:
        return between
    return "LossScaleOptimizer wraps" if order[0] == "scale" else None


def _stack(order, groups=GROUPS, accumulation=None):
    stack = ("sgd", {"rate": 0.5, "accumulation": accumulation})
    options = {
        "cross": {"groups": groups},
        # The reduction that a tower adds has to follow the groups around it.
        "tower": {"num_towers": 2},
        "agn": {"groups": groups, "period": 2},
        "scale": {},
    }
    for name in reversed(order):
        stack = (name, options[name], stack)
    return stack


def test_an_order_is_refused_before_a_step():
    with replicas.mirrored(2).scope():
        weight = keras.Variable(0.0)
        for order in ORDERS:
            if message := _refusal(order):
                with pytest.raises(ValueError, match=message):
                    stacks.optimizer_of(_stack(order, None)).build([weight])


def _check_order(kind, order, *settings):
    stack = _stack(order, *settings)
    gradients = random_stacks.random_gradients(
        np.random.default_rng(7), 16, 4, "float32", "scale" in order
    )
    [got] = _traced(stack, 4, "float32", kind).run(gradients / 4)
    stacks.check(got, stack, gradients, "")


@pytest.mark.parametrize(
    "order",
    [
        ("cross", "tower", "scale"),
        ("cross", "agn"),
        ("tower", "cross"),
        ("cross", "tower", "agn"),
    ],
    ids="-".join,
)
def test_an_order_is_right(order):
    _check_order("mirrored", order)


@replicas.in_full
@replicas.on_mirrored_and_permuted
def test_every_order_is_right(kind):
    accepted = [order for order in ORDERS if not _refusal(order)]
    for case in replicas.in_turn(accepted, [GROUPS, GROUPS, None], [None, 2]):
        _check_order(kind, *case)


def _grouped():
    return tf_xshard.CrossShardOptimizer(
        tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 1),
        "mean",
        [[0], [1]],
    )


def _loaded():
    optimizer = _grouped()
    return type(optimizer).from_config(optimizer.get_config())


def _in_multi():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    return keras.optimizers.MultiOptimizer(lambda variable: _grouped())


@pytest.mark.parametrize(
    "make", [_grouped, _loaded, _in_multi], ids=["made", "loaded", "in_multi"]
)
def test_a_tower_follows_the_groups_around_it(make):
    """The reduction that it adds neither undoes 1/N again nor mixes groups."""
    made = []
    [weights] = steps.stepped(
        lambda: made.append(make()) or made[0],
        lambda r: [tf.constant(10.0**r / 2)],
        num_replicas=2,
    )
    assert weights == [-1, -10]
    assert tf_xshard.GroupState({"optimizer": made[0]}).num_groups == 2


def test_a_multi_optimizer_that_makes_wrappers_is_refused_unbuilt():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    multi = keras.optimizers.MultiOptimizer(lambda variable: _grouped())
    optimizer = tf_xshard.TowerOptimizer(multi, 2)
    with pytest.raises(ValueError, match="a MultiOptimizer that contains"):
        optimizer.build([keras.Variable(0.0)])
    assert not multi.built and not multi.optimizers
