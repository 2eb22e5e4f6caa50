"""The main job on real data: handwritten digits, one device against many.

Trains one small convolutional classifier on one device, with plain Keras under
a strategy, with CrossShardOptimizer over all replicas, and in groups, and
checks what the package promises.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import logical_devices

BATCH_SIZE = 64
NUM_VALIDATION = 357
DEFAULT_EPOCHS = 10
MIN_ACCURACY = 0.95
MIN_GROUP_DIFFERENCE = 1e-3

_OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(4e-3),
    "adamw": lambda: keras.optimizers.AdamW(2e-3, weight_decay=0.01),
    "clipped": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.5
    ),
    "nadam": lambda: keras.optimizers.Nadam(2e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=DEFAULT_EPOCHS)
    parser.add_argument(
        "--optimizer", choices=sorted(_OPTIMIZERS), default="adam"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="a picture of the groups' loss curves"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


@dataclasses.dataclass
class _Digits:
    """Every batch of every epoch in order, and what validates."""

    x: np.ndarray
    y: np.ndarray
    x_validation: np.ndarray
    y_validation: np.ndarray
    steps_per_epoch: int
    batch_size: int = BATCH_SIZE

    def of_shards(self, members, num_replicas) -> _Digits:
        """What the replicas of one group see of each batch."""
        shard = BATCH_SIZE // num_replicas
        rows = np.arange(len(self.x)).reshape(-1, num_replicas, shard)
        rows = rows[:, list(members)].reshape(-1)
        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            batch_size=shard * len(members),
        )

    def with_permuted_batches(self, seed) -> _Digits:
        """The same batches, with their rows in another order."""
        rng = np.random.default_rng(seed)
        rows = np.arange(len(self.x)).reshape(-1, self.batch_size)
        rows = rng.permuted(rows, axis=1).reshape(-1)
        return dataclasses.replace(self, x=self.x[rows], y=self.y[rows])


def _load(epochs, seed) -> _Digits:
    from sklearn import datasets

    digits = datasets.load_digits()
    x = (digits.images[..., np.newaxis] / 16.0).astype(np.float32)
    y = digits.target.astype(np.int32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    train, validation = order[NUM_VALIDATION:], order[:NUM_VALIDATION]
    steps = len(train) // BATCH_SIZE
    rows = np.concatenate(
        [rng.permutation(train)[: steps * BATCH_SIZE] for _ in range(epochs)]
    )
    return _Digits(x[rows], y[rows], x[validation], y[validation], steps)


def _model(seed) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="gelu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="gelu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def _compile(model, optimizer):
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


class _Trained:
    """A finished run: the weights of every replica, and what they are worth."""

    def __init__(
        self, title, digits, options, strategy=None, wrap=None, callbacks=()
    ):
        print(f"\n{title}", flush=True)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = _model(options.seed)
            optimizer = _OPTIMIZERS[options.optimizer]()
            _compile(model, wrap(optimizer) if wrap else optimizer)
            model.optimizer.build(model.trainable_variables)
        self.start = [np.array(v) for v in model.get_weights()]
        dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
        model.fit(
            dataset.batch(digits.batch_size, drop_remainder=True),
            epochs=options.epochs,
            steps_per_epoch=digits.steps_per_epoch,
            shuffle=False,
            callbacks=[one(model, strategy) for one in callbacks],
        )
        self._digits, self._options = digits, options
        self.weights = of_replicas(model, strategy)

    def moved(self, replica_id=0) -> float:
        return _difference(self.weights[replica_id], self.start)

    def accuracy(self, replica_id=0) -> float:
        return _evaluate(
            self.weights[replica_id],
            self._digits.x_validation,
            self._digits.y_validation,
            self._options.seed,
        )[1]

    def tolerance(self) -> float:
        """How exact float32 is: what the order of rows in a batch changes."""
        permuted = _Trained(
            "The same with the rows inside each batch in another order",
            self._digits.with_permuted_batches(self._options.seed),
            self._options,
        )
        return max(1e-6, 3 * permuted.deviation(self))

    def deviation(self, other: _Trained, members=None) -> float:
        """The largest difference of any replica's weights from one device's."""
        members = range(len(self.weights)) if members is None else members
        # np.max and not max, which can lose a nan.
        return float(
            np.max(
                [
                    _difference(self.weights[r], other.weights[0])
                    for r in members
                ]
            )
        )


def of_replicas(model, strategy) -> list[list[np.ndarray]]:
    """`weights[replica][variable]`."""
    if strategy is None:
        return [model.get_weights()]
    of_variables = [
        [np.array(one) for one in strategy.experimental_local_results(v.value)]
        for v in model.weights
    ]
    return [list(of_replica) for of_replica in zip(*of_variables, strict=True)]


def _difference(some, others) -> float:
    return float(
        np.max([np.abs(a - b).max() for a, b in zip(some, others, strict=True)])
    )


def _evaluate(weights, x, y, seed):
    model = _model(seed)
    _compile(model, keras.optimizers.SGD())
    model.set_weights(weights)
    return model.evaluate(x, y, batch_size=len(x), verbose=0)


class _LossOfGroups(keras.callbacks.Callback):
    """Each group's validation loss after every epoch."""

    def __init__(self, groups, digits, seed, losses):
        super().__init__()
        self._groups, self._digits = groups, digits
        self._seed, self._losses = seed, losses

    def bound_to(self, model, strategy):
        self._strategy = strategy
        return self

    def on_epoch_end(self, epoch, logs=None):
        weights = of_replicas(self.model, self._strategy)
        self._losses.append(
            [
                _evaluate(
                    weights[members[0]],
                    self._digits.x_validation,
                    self._digits.y_validation,
                    self._seed,
                )[0]
                for members in self._groups
            ]
        )


