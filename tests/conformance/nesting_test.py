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
from tests.support import versions

full = replicas.in_full
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
        ("mirrored", 1),
        # These have a loss scale and a sharded update of one group.
        ("tpu", 22_040),
        ("multi_worker", 22_040),
        ("tpu_permuted", 21_011),
        *(
            pytest.param("mirrored", seed, marks=full)
            for seed in (4, 5, 8, *range(1_000, 1_080))
        ),
        *(
            pytest.param(kind, seed, marks=full)
            for kind in ("tpu", "tpu_permuted", "multi_worker")
            for seed in range(22_000, 22_015)
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
    dtype = str(rng.choice(["float32", "float64"])) if is_mirrored else None
    normalization = rng.choice([None, "replica"])
    step = _traced(stack, num_replicas, dtype, kind, normalization)
    divisor = 1 if normalization == "replica" else num_replicas
    for index in range(15 if is_mirrored else 5):
        gradients = random_stacks.random_gradients(
            rng,
            int(rng.integers(1, 7)),
            num_replicas,
            dtype or "float32",
            overflows="scale" in stacks.names(stack) and rng.random() < 0.5,
        )
        [got] = step.run(gradients / divisor)
        stacks.check(got, stack, gradients, f"sequence {index}")


# Every order of two and three wrappers; `scale_at` is the number of wrappers
# inside a LossScaleOptimizer, None for none.
ORDERS = [
    (order, scale_at)
    for number in (2, 3)
    for order in itertools.product(stacks.WRAPPERS, repeat=number)
    for scale_at in (None, *range(number + 1))
]


def _refusal(order, scale_at):
    """What the error of an order says, or None if the order is accepted."""
    if "agn" in order[:-1] or (scale_at == 0 and order[-1] == "agn"):
        return "inside AGNOptimizer, which|AGNOptimizer does not support loss"
    if scale_at == len(order):
        return "LossScaleOptimizer wraps"
    return None


ACCEPTED = [one for one in ORDERS if not _refusal(*one)]


def _stack(order, scale_at, groups=GROUPS, accumulation=None):
    stack = ("sgd", {"rate": 0.5, "accumulation": accumulation})
    for depth, name in enumerate(reversed(order)):
        if depth == scale_at:
            stack = ("scale", {}, stack)
        options = {"groups": groups, "num_towers": 2, "period": 2}
        # The reduction that a tower adds has to follow these groups.
        stack = (name, options, stack)
    return ("scale", {}, stack) if scale_at == len(order) else stack


def test_an_order_is_refused_before_a_step():
    with replicas.mirrored(2).scope():
        weight = keras.Variable(0.0)
        for order in ORDERS:
            if message := _refusal(*order):
                with pytest.raises(ValueError, match=message):
                    stacks.optimizer_of(_stack(*order, None)).build([weight])


def _check_order(order, scale_at, groups, accumulation, kind):
    stack = _stack(order, scale_at, groups, accumulation)
    gradients = random_stacks.random_gradients(
        np.random.default_rng(7), 16, 4, "float32", scale_at is not None
    )
    [got] = _traced(stack, 4, "float32", kind).run(gradients / 4)
    stacks.check(got, stack, gradients, "")


def _places_in_turn():
    """Every accepted order, with one of the places of a loss scale."""
    for number, order in enumerate(dict(ACCEPTED)):
        places = [place for other, place in ACCEPTED if other == order]
        # Seeds above have the others.
        marks = () if len(order) == len(set(order)) == 2 else full
        yield pytest.param(order, places[number % len(places)], marks=marks)


@pytest.mark.parametrize("order, scale_at", [*_places_in_turn()], ids=str)
def test_an_order_is_right(order, scale_at):
    _check_order(order, scale_at, GROUPS, None, "mirrored")


@replicas.in_full
@replicas.on_mirrored_and_permuted
def test_every_order_is_right(kind):
    options = itertools.cycle(itertools.product((GROUPS, None), (None, 2)))
    for case, settings in zip(ACCEPTED, options, strict=False):
        _check_order(*case, *settings, kind)


def _multi(make):
    return keras.optimizers.MultiOptimizer(lambda variable: make())


def _cross(inner=None):
    return tf_xshard.CrossShardOptimizer(
        inner or keras.optimizers.SGD(1.0), "mean", [[0], [1]]
    )


def _tower(inner=None):
    return tf_xshard.TowerOptimizer(inner or keras.optimizers.SGD(1.0), 1)


@pytest.mark.parametrize(
    "make, expected",
    [
        # They neither undo 1/N again nor mix what the groups have reduced.
        pytest.param(
            lambda: _tower(_multi(_cross)),
            [-1, -10],
            marks=versions.needs_multi_optimizer,
            id="groups_in_multi",
        ),
        # A tower that is loaded still follows the groups around it.
        pytest.param(
            lambda: tf_xshard.CrossShardOptimizer.from_config(
                _cross(_tower()).get_config()
            ),
            [-1, -10],
            id="loaded",
        ),
        # Nothing around them reduces: the sum must not be left out twice.
        pytest.param(
            lambda: _tower(_multi(_tower)),
            [-5.5] * 2,
            marks=versions.needs_multi_optimizer,
            id="towers_in_multi",
        ),
    ],
)
def test_wrappers_that_others_make(make, expected):
    made = []
    [weights] = steps.stepped(
        lambda: made.append(make()) or made[0],
        lambda r: [tf.constant(10.0**r / 2)],
        num_replicas=2,
    )
    assert weights == expected
    state = tf_xshard.GroupState({"optimizer": made[0]})
    assert state.num_groups == len(set(expected))


def test_a_stack_is_saved_whole(tmp_path):
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(1.0, momentum=0.5)
    model.compile(
        tf_xshard.CrossShardOptimizer(tf_xshard.TowerOptimizer(inner, 3)), "mse"
    )
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.optimizer.variables, 1):
        variable.assign(np.full(variable.shape, number))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").optimizer
    for got, want in zip(
        loaded.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(got, want)
