"""A plan is what runs: counted, and by the formulas that a person would use."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import collective_counts
from tests.support import replicas
from tests.support import training
from tf_xshard.collectives import recorder
from tf_xshard.collectives import watchdog

SGD = keras.optimizers.SGD
PAIRS = [[0, 1], [2, 3]]
SHAPES = ((8, 16), (16,), (16, 1), (1,))
NUM_BYTES = 4 * 161
PADDED = 4 * (128 + 16 + 16 + 4)


def _cross_shard(inner=None, **kwargs):
    return tf_xshard.CrossShardOptimizer(inner or SGD(0.1), **kwargs)


def _sharded(inner=None, **kwargs):
    return _cross_shard(inner, shard_update=True, **kwargs)


def _summed(sent, every=1):
    return "all-reduce", "gradients", "float32", NUM_BYTES, sent, every


# Per step of four replicas: (operation, purpose, dtype, bytes, sent, every).
CASES = {
    "all": (_cross_shard, [_summed(1.5)]),
    "groups": (lambda: _cross_shard(group_assignment=PAIRS), [_summed(1.0)]),
    "int8": (
        lambda: _cross_shard(
            communication=tf_xshard.Communication(dtype="int8")
        ),
        # Rows of 41 floats, and so of 11 words and a scale.
        [
            ("reduce-scatter", "gradients", "int8", 4 * 4 * 12, 0.75, 1),
            ("all-gather", "gradients", "int8", 4 * 12, 3, 1),
        ],
    ),
    "sharded": (
        lambda: _sharded(SGD(0.1, global_clipnorm=1.0)),
        [
            ("reduce-scatter", "gradients", "float32", PADDED, 0.75, 1),
            ("all-reduce", "norms", "float32", 16, 1.5, 1),
            ("all-gather", "variables", "float32", PADDED // 4, 3, 1),
        ],
    ),
    # A nan of any replica is in the sum over all.
    "skip": (lambda: _cross_shard(skip_nonfinite=True), [_summed(1.5)]),
    "skip_hook": (
        lambda: _cross_shard(skip_nonfinite=True, pre_reduce=list),
        [_summed(1.5), ("all-reduce", "finite vote", "float32", 8, 1.5, 1)],
    ),
    "towers": (
        lambda: tf_xshard.TowerOptimizer(SGD(0.1), 4),
        [_summed(1.5, 4)],
    ),
    "identity": (
        lambda: _cross_shard(group_assignment=[[0], [1], [2], [3]]),
        [],
    ),
}


def _made(make):
    """An optimizer on four replicas, its variables, and its plan."""
    with replicas.mirrored(4).scope():
        variables = [keras.Variable(tf.zeros(shape)) for shape in SHAPES]
        optimizer = make()
    plan = tf_xshard.communication_plan(optimizer, variables)
    return optimizer, variables, plan


@functools.cache
def _planned(name):
    return _made(CASES[name][0])


def _compiled(make_model, loss="mse"):
    with replicas.mirrored(2).scope():
        model = make_model()
        model.compile(_cross_shard(), loss)
    return model


def _counted(run, num_times=1):
    """Collectives, bytes and bytes sent of all replicas."""
    before = watchdog.WATCHDOG.totals()
    for _ in range(num_times):
        run()
    return np.subtract(watchdog.WATCHDOG.totals(), before)[:3].tolist()


@pytest.mark.parametrize(
    "name, graph", [*((name, True) for name in CASES), ("groups", False)]
)
def test_operations_bytes_and_counters(name, graph):
    """On Mirrored: as written above, and counted while eight steps run."""
    _, expected = CASES[name]
    optimizer, variables, plan = _planned(name)
    found = [
        (p.operation, p.purpose, p.dtype, p.num_bytes, p.bytes_sent, p.every)
        for p in plan.operations
    ]
    assert found == [
        (operation, purpose, dtype, size, size * factor, every)
        for operation, purpose, dtype, size, factor, every in expected
    ]

    gradients = lambda r: [tf.ones(shape) for shape in SHAPES]
    step = replicas.applying(
        replicas.mirrored(4), optimizer, gradients, variables, graph
    )
    planned = [
        # An eager step reduces every gradient separately.
        plan.collectives_per_step * (1 if graph else len(SHAPES)),
        plan.bytes_per_step,
        plan.bytes_sent_per_step,
    ]
    assert _counted(step, 8) == [8 * 4 * number for number in planned]


@pytest.mark.parametrize(
    "kind, sent", [("tpu", 8 * 1.0), ("tpu_permuted", 2 * 8 * 1.5)]
)
def test_tpus(kind, sent):
    """Without a device assignment groups are a stack of all replicas."""
    strategy = replicas.STRATEGIES[kind](4)
    make = lambda: _cross_shard(group_assignment=PAIRS)
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = make()
    plan = tf_xshard.communication_plan(optimizer, [weight])
    assert plan.bytes_sent_per_step == sent
    *in_graph, _ = collective_counts.trained(strategy, make, 0)
    assert plan.collectives_per_step == sum(in_graph)


def _with_an_embedding(**kwargs):
    return keras.Sequential(
        [
            keras.layers.Input((3,), dtype="int32"),
            keras.layers.Embedding(50, 4, **kwargs),
            keras.layers.Flatten(),
            keras.layers.Dense(1, use_bias=False),
        ]
    )


def test_sparse_gradients():
    """Their rows are padded to a power of two, and padding is sent."""
    model = _compiled(_with_an_embedding)
    with pytest.raises(ValueError, match="Pass rows_per_step"):
        tf_xshard.communication_plan(model)
    plan = tf_xshard.communication_plan(model, rows_per_step=6)
    sizes = {(p.operation, p.dtype, p.num_bytes) for p in plan.operations}
    assert sizes == {
        ("all-reduce", "float32", 4 * 12),
        ("all-gather", "int64", 2 * 8),  # The numbers of rows.
        ("all-gather", "float32", 8 * 16),
        ("all-gather", "int64", 8 * 8),
    }
    # Each replica has two rows of three ids, all different.
    x = np.arange(12).reshape(4, 3).astype("int32")
    batch = x, np.ones([4, 1], "float32")
    counted = _counted(lambda: training.run_steps(model, [batch]))
    assert counted[2] == 2 * plan.bytes_sent_per_step


def test_nothing_runs_and_nothing_is_remembered():
    """AGN's record of gradients is not that of the plan's trace."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        first, second = keras.Variable([1.0]), keras.Variable([1.0])
        optimizer = tf_xshard.AGNOptimizer(SGD(1.0), communication_period=1)
        optimizer.build([first, second])
    before = [v.numpy().tolist() for v in optimizer.variables]
    tf_xshard.communication_plan(optimizer)
    assert [v.numpy().tolist() for v in optimizer.variables] == before
    assert not len(optimizer._seen)

    gradients = lambda r: [tf.ones([1]), None]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        replicas.apply_once(strategy, optimizer, gradients, [first, second])
    assert first.numpy() == -1.0  # The gradient, 1 / N undone.
    assert second.numpy() == 1.0


