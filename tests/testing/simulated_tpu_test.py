"""`simulated_tpu_strategy` runs custom loops, with exact numbers."""

import concurrent.futures
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests.support import replicas
from tf_xshard import testing
from tf_xshard.testing import replicated_program
from tf_xshard.testing import stablehlo
from tf_xshard.testing import xla_cpu


def _context():
    return tf.distribute.get_replica_context()


def _cross_replica_sum(x, groups):
    return tf.raw_ops.CrossReplicaSum(input=x, group_assignment=groups)


def _floats(strategy, result):
    """Every replica's result."""
    return [float(v) for v in strategy.experimental_local_results(result)]


@pytest.mark.parametrize(
    "kind, number", [("tpu", 1), ("tpu", 3), ("tpu_permuted", 4)]
)
def test_a_tpu_strategys_collectives(kind, number):
    """Exact: each replica's value names it."""
    strategy = replicas.STRATEGIES[kind](number)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert strategy.num_replicas_in_sync == number
    assert strategy.extended.num_hosts == 1
    assert len(set(strategy.extended.worker_devices)) == number

    def function(x):
        return (
            _context().all_reduce("SUM", x),
            _context().all_reduce("MEAN", x),
            _context().all_gather(x, axis=0),
            # int64 travels through an AllToAll.
            _context().all_gather(tf.cast(x[:1], tf.int64), axis=0),
            _context().replica_id_in_sync_group,
        )

    total, mean, gathered, integers, ids = replicas.run(kind, function, number)
    own = [10**r for r in range(number)]
    assert total == [[sum(own)] * 2] * number
    np.testing.assert_allclose(mean, sum(own) / number, rtol=1e-6)
    assert gathered == [[r for r in own for _ in range(2)]] * number
    assert integers == [own] * number
    assert ids == list(range(number))


def test_native_groups_with_a_device_assignment():
    dtypes = "bfloat16", "float16", "float32", "int32"

    def function(x):
        groups = [[2, 0], [1, 3]]
        sums = [_cross_replica_sum(tf.cast(x, t), groups) for t in dtypes]
        permuted = tf.raw_ops.CollectivePermute(
            input=x, source_target_pairs=[[0, 1], [1, 2], [2, 3], [3, 0]]
        )
        return [tf.cast(one, tf.float32) for one in sums], permuted

    sums, permuted = replicas.run(
        "tpu",
        function,
        value=lambda c: tf.fill([2], 2.0**c.replica_id_in_sync_group),
    )
    assert sums == [[[5, 5], [10, 10], [5, 5], [10, 10]]] * 4
    assert permuted == [[8, 8], [1, 1], [2, 2], [4, 4]]


def test_native_groups_without_one_pair_other_replicas():
    """The trap that a device assignment avoids is modelled."""
    strategy = testing.simulated_tpu_strategy(
        4, device_assignment=False, replica_permutation=[0, 2, 1, 3]
    )

    pairs = lambda: _cross_replica_sum(
        replicas.power_of_ten(), [[0, 1], [2, 3]]
    )
    step = tf.function(lambda: strategy.run(pairs), autograph=False)
    assert _floats(strategy, step()) == [101, 1010, 101, 1010]


def test_control_flow():
    def function(x):
        _, looped, gathered = tf.while_loop(
            lambda i, *_: i < 3,
            lambda i, y, z: (
                i + 1,
                y + _cross_replica_sum(x, [[0, 1, 2, 3]]),
                z + _context().all_gather(tf.cast(x[:1], tf.int64), axis=0),
            ),
            [tf.constant(0), tf.zeros([2]), tf.zeros([4], tf.int64)],
        )
        is_low = _context().replica_id_in_sync_group < 2
        return looped, tf.cond(is_low, lambda: x, lambda: -x), gathered

    looped, branched, gathered = replicas.run("tpu_permuted", function)
    assert looped == [[3333, 3333]] * 4
    assert branched == [[1, 1], [10, 10], [-100, -100], [-1000, -1000]]
    assert gathered == [[3, 30, 300, 3000]] * 4


