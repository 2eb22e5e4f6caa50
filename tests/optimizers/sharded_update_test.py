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
from tf_xshard.optimizers.update import clipping
from tf_xshard.private.keras import sharded_updates

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
GROUPS = {
    2: [None],
    3: [None],
    4: [None, [[0, 2], [3, 1]]],
    8: [None, [[7, 1, 2, 0], [3, 5, 4, 6]]],
}
TOLERANCE = 1e-6


def _check(inner_fn, strategy, groups, graph=True, whole=False, **kwargs):
    """Equal to one device's, on every replica, and to the whole update."""
    got = sharded.Trained(
        inner_fn, strategy, groups, graph, shard_update=True, **kwargs
    )
    state = got.state()
    num_replicas = strategy.num_replicas_in_sync
    for members in groups or [range(num_replicas)]:
        first = members[0]
        for value in (*got.weights, *state.values()):
            for r in members:
                np.testing.assert_array_equal(value[r], value[first])
        weights, slots = sharded.one_device(
            inner_fn, members, num_replicas, kwargs.get("constraint")
        )
        own = [value[first] for value in got.weights]
        assert sharded.difference(own, weights) < 3 * _tolerance(weights)
        assert state.keys() == slots.keys()
        for name, value in slots.items():
            _assert_slot(state[name][first], value, name)
    for slot in got.slots():
        size = max(1, -(-slot.shape.num_elements() // _group_size(got)))
        for copy in slot.shards.values:
            assert copy.shape == [size]
    if whole:
        _check_whole(
            got, sharded.Trained(inner_fn, strategy, groups, graph, **kwargs)
        )
    return got


def _check_whole(got, whole):
    """Slots have the names, shapes and values of the whole update's."""
    difference = sharded.difference(got.weights, whole.weights)
    assert difference < _tolerance(whole.weights)
    mine, others = got.state(), whole.state()
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        _assert_slot(value, others[name], name)


def _assert_slot(value, expected, name):
    np.testing.assert_allclose(
        value, expected, rtol=1e-4, atol=1e-5, err_msg=name
    )


def _tolerance(weights):
    return TOLERANCE * max(1.0, *(np.abs(w).max(initial=0) for w in weights))


def _group_size(trained):
    groups = trained.optimizer.group_assignment
    if groups is None:
        return trained.strategy.num_replicas_in_sync
    return groups.group_size


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_compute_element_by_element(name):
    """In groups: test_what_is_set_on_the_inner_optimizer."""
    _check(OPTIMIZERS[name], replicas.mirrored(2), None)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_set_on_the_inner_optimizer(name):
    """In groups where something is summed over them."""
    if name in ("clipvalue", "decay_but_names", "ema", "schedule"):
        _check(SETTINGS[name], replicas.mirrored(2), None, whole=name == "ema")
    else:
        whole = name in ("global_clipnorm", "scale")
        _check(
            SETTINGS[name], replicas.mirrored(4), [[0, 2], [3, 1]], whole=whole
        )


@pytest.mark.parametrize(
    "kind, name, groups",
    [
        ("tpu", "accumulation", [[0, 2], [3, 1]]),
        ("tpu_permuted", "scale", None),
        ("tpu_permuted", "ema", [[0, 2], [3, 1]]),
    ],
)
def test_on_a_simulated_tpu(kind, name, groups):
    _check(SETTINGS[name], replicas.STRATEGIES[kind](4), groups)


@pytest.mark.parametrize("name", ["clipnorm", "scale"])
def test_in_eager_mode(name):
    _check(SETTINGS[name], replicas.mirrored(2), None, graph=False)


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_numbers_of_replicas(num_replicas):
    for groups in GROUPS[num_replicas]:
        _check(
            SETTINGS["global_clipnorm"], replicas.mirrored(num_replicas), groups
        )


PLACES = [
    *(("mirrored", n) for n in GROUPS),
    ("tpu", 4),
    ("tpu_permuted", 4),
]


@replicas.in_full
@pytest.mark.parametrize("kind, num_replicas", PLACES)
def test_all_of_them_everywhere(kind, num_replicas):
    for name, groups in itertools.product(
        {**OPTIMIZERS, **SETTINGS}, GROUPS[num_replicas]
    ):
        _check(
            {**OPTIMIZERS, **SETTINGS}[name],
            replicas.STRATEGIES[kind](num_replicas),
            groups,
        )


def _combinations():
    """Some of clipping x decay x averages x accumulation for each optimizer."""
    every = list(
        itertools.product(
            (
                {},
                {"clipnorm": 0.05},
                {"global_clipnorm": 0.1},
                {"clipvalue": 0.02},
            ),
            ({}, {"weight_decay": 0.1}),
            ({}, {"use_ema": True, "ema_overwrite_frequency": 3}),
            ({}, {"gradient_accumulation_steps": 3}),
        )
    )
    rng = np.random.default_rng(0)
    for name, inner_fn in OPTIMIZERS.items():
        chosen = rng.choice(len(every), size=6, replace=False)
        for index in chosen:
            options = {k: v for part in every[index] for k, v in part.items()}
            yield name, inner_fn, options


@replicas.in_full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_combinations_of_settings(name):
    for of, inner_fn, options in _combinations():
        if of == name:
            inner = inner_fn()
            config = {**inner.get_config(), **options}
            _check(
                functools.partial(type(inner).from_config, config),
                replicas.mirrored(4),
                [[0, 2], [3, 1]],
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
    shapes = []

    def halves(pairs):
        shapes.append([tuple(gradient.shape) for gradient, _ in pairs])
        return [(gradient / 2, variable) for gradient, variable in pairs]

    for name in ("pre_reduce", "post_reduce"):
        hook = {name: halves}
        whole, got = (
            sharded.Trained(
                SETTINGS["clipnorm"],
                replicas.mirrored(2),
                shard_update=shard_update,
                **hook,
            )
            for shard_update in (False, True)
        )
        assert sharded.difference(got.weights, whole.weights) < TOLERANCE
    assert shapes and all(one == sharded.SHAPES for one in shapes)


@pytest.mark.parametrize("name", ["adam", "scale"])
def test_constraints_are_of_whole_variables(name):
    inner_fn = {**OPTIMIZERS, **SETTINGS}[name]
    _check(
        inner_fn,
        replicas.mirrored(4),
        [[0, 2], [3, 1]],
        constraint=keras.constraints.MaxNorm(0.4, axis=0),
    )


def test_in_towers_and_nested():
    def towers(optimizer):
        return tf_xshard.TowerOptimizer(optimizer, 2)

    def rows(optimizer):
        return tf_xshard.CrossShardOptimizer(
            optimizer, "mean", [[0, 1], [2, 3]]
        )

    for around, groups in (
        (towers, [[0, 3], [1, 2]]),
        (rows, [[0, 2], [1, 3]]),
    ):
        whole, got = (
            sharded.Trained(
                SETTINGS["global_clipnorm"],
                replicas.mirrored(4),
                groups,
                around=around,
                shard_update=shard_update,
            )
            for shard_update in (False, True)
        )
        assert got.slots()
        assert sharded.difference(got.weights, whole.weights) < TOLERANCE


def test_half_the_bytes_on_the_wire():
    """Gradients are rounded to the type, weights are not."""
    communication = tf_xshard.Communication(dtype="bfloat16")
    whole, got = (
        sharded.Trained(
            OPTIMIZERS["sgd"],
            replicas.mirrored(4),
            shard_update=True,
            communication=one,
        )
        for one in (None, communication)
    )
    error = sharded.difference(got.weights, whole.weights)
    moved = sharded.difference(
        [w[0] for w in whole.weights], sharded.start_weights()
    )
    assert 1e-5 < error < 2.0**-8 * 4 * moved


@pytest.mark.parametrize("graph", [True, False])
def test_none_and_sparse_gradients(graph):
    """Each group has another pattern; a variable without one stays."""
    strategy = replicas.mirrored(4)
    groups = [[0, 2], [1, 3]]
    found = []
    for shard_update in (False, True):
        with strategy.scope():
            table, missing, some = (
                keras.Variable(tf.ones([5, 3])),
                keras.Variable(tf.ones([3])),
                keras.Variable(tf.ones([3])),
            )
            optimizer = tf_xshard.CrossShardOptimizer(
                O.Adam(0.1, global_clipnorm=0.5),
                "mean",
                groups,
                loss_normalization="replica",
                shard_update=shard_update,
            )
            optimizer.build([table, missing, some])

        def on_replica(variables=(table, missing, some), one=optimizer):
            r = replicas.replica_id()
            rows = tf.IndexedSlices(
                tf.fill([3, 3], float(r + 1)),
                tf.constant([4, r, 4], tf.int64),
                tf.constant([5, 3], tf.int64),
            )
            only = tf.fill([3], float(10**r)) if r == 2 else None
            one.apply([rows, None, only], list(variables))

        def step(on_replica=on_replica):
            strategy.run(on_replica)

        step = tf.function(step, autograph=False) if graph else step
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            for _ in range(3):
                step()
        found.append(
            [
                np.stack(replicas.values(strategy, v))
                for v in (table, missing, some, *optimizer.variables[2:])
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


def _no_gather(self, tensors):
    return [
        tf.repeat(t[tf.newaxis], self.groups.group_size, 0) for t in tensors
    ]


def _reversed_gather(self, tensors):
    return [tf.reverse(t, [0]) for t in _gather(self, tensors)]


def _with_padding(self, rows):
    padding = self.groups.group_size * self.size - self.num_elements
    return tf.reshape(tf.reshape(rows, [-1])[padding:], self.shape)


_gather = subgroups.Subgroups.all_gather
MUTANTS = {
    "no_gather": (subgroups.Subgroups, "all_gather", _no_gather, "adam"),
    "order": (subgroups.Subgroups, "all_gather", _reversed_gather, "adam"),
    "padding": (shards.Layout, "join", _with_padding, "adam"),
    "norm_of_a_shard": (
        clipping,
        "_sum_over_group",
        lambda reducer, groups, num_variables, squares: squares,
        "global_clipnorm",
    ),
    "decay": (
        sharded_updates.UpdatesShards,
        "_var_key",
        None,
        "decay_but_list",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name, monkeypatch):
    owner, attribute, wrong, setting = MUTANTS[name]
    if name == "decay":
        _check_exclusion_by_list()
        # The shards' own keys, which the user never named.
        wrong = lambda self, variable: super(
            sharded_updates.UpdatesShards, self
        )._var_key(getattr(variable, "shards", variable))
        monkeypatch.setattr(owner, attribute, wrong)
        with pytest.raises(AssertionError):
            _check_exclusion_by_list()
        return
    monkeypatch.setattr(owner, attribute, wrong)
    with pytest.raises(AssertionError):
        _check({**OPTIMIZERS, **SETTINGS}[setting], replicas.mirrored(4), None)


def _check_exclusion_by_list():
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
