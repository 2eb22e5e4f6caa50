"""GlobalMean: one device's training, whatever the replicas' batches are."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import seeds
from tests.support import training
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import loss_records

SGD = keras.optimizers.SGD
GlobalMean = tf_xshard.GlobalMean
PAIRS = [[0, 1], [2, 3]]
RNG = np.random.default_rng(7)


def _cross(**options):
    return tf_xshard.CrossShardOptimizer(SGD(0.1), **options)


def _tower(num_towers=2, inner=None, **options):
    return tf_xshard.TowerOptimizer(inner or SGD(0.1), num_towers, **options)


def _local_steps_on_two_hosts():
    hosts = tf_xshard.GroupAssignment(PAIRS)
    return tf_xshard.CrossShardOptimizer(
        tf_xshard.AGNOptimizer(
            SGD(1.0),
            local_optimizer=SGD(0.1),
            communication_period=10,
            group_assignment=hosts.transposed(),
        ),
        group_assignment=hosts,
    )


def _dense():
    seeds.seed(2)
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(5, "tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )


def _language():
    """Hands the mask of padded tokens on to the loss."""
    seeds.seed(2)
    return keras.Sequential(
        [
            keras.layers.Input((10,), dtype="int32"),
            keras.layers.Embedding(12, 8, mask_zero=True),
            keras.layers.Dense(12, kernel_regularizer="l2"),
        ]
    )


def _two_outputs():
    seeds.seed(2)
    x = keras.Input((4,))
    h = keras.layers.Dense(3, "tanh", kernel_regularizer="l2")(x)
    return keras.Model(x, [keras.layers.Dense(1, name=n)(h) for n in "ab"])


def _rows(num_rows):
    x = RNG.normal(size=(num_rows, 4)).astype("float32")
    return x, np.sin(x[:, :1] + 2 * x[:, 1:2])


def _weighted(num_rows, top=3):
    """Rows with weights of 0 to `top` - 1."""
    weights = RNG.integers(0, top, size=num_rows).astype("float32")
    return *_rows(num_rows), weights


def _for_two_outputs(num_rows):
    x, y = _rows(num_rows)
    return x, (y, y * y)


def _tokens(num_rows, length):
    """Rows of `length` tokens, padded with zeros."""
    x = RNG.integers(1, 12, size=(num_rows, 10)).astype("int32")
    x[:, length:] = 0
    return x, np.roll(x, 1, 1)


SQUARE = keras.losses.MeanSquaredError
WEIGHT_MEAN = functools.partial(SQUARE, reduction="mean_with_sample_weight")
TOKENS_LOSS = functools.partial(
    keras.losses.SparseCategoricalCrossentropy, from_logits=True
)
# The lengths of the rows of two replicas, in each call of a round.
CALLS = [
    [_tokens(1, length), _tokens(1, other)]
    for length, other in ((10, 9), (1, 1), (4, 2), (7, 3))
]


class Case(NamedTuple):
    """A training to compare.

    Attributes:
      steps: In each step, the part of each replica.
      model: Makes a model.
      loss: What `compile` gets, from a function that may wrap a loss.
      optimizer: Makes an optimizer whose steps are those of SGD(0.1).
      kind: The strategy.
      groups: The groups of replicas that train as one device each.
      calls: The number of steps of an update.
      train_step: The model's own step, or None.
    """

    steps: list
    model: Callable = _dense
    loss: Callable = lambda wrap: {"loss": wrap(SQUARE())}
    optimizer: Callable = _cross
    kind: str = "mirrored"
    groups: Any = None
    calls: int = 1
    train_step: Any = None


def _tokens_loss(wrap, **options):
    return {"loss": wrap(TOKENS_LOSS(**options))}


GROUPS = Case(
    [[_weighted(n) for n in (4, 1, 2, 3)]],
    loss=lambda wrap: {"loss": wrap(WEIGHT_MEAN())},
    groups=PAIRS,
    optimizer=lambda: _cross(group_assignment=PAIRS),
)
ROUND = Case(
    CALLS * 2,
    _language,
    _tokens_loss,
    functools.partial(_tower, 4),
    calls=4,
)
CASES = {
    # The last of the batches has one row, or weights of 0 on a replica.
    "ragged": Case(
        [
            [_weighted(6), _weighted(2)],
            [_weighted(1), _weighted(0)],
            [_weighted(5), _weighted(2, 1)],
        ]
    ),
    # Each loss has its own items, and a sum has none.
    "two_outputs": Case(
        [[_for_two_outputs(5), _for_two_outputs(3)]] * 2,
        _two_outputs,
        lambda wrap: {
            "loss": [wrap("mse"), wrap(SQUARE(reduction="sum"))],
            "loss_weights": [0.7, 0.02],
        },
    ),
    "groups": GROUPS,
    # A TPU's parts have equal shapes.
    "groups_tpu": GROUPS._replace(
        steps=[[_weighted(3) for _ in range(4)]] * 2, kind="tpu_permuted"
    ),
    # The mean is over the groups around the AGNOptimizer.
    "local_steps": GROUPS._replace(optimizer=_local_steps_on_two_hosts),
    # Calls with different numbers of tokens are one batch of all.
    "round_tpu": ROUND._replace(
        loss=functools.partial(_tokens_loss, ignore_class=3),
        kind="tpu_permuted",
    ),
    "round_inside": ROUND._replace(
        optimizer=lambda: tf_xshard.CrossShardOptimizer(_tower(4))
    ),
    "round_loss_scale": ROUND._replace(
        optimizer=lambda: _tower(
            4, keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=64.0)
        )
    ),
    # Neither towers nor replicas have equally many tokens, and one has none.
    "towers": Case(
        [[training.joined(_tokens(1, n) for n in (10, 1, 4)), _tokens(1, 7)]],
        _language,
        functools.partial(_tokens_loss, ignore_class=3),
        _tower,
        train_step=tf_xshard.tower_train_step(
            # Replica r is on CPU:r.
            lambda r: [f"CPU:{r}", f"CPU:{2 + r}"]
        ),
    ),
}


def _train(case, strategy, wrap, optimizer_fn, steps, train_step=None):
    """All replicas' weights, and each step's loss."""
    with strategy.scope():
        model = case.model()
        if train_step:
            model.train_step = functools.partial(train_step, model)
        model.compile(optimizer_fn(), **case.loss(wrap))
        model.optimizer.build(model.trainable_variables)
    losses = training.run_parts(model, steps)
    return training.weights(model, strategy), losses


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=name) for name, one in CASES.items()),
        pytest.param(
            CASES["towers"]._replace(
                steps=[[_tokens(3, 8), _tokens(3, 2)]],
                kind="tpu_permuted",
                train_step=tf_xshard.tower_train_step(),
            ),
            id="towers_tpu",
            marks=replicas.in_full,
        ),
    ],
)
def test_equals_one_device(case):
    num_replicas = len(case.steps[0])
    weights, losses = _train(
        case,
        replicas.STRATEGIES[case.kind](num_replicas),
        lambda loss: GlobalMean(loss, case.groups),
        case.optimizer,
        case.steps,
        case.train_step,
    )
    for members in case.groups or [range(num_replicas)]:
        steps = [
            [
                training.joined(
                    parts[r]
                    for parts in case.steps[first : first + case.calls]
                    for r in members
                )
            ]
            for first in range(0, len(case.steps), case.calls)
        ]
        expected, expected_losses = _train(
            case,
            tf.distribute.get_strategy(),
            lambda loss: loss,
            lambda: SGD(0.1),
            steps,
        )
        difference = training.deviation(weights, expected, members)
        assert difference <= 1e-6
        if case.groups is None and case.calls == 1:
            np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param("mirrored", marks=replicas.in_full), "tpu"]
)
def test_fit_with_a_ragged_end(kind):
    """The weights, and the losses that `fit` shows.

    Also with a plain Keras optimizer, on replicas that are not a TPU's.
    """
    x, _, weights = _weighted(13)
    y = np.float32(x[:, :1] > 0)
    if kind == "tpu":
        # Rows that pad a part are no items.
        optimizer, options = _cross, {"sample_weight": weights}
    else:
        optimizer = lambda: SGD(0.1)
        options = {
            "class_weight": {0: 0.0, 1: 2.5},
            "validation_data": (x, y),
        }

    def fit(strategy, loss, optimizer):
        with strategy.scope():
            model = _dense()
            model.compile(optimizer(), loss)
        history = model.fit(x, y, 8, shuffle=False, verbose=0, **options)
        return training.weights(model, strategy), history.history

    expected = fit(tf.distribute.get_strategy(), "mse", lambda: SGD(0.1))
    got = fit(replicas.STRATEGIES[kind](2), GlobalMean("mse"), optimizer)
    assert training.deviation(got[0], expected[0]) <= 1e-6
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-5)


def prediction(y_true, y_pred):
    """A loss whose gradient by the predictions is 1."""
    return y_pred


@pytest.fixture
def floatx(request):
    keras.config.set_floatx(request.param)
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize(
    "graph, floatx",
    [(False, "float32"), (True, "float64")],
    indirect=["floatx"],
)
def test_the_drawing_of_the_guide(graph, floatx):
    """In a custom loop; `value * N` is the mean over all rows."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0, dtype=keras.config.floatx())
        optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
        optimizer.build([weight])
    loss, of_keras = GlobalMean(prediction), keras.losses.MeanAbsoluteError()
    losses = np.array([[0.1], [0.2], [0.3]]), np.array([[0.8]])

    def on_replica():
        own = losses[replicas.replica_id()]
        rows = tf.constant(own, keras.config.floatx())
        with tf.GradientTape() as tape:
            value = loss(rows * 0, rows * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])
        return value, of_keras(rows * 0, rows)

    run = tf.function(strategy.run, autograph=False) if graph else strategy.run
    values, plain = map(strategy.experimental_local_results, run(on_replica))
    check = functools.partial(
        np.testing.assert_allclose, rtol=1e-12 if graph else 1e-6
    )
    check(values, [0.35 / 2] * 2)
    check(sum(plain), 0.5)
    check(replicas.values(strategy, weight), [1 - 0.35] * 2)


