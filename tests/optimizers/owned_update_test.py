"""shard_update=True, where variables have owners: who holds and costs what."""

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard.distribute import ownership
from tf_xshard.optimizers.update import kinds
from tf_xshard.private.keras import shards as keras_shards

O = keras.optimizers  # noqa: E741


def _made(inner, num_replicas, **shapes):
    """Variables and a sharded optimizer, which is not built."""
    with replicas.mirrored(num_replicas).scope():
        variables = [
            keras.Variable(tf.ones(shape), name=name)
            for name, shape in shapes.items()
        ]
        optimizer = tf_xshard.CrossShardOptimizer(inner(), shard_update=True)
    return variables, optimizer


def test_slots_are_on_their_owners_only():
    """Shapes of several dtypes and blocks; the bytes are those of the plan."""
    shapes = [[200, 100], [120, 130], [90, 150], [5], [64, 64], []]
    shapes = {f"w{i}": shape for i, shape in enumerate(shapes)}
    variables, optimizer = _made(O.Lamb, 4, **shapes)
    with replicas.mirrored(4).scope():
        double = keras.Variable(np.ones([110, 100]), dtype="float64")
        variables.append(double)
        optimizer.build(variables)
    slots = [
        v for v in optimizer.variables if isinstance(v, keras_shards.Owned)
    ]
    assert len(slots) == 2 * len(variables)
    blocks = {id(one.shards): one.shards for one in slots}
    assert 1 < len(blocks) < len(slots)
    held = sum(
        one.dtype.size * one.shape.num_elements() for one in blocks.values()
    )
    # Two float32 slots of 200 x 100, and two float64 slots of 110 x 100.
    assert {one.layout.owner for one in slots} == {0, 1, 2, 3}
    assert 4 * 2 * 200 * 100 <= held <= 1.05 * (8 * 200 * 100 + 16 * 110 * 100)
    plan = tf_xshard.communication_plan(optimizer, variables)
    assert plan.slot_bytes == held + 8 + 4  # iterations, learning rate
    assert 1 <= plan.balance.largest_owner < 1.5
    rng = np.random.default_rng(0)
    values = [rng.integers(99, size=tuple(slot.shape)) for slot in slots]
    for slot, value in zip(slots, values, strict=True):
        slot.assign(value)
    for slot, value in zip(slots, values, strict=True):
        np.testing.assert_array_equal(slot.numpy(), value)


def test_the_plan_says_what_one_large_variable_costs():
    """Weights are gathered when they change, which is every fourth step."""
    inner = lambda: O.Lamb(gradient_accumulation_steps=4)
    variables, optimizer = _made(inner, 4, table=[90, 90], w=[30, 30])
    plan = tf_xshard.communication_plan(optimizer, variables)
    largest, variable, share = plan.balance
    assert variable == "table"
    np.testing.assert_allclose([largest, share], [3.6, 0.9])
    assert "3.6 times the mean. The costliest variable, table, has 90.0%" in (
        str(plan)
    )
    planned = {one.operation: one for one in plan.operations}
    # Four rows of the length of the largest owner's.
    assert planned["reduce-scatter"].num_bytes == 4 * 4 * 8100
    assert planned["reduce-scatter"].num_variables == 2
    assert {name: one.every for name, one in planned.items()} == {
        "reduce-scatter": 1,
        "all-gather": 4,
    }
    elementwise = tf_xshard.CrossShardOptimizer(O.Adam(), shard_update=True)
    plan = tf_xshard.communication_plan(elementwise, [keras.Variable(1.0)])
    assert plan.balance is None


def test_muon_divides_what_it_updates_like_adamw_by_element():
    variables, optimizer = _made(
        O.Muon, 2, kernel=[6, 4], embeddings=[6, 4], bias=[4]
    )
    optimizer.build(variables)
    kinds_of_slots = {
        v.path.split("/")[-1]: type(v) for v in optimizer.variables[2:]
    }
    assert kinds_of_slots == {
        "kernel_momentum": keras_shards.Owned,
        "embeddings_momentum": keras_shards.Sharded,
        "embeddings_velocity": keras_shards.Sharded,
        "bias_momentum": keras_shards.Sharded,
        "bias_velocity": keras_shards.Sharded,
    }
    # Newton-Schulz costs more than Lamb, which costs 1 for each element.
    assert kinds.cost_of_owner(O.Muon(), (64, 256), "kernel") > 64 * 256


def test_owners_have_similar_costs():
    costs = {i: float(size) for i, size in enumerate([1, 4, 9, 5, 8, 6, 7])}
    owner_of = ownership.balanced(costs, 3)
    assert sorted(owner_of) == sorted(costs)
    totals = [
        sum(costs[i] for i in costs if owner_of[i] == p) for p in range(3)
    ]
    assert sorted(totals) == [13, 13, 14]
    # The largest owner has at most the mean and its largest variable.
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = {i: float(x) for i, x in enumerate(rng.integers(1, 99, 17))}
        balance = ownership.balance_of(costs, ownership.balanced(costs, 4), 4)
        mean = sum(costs.values()) / 4
        assert balance.largest_owner * mean <= mean + max(costs.values())
