"""`simulated_tpu_strategy` runs what TPUStrategy users run, with its numbers."""

import gc
import json
import os
import pathlib
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import replicas
from tests import training
from tf_xshard import testing
from tf_xshard.testing import replicated_program
from tf_xshard.testing import requirements
from tf_xshard.testing import xla_cpu

O = keras.optimizers  # noqa: E741

ROOT = pathlib.Path(__file__).parent.parent
on_both = pytest.mark.parametrize("kind", replicas.TPUS)


def _run(kind, function, num_replicas=4, value=None):
    """Runs `function(10^r)` on replica r; the results as nested lists."""
    strategy = replicas.STRATEGIES[kind](num_replicas)
    arguments = strategy.experimental_distribute_values_from_function(
        value or (lambda c: tf.fill([2], 10.0**c.replica_id_in_sync_group))
    )

    @tf.function
    def step(x):
        return strategy.run(function, args=(x,))

    return tf.nest.map_structure(
        lambda result: [
            one.numpy().tolist()
            for one in strategy.experimental_local_results(result)
        ],
        step(arguments),
    )


def _context():
    return tf.distribute.get_replica_context()


def _cross_replica_sum(x, groups):
    return tf.raw_ops.CrossReplicaSum(input=x, group_assignment=groups)


@on_both
def test_it_is_a_tpu_strategy(kind):
    strategy = replicas.STRATEGIES[kind](4)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert strategy.num_replicas_in_sync == 4
    assert strategy.extended.num_hosts == 1
    assert len(set(strategy.extended.worker_devices)) == 4


@on_both
def test_collectives(kind):
    """Exact: each replica's value names it."""

    def function(x):
        return (
            _context().all_reduce("SUM", x),
            _context().all_reduce("MEAN", x),
            _context().all_gather(x, axis=0),
            # int64 travels through an AllToAll.
            _context().all_gather(tf.cast(x[:1], tf.int64), axis=0),
            _context().replica_id_in_sync_group,
        )

    total, mean, gathered, integers, ids = _run(kind, function)
    assert total == [[1111, 1111]] * 4
    assert mean == [[277.75, 277.75]] * 4
    assert gathered == [[1, 1, 10, 10, 100, 100, 1000, 1000]] * 4
    assert integers == [[1, 10, 100, 1000]] * 4
    assert ids == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
def test_native_groups_with_a_device_assignment(dtype):
    groups = [[2, 0], [1, 3]]

    def function(x):
        return tf.cast(
            _cross_replica_sum(tf.cast(x, dtype), groups), tf.float32
        )

    got = _run(
        "tpu",
        function,
        value=lambda c: tf.fill([2], 2.0**c.replica_id_in_sync_group),
    )
    assert got == [[5, 5], [10, 10], [5, 5], [10, 10]]


def test_native_groups_without_one_pair_other_replicas():
    """The trap that a device assignment avoids is modelled."""
    got = _run(
        "tpu_permuted", lambda x: _cross_replica_sum(x, [[0, 1], [2, 3]])
    )
    numbering = replicas.tpu_permuted(4).extended._xla_numbering
    expected = [None] * 4
    for pair in (numbering[:2], numbering[2:]):
        for replica in pair:
            expected[replica] = [float(sum(10**r for r in pair))] * 2
    assert got == expected


def test_a_permutation_that_splits_the_groups():
    strategy = testing.simulated_tpu_strategy(
        4, device_assignment=False, replica_permutation=[0, 2, 1, 3]
    )

    @tf.function
    def step():
        return strategy.run(
            lambda: _cross_replica_sum(
                replicas.power_of_ten(), [[0, 1], [2, 3]]
            )
        )

    got = [float(v) for v in strategy.experimental_local_results(step())]
    assert got == [101, 1010, 101, 1010]


@on_both
def test_control_flow(kind):
    def function(x):
        groups = [[0, 1, 2, 3]]

        def body(i, y):
            return i + 1, y + _cross_replica_sum(x, groups)

        _, looped = tf.while_loop(
            lambda i, y: i < 3, body, [tf.constant(0), tf.zeros([2])]
        )
        branched = tf.cond(
            _context().replica_id_in_sync_group < 2, lambda: x, lambda: -x
        )
        gathered = tf.while_loop(
            lambda i, y: i < 2,
            lambda i, y: (
                i + 1,
                y + _context().all_gather(tf.cast(x[:1], tf.int64), axis=0),
            ),
            [tf.constant(0), tf.zeros([4], tf.int64)],
        )[1]
        return looped, branched, gathered

    looped, branched, gathered = _run(kind, function)
    assert looped == [[3333, 3333]] * 4
    assert branched == [[1, 1], [10, 10], [-100, -100], [-1000, -1000]]
    assert gathered == [[2, 20, 200, 2000]] * 4