@replicas.on_mirrored_and_tpu
def test_without_items_all_is_zero(kind):
    strategy = replicas.STRATEGIES[kind](2)
    loss = GlobalMean(WEIGHT_MEAN())

    def on_replica():
        x = tf.ones([3, 1])
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x * 0, x, tf.zeros([3]))
        return value, tape.gradient(value, x)

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    for result in step():
        for one in strategy.experimental_local_results(result):
            assert not np.any(one)


BINARY = keras.losses.BinaryCrossentropy


@pytest.mark.parametrize(
    "loss, given",
    [
        (SQUARE, None),
        (WEIGHT_MEAN, None),
        (functools.partial(SQUARE, reduction="sum"), None),
        # Shapes choose the loss.
        (BINARY, "crossentropy"),
        (BINARY, "ce"),
    ],
)
def test_on_one_device_it_is_the_loss(loss, given):
    labels, predictions = np.array([[1], [0]]), np.float32([[0.7], [0.2]])
    batch = labels, predictions, np.float32([1, 2])
    expected = float(loss()(*batch))
    assert float(GlobalMean(given or loss())(*batch)) == expected


def test_a_function_whose_name_is_no_scope_of_tensorflow():
    def _square(labels, predictions):
        return tf.reduce_mean(tf.square(predictions - labels), axis=1)

    loss = GlobalMean(_square)
    value = tf.function(loss, autograph=False)(
        tf.zeros([2, 1]), tf.ones([2, 1])
    )
    assert float(value) == 1.0


