"""Trains the demo's model, and collects the runs and the promises that fail."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_xshard.cli import numbers
from tf_xshard.cli.demo import digits as digits_lib


@dataclasses.dataclass(frozen=True)
class Runs:
    """Makes the runs of a demo, which share data, options and strategy.

    Attributes:
      digits: The data.
      options: The command's arguments.
      strategy: The strategy with several replicas.
      tolerance: The difference of a weight that counts as equal.
    """

    digits: digits_lib.Digits
    options: argparse.Namespace
    strategy: tf.distribute.Strategy
    tolerance: float

    def on_one_device(
        self, title: str, digits: digits_lib.Digits | None = None
    ) -> numbers.Trained:
        """Trains without the strategy."""
        return self._trained(title, digits, None)

    def replicated(
        self,
        title: str,
        wrap: numbers.Wrap = numbers.unwrapped,
        digits: digits_lib.Digits | None = None,
        **kwargs: Any,
    ) -> numbers.Trained:
        """Trains under the strategy."""
        return self._trained(title, digits, self.strategy, wrap=wrap, **kwargs)

    def _trained(
        self,
        title: str,
        digits: digits_lib.Digits | None,
        strategy: tf.distribute.Strategy | None,
        **kwargs: Any,
    ) -> numbers.Trained:
        print(f"\n{title}", flush=True)
        digits, options = digits or self.digits, self.options
        dataset = tf.data.Dataset.from_tensor_slices((digits.x, digits.y))
        return numbers.trained(
            lambda: digits_lib.create_model(options.seed),
            digits_lib.OPTIMIZERS[options.optimizer],
            dataset.batch(digits.batch_size, drop_remainder=True),
            strategy,
            compiled=digits_lib.compile_arguments(),
            epochs=options.epochs,
            steps_per_epoch=digits.steps_per_epoch,
            **kwargs,
        )

    def accuracy(self, weights: Sequence[np.ndarray]) -> float:
        """Returns the accuracy of weights on the validation data."""
        return digits_lib.evaluate(weights, self.digits, self.options.seed)[1]


DEFAULT_EPOCHS = 10
MIN_ACCURACY = 0.95


class Promises:
    """Collects the rows of the table, and the failures."""

    def __init__(self, reference: str, runs: Runs) -> None:
        self._runs = runs
        self._head = ("run", "accuracy", "moved", f"max |dw| from {reference}")
        self._rows: list[tuple[str, str, str, str]] = []
        self._failures: list[str] = []

    def show(
        self,
        row: str,
        trained: numbers.Trained | None = None,
        remark: str = "",
        replica_id: int = 0,
    ) -> None:
        """Adds a row without a promise."""
        self._rows.append(
            (
                row,
                f"{self._accuracy(trained, replica_id):8.4f}"
                if trained
                else "",
                f"{trained.moved(replica_id):6.3f}" if trained else "",
                remark,
            )
        )

    def check(
        self,
        row: str,
        trained: numbers.Trained,
        reference: Sequence[np.ndarray],
        members: Sequence[int] | None = None,
        right: bool = True,
    ) -> None:
        """Checks that weights equal a reference, or differ if not `right`."""
        off = numbers.deviation(trained.weights, reference, members)
        tolerance = self._runs.tolerance
        holds = off <= tolerance
        self.show(
            row,
            trained,
            f"{off:.1e} {'equal' if holds else 'WRONG'}",
            members[0] if members else 0,
        )
        self.check_that(
            holds == right or np.isinf(tolerance),
            f"{row}: {off:.1e} from its reference, tolerance {tolerance:.1e}",
        )

    def _accuracy(self, trained: numbers.Trained, replica_id: int = 0) -> float:
        return self._runs.accuracy(trained.weights[replica_id])

    def check_that(self, holds: bool, otherwise: str) -> None:
        """Records a failure unless a promise holds."""
        if not holds:
            self._failures.append(otherwise)

    def check_accuracy(
        self, runs: Iterable[numbers.Trained], epochs: int
    ) -> None:
        """Checks the accuracy of runs, if the runs are long enough."""
        if epochs < DEFAULT_EPOCHS:
            print(f"accuracy is not checked below {DEFAULT_EPOCHS} epochs")
            return
        least = min(self._accuracy(trained) for trained in runs)
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
        tolerance = self._runs.tolerance
        print(
            "float32, not judged: a TPU multiplies in bfloat16"
            if np.isinf(tolerance)
            else f"equal: at most {tolerance:.0e} apart, in float64"
        )

    def exit_code(self) -> int:
        """Prints failed promises; returns 0 if all promises hold, else 1."""
        for failure in self._failures:
            print(f"FAILED: {failure}")
        if not self._failures:
            print("All promises hold.")
        return 1 if self._failures else 0
