"""shard_update=True: the numbers of the whole update, from shards."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import sharded
from tf_xshard.collectives import subgroups
from tf_xshard.distribute import shards
from tf_xshard.optimizers.update import sharded as sharded_lib

O = keras.optimizers  # noqa: E741


@tf_xshard.elementwise
class Signs(O.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, 0.01 * tf.sign(gradient))


OPTIMIZERS = {
    "sgd": lambda: O.SGD(0.1),
    "momentum": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: O.Adam(0.05),
    "amsgrad": lambda: O.Adam(0.05, amsgrad=True),
    "adamw": lambda: O.AdamW(0.05, weight_decay=0.1),
    "adamax": lambda: O.Adamax(0.05),
    "nadam": lambda: O.Nadam(0.05),
    "adagrad": lambda: O.Adagrad(0.1),
    "adadelta": lambda: O.Adadelta(1.0),
    "rmsprop": lambda: O.RMSprop(0.01, centered=True, momentum=0.5),
    "ftrl": lambda: O.Ftrl(0.1, l1_regularization_strength=0.001),
    "lion": lambda: O.Lion(0.01),
    "users": Signs,
}
if hasattr(O, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free"] = lambda: O.ScheduleFreeAdamW(0.05)


def _without_decay(**exclusions):
    optimizer = O.AdamW(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**exclusions)
    return optimizer


SETTINGS = {
    "clipnorm": lambda: O.Adam(0.05, clipnorm=0.02),
    "global_clipnorm": lambda: O.SGD(0.5, momentum=0.5, global_clipnorm=0.1),
    "clipvalue": lambda: O.SGD(0.5, clipvalue=0.01),
    "decay_but_names": lambda: _without_decay(var_names=["bias", "^row"]),
    "ema": lambda: O.SGD(
        0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: O.Adam(
        0.05, gradient_accumulation_steps=3, global_clipnorm=0.05
    ),
    "static_scale": lambda: O.SGD(0.1, clipnorm=0.01, loss_scale_factor=16.0),
    "scale": lambda: O.LossScaleOptimizer(
        O.Adam(0.05, global_clipnorm=0.1), initial_scale=64.0
    ),
    "schedule": lambda: O.Adam(
        O.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.7)
    ),
}
if hasattr(O, "MultiOptimizer"):
    SETTINGS["multi"] = lambda: O.MultiOptimizer(
        O.OptimizerMap(
            O.SGD(0.1, global_clipnorm=0.05), {"kernel|bias": O.Adam(0.05)}
        )
    )
    SETTINGS["multi_function"] = lambda: O.MultiOptimizer(
        # Sees the shapes of weights, not of shards.
        lambda v: O.Adam(0.05) if len(v.shape) > 1 else O.SGD(0.1, momentum=0.5)
    )
PAIRS = [[0, 2], [3, 1]]
GROUPS = {
    2: [None],
    3: [None],
    4: [None, PAIRS],
    8: [None, [[7, 1, 2, 0], [3, 5, 4, 6]]],
}
ALL = {**OPTIMIZERS, **SETTINGS}
# These options need no sum over the group.
OF_ELEMENTS = ("clipvalue", "decay_but_names", "ema", "schedule")


@pytest.mark.parametrize(
    "name, kind, num_replicas, groups",
    [
        *((name, "mirrored", 2, None) for name in (*OPTIMIZERS, *OF_ELEMENTS)),
        *(
            (name, "mirrored", 4, PAIRS)
            for name in SETTINGS
            if name not in OF_ELEMENTS
        ),
        ("global_clipnorm", "mirrored", 3, None),
        ("global_clipnorm", "mirrored", 8, GROUPS[8][1]),
        ("accumulation", "tpu", 4, PAIRS),
        ("scale", "tpu_permuted", 4, None),
        ("ema", "tpu_permuted", 4, PAIRS),
    ],
    ids=str,
)
def test_is_one_device(name, kind, num_replicas, groups):
    is_compared = (name, num_replicas) in (("ema", 2), ("scale", 4))
    sharded.check(
        ALL[name],
        replicas.STRATEGIES[kind](num_replicas),
        groups,
        whole=is_compared and kind == "mirrored",
    )


@pytest.mark.parametrize(
    "devices, groups, graph",
    [
        (replicas.REVERSED, None, True),
        (replicas.MIXED, PAIRS, True),
        (replicas.MIXED, PAIRS, False),
        (replicas.TWELVE, None, True),
        (replicas.SIXTEEN, None, True),
    ],
    ids=str,
)
def test_devices_in_any_order_and_number(devices, groups, graph):
    sharded.check(
        OPTIMIZERS["adam"],
        replicas.mirrored_on(devices),
        groups,
        graph,
        whole=devices == replicas.MIXED,
    )


def test_in_eager_mode():
    sharded.check(SETTINGS["scale"], replicas.mirrored(2), None, graph=False)


PLACES = [
    *(("mirrored", n) for n in GROUPS),
    ("tpu", 4),
    ("tpu_permuted", 4),
]


@replicas.in_full
@pytest.mark.parametrize("kind, num_replicas", PLACES)
def test_all_of_them_everywhere(kind, num_replicas):
    for name, groups in itertools.product(ALL, GROUPS[num_replicas]):
        sharded.check(
            ALL[name], replicas.STRATEGIES[kind](num_replicas), groups
        )


OPTIONS = (
    [{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}],
    [{}, {"weight_decay": 0.1}],
    [{}, {"use_ema": True, "ema_overwrite_frequency": 3}],
    [{}, {"gradient_accumulation_steps": 3}],
)


@replicas.in_full
@pytest.mark.parametrize("seed, name", list(enumerate(OPTIMIZERS)))
def test_combinations_of_settings(seed, name):
    every = list(itertools.product(*OPTIONS))
    chosen = np.random.default_rng(seed).choice(len(every), 6, replace=False)
    inner = OPTIMIZERS[name]()
    for index in chosen:
        config = inner.get_config()
        for option in every[index]:
            config.update(option)
        sharded.check(
            functools.partial(type(inner).from_config, config),
            replicas.mirrored(4),
            PAIRS,
            whole=True,
        )


def test_one_replica_and_groups_of_one_are_the_identity():
    alone = sharded.Trained(
        OPTIMIZERS["adam"],
        replicas.mirrored(2),
        [[0], [1]],
        shard_update=True,
    )
    assert not alone.slots()
    for r in range(2):
        want, _ = sharded.one_device(OPTIMIZERS["adam"], [r], 2)
        assert sharded.difference([w[r] for w in alone.weights], want) < 1e-6


def test_hooks_see_whole_gradients():
    """nesting_test.py has the numbers."""
    seen = {}

    def note(name):
        def hook(pairs):
            seen[name] = [tuple(gradient.shape) for gradient, _ in pairs]
            return pairs

        return hook

    sharded.Trained(
        OPTIMIZERS["sgd"],
        replicas.mirrored(2),
        num_steps=1,
        shard_update=True,
        pre_reduce=note("pre"),
        post_reduce=note("post"),
    )
    assert seen == {"pre": sharded.SHAPES, "post": sharded.SHAPES}


def test_constraints_are_of_whole_variables():
    sharded.check(
        OPTIMIZERS["adam"],
        replicas.mirrored(4),
        PAIRS,
        constraint=keras.constraints.MaxNorm(0.4, axis=0),
    )


def test_half_the_bytes_on_the_wire():
    """Gradients are rounded to the type, weights are not."""
    whole, got = (
        sharded.Trained(
            OPTIMIZERS["sgd"],
            replicas.mirrored(2),
            shard_update=True,
            communication=communication,
        )
        for communication in (None, tf_xshard.Communication(dtype="bfloat16"))
    )
    error = sharded.difference(got.weights, whole.weights)
    moved = sharded.difference(
        [w[0] for w in whole.weights], sharded.start_weights()
    )
    assert 1e-5 < error < 2.0**-8 * 4 * moved


def test_none_and_sparse_gradients():
    """Each group has another pattern; a variable without one stays."""
    strategy = replicas.mirrored(4)

    def gradients(r):
        rows = tf.IndexedSlices(
            tf.fill([3, 3], float(r + 1)),
            tf.constant([4, r, 4], tf.int64),
            tf.constant([5, 3], tf.int64),
        )
        return [rows, None, tf.fill([3], 100.0) if r == 2 else None]

    found = []
    for shard_update in (False, True):
        with strategy.scope():
            variables = [
                keras.Variable(tf.ones(shape)) for shape in ([5, 3], [3], [3])
            ]
            optimizer = tf_xshard.CrossShardOptimizer(
                O.Adam(0.1, global_clipnorm=0.5),
                "mean",
                PAIRS,
                loss_normalization="replica",
                shard_update=shard_update,
            )
            optimizer.build(variables)
        step = replicas.applying(strategy, optimizer, gradients, variables)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            for _ in range(3):
                step()
        found.append(
            [
                np.stack(replicas.values(strategy, v))
                for v in (*variables, *optimizer.variables[2:])
            ]
        )
    assert sharded.difference(*found) < 1e-6
    _, missing, some, *_ = found[1]
    assert (missing == 1).all()
    assert (some[[1, 3]] == 1).all() and (some[[0, 2]] != 1).all()


def test_an_overflow_on_one_replica_is_skipped_by_all():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(tf.ones([5]))
        weight.constraint = keras.constraints.MaxNorm(0.1)
        optimizer = tf_xshard.CrossShardOptimizer(
            O.LossScaleOptimizer(O.SGD(1.0), initial_scale=8.0),
            shard_update=True,
        )
        optimizer.build([weight])

    @tf.function(autograph=False)
    def step(last):
        def on_replica():
            bad = tf.cast(replicas.replica_id_tensor() == 1, tf.float32) * last
            # Only in the shard of replica 0.
            optimizer.apply([tf.stack([8 / (1 - bad), 8, 8, 8, 8])], [weight])

        strategy.run(on_replica)

    step(1.0)
    for value in replicas.values(strategy, weight):
        np.testing.assert_array_equal(value, np.ones(5))
    step(0.0)
    for value in replicas.values(strategy, weight):
        # Constrained as a whole, now that it is updated.
        np.testing.assert_allclose(np.linalg.norm(value), 0.1, rtol=1e-5)


# What must be noticed by the comparisons above.


def _reversed_gather(self, tensors):
    return [tf.reverse(t, [0]) for t in _gather(self, tensors)]


def _with_padding(self, rows):
    padding = self.groups.group_size * self.size - self.num_elements
    return tf.reshape(tf.reshape(rows, [-1])[padding:], self.shape)


_gather = subgroups.Subgroups.all_gather


MUTANTS = {
    "order": (subgroups.Subgroups, "all_gather", _reversed_gather),
    "padding": (shards.Layout, "join", _with_padding),
    "norm_of_a_shard": (
        sharded_lib,
        "_sum_over_group",
        lambda reducer, groups, num_variables, squares: squares,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises(AssertionError):
        sharded.check(SETTINGS["global_clipnorm"], replicas.mirrored(2), None)


def test_exclusion_from_weight_decay_by_list():
    """The user names the whole variables, not their shards."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        kept, decayed = (keras.Variable(tf.ones([3])) for _ in range(2))
        inner = O.AdamW(0.1, weight_decay=0.5)
        inner.exclude_from_weight_decay(var_list=[kept])
        optimizer = tf_xshard.CrossShardOptimizer(inner, shard_update=True)
        optimizer.build([kept, decayed])
    strategy.run(lambda: optimizer.apply([tf.zeros([3])] * 2, [kept, decayed]))
    np.testing.assert_array_equal(kept, np.ones(3))
    np.testing.assert_allclose(decayed, np.full(3, 0.95), rtol=1e-6)