def test_variables():
    """Of each aggregation, and written more than once."""
    strategy, aggregation = replicas.tpu(4), tf.VariableAggregation
    with strategy.scope():
        mirrored = tf.Variable([0.0, 0.0])
        own = tf.Variable([0.0, 0.0], aggregation=aggregation.NONE)
        counter = tf.Variable(0, aggregation=aggregation.ONLY_FIRST_REPLICA)

    nested = tf.function(lambda x: own.assign_add(x), autograph=False)

    update = lambda strategy, value: strategy.extended.update(
        mirrored, lambda v, g: v.assign_sub(g), args=(value,)
    )

    def function(x):
        nested(x)
        counter.assign_add(1)
        before = own.read_value()
        own.assign_add(x)
        _context().merge_call(update, args=(_context().all_reduce("SUM", x),))
        return before, own.read_value()

    before, after = replicas.run("tpu", function)
    assert before == [[10.0**r] * 2 for r in range(4)]
    assert after == [[2 * 10.0**r] * 2 for r in range(4)]
    assert [v[0] for v in replicas.values(strategy, mirrored)] == [-1111] * 4
    assert [v[0] for v in replicas.values(strategy, own)] == [2, 20, 200, 2000]
    assert [int(v) for v in replicas.values(strategy, counter)] == [1] * 4


def test_dynamic_shapes():
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

    total, size, doubled, mean, soft, positions = replicas.run(
        "tpu_permuted",
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


def test_run_outside_a_function():
    strategy = replicas.tpu(2)
    function = tf.function(lambda: replicas.power_of_ten())
    for _ in range(2):
        assert _floats(strategy, strategy.run(function)) == [1, 10]
    with pytest.raises(NotImplementedError, match="pure eager execution"):
        strategy.run(lambda: 1.0)
    # No results and no variables.
    assert tf.function(lambda: strategy.run(lambda: None))() is None


def test_bools_as_bits_and_as_bytes():
    """TensorFlow 2.22 prints a byte for each, older versions a bit."""
    mask = np.random.default_rng(0).random([12, 13]) > 0.5
    bits = np.packbits(mask.reshape(-1), bitorder="little")
    for data in (bits, mask.astype(np.uint8)):
        dense = f'dense<"0x{data.tobytes().hex().upper()}">'
        [found] = stablehlo.constants(
            "module { func.func @main() -> tensor<12x13xi1> {"
            f" %0 = stablehlo.constant {dense} : tensor<12x13xi1>\n"
            "return %0 : tensor<12x13xi1> } }"
        )
        np.testing.assert_array_equal(found, mask)


def test_constants_that_are_written_differently(monkeypatch):
    stablehlo.check_constants.cache_clear()
    stablehlo.check_constants()
    read = stablehlo.constants
    inverted = lambda text: [~read(text)[0], *read(text)[1:]]
    monkeypatch.setattr(stablehlo, "constants", inverted)
    stablehlo.check_constants.cache_clear()
    with pytest.raises(ImportError, match="writes bool constants"):
        stablehlo.check_constants()


def test_gradients_through_run_are_refused():
    """As TPUReplicatedOutput refuses them; None would go unnoticed."""
    strategy = replicas.tpu(2)

    @tf.function(autograph=False)  # Its error hides the type.
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = strategy.run(lambda x: x * x, args=(x,))
            y = strategy.reduce("SUM", y, axis=None)
        return tape.gradient(y, x)

    with pytest.raises(LookupError, match="Open the GradientTape in the"):
        step(tf.constant(2.0))


def test_threads():
    """Several threads' programs do not take each other's replicas."""
    strategy = replicas.tpu(2)
    total = lambda x: _context().all_reduce("SUM", x)
    step = tf.function(lambda x: strategy.run(total, (x,)), autograph=False)

    def steps(value):
        results = [step(value) for _ in range(20)]
        return [_floats(strategy, one)[1] for one in results]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = pool.map(steps, [tf.constant(float(n)) for n in range(4)])
    assert list(results) == [[2.0 * n] * 20 for n in range(4)]


@pytest.mark.parametrize("depends", [False, True])
def test_variables_created_in_the_step(depends):
    strategy = replicas.tpu(2)
    made = []

    def function(x):
        if not made:
            made.append(tf.Variable(x * 2.0 if depends else [1.0]))
        made[0].assign_add([replicas.power_of_ten()])

    step = tf.function(lambda x: strategy.run(function, (x,)), autograph=False)
    if depends:
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="initial values depend on"
        ):
            step(tf.ones([1]))
        return
    for _ in range(2):
        step(tf.ones([1]))
    assert replicas.values(strategy, made[0]) == [3, 21]


