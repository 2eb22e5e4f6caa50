"""Collects a demo's runs in a table, and the promises that fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tf_xshard.cli.demo import training

DEFAULT_EPOCHS = 10
MIN_ACCURACY = 0.95


class Promises:
    """The rows of the table, and the failures."""

    def __init__(self, reference: str) -> None:
        self._head = ("run", "accuracy", "moved", f"max |dw| from {reference}")
        self._rows: list[tuple[str, str, str, str]] = []
        self._failures: list[str] = []

    def show(
        self,
        row: str,
        trained: training.Trained | None = None,
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
        trained: training.Trained,
        reference: Sequence[np.ndarray],
        tolerance: float,
        members: Sequence[int] | None = None,
        right: bool = True,
    ) -> None:
        """Checks that weights equal a reference, or differ if not `right`."""
        deviation = training.deviation(trained.weights, reference, members)
        holds = deviation <= tolerance
        self.show(
            row,
            trained,
            f"{deviation:.1e} {'equal' if holds else 'WRONG'}, tolerance"
            f" {tolerance:.1e}",
            members[0] if members else 0,
        )
        self.check_that(
            holds == right,
            f"{row}: {deviation:.1e} from its reference, tolerance"
            f" {tolerance:.1e}",
        )

    def check_that(self, holds: bool, otherwise: str) -> None:
        """Records a failure unless a promise holds."""
        if not holds:
            self._failures.append(otherwise)

    def check_accuracy(
        self, runs: Iterable[training.Trained], epochs: int
    ) -> None:
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