def _gradient(variable, *losses, num_rows=1, value=1.0):
    """Of a sum of losses of the same rows."""
    rows = tf.fill([num_rows, 1], value)
    with tf.GradientTape() as tape:
        total = sum(one(rows * 0, rows * variable) for one in losses)
    return tape.gradient(total, variable.value)


def _call(optimizer, variable, *losses, **rows):
    optimizer.apply([_gradient(variable, *losses, **rows)], [variable])


def _value_after(optimizer, *calls):
    """Of a variable that is 1 at first; a call is a loss and its rows."""
    variable = keras.Variable(1.0)
    for loss, num_rows, value in calls:
        _call(optimizer, variable, loss, num_rows=num_rows, value=value)
    return float(variable)


def test_evaluation_leaves_no_record():
    """Only a loss that is differentiated counts for the next step."""
    loss = GlobalMean(prediction)

    def evaluated(y_true, y_pred):
        loss(np.zeros((9, 1)), np.zeros((9, 1)))
        return loss(y_true, y_pred)

    got = _value_after(_tower(), (evaluated, 3, 1.0), (evaluated, 1, 5.0))
    np.testing.assert_allclose(got, 1 - 0.1 * (3 * 1 + 5) / 4)


def test_a_sum_of_towers_is_not_weighted():
    loss = GlobalMean(prediction)
    got = _value_after(_tower(reduction="sum"), (loss, 3, 1.0), (loss, 1, 5.0))
    np.testing.assert_allclose(got, 1 - 0.1 * (1 + 5), rtol=1e-6)


