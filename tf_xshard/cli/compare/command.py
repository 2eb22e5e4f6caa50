"""`python -m tf_xshard compare`: its arguments, its runs and its verdict."""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile

from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import runs as runs_lib
from tf_xshard.cli.compare import verdict

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
_TWO_LINES = """\
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():  # around the model and compile"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    for name, default, text in (
        ("--replicas", 4, "the number of replicas"),
        ("--steps", 5, "how many steps are compared"),
    ):
        parser.add_argument(
            name, type=int, default=default, help=f"{text}; default: {default}"
        )
    parser.add_argument(
        "--rows",
        type=int,
        help="keep only so many rows of every batch, to take less memory",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="end a run that makes no update for so long; default: 10",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=verdict.TOLERANCE,
        help="what is different, as a part of the largest movement of a"
        f" weight; default: {verdict.TOLERANCE:.0e}",
    )
    parser.add_argument(
        "--copy",
        action="store_true",
        help="run in a copy of the working folder",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show what the script prints"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Runs the script on one and on several replicas, and compares."""
    if options.script.endswith(".ipynb"):
        parser.error(
            "a notebook can't be run; pass the script that `jupyter nbconvert"
            " --to script` makes of it"
        )
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}")
    for name, least in (("replicas", 2), ("steps", 1), ("rows", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: must be at least {least}")
    with tempfile.TemporaryDirectory() as temporary:
        runs = runs_lib.Runs(options, pathlib.Path(temporary))
        try:
            return _Comparison(runs, options.tolerance).print()
        except runs_lib.NotComparable as reason:
            print(f"\nnot comparable: {reason}")
            return NOT_COMPARABLE
        finally:
            runs.print_files()


class _Comparison:
    """Compares the runs of a script."""

    def __init__(self, runs: runs_lib.Runs, tolerance: float) -> None:
        self._runs = runs
        self._allowed = tolerance
        self._number = runs.settings.seen_replicas

    def print(self) -> int:
        """Runs the script, prints the table and the verdict."""
        runs = self._runs
        one = self._on_one()
        many = runs.run(self._number)
        if many.status == recording_lib.FAILED and runs.settings.floatx:
            # It may take float32 only.
            runs.change(floatx=None)
            one = self._on_one()
            many = runs.run(self._number)
        if not any(one.rows):
            self._check_repeatable(one)
        if not runs.settings.floatx:
            self._allowed = max(self._allowed, self._rounding(one))
        if many.status == recording_lib.FAILED:
            print(f"\nIt fails on {self._number} replicas:\n{many.error}")
            self._print_notes(one, many)
            return self._explain(one, None)
        reason = verdict.not_comparable(one, many, self._number, self._allowed)
        if reason:
            raise runs_lib.NotComparable(reason)
        found = verdict.differences(one, many)
        self._print_table(one, many, found)
        self._print_notes(one, many)
        if verdict.worst(found) > self._allowed:
            return self._explain(one, found)
        if idle := one.idle():
            raise runs_lib.NotComparable(
                f"optimizer {idle[0] + 1} of {len(one.starts)} has made no"
                " update in these steps. Pass more --steps."
            )
        if not found[-1].moved:
            raise runs_lib.NotComparable(
                "no weight has moved. Pass more --steps, or a learning rate"
                " above 0."
            )
        self._print_equal(found)
        return EQUAL

    def _on_one(self) -> recording_lib.Recording:
        one = self._runs.run(1)
        if one.status == recording_lib.FAILED:
            raise runs_lib.NotComparable(
                f"the script fails on one replica.\n{one.error}"
            )
        return one

    def _check_repeatable(self, one: recording_lib.Recording) -> None:
        """Runs again on one replica, since the rows can't be compared."""
        again = self._on_one()
        if verdict.worst(verdict.differences(one, again)) > self._allowed:
            raise runs_lib.NotComparable(
                "your script feeds different data in two runs on one replica."
                " Set the seed of what makes its data."
            )

    def _rounding(self, one: recording_lib.Recording) -> float:
        """Returns what counts as different in the dtype of the script."""
        permuted = self._runs.run(1, permuted=True)
        if permuted.status != recording_lib.TRAINED:
            raise runs_lib.NotComparable(
                "the script fails when the rows of its batches are permuted,"
                f" which shows its rounding.\n{permuted.error}"
            )
        found = verdict.differences(one, permuted)
        return verdict.TIMES_ROUNDING * verdict.worst(found)

    def _print_table(
        self,
        one: recording_lib.Recording,
        many: recording_lib.Recording,
        found: list[verdict.Difference],
    ) -> None:
        many_title = f"on {self._number}"
        print(
            f"\n{'step':>4} {'rows':>6} {'rate':>8}  {'loss on 1':>10}"
            f" {many_title:>10}  {'moved':>8}  difference"
        )
        for index, each in enumerate(found):
            steps = [recording.steps[index] for recording in (one, many)]
            losses = [
                "" if step.loss is None else f"{step.loss:.6g}"
                for step in steps
            ]
            rate = steps[0].states[0].learning_rates[0]
            print(
                f"{index + 1:4} {verdict.num_rows(one, index):>6} {rate:8.2g}"
                f"  {losses[0]:>10} {losses[1]:>10}  {each.moved:8.1e}"
                f"  {each.ratio:.1e}  {each.where()}"
            )
        print(
            "The difference is a part of the largest movement of a weight since"
            " the start."
        )

    def _print_notes(
        self, one: recording_lib.Recording, many: recording_lib.Recording
    ) -> None:
        if self._runs.settings.default_strategy:
            print(
                "\nThe script has no strategy, so it ran under a"
                f" MirroredStrategy. Add:\n{_TWO_LINES}"
            )
        notes = list(dict.fromkeys([*one.notes, *many.notes]))
        if notes:
            print(f"In both runs: {'; '.join(notes)}.")

    def _print_equal(self, found: list[verdict.Difference]) -> None:
        what = "equal"
        if not self._runs.settings.floatx:
            what = "no difference above rounding"
        print(
            f"\n{what}: after each of {len(found)} steps, {self._number}"
            " replicas have the weights of one (apart by at most"
            f" {verdict.worst(found):.1e} of their movement,"
            f" {self._allowed:.0e} is allowed). Not tried: other numbers of"
            " replicas, several processes, GPUs, later steps."
        )

    def _explain(
        self,
        one: recording_lib.Recording,
        found: list[verdict.Difference] | None,
    ) -> int:
        """Tries the cures, and names the causes whose cure helps."""
        before = verdict.worst(found) if found else float("inf")
        helped: list[str] = []
        lines: list[tuple[str, str]] = []
        for name, cure in cures.CURES.items():
            if cure.needs and cure.needs not in one.features:
                continue
            tried = [each for each in helped if each != cure.instead_of]
            ratio = self._with_cures([*tried, name], cure, one)
            lines.append((name, "fails" if ratio is None else f"{ratio:.1e}"))
            if ratio is not None and (
                ratio <= self._allowed or ratio * 10 <= before
            ):
                helped, before = [*tried, name], ratio
                if ratio <= self._allowed:
                    break
        print(f"\n{'with':24}difference")
        for name, text in lines:
            print(f"{name + ' *' * (name in helped):24}{text}")
        print(f"\ndifferent: {self._number} replicas do not train as one.")
        for name in helped:
            print(
                f"Cause: {cures.CURES[name].cause}.\n"
                f"Write: {cures.CURES[name].advice}."
            )
        if before > self._allowed:
            self._print_unknown(helped, found)
        return DIFFERENT

    def _with_cures(
        self, names: list[str], cure: cures.Cure, one: recording_lib.Recording
    ) -> float | None:
        """Returns the largest difference with cures, or None if it fails."""
        try:
            cured = self._runs.run(self._number, cures=tuple(names))
            if cure.on_one_device:
                one = self._runs.run(1, cures=tuple(names))
        except runs_lib.NotComparable:
            return None
        if cured.status != recording_lib.TRAINED or (
            one.status != recording_lib.TRAINED
        ):
            return None
        return verdict.worst(verdict.differences(one, cured))

    def _print_unknown(
        self, helped: list[str], found: list[verdict.Difference] | None
    ) -> None:
        print(
            "The rest has an unknown cause."
            if helped
            else "Cause unknown: no cure has helped."
        )
        if not found:
            return
        index = next(
            index
            for index, each in enumerate(found)
            if each.ratio > self._allowed
        )
        print(
            f"It begins in step {index + 1}: {found[index].where()}. Compare"
            " the gradients of this variable on one and on all replicas."
        )
