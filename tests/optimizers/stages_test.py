"""Each stage of a step can be called by itself, and does what its name says."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tf_xshard import reductions
from tf_xshard.collectives import channel
from tf_xshard.distribute import indexed_slices
from tf_xshard.distribute import site as site_lib
from tf_xshard.distribute import variable_role
from tf_xshard.optimizers import hooks
from tf_xshard.optimizers import stack
from tf_xshard.reduction import gradients
from tf_xshard.reduction import loss_scaling
from tf_xshard.reduction import reducer

GROUPS = [[0, 2], [1, 3]]


def test_standardized():
    variables = [keras.Variable(np.zeros([4, 2])), keras.Variable(0.0)]
    rows = tf.IndexedSlices(
        tf.constant([[1.0, 1.0], [2.0, 2.0]]), tf.constant([3, 3])
    )
    found = gradients.standardized([rows, 1.0], variables)
    assert found[0].indices.numpy().tolist() == [3]
    assert found[0].values.numpy().tolist() == [[3.0, 3.0]]
    assert float(found[1]) == 1.0
    assert gradients.standardized([None, None], variables) == [None, None]


def test_indices_are_made_unique_once():
    """A second look at what is unique costs an operation each step."""
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([3, 3]))
    unique = indexed_slices.unique(rows)
    assert indexed_slices.unique(unique) is unique
    doubled = indexed_slices.map_values(lambda x: 2 * x, unique)
    assert indexed_slices.unique(doubled) is doubled
    assert doubled.values.numpy().tolist() == [[4.0, 4.0]]
    # What a user makes of it counts as unknown.
    again = tf.IndexedSlices(unique.values, unique.indices)
    assert indexed_slices.unique(again) is not again


def test_a_tower_makes_indices_unique_once():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.zeros([4, 2], "float32"))
        optimizer = tf_xshard.TowerOptimizer(keras.optimizers.SGD(1.0), 1)
        optimizer.build([table])

    @tf.function(autograph=False)
    def step():
        def on_replica():
            rows = tf.IndexedSlices(
                tf.ones([2, 2]), tf.constant([3, 3]), tf.constant([4, 2])
            )
            optimizer.apply([rows], [table])

        strategy.run(on_replica)

    graph = step.get_concrete_function().graph.as_graph_def()
    nodes = [
        *graph.node,
        *(n for f in graph.library.function for n in f.node_def),
    ]
    # For each replica: as they arrive, and after rows have been gathered.
    assert sum(node.op == "Unique" for node in nodes) == 2 * 2
    step()
    for value in replicas.values(strategy, table):
        assert value[3].tolist() == [-4.0, -4.0]


def test_hooks_see_unscaled_gradients():
    variable = keras.Variable(0.0)
    seen = []

    def hook(pairs):
        seen.extend(float(g) for g, _ in pairs)
        return [(g + 1.0, v) for g, v in pairs]

    batch = gradients.GradientBatch(
        [tf.constant(6.0), None], [variable, keras.Variable(1.0)], scale=4
    )
    found = hooks.Hook("pre_reduce", hook)(batch, lambda loss: loss * 8.0)
    assert seen == [3.0]  # 6 * 4 / 8
    # (3 + 1) * 8 / 4
    assert float(found.values[0]) == 8.0 and found.values[1] is None
    assert found.scale == 4
    # Nothing is asked of the optimizer where there is no hook.
    assert hooks.Hook("x", None)(batch, None) is batch


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@replicas.on_every_strategy
def test_the_reducer(kind, reduction):
    own = reducer.GradientReducer(tf_xshard.Communication())
    variables = [keras.Variable(np.zeros([2], "float32")) for _ in range(2)]

    def on_replica(x):
        batch, carry = own.all_reduce(
            gradients.GradientBatch([x, None], variables, scale=4),
            site_lib.current(),
            tf_xshard.GroupAssignment(GROUPS),
            reductions.TABLE[reduction],
        )
        [total, none] = batch.values
        assert none is None and carry is None and batch.scale == 1
        return total

    found = replicas.run(kind, on_replica)
    scale = 4 / 2 if reduction == "mean" else 4
    expected = [101, 1010, 101, 1010]
    assert found == [[scale * e] * 2 for e in expected]


@replicas.on_every_strategy
def test_the_finite_vote(kind):
    """One replica of another group has an overflow: none is finite."""

    def on_replica(x):
        finite = loss_scaling.all_replicas_finite(
            [x, None],
            site_lib.current(),
            channel.Channel(
                tf_xshard.GroupAssignment(GROUPS), tf_xshard.Communication()
            ),
        )
        [kept] = loss_scaling.nan_unless(finite, [tf.ones([2])])
        return kept

    def overflow(context):
        value = np.inf if context.replica_id_in_sync_group == 3 else 1.0
        return tf.fill([2], value)

    finite = replicas.run(kind, on_replica)
    assert finite == [[1.0, 1.0]] * 4
    poisoned = replicas.run(kind, on_replica, value=overflow)
    assert np.isnan(poisoned).all()


def test_roles():
    weight, statistic = keras.Variable(1.0), keras.Variable(2.0)
    statistic.overwrite_with_gradient = True
    role_of = variable_role.role_of
    assert role_of(weight) is variable_role.TRAINED
    assert role_of(weight.value) is variable_role.TRAINED
    assert role_of(statistic) is variable_role.OVERWRITTEN
    strategy = replicas.mirrored(2)
    with strategy.scope():
        own = keras.Variable(0.0, synchronization="on_read", aggregation="sum")
    assert role_of(own) is variable_role.LOCAL
    kinds = [variable_role.kind_of_state(v) for v in (weight, statistic, own)]
    assert kinds == ["weight", "statistic", "local"]


def test_the_walker():
    sgd = keras.optimizers.SGD()
    agn = tf_xshard.AGNOptimizer(sgd, local_optimizer=keras.optimizers.Adam())
    outer = tf_xshard.CrossShardOptimizer(agn)
    assert list(stack.descendants(outer)) == [outer, agn, sgd]
    assert list(stack.with_local_optimizers(outer)) == [
        outer,
        agn,
        agn.local_optimizer,
        sgd,
    ]
    assert stack.wrappers(outer) == [outer, agn]
    assert not stack.has_loss_scale_optimizer(outer)