def test_collective_permute():
    pairs = [[0, 1], [1, 2], [2, 3], [3, 0]]
    got = _run(
        "tpu",
        lambda x: tf.raw_ops.CollectivePermute(
            input=x, source_target_pairs=pairs
        ),
    )
    assert got == [[1000, 1000], [1, 1], [10, 10], [100, 100]]


@on_both
def test_variables(kind):
    strategy = replicas.STRATEGIES[kind](4)
    with strategy.scope():
        mirrored = tf.Variable([0.0, 0.0])
        own = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation.NONE)
        summed = tf.Variable(
            [0.0, 0.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        counter = tf.Variable(
            0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )

    @tf.function
    def nested(x):
        own.assign_add(x)

    def function(x):
        nested(x)
        summed.assign_add(x)
        counter.assign_add(1)
        before = own.read_value()
        own.assign_add(x)

        def update(strategy, value):
            return strategy.extended.update(
                mirrored, lambda v, g: v.assign_sub(g), args=(value,)
            )

        _context().merge_call(update, args=(_context().all_reduce("SUM", x),))
        return before, own.read_value()

    before, after = _run(kind, function)
    assert before == [[10.0**r] * 2 for r in range(4)]
    assert after == [[2 * 10.0**r] * 2 for r in range(4)]
    assert [v[0] for v in replicas.values(strategy, mirrored)] == [-1111] * 4
    assert [v[0] for v in replicas.values(strategy, own)] == [2, 20, 200, 2000]
    assert summed.read_value().numpy().tolist() == [1111, 1111]
    assert [int(v) for v in replicas.values(strategy, counter)] == [1] * 4


@on_both
def test_dynamic_shapes(kind):
    """Replicas hold 3, 0, 2 and 1 rows of a batch."""
    rows = [3, 0, 2, 1]

    def function(x):
        return (
            tf.reduce_sum(x),
            tf.shape(x)[0],
            x * 2.0,
            tf.reduce_mean(x),
            tf.nn.softmax(tf.reshape(x, [-1]))[:1],
            tf.where(x[:, 0] > 0)[:, 0],
        )

    total, size, doubled, mean, soft, positions = _run(
        kind,
        function,
        value=lambda c: tf.ones([rows[c.replica_id_in_sync_group], 2]),
    )
    assert total == [6, 0, 4, 2]
    assert size == rows
    assert doubled == [[[2.0, 2.0]] * n for n in rows]
    assert mean[::2] == [1, 1] and np.isnan(mean[1])
    assert [len(s) for s in soft] == [1, 0, 1, 1]
    np.testing.assert_allclose(soft[2], [0.25])
    assert positions == [list(range(n)) for n in rows]


@on_both
def test_kinds_of_results(kind):
    def function(x):
        return {
            "types": [tf.cast(x, t) for t in (tf.bool, tf.uint8, tf.float64)],
            "none": None,
            "number": 3,
            "slices": tf.IndexedSlices(x, tf.constant([1, 0])),
        }

    strategy = replicas.STRATEGIES[kind](4)
    step = tf.function(lambda: strategy.run(function, args=(tf.ones([2]),)))
    results = step()
    assert results["none"] is None
    for dtype, value in zip(
        ("bool", "uint8", "float64"), results["types"], strict=True
    ):
        for one in strategy.experimental_local_results(value):
            assert one.dtype == dtype and one.numpy().tolist() == [1, 1]
    for one in strategy.experimental_local_results(results["slices"]):
        assert one.indices.numpy().tolist() == [1, 0]


def test_run_outside_a_function():
    strategy = replicas.tpu(4)
    function = tf.function(lambda: replicas.power_of_ten())
    for _ in range(2):
        got = strategy.experimental_local_results(strategy.run(function))
        assert [float(v) for v in got] == [1, 10, 100, 1000]
    with pytest.raises(NotImplementedError, match="pure eager execution"):
        strategy.run(lambda: 1.0)


def test_no_results_and_no_variables():
    strategy = replicas.tpu(4)
    tf.function(lambda: strategy.run(lambda: None))()


def test_variables_created_in_the_step():
    strategy = replicas.tpu(4)
    made = []

    @tf.function
    def step():
        def function():
            if not made:
                made.append(tf.Variable([1.0]))
            made[0].assign_add([replicas.power_of_ten()])

        strategy.run(function)

    step()
    step()
    assert [v[0] for v in replicas.values(strategy, made[0])] == [
        3,
        21,
        201,
        2001,
    ]


def test_variables_whose_initial_values_are_arguments():
    strategy = replicas.tpu(4)
    made = []

    @tf.function
    def step(x):
        def function(x):
            if not made:
                made.append(tf.Variable(x * 2.0))
            return made[0] + x

        return strategy.run(function, args=(x,))

    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError, RuntimeError)
    ):
        step(tf.ones([2]))