def test_another_loss_after_reset():
    optimizer, variable = _tower(), keras.Variable(1.0)
    _call(optimizer, variable, GlobalMean(prediction), num_rows=3)
    optimizer.reset()
    for num_rows, value in ((3, 1.0), (1, 5.0)):
        _call(
            *(optimizer, variable, keras.losses.MeanAbsoluteError()),
            num_rows=num_rows,
            value=value,
        )
    np.testing.assert_allclose(float(variable), 1 - 0.1 * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "loss, weights, mean",
    [
        (keras.losses.MeanAbsoluteError(), [3, 1.0], 2.0),
        (GlobalMean(prediction), None, 2.0),
        (keras.losses.MeanAbsoluteError(), None, 3.0),
    ],
    ids=["weights", "records", "neither"],
)
def test_apply_towers_with_weights_and_with_records(loss, weights, mean):
    variable = keras.Variable(1.0)
    towers = [
        [_gradient(variable, loss, num_rows=num_rows, value=value)]
        for num_rows, value in ((3, 1.0), (1, 5.0))
    ]
    _tower().apply_towers(towers, [variable], weights)
    np.testing.assert_allclose(float(variable), 1 - 0.1 * mean, rtol=1e-6)


def test_losses_whose_items_are_multiples_of_rows_share_a_round():
    """A call counts in proportion to its rows."""
    two_items = GlobalMean(lambda y, p: tf.concat([p, p], 1))
    optimizer, variable = _tower(), keras.Variable(1.0)
    for num_rows, value in ((3, 1.0), (1, 5.0)):
        _call(
            *(optimizer, variable, GlobalMean(prediction), two_items),
            num_rows=num_rows,
            value=value,
        )
    # Each of the two losses has a mean of 2.
    np.testing.assert_allclose(float(variable), 1 - 0.1 * 4, rtol=1e-6)


class _OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(y_pred)


MEAN, SUM = GlobalMean("mse"), GlobalMean(SQUARE(reduction="sum"))


def _on_one(*losses, num_rows=1):
    _call(_tower(), keras.Variable(1.0), *losses, num_rows=num_rows)


def _on_two(optimizer, *groups):
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variable, made = keras.Variable(1.0), optimizer()
        made.build([variable])
        strategy.run(_call, (made, variable, GlobalMean("mse", *groups)))


def _in_another_function():
    variable = keras.Variable(1.0)
    gradient = tf.function(lambda: _gradient(variable, MEAN), autograph=False)()
    _tower().apply([gradient], [variable])


def _three_of_two():
    with tf.GradientTape(persistent=True) as tape:
        x = tf.constant([[1.0]])
        tape.watch(x)
        value = MEAN(x * 0, x)
    gradients = [tape.gradient(value, x) for _ in range(3)]
    _tower().apply_towers([[one] for one in gradients[:2]], [keras.Variable(x)])


def _beside_a_plain_loss(train_step=None):
    model = _two_outputs()
    if train_step:
        model.train_step = functools.partial(train_step, model)
    model.compile(_tower(), [MEAN, "mae"])
    model.train_on_batch(*_for_two_outputs(4))


def _two_towers_of_one_loss():
    pairs = [(_tower(), keras.Variable(1.0)) for _ in range(2)]
    for optimizer, variable in pairs:
        optimizer.build([variable])

    @tf.function(autograph=False)
    def step():
        rows = tf.ones([2, 1])
        with tf.GradientTape() as tape:
            value = MEAN(rows * 0, rows * pairs[0][1] * pairs[1][1])
        gradients = tape.gradient(value, [v.value for _, v in pairs])
        for (optimizer, variable), gradient in zip(
            pairs, gradients, strict=True
        ):
            optimizer.apply([gradient], [variable])

    step()


def _in_multi_optimizer():
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: _tower())
    variable = keras.Variable(1.0)
    optimizer.build([variable])
    _call(optimizer, variable, MEAN)


def _other_groups_in_a_tower_train_step():
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = _dense()
        model.compile(_tower(), GlobalMean("mse", [[0], [1]]))
        step = tf_xshard.tower_train_step()
        model.train_step = functools.partial(step, model)
        training.run_parts(model, [[_rows(4)] * 2])


def _apply_towers(weights, **options):
    _tower(**options).apply_towers(
        [[1.0], [1.0]], [keras.Variable(1.0)], weights
    )