def test_a_plan_leaves_another_threads_trace_alone():
    """That one negotiates, while this one only records."""
    seen = []
    look = lambda: seen.append(recorder.is_recording())

    def meanwhile(pairs):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
        return pairs

    _made(lambda: _cross_shard(pre_reduce=meanwhile))
    assert seen == [False, True] * 4


@pytest.mark.parametrize(
    "make, slots, copied",
    [
        (_cross_shard, NUM_BYTES, NUM_BYTES),
        (_sharded, PADDED // 4, PADDED * 5 // 4),
    ],
    ids=["whole", "sharded"],
)
def test_memory(make, slots, copied):
    """Adam has two slots for each weight; a shard's with four replicas."""
    _, _, plan = _made(lambda: make(keras.optimizers.Adam(0.1)))
    scalars = 4 + 8  # The learning rate, iterations.
    assert abs(plan.slot_bytes - 2 * slots) <= 2 * scalars
    assert plan.bucket_bytes == copied


def test_times_and_the_table():
    optimizer, variables, _ = _planned("sharded")
    plan = tf_xshard.communication_plan(
        optimizer, variables, gigabytes_per_second=(0.001, 1)
    )
    # One process is one host: 0.001 GB/s, and compute is ignored.
    sent = 0.75 * PADDED + 24 + 3 * PADDED // 4
    assert plan.seconds_per_step == pytest.approx(sent / 1e6)
    lines = str(plan).splitlines()
    first = "reduce-scatter gradients all 4 float32"
    assert lines[1].split()[:5] == first.split()
    assert "bytes_per_step: 836 B" in lines
    assert "seconds_per_step: 1.01 ms" in lines


def test_a_difference():
    one, towers, identity = (
        _planned(name)[2] for name in ("all", "towers", "identity")
    )
    difference = one.difference(towers)
    assert difference.ratio("bytes_per_step") == 0.25
    assert identity.seconds_per_step is None  # Of nothing, too.
    assert difference.ratio("bucket_bytes") == 1.0
    with pytest.raises(KeyError, match="seconds_per_step"):
        difference.ratio("seconds_per_step")
    assert "bytes_per_step        644 B" in str(difference)
    assert identity.difference(one).ratio("bytes_per_step") == float("inf")
    with pytest.raises(TypeError, match="compares with a plan"):
        one.difference(None)


def _built():
    optimizer = _cross_shard()
    optimizer.build([keras.Variable(1.0)])
    return optimizer


VECTOR = keras.Variable([1.0, 2.0])


@pytest.mark.parametrize(
    "make, kwargs, error, match",
    [
        (SGD, {}, ValueError, "got <keras"),
        (_cross_shard, {}, ValueError, "Pass its variables"),
        (keras.Sequential, {}, ValueError, "keras.layers.Input"),
        (training.model, {"variables": []}, ValueError, "own variables"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(_cross_shard()),
            *({}, ValueError, "auto_scale_loss=False"),
        ),
        (_cross_shard, {"variables": [1.0]}, TypeError, "a list of variables"),
        (_cross_shard, {"variables": VECTOR}, TypeError, "list of variables"),
        (_built, {"gigabytes_per_second": "x"}, TypeError, "number or a pair"),
        (_built, {"gigabytes_per_second": 0}, ValueError, "gigabytes_per_sec"),
        (_built, {"gigabytes_per_second": (1, 2, 3)}, TypeError, "pair"),
        (_built, {"rows_per_step": 0}, ValueError, "rows_per_step"),
    ],
)
def test_refusals(make, kwargs, error, match):
    with pytest.raises(error, match=match):
        tf_xshard.communication_plan(make(), **kwargs)


def test_inside_strategy_run():
    plan = lambda: tf_xshard.communication_plan(_cross_shard())
    with pytest.raises(RuntimeError, match="outside of strategy.run"):
        replicas.mirrored(2).run(plan)


def _of_a_dict():
    inputs = {
        "b": keras.layers.Input((2,), name="b"),
        "a": keras.layers.Input((3,), name="a"),
    }
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    return keras.Model(inputs, keras.layers.Dense(2)(joined))


def _of_two_rows():
    inputs = keras.layers.Input(batch_shape=(2, 4, 3))
    hidden = keras.layers.GRU(3, stateful=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


@pytest.mark.parametrize(
    "make, loss, others",
    [
        (_of_a_dict, "mse", []),
        (_of_two_rows, "mse", []),
        (lambda: _with_an_embedding(embeddings_regularizer="l2"), "mse", []),
        (training.model, tf_xshard.GlobalMean("mse"), [2 * 4]),
    ],
    ids=["dict", "two_rows", "regularized", "global_mean"],
)
def test_models_of_other_kinds(make, loss, others):
    """All gradients are dense; a global mean adds a sum of two numbers."""
    model = _compiled(make, loss)
    plan = tf_xshard.communication_plan(model)
    size = sum(v.shape.num_elements() for v in model.trainable_variables)
    assert sorted(p.num_bytes for p in plan.operations) == [*others, 4 * size]