# Keras on it.

LAYERS = {
    "dense": ((8,), lambda: [keras.layers.Dense(6, activation="relu")]),
    "embedding": (
        (5,),
        lambda: [keras.layers.Embedding(11, 4), keras.layers.Flatten()],
    ),
    "convolution": (
        (8, 8, 1),
        lambda: [
            keras.layers.Conv2D(3, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
        ],
    ),
    "recurrent": ((5, 3), lambda: [keras.layers.LSTM(4)]),
    "attention": (
        (5, 8),
        lambda: [_Attention(), keras.layers.GlobalAveragePooling1D()],
    ),
    "normalization": (
        (8,),
        lambda: [keras.layers.Dense(6), keras.layers.BatchNormalization()],
    ),
}


class _Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, seed=1)

    def call(self, x):
        return self.attention(x, x)


def _keras_data(name, num_rows):
    shape, _ = LAYERS[name]
    rng = np.random.default_rng(0)
    if name == "embedding":
        x = rng.integers(0, 11, size=(num_rows, *shape))
    else:
        x = rng.normal(size=(num_rows, *shape)).astype("float32")
    return x, rng.normal(size=(num_rows, 2)).astype("float32")


def _keras_model(name, optimizer, **compile_options):
    shape, layers = LAYERS[name]
    keras.utils.set_random_seed(3)
    dtype = "int32" if name == "embedding" else "float32"
    model = keras.Sequential(
        [
            keras.layers.Input(shape, dtype=dtype),
            *layers(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss="mse",
        metrics=["mae"],
        **compile_options,
    )
    return model


def _fit(strategy, name, optimizer_fn, num_rows=28, **compile_options):
    """Two epochs of two batches of 12 and a ragged one, 4 rows."""
    x, y = _keras_data(name, num_rows)
    with strategy.scope():
        model = _keras_model(name, optimizer_fn(), **compile_options)
    history = model.fit(
        x, y, batch_size=12, epochs=2, shuffle=False, verbose=0
    ).history
    evaluated = model.evaluate(x, y, batch_size=12, verbose=0)
    predicted = model.predict(x, batch_size=12, verbose=0)
    return model, history, evaluated, predicted


@pytest.mark.parametrize(
    "kind",
    ["tpu", pytest.param("tpu_permuted", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_plain_keras_equals_mirrored_strategy(name, kind, report):
    """`fit` with a ragged last batch, metrics, `evaluate` and `predict`."""

    def optimizer():
        return O.SGD(O.schedules.ExponentialDecay(0.05, 2, 0.5), momentum=0.9)

    reference = _fit(replicas.mirrored(4), name, optimizer)
    got = _fit(replicas.STRATEGIES[kind](4), name, optimizer)
    strategies = (replicas.mirrored(4), replicas.STRATEGIES[kind](4))
    largest = 0.0
    for mine, theirs in zip(got[0].weights, reference[0].weights, strict=True):
        for own, other in zip(
            replicas.values(strategies[1], mine),
            replicas.values(strategies[0], theirs),
            strict=True,
        ):
            largest = max(largest, float(np.abs(own - other).max()))
    for key, values in reference[1].items():
        np.testing.assert_allclose(got[1][key], values, rtol=1e-5)
    np.testing.assert_allclose(got[2], reference[2], rtol=1e-5)
    np.testing.assert_allclose(got[3], reference[3], atol=1e-5)
    report(f"plain Keras, {name}, {kind}: from MirroredStrategy {largest:.1e}")
    assert largest <= 2e-6
    first = _keras_model(name, "sgd").get_weights()
    assert np.abs(got[0].get_weights()[0] - first[0]).max() > 1e-3


@pytest.mark.parametrize("steps_per_execution", [2, 3])
def test_steps_per_execution(steps_per_execution):
    def optimizer():
        return O.Adam(0.01)

    strategy = replicas.tpu(4)
    reference = _fit(strategy, "dense", optimizer)
    got = _fit(
        strategy,
        "dense",
        optimizer,
        steps_per_execution=steps_per_execution,
    )
    assert got[0].optimizer.iterations == reference[0].optimizer.iterations
    for mine, theirs in zip(
        got[0].get_weights(), reference[0].get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_dropout_and_mixed_bfloat16():
    """Masks differ from step to step; the loss falls."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    x, _ = training.data(256)
    y = x[:, :1] * 2.0
    with replicas.tpu(4).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((8,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(optimizer=O.Adam(0.02), loss="mse")
    dropped = model.layers[1](tf.ones([64, 4]), training=True).numpy()
    assert model.layers[0].compute_dtype == "bfloat16" and (dropped == 0).any()
    state = [w.numpy().copy() for w in model.layers[1].variables]
    losses = model.fit(x, y, batch_size=64, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert any(
        (w.numpy() != old).any()
        for w, old in zip(model.layers[1].variables, state, strict=True)
    )


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data")
def test_custom_loop_over_a_distributed_dataset():
    """The loop is in the graph; the last batch is ragged."""
    strategy = replicas.tpu(4)
    x, y = training.data(60)
    with strategy.scope():
        model = training.model()
        optimizer = O.SGD(0.1)
        optimizer.build(model.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def epoch(batches):
        total = 0.0
        for x, y in batches:

            def on_replica(x, y):
                with tf.GradientTape() as tape:
                    errors = tf.square(model(x) - y)
                    loss = tf.nn.compute_average_loss(
                        tf.reduce_mean(errors, axis=-1), global_batch_size=16
                    )
                optimizer.apply(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                )
                return loss

            per_replica = strategy.run(on_replica, args=(x, y))
            total += strategy.reduce("SUM", per_replica, axis=None)
        return total

    got = float(epoch(distributed))
    one = training.model()
    plain = O.SGD(0.1)
    total = 0.0
    for x, y in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(one(x) - y)) / 16
        plain.apply(
            tape.gradient(loss, [v.value for v in one.trainable_variables]),
            one.trainable_variables,
        )
        total += float(loss)
    assert got == pytest.approx(total, rel=1e-5)
    assert (
        training.deviation(
            training.weights(model, strategy), training.weights(one)
        )
        <= 1e-6
    )


def test_several_hosts():
    """Each host has an input pipeline of its own."""
    strategy = testing.simulated_tpu_strategy(8, num_hosts=4)
    assert strategy.extended.num_hosts == 4
    pipelines = []

    def dataset_of(context):
        pipelines.append(context.input_pipeline_id)
        first = 100.0 * context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(first + tf.range(4.0)).batch(
            context.get_per_replica_batch_size(8)
        )

    iterator = iter(strategy.distribute_datasets_from_function(dataset_of))
    step = tf.function(
        lambda x: strategy.run(
            lambda x: (x, _context().all_reduce("SUM", x)), args=(x,)
        )
    )
    for shift in (0, 2):
        own, total = step(next(iterator))
        own = [float(v[0]) for v in strategy.experimental_local_results(own)]
        expected = [100 * h + shift + k for h in range(4) for k in range(2)]
        assert own == expected
        for value in strategy.experimental_local_results(total):
            assert float(value[0]) == sum(expected)
    assert pipelines == [0, 1, 2, 3]


def test_fit_on_several_hosts_is_one_device():
    reference = training.train(lambda: O.SGD(0.05))[1]
    for device_assignment in (True, False):
        strategy = testing.simulated_tpu_strategy(
            8, num_hosts=2, device_assignment=device_assignment
        )
        got = training.train(lambda: O.SGD(0.05), strategy)[1]
        assert training.deviation(got, reference) <= 1e-6


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_other_numbers_of_replicas(num_replicas):
    options = dict(xy=training.data(48 * 4), batch_size=48)
    reference = training.train(lambda: O.SGD(0.05), **options)[1]
    got = training.train(
        lambda: O.SGD(0.05), replicas.tpu(num_replicas), **options
    )[1]
    assert training.deviation(got, reference) <= 1e-6


def test_checkpoints_and_files(tmp_path):
    strategy = replicas.tpu(4)
    model, _ = training.train(lambda: O.Adam(0.01), strategy, num_steps=3)
    kept = model.get_weights()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(os.path.join(tmp_path, "checkpoint"))
    file = os.path.join(tmp_path, "model.keras")
    model.save(file)
    x, y = training.data()
    model.fit(x, y, batch_size=64, verbose=0)
    assert np.abs(model.get_weights()[0] - kept[0]).max() > 1e-4
    checkpoint.restore(path).assert_consumed()
    with strategy.scope():
        loaded = keras.saving.load_model(file)
    for restored in (model, loaded):
        for mine, theirs in zip(restored.get_weights(), kept, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert restored.optimizer.iterations.numpy() == 3
        restored.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    for mine, theirs in zip(
        model.get_weights(), loaded.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


# What it leaves alone, and what it keeps.


def test_programs_are_compiled_once():
    strategy = replicas.tpu(4)

    def train():
        model, _ = training.train(lambda: O.SGD(0.05), strategy, num_steps=3)
        model.fit(*training.data(), batch_size=64, verbose=0)

    train()
    before = xla_cpu.compiled.cache_info().misses
    train()
    assert xla_cpu.compiled.cache_info().misses == before


def test_a_context_manager_frees_programs():
    with testing.simulated_tpu_strategy(2) as strategy:
        step = tf.function(lambda: strategy.run(replicas.power_of_ten))
        step()
        assert xla_cpu.compiled.cache_info().currsize > 0
    assert xla_cpu.compiled.cache_info().currsize == 0
    got = strategy.experimental_local_results(step())
    assert [float(v) for v in got] == [1, 10]


def test_nothing_of_tensorflow_is_patched():
    """The strategy's own methods run, all but one, and no module changes."""
    from tensorflow.python.distribute import tpu_strategy
    from tensorflow.python.tpu import tpu

    strategy = replicas.tpu(2)
    assert tpu_strategy.tpu is tpu
    assert tpu.replicate.__module__ == tpu.__name__
    kept = type(strategy.extended)
    overridden = {
        name
        for name in vars(kept)
        if not name.startswith("__") and hasattr(tpu_strategy.TPUExtended, name)
    }
    assert overridden == {"_tpu_function_creator"}


def test_graphs_are_freed():
    """No reference cycle keeps what a step needed for ever."""
    strategy = replicas.tpu(2)
    made = []
    extract = replicated_program.extract

    def extract_and_remember(*args):
        extraction = extract(*args)
        made.append(weakref.ref(extraction.program))
        return extraction

    replicated_program.extract = extract_and_remember
    try:
        step = tf.function(lambda: strategy.run(replicas.power_of_ten))
        step()
    finally:
        replicated_program.extract = extract
    assert made[0]() is not None
    del step
    gc.collect()
    assert made[0]() is None


def test_an_inner_function_outlives_the_one_that_traced_it():
    strategy = replicas.tpu(2)

    @tf.function
    def inner():
        return strategy.run(replicas.power_of_ten)

    def outer():
        return inner()

    for _ in range(2):
        traced_in = tf.function(outer)
        got = strategy.experimental_local_results(traced_in())
        assert [float(v) for v in got] == [1, 10]
        del traced_in
        gc.collect()
    assert inner.experimental_get_tracing_count() == 1


# What can't run, by name.


def _table():
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1], [2]), 0
    )


def _outside_variable():
    variable = tf.Variable(1.0)
    return lambda x: x * variable


REFUSED = {
    "print": (lambda: lambda x: [tf.print(x), x][1], "tf.print"),
    "python": (
        lambda: lambda x: tf.numpy_function(lambda a: a, [x], tf.float32),
        "tf.numpy_function",
    ),
    "py_function": (
        lambda: lambda x: tf.py_function(lambda a: a, [x], tf.float32),
        "tf.py_function",
    ),
    "table": (
        lambda: (lambda t: lambda x: t.lookup(tf.cast(x, tf.int32)))(_table()),
        "a resource that is no variable",
    ),
    "variable": (_outside_variable, "outside strategy.scope"),
    "outside_compilation": (
        lambda: lambda x: tf.compat.v1.tpu.outside_compilation(tf.sin, x),
        "outside compilation",
    ),
    "strings": (
        lambda: lambda x: tf.strings.length(tf.strings.as_string(x)),
        "AsString",
    ),
    "infeed": (
        lambda: lambda x: tf.raw_ops.InfeedDequeue(dtype=tf.float32, shape=[2]),
        "infeed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, match = REFUSED[name]
    function = make()
    with pytest.raises(NotImplementedError, match=match):
        _run("tpu", function)


def test_jit_compile_is_refused():
    strategy = replicas.tpu(2)
    step = tf.function(
        lambda: strategy.run(replicas.power_of_ten), jit_compile=True
    )
    with pytest.raises(NotImplementedError, match="take off jit_compile=True"):
        step()
    with strategy.scope():
        model = training.model()
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        model.fit(*training.data(), batch_size=64, verbose=0)


@pytest.mark.parametrize(
    "kwargs, error, match",
    [
        (dict(num_replicas=0), ValueError, "num_replicas must be positive"),
        (dict(num_replicas="8"), TypeError, "must be an int, got '8'"),
        (dict(num_replicas=True), TypeError, "must be an int, got True"),
        (dict(num_replicas=8, num_hosts=3), ValueError, "spread evenly"),
        (
            dict(num_replicas=2, replica_permutation=[1, 0]),
            ValueError,
            "Pass device_assignment=False",
        ),
        (
            dict(
                num_replicas=2,
                device_assignment=False,
                replica_permutation=[1, 1],
            ),
            ValueError,
            "each of 0 to 1 once",
        ),
        (dict(num_replicas=9), RuntimeError, "needs 9 logical CPUs"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        testing.simulated_tpu_strategy(**kwargs)


@pytest.mark.parametrize(
    "versions, match",
    [
        ({"jax": None}, "needs jax 0.10.2, found none"),
        ({"jax": "0.9.0"}, "needs jax 0.10.2, found 0.9.0"),
        ({"jaxlib": "0.10.1"}, "needs jaxlib 0.10.2, found 0.10.1"),
        ({"tensorflow-tpu": "2.20.0"}, "environment of its own"),
        ({"libtpu": "0.0.51"}, "needs libtpu 0.0.42.1"),
        ({"libtpu": None}, "Linux x86-64 only"),
    ],
    ids=str,
)
def test_versions(versions, match, monkeypatch):
    version = requirements._version
    monkeypatch.setattr(
        requirements, "_version", lambda d: versions.get(d, version(d))
    )
    with pytest.raises(ImportError, match=match):
        requirements.check_jax()
        requirements.check_libtpu()


def test_the_versions_are_those_of_the_extra():
    text = (ROOT / "setup.cfg").read_text()
    assert f"jax =={requirements.JAX}\n" in text
    assert f"jaxlib =={requirements.JAX}\n" in text
    assert f"libtpu =={requirements.LIBTPU};" in text


def test_a_new_process_needs_one_call():
    """No flag, no logical CPUs, and jax is used by others beforehand."""
    program = """
import json
import jax
import tensorflow as tf
from tf_xshard import testing
devices = len(jax.devices())
strategy = testing.simulated_tpu_strategy(3)
step = tf.function(lambda: strategy.run(
    lambda: tf.distribute.get_replica_context().all_reduce("SUM", 2.0)))
got = [float(v) for v in strategy.experimental_local_results(step())]
try:
    testing.simulated_tpu_strategy(4)
except RuntimeError as error:
    message = str(error)
print(json.dumps([got, devices, len(jax.devices()), message]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    got, before, after, message = json.loads(result.stdout.splitlines()[-1])
    assert got == [6.0] * 3
    assert before == after
    assert "needs 4 logical CPUs, and TensorFlow runs already with 3" in message


@pytest.mark.full
def test_a_collective_that_not_all_replicas_reach_ends_the_process():
    """A TPU would hang: replicas run their loops a different number of times."""
    program = """
import tensorflow as tf
from tf_xshard import testing
strategy = testing.simulated_tpu_strategy(2)
def on_replica():
    context = tf.distribute.get_replica_context()
    return tf.while_loop(
        lambda i, y: i < context.replica_id_in_sync_group,
        lambda i, y: (i + 1, context.all_reduce("SUM", y)),
        [0, tf.ones([2])],
    )[1]
tf.function(lambda: strategy.run(on_replica))()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode < 0
    assert "Termination timeout for `all reduce" in result.stderr


def test_the_host_side_is_rebuilt_with_its_functions():
    """Replicas with other numbers of rows: padding is a tf.cond on the host."""
    strategy = replicas.tpu(4)

    @tf.function
    def step(x):
        return strategy.run(tf.reduce_sum, args=(x,))

    values = strategy.experimental_distribute_values_from_function(
        lambda c: tf.ones([c.replica_id_in_sync_group + 1])
    )
    step.get_concrete_function(values)
    gc.collect()
    got = strategy.experimental_local_results(step(values))
    assert [float(v) for v in got] == [1, 2, 3, 4]