# What it leaves alone, and what it keeps.


def test_programs_are_compiled_once():
    """An equal program that is traced again is not compiled again."""
    strategy = replicas.tpu(2)

    def compilations():
        before = xla_cpu.compiled.cache_info().misses
        function = tf.function(lambda x: tf.tanh(x) + 3.0)
        step = tf.function(lambda: strategy.run(function, (tf.ones([7]),)))
        for _ in range(2):
            step()
        return xla_cpu.compiled.cache_info().misses - before

    assert [compilations() for _ in range(2)] == [1, 0]


def test_a_context_manager_frees_programs():
    with testing.simulated_tpu_strategy(2) as strategy:
        step = tf.function(lambda: strategy.run(replicas.power_of_ten))
        step()
        assert xla_cpu.compiled.cache_info().currsize > 0
    assert xla_cpu.compiled.cache_info().currsize == 0
    assert _floats(strategy, step()) == [1, 10]


def test_nothing_of_tensorflow_is_patched():
    from tensorflow.python.distribute import tpu_strategy
    from tensorflow.python.tpu import tpu

    replicas.tpu(2)
    assert tpu_strategy.tpu is tpu
    assert tpu.replicate.__module__ == tpu.__name__


def test_only_its_own_iterators_are_untuned():
    """A thread that tunes would sleep longer and longer as a program ends."""
    data = tf.data.Dataset.range(8).batch(4)
    for strategy in (replicas.tpu(2), replicas.mirrored(2)):
        for distributed in (
            strategy.distribute_datasets_from_function(lambda context: data),
            strategy.experimental_distribute_dataset(data),
        ):
            assert isinstance(distributed, tf.distribute.DistributedDataset)
            enabled = {
                of_device._dataset.options().autotune.enabled
                for of_host in iter(distributed)._iterators
                for of_device in of_host._iterator._device_iterators
            }
            assert enabled == {False if replicas.is_tpu(strategy) else None}


def test_graphs_are_freed(monkeypatch):
    """No reference cycle keeps what a step needed for ever.

    What is left of the host's side holds: replicas with other numbers of rows
    are padded there, in a tf.cond.
    """
    strategy, made = replicas.tpu(2), []
    extract = replicated_program.extract

    def extract_and_remember(*args):
        extraction = extract(*args)
        made.append(weakref.ref(extraction.program))
        return extraction

    monkeypatch.setattr(replicated_program, "extract", extract_and_remember)
    step = tf.function(
        lambda x: strategy.run(tf.reduce_sum, args=(x,)), autograph=False
    )
    values = strategy.experimental_distribute_values_from_function(
        lambda c: tf.ones([c.replica_id_in_sync_group + 1])
    )
    step.get_concrete_function(values)
    gc.collect()
    assert _floats(strategy, step(values)) == [1, 2]
    assert made[0]() is not None
    del step
    gc.collect()
    assert made[0]() is None


def test_an_inner_function_outlives_the_one_that_traced_it():
    strategy = replicas.tpu(2)

    inner = tf.function(
        lambda: strategy.run(replicas.power_of_ten), autograph=False
    )
    for _ in range(2):
        assert _floats(strategy, tf.function(lambda: inner())()) == [1, 10]
        gc.collect()
    assert inner.experimental_get_tracing_count() == 1
