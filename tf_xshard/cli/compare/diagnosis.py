"""Finds the cures that make a difference go away."""

from __future__ import annotations

import dataclasses

import numpy as np

from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import runs as runs_lib
from tf_xshard.cli.compare import verdict


@dataclasses.dataclass
class Diagnosis:
    """Tries cures.

    Attributes:
      runs: Runs the script.
      one: The run on one replica, which may have failed.
      allowed: The largest difference that is none.
      ratio: The difference with the cures that help.
      helped: The names of these cures.
      tried: The names of the cures of each run, and its difference or None.
    """

    runs: runs_lib.Runs
    one: recording_lib.Recording
    allowed: float
    ratio: float
    helped: list[str] = dataclasses.field(default_factory=list)
    tried: dict[tuple[str, ...], float | None] = dataclasses.field(
        default_factory=dict
    )

    def find(self) -> None:
        """Adds up the cures that help, in their order; then tries all."""
        names = [
            name
            for name, cure in cures.CURES.items()
            if not cure.needs or cure.needs in self.one.features
        ]
        for name in names:
            kept = [
                each
                for each in self.helped
                if each != cures.CURES[name].instead_of
            ]
            if self._helps([*kept, name]) and self.ratio <= self.allowed:
                return
        rest = [
            name
            for name in names
            if name not in self.helped and not cures.CURES[name].instead_of
        ]
        # Two causes may hide each other.
        if len(rest) > 1 and self._helps([*self.helped, *rest]):
            self._leave_out(rest)

    def _helps(self, names: list[str]) -> bool:
        """Takes cures that make the difference none, or ten times smaller."""
        ratio = self._ratio_with(names)
        helps = (
            ratio is not None
            and np.isfinite(ratio)
            and (ratio <= self.allowed or ratio * 10 <= self.ratio)
        )
        if ratio is not None and helps:
            self.helped, self.ratio = names, ratio
        return helps

    def _leave_out(self, names: list[str]) -> None:
        """Drops those without which the difference is no larger."""
        most = max(self.allowed, 10 * self.ratio)
        for name in names:
            fewer = [each for each in self.helped if each != name]
            ratio = self._ratio_with(fewer)
            if ratio is not None and ratio <= most:
                self.helped, self.ratio = fewer, ratio

    def _ratio_with(self, names: list[str]) -> float | None:
        """Returns the largest difference with cures, or None if they fail."""
        some = tuple(names)
        if some not in self.tried:
            self.tried[some] = self._difference(some)
        return self.tried[some]

    def _difference(self, names: tuple[str, ...]) -> float | None:
        one = self.one
        try:
            if one.status == recording_lib.FAILED or any(
                cures.CURES[name].on_one_device for name in names
            ):
                one = self.runs.run(1, cures=names)
            if one.status == recording_lib.FAILED:
                return None
            cured = self.runs.run(self.runs.settings.seen_replicas, cures=names)
        except runs_lib.FilesChanged:
            raise
        except runs_lib.NotComparable:
            return None
        if cured.status == recording_lib.FAILED or verdict.not_comparable(
            one, cured, self.runs.settings.seen_replicas, self.allowed
        ):
            return None
        return verdict.worst(verdict.differences(one, cured))
