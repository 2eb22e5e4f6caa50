"""GlobalMean: one device's training, whatever the replicas' batches are.

open_round_test.py saves an open round with its items.
"""

import functools
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
from tests.support import steps
from tests.support import training
from tf_xshard.distribute import site as site_lib
from tf_xshard.reduction import loss_records

SGD = keras.optimizers.SGD
GlobalMean = tf_xshard.GlobalMean
PAIRS = [[0, 1], [2, 3]]
RNG = np.random.default_rng(7)
T, V, A = TypeError, ValueError, tf.errors.InvalidArgumentError


def _sgd():
    return SGD(0.1)


def _cross(**options):
    return tf_xshard.CrossShardOptimizer(_sgd(), **options)


def _tower(num_towers=2, **options):
    return tf_xshard.TowerOptimizer(_sgd(), num_towers, **options)


def _local_steps_on_two_hosts():
    hosts = tf_xshard.GroupAssignment(PAIRS)
    return tf_xshard.CrossShardOptimizer(
        tf_xshard.AGNOptimizer(
            SGD(1.0),
            local_optimizer=_sgd(),
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


def _compiled(model, optimizer, loss, train_step=None, **options):
    """The model, with its optimizer built and a step of its own, if any."""
    if train_step:
        model.train_step = functools.partial(train_step, model)
    model.compile(optimizer, loss, **options)
    model.optimizer.build(model.trainable_variables)
    return model


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


def _tokens_loss(wrap):
    return wrap(
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=3
        )
    )


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
      options: More options of `compile`.
    """

    steps: list
    model: Callable = _dense
    loss: Callable = lambda wrap: wrap(SQUARE())
    optimizer: Callable = _cross
    kind: str = "mirrored"
    groups: Any = None
    calls: int = 1
    train_step: Any = None
    options: Any = {}


RAGGED = Case(
    # The last of the batches has one row, or weights of 0 on a replica.
    [
        [_weighted(6), _weighted(2)],
        [_weighted(1), _weighted(0)],
        [_weighted(5), _weighted(2, 1)],
    ]
)
GROUPS = Case(
    # In the second step there are no items.
    [
        [_weighted(n) for n in (4, 1, 2, 3)],
        [_weighted(1, 1) for _ in range(4)],
    ],
    loss=lambda wrap: wrap(WEIGHT_MEAN()),
    groups=PAIRS,
    optimizer=lambda: _cross(group_assignment=PAIRS),
)
ROUND = Case(
    # Calls with different numbers of tokens are one batch of all.
    [
        [_tokens(1, length), _tokens(1, other)]
        for length, other in ((10, 9), (1, 1), (4, 2), (7, 3)) * 2
    ],
    _language,
    _tokens_loss,
    calls=4,
)
CASES = {
    "ragged": RAGGED,
    "plain_keras": RAGGED._replace(optimizer=_sgd),
    # Each loss has its own items, and a sum has none.
    "two_outputs": Case(
        [[_for_two_outputs(5), _for_two_outputs(3)]] * 2,
        _two_outputs,
        lambda wrap: [wrap("mse"), wrap(SQUARE(reduction="sum"))],
        options={"loss_weights": [0.7, 0.02]},
    ),
    "groups": GROUPS,
    # A TPU's parts have equal shapes.
    "groups_tpu": GROUPS._replace(
        steps=[[_weighted(3, top) for _ in range(4)] for top in (3, 1)],
        kind="tpu_permuted",
    ),
    # The mean is over the groups around the AGNOptimizer.
    "local_steps": GROUPS._replace(optimizer=_local_steps_on_two_hosts),
    "round_tpu": ROUND._replace(
        optimizer=lambda: _tower(4), kind="tpu_permuted"
    ),
    "round_inside": ROUND._replace(
        optimizer=lambda: tf_xshard.CrossShardOptimizer(_tower(4))
    ),
    "round_in_round": ROUND._replace(
        optimizer=lambda: tf_xshard.TowerOptimizer(_tower(2), 2)
    ),
    # Neither towers nor replicas have equally many tokens, and one has none.
    "towers": Case(
        [[training.joined(_tokens(1, n) for n in (10, 1, 4)), _tokens(1, 7)]],
        _language,
        _tokens_loss,
        _tower,
        train_step=tf_xshard.tower_train_step(
            # Replica r is on CPU:r.
            lambda r: [f"CPU:{r}", f"CPU:{2 + r}"]
        ),
    ),
}


def _train(case, strategy, wrap, optimizer, parts, train_step=None):
    """All replicas' weights, and each step's loss."""
    with strategy.scope():
        loss, options = case.loss(wrap), case.options
        model = _compiled(
            case.model(), optimizer(), loss, train_step, **options
        )
    losses = training.run_parts(model, parts)
    return training.weights(model, strategy), losses


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    case = CASES[name]
    num_replicas = len(case.steps[0])
    weights, losses = _train(
        case,
        replicas.STRATEGIES[case.kind](num_replicas),
        lambda loss: GlobalMean(loss, case.groups),
        case.optimizer,
        case.steps,
        case.train_step,
    )
    assert np.isfinite(losses).all()
    for members in case.groups or [range(num_replicas)]:
        joined = [
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
            _sgd,
            joined,
        )
        difference = training.deviation(weights, expected, members)
        assert difference <= 1e-6
        if case.groups is None and case.calls == 1:
            np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)


def test_fit_with_a_ragged_end_on_a_tpu():
    """Rows that pad a part are no items of the weights and of the losses."""
    x, y, weights = _weighted(13)

    def fit(strategy, loss, optimizer):
        with strategy.scope():
            model = _compiled(_dense(), optimizer(), loss)
        history = model.fit(
            *(x, y, 8), shuffle=False, verbose=0, sample_weight=weights
        )
        return training.weights(model, strategy), history.history

    expected = fit(tf.distribute.get_strategy(), "mse", _sgd)
    got = fit(replicas.tpu(2), GlobalMean("mse"), _cross)
    assert training.deviation(got[0], expected[0]) <= 1e-6
    for name, values in expected[1].items():
        np.testing.assert_allclose(got[1][name], values, rtol=1e-5)


def test_the_drawing_of_the_guide():
    """In a custom loop of float64; `value * N` is the mean over all rows."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        weight = keras.Variable(1.0, dtype="float64")
        optimizer = tf_xshard.CrossShardOptimizer(SGD(1.0))
        optimizer.build([weight])
    of_keras = keras.losses.MeanAbsoluteError(dtype="float64")
    loss = GlobalMean(of_keras)
    losses = np.array([[0.1], [0.2], [0.3]]), np.array([[0.8]])

    def on_replica():
        rows = tf.constant(losses[replicas.replica_id()])
        with tf.GradientTape() as tape:
            value = loss(rows * 0, rows * weight)
        optimizer.apply([tape.gradient(value, weight.value)], [weight])
        return value, of_keras(rows * 0, rows)

    values, plain = map(
        strategy.experimental_local_results, strategy.run(on_replica)
    )
    check = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    check(values, [0.35 / 2] * 2)
    check(sum(plain), 0.5)
    check(replicas.values(strategy, weight), [1 - 0.35] * 2)


def _square(y_true, y_pred):
    """A name that is no name of a scope of TensorFlow."""
    return tf.reduce_mean(tf.square(y_pred - y_true), axis=1)


@pytest.mark.parametrize(
    "given, loss",
    [
        (_square, SQUARE()),
        (WEIGHT_MEAN(), WEIGHT_MEAN()),
        (SQUARE(reduction="sum"), SQUARE(reduction="sum")),
        # Shapes choose the loss.
        ("crossentropy", keras.losses.BinaryCrossentropy()),
    ],
)
def test_on_one_device_it_is_the_loss(given, loss):
    batch = [
        tf.constant(one) for one in ([[1.0], [0.0]], [[0.7], [0.2]], [1.0, 2.0])
    ]
    value = tf.function(GlobalMean(given), autograph=False)(*batch)
    np.testing.assert_allclose(value, loss(*batch), rtol=1e-6)


ABSOLUTE = keras.losses.MeanAbsoluteError()
# Its gradient by the predictions is 1.
PREDICTION = GlobalMean(lambda y_true, y_pred: y_pred)
# The number of rows, and the gradient of each, of two calls.
CALLS = ((3, 1.0), (1, 5.0))


def _gradient(variable, *losses, num_rows=1, value=1.0):
    """Of a sum of losses of the same rows."""
    rows = tf.fill([num_rows, 1], value)
    with tf.GradientTape() as tape:
        total = sum(one(rows * 0, rows * variable) for one in losses)
    return tape.gradient(total, variable.value)


def _call(optimizer, variable, *losses, **rows):
    optimizer.apply([_gradient(variable, *losses, **rows)], [variable])


def _applied(optimizer, variable, *losses):
    """The gradient that both calls of a round apply with the rate 0.1."""
    before = float(variable)
    for num_rows, value in CALLS:
        _call(optimizer, variable, *losses, num_rows=num_rows, value=value)
    return pytest.approx((before - float(variable)) / 0.1, rel=1e-5)


def _after_an_evaluation(y_true, y_pred):
    PREDICTION(np.zeros((9, 1)), np.zeros((9, 1)))
    return PREDICTION(y_true, y_pred)


@pytest.mark.parametrize(
    "losses, options, gradient",
    [
        # Only a loss that is differentiated counts for the next step.
        ([_after_an_evaluation], {}, 2),
        # A call counts in proportion to its rows. Each loss has a mean of 2.
        ([PREDICTION, GlobalMean(lambda y, p: tf.concat([p, p], 1))], {}, 4),
        ([PREDICTION], {"reduction": "sum"}, 6),
    ],
    ids=["evaluation", "multiples_of_rows", "sum"],
)
def test_a_round_weights_its_calls_by_items(losses, options, gradient):
    assert gradient == _applied(_tower(**options), keras.Variable(1.0), *losses)


def test_another_loss_after_reset():
    optimizer, variable = _tower(), keras.Variable(1.0)
    _call(optimizer, variable, PREDICTION, num_rows=3)
    optimizer.reset()
    assert _applied(optimizer, variable, ABSOLUTE) == 3


@pytest.mark.parametrize(
    "loss, weights",
    [(ABSOLUTE, [3, 1.0]), (PREDICTION, None)],
    ids=["weights", "records"],
)
def test_apply_towers_with_weights_and_with_records(loss, weights):
    variable = keras.Variable(1.0)
    towers = [
        [_gradient(variable, loss, num_rows=num_rows, value=value)]
        for num_rows, value in CALLS
    ]
    _tower().apply_towers(towers, [variable], weights)
    np.testing.assert_allclose(float(variable), 1 - 0.1 * 2, rtol=1e-6)


class _OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_mean(y_pred)


MEAN, SUM = GlobalMean("mse"), GlobalMean(SQUARE(reduction="sum"))
TOWER_STEP = tf_xshard.tower_train_step()


def _once(*losses, num_rows=1):
    _call(_tower(), keras.Variable(1.0), *losses, num_rows=num_rows)


def _in_one_round(*losses):
    optimizer, variable = _tower(), keras.Variable(1.0)
    for loss in losses:
        _call(optimizer, variable, loss)


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
    model = _compiled(_two_outputs(), _tower(), [MEAN, "mae"], train_step)
    model.train_on_batch(*_for_two_outputs(4))


def _two_towers_of_one_loss():
    variable, optimizers = keras.Variable(1.0), [_tower(), _tower()]
    for one in optimizers:
        one.build([variable])

    @tf.function(autograph=False)
    def step():
        gradient = _gradient(variable, MEAN)
        for one in optimizers:
            one.apply([gradient], [variable])

    step()


def _in_multi_optimizer():
    multi = keras.optimizers.MultiOptimizer(lambda variable: _tower())
    _call(multi, keras.Variable(1.0), MEAN)


def _other_groups_in_a_tower_train_step():
    loss = GlobalMean("mse", [[0], [1]])
    with replicas.mirrored(2).scope():
        model = _compiled(_dense(), _tower(), loss, TOWER_STEP)
        training.run_parts(model, [[_rows(4)] * 2])


def _apply_towers(weights, reduction="mean"):
    gradients, variables = [[1.0], [1.0]], [keras.Variable(1.0)]
    optimizer = _tower(reduction=reduction)
    optimizer.apply_towers(gradients, variables, weights)


def _agn():
    return tf_xshard.AGNOptimizer(_sgd())


def _cross_of_replicas():
    return _cross(loss_normalization="replica")


def _rows_that_are_known_when_it_runs():
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
    assert float(variable) == 1
    step(tf.ones([2, 1]), tf.ones([3, 1]))


def _called(loss):
    GlobalMean(loss)(np.zeros(2), np.zeros(2))


SCALAR = tf_xshard.ScalarLoss(lambda y, p: 1.0)
FIRST_ROW = lambda y, p: MEAN(y[:1], p[:1])


@pytest.mark.parametrize(
    "error, message, call",
    [
        (T, "takes a loss as compile", lambda: GlobalMean(3)),
        (V, "nonsense", lambda: GlobalMean("nonsense")),
        (T, "wrap the loss of each", lambda: GlobalMean(["mse"])),
        (V, "reduction None", lambda: GlobalMean(SQUARE(reduction=None))),
        (V, "can't wrap GlobalMean", lambda: GlobalMean(MEAN)),
        (V, "can't wrap ScalarLoss", lambda: GlobalMean(SCALAR)),
        (V, "one number", lambda: _called(lambda y, p: tf.reduce_mean(p))),
        (V, "one number", lambda: _called(_OwnCall())),
        (V, "exactly once", lambda: GlobalMean("mse", [[0], [0]])),
        (V, "of items may differ", lambda: _once(MEAN, SUM)),
        (V, "of items may differ", lambda: _once(MEAN, FIRST_ROW, num_rows=3)),
        (A, "different numbers of rows", _rows_that_are_known_when_it_runs),
        (V, "another loss.*reset", lambda: _in_one_round(MEAN, SQUARE())),
        (V, "were not computed", lambda: _in_one_round(SQUARE(), MEAN)),
        (V, "computed in another tf.function", _in_another_function),
        (V, "Each tower needs the same", _three_of_two),
        (V, "Wrap all of them, or none", _beside_a_plain_loss),
        (V, "Wrap all of them", lambda: _beside_a_plain_loss(TOWER_STEP)),
        (V, "took the number of items", _two_towers_of_one_loss),
        (V, "inside a MultiOptimizer", _in_multi_optimizer),
        (V, '="replica"', lambda: _on_two(_cross_of_replicas)),
        (V, r"loss, \[\[0, 1\]\]\)", lambda: _on_two(_cross, [[0], [1]])),
        (V, "pass the loss itself", lambda: _on_two(_agn)),
        (V, r"\[\[0, 1\]\]", _other_groups_in_a_tower_train_step),
        (V, "got 1 weights", lambda: _apply_towers([1])),
        (V, 'only with reduction="mean"', lambda: _apply_towers([1, 1], "sum")),
    ],
)
def test_refused(error, message, call):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("is_applied", [False, True])
def test_no_graph_is_kept(is_applied):
    """Nor by a record that no optimizer takes."""
    with replicas.mirrored(2).scope():
        variable, optimizer = keras.Variable(1.0), _cross()
        optimizer.build([variable])
    run = functools.partial(_call, optimizer) if is_applied else _gradient
    steps.check_no_graph_is_kept(lambda: run(variable, MEAN))


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
    communication = tf_xshard.Communication(timeout_seconds=7)
    made = GlobalMean(loss, [[0]], communication=communication, name="mine")
    _compiled(_dense(), "sgd", made).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").loss
    assert isinstance(loaded, GlobalMean)
    assert loaded.get_config() == made.get_config()
    assert loaded.group_assignment.to_list() == [[0]]
    assert loaded.name == "mine"


def test_an_exported_model_needs_no_tf_xshard(tmp_path):
    model = _compiled(_dense(), _cross(), GlobalMean("mse"))
    tf_xshard.GroupState(model).export(0, tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").loss == "mse"