def _plot(losses, groups, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    epochs = range(1, len(losses) + 1)
    for index, members in enumerate(groups):
        axes.plot(
            epochs,
            [of_epoch[index] for of_epoch in losses],
            marker="o",
            label=f"group {index}: replicas {list(members)}",
        )
    axes.set(
        xlabel="epoch",
        ylabel="validation loss",
        yscale="log",
        title="Groups that train apart (handwritten digits)",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"\nThe groups' loss curves are in {path}")


def _print_table(rows):
    head = ("run", "accuracy", "moved", "max |dw| from one device")
    width = max(len(row[0]) for row in rows)
    print(f"\n{head[0]:{width}}  {head[1]:>8}  {head[2]:>6}  {head[3]}")
    for title, accuracy, moved, deviation in rows:
        print(f"{title:{width}}  {accuracy:8.4f}  {moved:6.3f}  {deviation}")


def _check_arguments(options, parser):
    if options.replicas < 2 or BATCH_SIZE % options.replicas:
        parser.error(
            f"--replicas {options.replicas}: must be at least 2 and divide the"
            f" batch of {BATCH_SIZE}"
        )
    if options.groups < 1 or options.replicas % options.groups:
        parser.error(
            f"--groups {options.groups}: must be at least 1 and divide the"
            f" {options.replicas} replicas"
        )
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: must be at least 1")


def run(options, parser) -> int:
    """Trains, prints the table and checks the promises.

    Returns:
      0 if every promise holds, else 1.
    """
    _check_arguments(options, parser)
    strategy = logical_devices.best_strategy(options.replicas)
    num_replicas = strategy.num_replicas_in_sync
    if num_replicas != options.replicas:
        print(f"This machine's strategy has {num_replicas} replicas.")
        options.replicas = num_replicas
        _check_arguments(options, parser)
    groups = tf_xshard.GroupAssignment.strided(
        num_replicas, num_replicas // options.groups
    )
    digits = _load(options.epochs, options.seed)
    print(
        f"{logical_devices.describe(strategy)}; groups {groups.to_list()};"
        f" {options.optimizer}; {options.epochs} epochs of"
        f" {digits.steps_per_epoch} batches of {BATCH_SIZE} handwritten digits"
    )
    losses = []
    watch = _LossOfGroups(groups, digits, options.seed, losses)
    one = _Trained("One device, the same global batch", digits, options)
    tolerance = one.tolerance()
    plain = _Trained(
        "Plain Keras under the strategy", digits, options, strategy
    )
    everyone = _Trained(
        "CrossShardOptimizer over all replicas",
        digits,
        options,
        strategy,
        tf_xshard.CrossShardOptimizer,
    )
    grouped = _Trained(
        f"CrossShardOptimizer in {groups.num_groups} groups",
        digits,
        options,
        strategy,
        lambda inner: tf_xshard.CrossShardOptimizer(
            inner, group_assignment=groups
        ),
        [watch.bound_to],
    )
    alone = [
        _Trained(
            f"One device on the shards of group {index}",
            digits.of_shards(members, num_replicas),
            options,
        )
        for index, members in enumerate(groups)
    ]
    tolerances = [reference.tolerance() for reference in alone]
    wrong = _Trained(
        "A wrong reduction: every replica by itself",
        digits,
        options,
        strategy,
        lambda inner: tf_xshard.CrossShardOptimizer(
            inner,
            group_assignment=tf_xshard.GroupAssignment.contiguous(
                num_replicas, 1
            ),
        ),
    )

    rows = [
        ("one device", one.accuracy(), one.moved(), "reference"),
        (
            "plain Keras under the strategy",
            plain.accuracy(),
            plain.moved(),
            f"{plain.deviation(one):.1e}",
        ),
    ]
    failures = []

    def check(row, trained, reference, members, tolerance, right=True):
        deviation = trained.deviation(reference, members)
        holds = deviation <= tolerance
        rows.append(
            (
                row,
                trained.accuracy(members[0]),
                trained.moved(members[0]),
                f"{deviation:.1e} {'equal' if holds else 'WRONG'}, tolerance"
                f" {tolerance:.1e}",
            )
        )
        if holds != right:
            failures.append(
                f"{row}: {deviation:.1e} from one device, tolerance"
                f" {tolerance:.1e}"
            )

    every = range(num_replicas)
    check("CrossShardOptimizer, all", everyone, one, every, tolerance)
    for index, members in enumerate(groups):
        check(
            f"group {index}, on its shards",
            grouped,
            alone[index],
            members,
            tolerances[index],
        )
    check(
        "a wrong reduction (on purpose)",
        wrong,
        one,
        every,
        tolerance,
        right=False,
    )
    _print_table(rows)
    print(
        "tolerance: three times what another order of the rows inside each"
        " batch changes on one device"
    )
    if options.plot:
        _plot(losses, groups, options.plot)
    least = min(one.accuracy(), everyone.accuracy())
    if options.epochs < DEFAULT_EPOCHS:
        print(f"accuracy is promised from {DEFAULT_EPOCHS} epochs on")
    elif not least >= MIN_ACCURACY:
        failures.append(f"accuracy {least:.4f} is below {MIN_ACCURACY}")
    for first, second in itertools.combinations(groups, 2):
        apart = _difference(
            grouped.weights[first[0]], grouped.weights[second[0]]
        )
        if not apart >= MIN_GROUP_DIFFERENCE:
            failures.append(
                f"groups {list(first)} and {list(second)} differ by {apart:.1e}"
                f" only, expected {MIN_GROUP_DIFFERENCE:.0e} at least"
            )
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All promises hold.")
    return 1 if failures else 0
