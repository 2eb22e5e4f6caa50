"""Trains the demo's model, and collects the runs and the promises that fail."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_xshard.cli.demo import digits as digits_lib


class Trained:
    """Holds a finished run's arrays, as `weights[replica][variable]`."""

    def __init__(
        self,
        title: str,
        digits: digits_lib.Digits,
        options: argparse.Namespace,
        strategy: tf.distribute.Strategy | None = None,
        wrap: Callable[[Any], keras.optimizers.Optimizer] | None = None,
        callbacks: Iterable[Callable[..., keras.callbacks.Callback]] = (),
        train_step: Callable[..., Any] | None = None,
    ) -> None:
        print(f"\n{title}", flush=True)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = digits_lib.create_model(options.seed)
            optimizer = digits_lib.OPTIMIZERS[options.optimizer]()
            if train_step:
                model.train_step = functools.partial(train_step, model)
            digits_lib.compiled(model, wrap(optimizer) if wrap else optimizer)
            model.optimizer.build(model.trainable_variables)
        self.start = [np.array(v) for v in model.get_weights()]
        dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
        self.history = model.fit(
            dataset.batch(digits.batch_size, drop_remainder=True),
            epochs=options.epochs,
            steps_per_epoch=digits.steps_per_epoch,
            shuffle=False,
            callbacks=[one(model, strategy) for one in callbacks],
        ).history
        self.model = model
        self._digits, self._options = digits, options
        self.weights = of_replicas(model, strategy)

    def moved(self, replica_id: int = 0) -> float:
        """Returns the largest change of a weight on a replica."""
        return difference(self.weights[replica_id], self.start)

    def accuracy(self, replica_id: int = 0) -> float:
        """Returns a replica's accuracy on the validation data."""
        return digits_lib.evaluate(
            self.weights[replica_id], self._digits, self._options.seed
        )[1]

    def tolerance(self) -> float:
        """Measures float32's precision by reordering the rows of batches."""
        permuted = Trained(
            "The same with the rows inside each batch in another order",
            self._digits.with_permuted_batches(self._options.seed),
            self._options,
        )
        return tolerance(deviation(permuted.weights, self.weights[0]))


@dataclasses.dataclass(frozen=True)
class Runs:
    """Makes the runs of a demo, which share data, options and strategy."""

    digits: digits_lib.Digits
    options: argparse.Namespace
    strategy: tf.distribute.Strategy

    def on_one_device(
        self, title: str, digits: digits_lib.Digits | None = None
    ) -> Trained:
        """Trains without the strategy."""
        return Trained(title, digits or self.digits, self.options)

    def replicated(
        self,
        title: str,
        wrap: Callable[[Any], keras.optimizers.Optimizer] | None = None,
        digits: digits_lib.Digits | None = None,
        **kwargs: Any,
    ) -> Trained:
        """Trains under the strategy."""
        digits = digits or self.digits
        return Trained(
            title, digits, self.options, self.strategy, wrap, **kwargs
        )


def tolerance(of_permuted_rows: float) -> float:
    """Returns the largest difference that counts as equal."""
    return max(1e-6, 3 * of_permuted_rows)


def of_replicas(
    model: keras.Model, strategy: tf.distribute.Strategy | None
) -> list[list[np.ndarray]]:
    """Returns the weights of every replica."""
    if strategy is None:
        return [model.get_weights()]
    of_variables = [
        [one.numpy() for one in strategy.experimental_local_results(v.value)]
        for v in model.weights
    ]
    return [list(of_replica) for of_replica in zip(*of_variables, strict=True)]


def difference(
    some: Sequence[np.ndarray], others: Sequence[np.ndarray]
) -> float:
    """Returns the largest difference between two lists of weights."""
    # np.max keeps a nan, which max can drop.
    return float(
        np.max([np.abs(a - b).max() for a, b in zip(some, others, strict=True)])
    )


def deviation(
    weights: Sequence[Sequence[np.ndarray]],
    reference: Sequence[np.ndarray],
    members: Iterable[int] | None = None,
) -> float:
    """Returns the largest difference of replicas' weights from a reference."""
    members = range(len(weights)) if members is None else members
    return float(np.max([difference(weights[r], reference) for r in members]))


DEFAULT_EPOCHS = 10
MIN_ACCURACY = 0.95


class Promises:
    """Collects the rows of the table, and the failures."""

    def __init__(self, reference: str) -> None:
        self._head = ("run", "accuracy", "moved", f"max |dw| from {reference}")
        self._rows: list[tuple[str, str, str, str]] = []
        self._failures: list[str] = []

    def show(
        self,
        row: str,
        trained: Trained | None = None,
        remark: str = "",
        replica_id: int = 0,
    ) -> None:
        """Adds a row without a promise."""
        self._rows.append(
            (
                row,
                f"{trained.accuracy(replica_id):8.4f}" if trained else "",
                f"{trained.moved(replica_id):6.3f}" if trained else "",
                remark,
            )
        )

    def check(
        self,
        row: str,
        trained: Trained,
        reference: Sequence[np.ndarray],
        tolerance: float,
        members: Sequence[int] | None = None,
        right: bool = True,
    ) -> None:
        """Checks that weights equal a reference, or differ if not `right`."""
        off = deviation(trained.weights, reference, members)
        holds = off <= tolerance
        self.show(
            row,
            trained,
            f"{off:.1e} {'equal' if holds else 'WRONG'}, tolerance"
            f" {tolerance:.1e}",
            members[0] if members else 0,
        )
        self.check_that(
            holds == right,
            f"{row}: {off:.1e} from its reference, tolerance {tolerance:.1e}",
        )

    def check_that(self, holds: bool, otherwise: str) -> None:
        """Records a failure unless a promise holds."""
        if not holds:
            self._failures.append(otherwise)

    def check_accuracy(self, runs: Iterable[Trained], epochs: int) -> None:
        """Checks the accuracy of runs, if the runs are long enough."""
        if epochs < DEFAULT_EPOCHS:
            print(f"accuracy is not checked below {DEFAULT_EPOCHS} epochs")
            return
        least = min(trained.accuracy() for trained in runs)
        self.check_that(
            least >= MIN_ACCURACY,
            f"accuracy {least:.4f} is below {MIN_ACCURACY}",
        )

    def print_table(self) -> None:
        """Prints all rows."""
        width = max(len(row[0]) for row in self._rows)
        head = self._head
        print(f"\n{head[0]:{width}}  {head[1]:>8}  {head[2]:>6}  {head[3]}")
        for title, accuracy, moved, remark in self._rows:
            print(f"{title:{width}}  {accuracy:8}  {moved:6}  {remark}")
        print(
            "tolerance: three times the change on one device when the rows of"
            " each batch are reordered"
        )

    def exit_code(self) -> int:
        """Prints failed promises; returns 0 if all promises hold, else 1."""
        for failure in self._failures:
            print(f"FAILED: {failure}")
        if not self._failures:
            print("All promises hold.")
        return 1 if self._failures else 0