def _called(loss):
    loss(np.zeros(2), np.zeros(2))


SCALAR = tf_xshard.ScalarLoss(lambda y, p: 1.0)
NOT_OF_ROWS = GlobalMean(lambda y, p: tf.reduce_mean(p))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: GlobalMean(3), TypeError, "takes a loss as compile"),
        (lambda: GlobalMean("nonsense"), ValueError, "nonsense"),
        (lambda: GlobalMean(["mse"]), TypeError, "wrap the loss of each"),
        (lambda: GlobalMean(SQUARE(reduction=None)), ValueError, "tion None"),
        (lambda: GlobalMean(MEAN), ValueError, "can't wrap GlobalMean"),
        (lambda: GlobalMean(SCALAR), ValueError, "can't wrap ScalarLoss"),
        (lambda: _called(NOT_OF_ROWS), ValueError, "returned one number"),
        (lambda: _called(GlobalMean(_OwnCall())), ValueError, "one number"),
        (lambda: GlobalMean("mse", [[0], [0]]), ValueError, "exactly once"),
        (lambda: _on_one(MEAN, SUM), ValueError, "of items may differ"),
        (
            lambda: _on_one(MEAN, lambda y, p: MEAN(y[:1], p[:1]), num_rows=3),
            ValueError,
            "of items may differ",
        ),
        (
            lambda: _value_after(_tower(), (MEAN, 1, 1.0), (SQUARE(), 1, 1.0)),
            ValueError,
            "gets gradients of another loss.*call optimizer.reset",
        ),
        (
            lambda: _value_after(_tower(), (SQUARE(), 1, 1.0), (MEAN, 1, 1.0)),
            ValueError,
            "were not computed from a GlobalMean",
        ),
        (_in_another_function, ValueError, "computed in another tf.function"),
        (_three_of_two, ValueError, "Each tower needs the same"),
        (_beside_a_plain_loss, ValueError, "Wrap all of them, or none"),
        (
            lambda: _beside_a_plain_loss(tf_xshard.tower_train_step()),
            ValueError,
            "Wrap all of them, or none",
        ),
        (_two_towers_of_one_loss, ValueError, "took the number of items"),
        (_in_multi_optimizer, ValueError, "inside a MultiOptimizer"),
        (
            lambda: _on_two(lambda: _cross(loss_normalization="replica")),
            ValueError,
            'loss_normalization="replica"',
        ),
        (
            lambda: _on_two(_cross, [[0], [1]]),
            ValueError,
            r"Pass GlobalMean\(loss, \[\[0, 1\]\]\)",
        ),
        (
            lambda: _on_two(lambda: tf_xshard.AGNOptimizer(SGD(0.1))),
            ValueError,
            "pass the loss itself",
        ),
        (_other_groups_in_a_tower_train_step, ValueError, r"\[\[0, 1\]\]"),
        (lambda: _apply_towers([1]), ValueError, "got 1 weights"),
        (
            lambda: _apply_towers([1, 1], reduction="sum"),
            ValueError,
            'Pass weights only with reduction="mean"',
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_dynamic_number_of_rows_is_checked_when_it_runs():
    optimizer, variable = _tower(), keras.Variable(1.0)
    optimizer.build([variable])

    @tf.function(
        autograph=False, input_signature=[tf.TensorSpec([None, 1])] * 2
    )
    def step(x, z):
        with tf.GradientTape() as tape:
            value = sum(MEAN(v * 0, v * variable) for v in (x, z))
        optimizer.apply([tape.gradient(value, variable.value)], [variable])

    step(tf.ones([2, 1]), tf.ones([2, 1]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="different numbers of rows"
    ):
        step(tf.ones([2, 1]), tf.ones([3, 1]))


@pytest.mark.parametrize("is_applied", [False, True])
def test_no_graph_is_kept(is_applied):
    """Nor by a record that no optimizer takes."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        variable, optimizer = keras.Variable(1.0), _cross()
        optimizer.build([variable])
    step = tf.function(
        lambda: strategy.run(
            functools.partial(_call, optimizer) if is_applied else _gradient,
            (variable, MEAN),
        ),
        autograph=False,
    )
    graph = weakref.ref(step.get_concrete_function().graph)
    assert graph() is not None
    del step
    gc.collect()
    assert graph() is None


def test_one_loss_in_two_threads():
    """Each training gets its own numbers."""
    loss = GlobalMean(
        "mse", communication=tf_xshard.Communication(timeout_seconds=20)
    )
    results = {2.0: [], 10.0: []}

    def evaluate(value):
        strategy = replicas.mirrored(2)
        rows = tf.fill([4, 1], value)
        step = tf.function(
            lambda: strategy.run(loss, (rows * 0, rows)), autograph=False
        )
        for _ in range(50):
            results[value] += [float(one) for one in step().values]

    threads = [threading.Thread(target=evaluate, args=(v,)) for v in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Divided by the two replicas.
    assert results == {value: [value**2 / 2] * 100 for value in results}


def test_a_function_that_differentiates_it_can_be_saved(tmp_path):
    """TensorFlow asks for all gradients when it saves."""

    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([2, 1])], autograph=False)
        def gradient(self, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                value = MEAN(x * 0, x)
            return tape.gradient(value, x)

    tf.saved_model.save(Module(), tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    x = tf.constant([[1.0], [3.0]])
    np.testing.assert_array_equal(loaded.gradient(x), x)


def test_records_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(loss_records, "_MOST_RECORDS", 5)
    monkeypatch.setattr(loss_records, "_replicas", weakref.WeakKeyDictionary())
    for _ in range(8):
        _gradient(keras.Variable(1.0), MEAN)
    assert len(loss_records.take(site_lib.current())) == 5


@keras.saving.register_keras_serializable("tests")
def _absolute(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), -1)


@pytest.mark.parametrize(
    "loss", ["mse", SQUARE(reduction="sum"), _absolute, "crossentropy"]
)
def test_it_is_saved_with_the_model(loss, tmp_path):
    model = _dense()
    made = GlobalMean(
        loss,
        [[0]],
        communication=tf_xshard.Communication(timeout_seconds=7),
        name="mine",
    )
    model.compile("sgd", made)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").loss
    assert isinstance(loaded, GlobalMean)
    assert loaded.get_config() == made.get_config()
    assert loaded.group_assignment.to_list() == [[0]]
    assert loaded.name == "mine"


def test_an_exported_model_needs_no_tf_xshard(tmp_path):
    model = _dense()
    model.compile(_cross(), GlobalMean("mse"))
    tf_xshard.GroupState(model).export(0, tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").loss == "mse"


@pytest.mark.parametrize(
    "kind", ["mirrored", pytest.param("tpu", marks=replicas.in_full)]
)
def test_the_plan_counts_it(kind):
    def plan(loss):
        with replicas.STRATEGIES[kind](2).scope():
            model = _dense()
            model.compile(_cross(), loss)
        return tf_xshard.communication_plan(model)

    operation, *others = plan(GlobalMean("mse")).operations
    assert (operation.purpose, operation.num_bytes) == ("loss", 8)
    assert others == list(plan("mse").operations)


# open_round_test.py has an open round with its items in other files, and on
# other numbers of replicas.
BATCHES = [_rows(16), _rows(16), _rows(8)]


def _trained(optimizer, loss, *batches):
    model = _dense()
    model.compile(optimizer, loss, run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    for batch in batches:
        model.train_on_batch(*batch)
    return model


def _in_rounds_of_three(*batches):
    return _trained(_tower(3), GlobalMean("mse"), *batches)


def _check_a_round(model):
    """Of all batches, after which the model is one device's."""
    expected = _trained(SGD(0.1), "mse", training.joined(BATCHES))
    difference = training.deviation(
        training.weights(model), training.weights(expected)
    )
    assert difference <= 1e-6


@pytest.mark.parametrize(
    "move", [training.by_keras_file, training.by_group_state]
)
@pytest.mark.parametrize("num_saved", [0, 2])
def test_an_open_round_is_saved_with_its_items(move, num_saved, tmp_path):
    """The round that was open meanwhile is forgotten, with its items."""
    saved = _in_rounds_of_three(*BATCHES[:num_saved])
    used = _in_rounds_of_three(BATCHES[2])
    move(saved, used, tmp_path)
    assert int(used.optimizer.iterations) == 0
    for batch in BATCHES[num_saved:]:
        used.train_on_batch(*batch)
    _check_a_round(used)


def test_a_round_of_a_global_mean_is_not_continued_with_another_loss(tmp_path):
    new = _trained(_tower(3), "mse")
    training.by_keras_file(_in_rounds_of_three(BATCHES[0]), new, tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError, match="optimizer.reset"):
        new.train_on_batch(*BATCHES[0])
