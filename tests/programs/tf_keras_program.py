"""Trains with tf_keras in a process of its own; prints differences as JSON.

Each replica gets other gradients, and each group must end with the weights of
one device that gets the group's mean or sum.
"""

import dataclasses
import json
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import tf_xshard
from tests.support import replicas
from tf_xshard.distribute import site

NUM_REPLICAS = 4
NUM_STEPS = 5
GROUPS = [[0, 2], [3, 1]]
SHAPES = [(5, 3), (7,), (4, 2)]
LEGACY = tf_keras.optimizers.legacy
NEW = tf_keras.optimizers
SCALER = tf_keras.mixed_precision.LossScaleOptimizer

OPTIMIZERS = {
    "legacy_adam": lambda **kw: LEGACY.Adam(0.1, global_clipnorm=0.5, **kw),
    "legacy_sgd": lambda **kw: LEGACY.SGD(0.1, momentum=0.9, **kw),
    "adam": lambda: NEW.Adam(0.1, global_clipnorm=0.5),
    "adamw": lambda: NEW.AdamW(0.1, weight_decay=0.1, clipnorm=0.3),
    "sgd": lambda: NEW.SGD(0.1, momentum=0.9),
    "clipped_sgd": lambda: NEW.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, and how it gets an aggregator."""

    optimizer: str
    reduction: str = "mean"
    groups: list | None = None
    # "argument" of a legacy optimizer, "given" afterwards, or "ignored".
    how: str = "given"
    is_scaled: bool = False
    # Further arguments of the aggregator.
    options: dict = dataclasses.field(default_factory=dict)
    # All steps in one tf.function, as in Orbit.
    loops: bool = False
    # Replica 1 has no gradient of the first variable.
    lacks_one: bool = False
    # The optimizer to compare with, if it is another one.
    reference: str | None = None


CASES = {
    "legacy_adam": Case("legacy_adam", how="argument"),
    "legacy_sgd": Case("legacy_sgd", "sum", GROUPS, "argument"),
    "legacy_sgd given": Case("legacy_sgd", "mean", GROUPS),
    "legacy_adam scaled": Case("legacy_adam", "mean", GROUPS, is_scaled=True),
    "adam": Case("adam", "mean", GROUPS),
    "adam scaled": Case("adam", "mean", GROUPS, is_scaled=True),
    "adamw": Case("adamw", "sum", GROUPS),
    "sgd": Case("sgd"),
    "replica": Case("sgd", options={"loss_normalization": "replica"}),
    "clipped": Case(
        "sgd",
        "mean",
        GROUPS,
        options={"post_reduce": tf_xshard.clip_by_global_norm(0.5)},
        reference="clipped_sgd",
    ),
    "loop": Case("adam", "mean", GROUPS, loops=True),
    "legacy loop": Case("legacy_adam", "sum", GROUPS, "argument", loops=True),
    "none": Case("sgd", "mean", GROUPS, lacks_one=True),
    "ignored": Case("sgd", "mean", GROUPS, "ignored"),
}


def gradients():
    """`result[step][variable][replica]`; the last variable has rows."""
    rng = np.random.default_rng(8)
    return [
        [
            rng.normal(size=(NUM_REPLICAS, *shape)).astype("float32")
            for shape in SHAPES
        ]
        for _ in range(NUM_STEPS)
    ]


def variables():
    rng = np.random.default_rng(7)
    return [tf.Variable(rng.normal(size=s).astype("float32")) for s in SHAPES]


def as_rows(value):
    """Makes IndexedSlices, in which rows 0 and 1 occur twice."""
    half = 0.5 * value[:2]
    return tf.IndexedSlices(
        tf.concat([half, half, value[2:]], 0),
        tf.constant([0, 1, 0, 1, 2, 3]),
        tf.constant(SHAPES[-1]),
    )


def apply(optimizer, scaled, values, given, sparse):
    """Applies gradients; the last one as IndexedSlices, if `sparse`."""
    values = list(values)
    if scaled:
        scale = optimizer.get_scaled_loss(tf.constant(1.0))
        values = [one * scale for one in values]
    if sparse:
        values[-1] = as_rows(values[-1])
    if scaled:
        values = optimizer.get_unscaled_gradients(values)
    optimizer.apply_gradients(list(zip(values, given, strict=True)))


def trained(strategy, case, overflow=None):
    """Returns each variable's value on every replica."""
    arguments = (case.reduction, case.groups)
    with strategy.scope():
        given = variables()
        if case.how == "argument":
            aggregator = tf_xshard.tf_keras.gradient_aggregator(
                *arguments, **case.options
            )
            optimizer = OPTIMIZERS[case.optimizer](
                gradient_aggregator=aggregator
            )
        else:
            optimizer = OPTIMIZERS[case.optimizer]()
        if case.is_scaled:
            optimizer = SCALER(optimizer, initial_scale=8.0)
        if case.how == "given":
            optimizer = tf_xshard.tf_keras.with_aggregator(
                optimizer, *arguments, **case.options
            )
    divisor = NUM_REPLICAS
    if case.options.get("loss_normalization") == "replica":
        divisor = 1

    def on_replica(step, *arriving):
        replica = replicas.replica_id_tensor()
        own = [one[replica] / divisor for one in arriving]
        if overflow is not None:
            is_bad = tf.logical_and(
                tf.equal(tf.cast(replica, tf.int32), overflow[1]),
                tf.equal(step, overflow[0]),
            )
            own[0] = tf.where(is_bad, np.inf, own[0])
        if case.lacks_one and tf.get_static_value(replica) == 1:
            own[0] = None
        apply(optimizer, case.is_scaled, own, given, sparse=True)

    @tf.function
    def step(number, *arriving):
        strategy.run(on_replica, args=(number, *arriving))

    @tf.function
    def loop(*all_steps):
        for number in tf.range(NUM_STEPS):
            arriving = [one[number] for one in all_steps]
            strategy.run(on_replica, args=(number, *arriving))

    if case.loops:
        loop(*map(tf.stack, zip(*gradients(), strict=True)))
    else:
        for number, one in enumerate(gradients()):
            step(tf.constant(number), *map(tf.constant, one))
    return [replicas.values(strategy, v) for v in given]


def one_device(case, members, overflow_at=None):
    """Returns each variable after plain tf_keras with a group's gradients."""
    given = variables()
    optimizer = OPTIMIZERS[case.reference or case.optimizer]()
    if case.is_scaled:
        optimizer = SCALER(optimizer, initial_scale=8.0)
    combine = np.mean if case.reduction == "mean" else np.sum
    for number, one in enumerate(gradients()):
        if case.lacks_one:
            one[0][1] = 0
        values = [tf.constant(combine(v[members], axis=0)) for v in one]
        if number == overflow_at:
            values[0] *= np.inf
        # tf_keras would clip by the norm of the repeated rows.
        apply(optimizer, case.is_scaled, values, given, sparse=False)
    return [v.numpy() for v in given]


def difference(strategy, case, overflow=None):
    """Compares every replica with one device; the largest |difference|."""
    return largest_difference(
        strategy,
        trained(strategy, case, overflow),
        case.groups,
        lambda members: one_device(case, members, overflow and overflow[0]),
    )


def largest_difference(strategy, got, groups, expected_of):
    """The largest |difference| of a replica's variables from its group's."""
    ids = site.local_replica_ids(strategy)
    largest = 0.0
    for members in groups or [list(range(NUM_REPLICAS))]:
        mine = set(members) & set(ids)
        expected = expected_of(members) if mine else []
        for values, want in zip(got, expected, strict=bool(mine)):
            for replica in mine:
                error = np.max(np.abs(values[ids.index(replica)] - want))
                largest = max(largest, float(error))
    return largest


def _fit(strategy, wrap):
    x = np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)
    with strategy.scope():
        tf_keras.utils.set_random_seed(3)
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(4, "tanh", input_shape=(3,))]
            + [tf_keras.layers.Dense(2)]
        )
        model.compile(wrap(NEW.Adam(0.05)), "mse")
    model.fit(x, x[:, :2], batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


def fit_difference(strategy):
    got = _fit(strategy, tf_xshard.tf_keras.with_aggregator)
    expected = _fit(tf.distribute.get_strategy(), lambda optimizer: optimizer)
    pairs = zip(got, expected, strict=True)
    return float(max(np.max(np.abs(a - b)) for a, b in pairs))


def _small(strategy):
    is_tpu = site.kind_of(strategy) == "tpu"
    return tf_xshard.Communication(
        dtype="bfloat16" if is_tpu else "int8", error_feedback=True
    )


def _with_feedback(strategy, optimizer, wrap):
    """Trains with small gradients; returns variables, and what `wrap` did."""
    communication = _small(strategy)
    with strategy.scope():
        given = variables()
        optimizer = wrap(optimizer, "mean", GROUPS, communication=communication)

    @tf.function
    def step(*arriving):
        def on_replica(*arriving):
            replica = replicas.replica_id_tensor()
            own = [one[replica] / NUM_REPLICAS for one in arriving]
            optimizer.apply_gradients(list(zip(own, given, strict=True)))

        strategy.run(on_replica, args=arriving)

    for one in gradients():
        step(*map(tf.constant, one))
    return [np.stack(replicas.values(strategy, v)) for v in given], optimizer


def feedback(strategy):
    """Compares small gradients and residuals with CrossShardOptimizer's."""
    with strategy.scope():
        expected, wrapper = _with_feedback(
            strategy,
            keras.optimizers.SGD(0.1, momentum=0.9),
            tf_xshard.CrossShardOptimizer,
        )
        got, optimizer = _with_feedback(
            strategy,
            NEW.SGD(0.1, momentum=0.9),
            tf_xshard.tf_keras.with_aggregator,
        )
    pairs = list(zip(got, expected, strict=True))
    wanted = [residual.numpy() for residual in wrapper._residuals]
    with tempfile.TemporaryDirectory() as directory:
        path = tf.train.Checkpoint(optimizer=optimizer).save(directory + "/c")
        with strategy.scope():
            other = tf_xshard.tf_keras.with_aggregator(
                NEW.SGD(0.1, momentum=0.9),
                communication=_small(strategy),
            )
            given = variables()
            tf.train.Checkpoint(optimizer=other).read(path)
        plan = tf_xshard.communication_plan(other, given)
        residuals = other.aggregate_gradients.residuals.residuals
        pairs += zip(residuals, wanted, strict=True)
    assert min(np.max(np.abs(one)) for one in wanted) > 1e-4
    num_values = sum(one.size for one in wanted)
    # Momentum and residuals; `iterations` and the learning rate are small.
    assert 0 <= plan.slot_bytes - 2 * 4 * num_values < 20
    assert {one.dtype for one in plan.operations} == {_small(strategy).dtype}
    return float(max(np.max(np.abs(a - b)) for a, b in pairs))


def ledger(strategy):
    """Returns bytes of an epoch in `fit`: measured, and planned."""
    x = np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)
    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Dense(4, input_shape=[3])])
        model.compile(
            tf_xshard.tf_keras.with_aggregator(LEGACY.SGD(), "mean", GROUPS),
            "mse",
        )
    callback = tf_xshard.tf_keras.communication_ledger()
    history = model.fit(
        x,
        np.zeros((32, 4), "float32"),
        batch_size=8,
        epochs=2,
        verbose=0,
        callbacks=[callback],
    ).history
    plan = tf_xshard.communication_plan(model)
    assert callback.totals["communication_bytes"] > 0
    return [history["communication_bytes"], [4 * plan.bytes_per_step] * 2]


def strategy_of(kind):
    """A strategy of four replicas; "workers" has one in each process."""
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )
    return replicas.STRATEGIES[kind](NUM_REPLICAS)


def main(kind):
    strategy = strategy_of(kind)
    found = {"fit": fit_difference(strategy), "ledger": ledger(strategy)}
    if kind != "workers":
        found["feedback"] = feedback(strategy)
    for name, case in CASES.items():
        # tf_keras refuses a LossScaleOptimizer under TPUStrategy, where all
        # replicas run one program.
        if not ((case.is_scaled or case.lacks_one) and kind == "tpu"):
            found[name] = difference(strategy, case)
        if case.is_scaled and kind != "tpu":
            # In step 2, replica 1 overflows: no group takes the step.
            found[f"{name}, overflow"] = difference(strategy, case, (2, 1))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
