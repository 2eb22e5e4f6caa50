"""shard_update=True: the numbers of one device, from shards and from owners."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import sharded
from tests.support import versions

O = keras.optimizers  # noqa: E741
PAIRS = sharded.PAIRS


BY_ELEMENT, OWNED = sharded.BY_ELEMENT, sharded.OWNED


@pytest.mark.parametrize(
    "inner_fns, variables",
    [
        (list(BY_ELEMENT.values())[::2], sharded.ONE),
        (list(BY_ELEMENT.values())[1::2], sharded.ONE),
        (list(OWNED.values()), sharded.TWO),
        pytest.param(
            [sharded.multi],
            tuple(sharded.SHAPES),
            marks=versions.needs_multi_optimizer,
        ),
    ],
    ids=["by_element", "others", "owned", "multi"],
)
def test_every_optimizer_is_one_device(inner_fns, variables):
    sharded.check(inner_fns, replicas.mirrored(2), names=variables)


def test_groups_of_one_are_the_identity():
    sharded.check(
        [BY_ELEMENT["Adam"]],
        replicas.mirrored(2),
        [[0], [1]],
        names=sharded.ONE,
    )


@pytest.mark.parametrize(
    "name, kind, devices, groups, graph",
    [
        ("schedule_decay_clipvalue", "mirrored", (0, 1), None, True),
        ("static_scale", "mirrored", (0, 1), None, True),
        pytest.param(
            *("scale", "mirrored", (0, 1), None, False), marks=replicas.in_full
        ),
        ("global_clipnorm", "mirrored", replicas.MIXED, PAIRS, True),
        ("ema", "tpu", 2, None, True),
        ("accumulation", "tpu_permuted", 4, PAIRS, True),
        pytest.param(
            *("global_clipnorm", "mirrored", replicas.MIXED, PAIRS, False),
            marks=replicas.in_full,
        ),
        pytest.param(
            *("accumulation", "mirrored", replicas.SIXTEEN, None, True),
            marks=replicas.in_full,
        ),
    ],
    ids=[
        *("elements", "clipnorm", "scale_eager", "global_clipnorm", "ema_tpu"),
        *("accumulation_tpu", "eager", "sixteen"),
    ],
)
def test_settings_are_one_devices(name, kind, devices, groups, graph):
    """On devices in any order and number."""
    is_mirrored = kind == "mirrored"
    make = replicas.mirrored_on if is_mirrored else replicas.STRATEGIES[kind]
    both = sharded.of_both_kinds(name)
    sharded.check(both, make(devices), groups, graph, names=sharded.TWO)


EVERYWHERE = [
    *([one] for one in (*BY_ELEMENT.values(), *OWNED.values())),
    *map(sharded.of_both_kinds, sharded.SETTINGS),
]
PLACES = [
    ("mirrored", 8, [[7, 1, 2, 0], [3, 5, 4, 6]]),
    ("tpu", 4, None),
    ("mirrored", 3, None),
    ("tpu_permuted", 4, PAIRS),
]


@replicas.in_full
@pytest.mark.parametrize(
    "inner_fns, place", replicas.in_turn(EVERYWHERE, PLACES)
)
def test_all_of_them_everywhere(inner_fns, place):
    kind, num_replicas, groups = place
    sharded.check(inner_fns, replicas.STRATEGIES[kind](num_replicas), groups)


def test_constraints_are_of_whole_variables():
    sharded.check(
        sharded.of_both_kinds("accumulation_ema"),
        replicas.mirrored(2),
        names=sharded.TWO,
        constraint=keras.constraints.MaxNorm(0.4, axis=0),
    )


def test_hooks_see_whole_gradients():
    """A hook that clips is one device's `clipnorm`."""
    seen = []

    def note(pairs):
        seen.append([tuple(gradient.shape) for gradient, _ in pairs])
        return pairs

    def momentum(kind, **options):
        return kind(0.5, momentum=0.5, name="sgd", **options)

    sharded.check(
        [functools.partial(momentum, kind) for kind in sharded.KINDS],
        replicas.mirrored(2),
        expected=functools.partial(momentum, O.SGD, clipnorm=0.05),
        names=sharded.TWO,
        pre_reduce=note,
        post_reduce=tf_xshard.clip_by_norm(0.05),
    )
    shapes = [sharded.SHAPES[name] for name in sharded.TWO]
    assert seen == [shapes] * 4


@pytest.mark.parametrize(
    "kind, graph", replicas.in_turn(sharded.KINDS, [True, False])
)
def test_none_and_sparse_gradients(kind, graph):
    """Each group has another pattern; a variable without one stays."""
    strategy = replicas.mirrored(4)
    shapes = {"rows": [5, 3], "missing": [3], "some": [3]}
    start = {name: np.ones(one, "float32") for name, one in shapes.items()}

    def gradients(r):
        rows = tf.IndexedSlices(tf.fill([3, 3], r + 1.0), [4, r, 4], [5, 3])
        return [rows, None, tf.fill([3], 100.0) if r == 2 else None]

    def mean(members):
        rows = np.zeros([5, 3], "float32")
        for m in members:
            np.add.at(rows, [4, m, 4], (m + 1) / 2)
        some = np.full(3, 50, "float32") if 2 in members else None
        return {"rows": rows, "missing": None, "some": some}

    inner = functools.partial(kind, 0.1, weight_decay=0.1)
    with strategy.scope():
        variables = [keras.Variable(value) for value in start.values()]
        optimizer = tf_xshard.CrossShardOptimizer(
            inner(),
            "mean",
            PAIRS,
            loss_normalization="replica",
            shard_update=True,
        )
        optimizer.build(variables)
    step = replicas.applying(strategy, optimizer, gradients, variables, graph)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        for _ in range(2):
            step()
        for members in PAIRS:
            expected, _ = sharded.one_device(
                inner, [mean(members)] * 2, start=start
            )
            for variable, want in zip(variables, expected, strict=True):
                got = replicas.values(strategy, variable)
                for r in members:
                    np.testing.assert_allclose(got[r], want, atol=1e-6)
    # Only a replica of the first group has the last one's gradient.
    changed = np.stack(replicas.values(strategy, variables[2])) != 1
    assert changed.all(1).tolist() == [True, False, True, False]


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
    for variable, want in ((kept, 1.0), (decayed, 0.95)):
        for value in replicas.values(strategy, variable):
            np.testing.assert_allclose(value, np.full(3, want), rtol=1e-6)
