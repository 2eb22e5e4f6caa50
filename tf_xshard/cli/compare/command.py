"""`python -m tf_xshard compare`: its arguments, its runs and its verdict."""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import traceback

from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import diagnosis
from tf_xshard.cli.compare import known_errors
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import runs as runs_lib
from tf_xshard.cli.compare import verdict

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
# What is wrong is above it.
_MAX_ROUNDING = 1e-2
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
        help="end a run after so many minutes without an update; default: 10",
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
        except Exception:
            traceback.print_exc()
            print("\nnot comparable: an error of compare. Please report it.")
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
        one, many = self._on_both()
        if many.status == recording_lib.FAILED:
            return self._explain_error(one, many)
        if not any(each.is_trained for passes in one.rows for each in passes):
            self._check_repeatable(one)
        if not self._runs.settings.floatx:
            self._allowed = max(self._allowed, self._rounding(one))
        reason = verdict.not_comparable(one, many, self._number, self._allowed)
        if reason:
            raise runs_lib.NotComparable(reason)
        found = verdict.differences(one, many)
        self._print_table(one, many, found)
        self._print_notes(one, many)
        if verdict.worst(found) > self._allowed:
            return self._explain(one, found)
        if one.idle:
            raise runs_lib.NotComparable(
                f"the optimizer {one.idle[0]} has made no update in these"
                " steps. Pass more --steps."
            )
        if not found[-1].moved:
            raise runs_lib.NotComparable(
                "no weight has moved. Pass more --steps, or a learning rate"
                " above 0."
            )
        self._print_equal(found)
        return EQUAL

    def _on_both(
        self,
    ) -> tuple[recording_lib.Recording, recording_lib.Recording]:
        """Runs the script on one and on several replicas."""
        both = self._once_on_both()
        floatx = self._runs.settings.floatx
        if floatx and both[-1].status == recording_lib.FAILED:
            print("The script fails. Again, in its own dtype:")
            self._runs.change(floatx=None)
            again = self._once_on_both()
            if again[-1].status != recording_lib.FAILED:
                return again
            self._runs.change(floatx=floatx)
        return both

    def _once_on_both(
        self,
    ) -> tuple[recording_lib.Recording, recording_lib.Recording]:
        one = self._runs.run(1)
        if one.status == recording_lib.FAILED:
            return one, one
        return one, self._runs.run(self._number)

    def _check_repeatable(self, one: recording_lib.Recording) -> None:
        """Runs again on one replica, since the rows can't be compared."""
        again = self._runs.run(1)
        if (
            again.status != recording_lib.TRAINED
            or verdict.worst(verdict.differences(one, again)) > self._allowed
        ):
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
        rounding = verdict.rounding(one, permuted)
        if rounding > _MAX_ROUNDING:
            raise runs_lib.NotComparable(
                "in the script's own dtype, another order of the rows changes"
                f" the weights by {rounding / verdict.TIMES_ROUNDING:.0e} of"
                " their movement, so rounding hides what is wrong. Take out"
                " what sets the dtype."
            )
        return rounding

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
                f"{index + 1:4} {steps[0].rows or '':>6} {rate:8.2g}"
                f"  {losses[0]:>10} {losses[1]:>10}  {each.moved:8.1e}"
                f"  {each.ratio:.1e}  {each.where()}"
            )
        print(
            "The difference is a fraction of the largest movement of a weight"
            " since the start."
        )

    def _print_notes(
        self, one: recording_lib.Recording, many: recording_lib.Recording
    ) -> None:
        if self._runs.settings.default_strategy:
            print(
                "\nThe script has no strategy, so it ran under a"
                f" MirroredStrategy. Add:\n{_TWO_LINES}"
            )
        if verdict.is_loss_divided(one, many):
            print(
                "\nThe loss that the step returns is divided by the number of"
                " replicas. The weights do not show this division."
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
            " replicas have the weights of one. The largest difference is"
            f" {verdict.worst(found):.1e} of their movement, and the limit is"
            f" {self._allowed:.0e}. Not tried: other numbers of"
            " replicas, several processes, GPUs, later steps and later models."
        )

    def _explain(
        self,
        one: recording_lib.Recording,
        found: list[verdict.Difference],
    ) -> int:
        """Tries the cures, and names the causes whose cure helps."""
        tried = self._tried(one, verdict.worst(found))
        if tried.ratio > self._allowed:
            # Its rows do not show all that may change, such as noise.
            self._check_repeatable(one)
        self._print_tried(tried)
        print(f"\ndifferent: {self._number} replicas do not train as one.")
        self._print_causes(tried, tried.helped)
        if tried.ratio > self._allowed:
            step, each = next(
                (step, each)
                for step, each in enumerate(found, 1)
                if each.ratio > self._allowed
            )
            print(
                f"It begins in step {step}: {each.where()}. Compare the"
                " gradients of this variable on one and on all replicas."
            )
        return DIFFERENT

    def _explain_error(
        self,
        one: recording_lib.Recording,
        many: recording_lib.Recording,
    ) -> int:
        """Tries the cures of a script that fails on several replicas."""
        fails_on_one = one.status == recording_lib.FAILED
        where = "one replica" if fails_on_one else f"{self._number} replicas"
        text = (
            f"the script fails on {where} of a MirroredStrategy.\n{many.error}"
        )
        known = known_errors.find(many.error)
        cause = ""
        if known:
            cause = f"\nCause: {known.meaning}\nWrite: {known.advice}"
        tried = None
        if not known or "CrossShardOptimizer" in known.advice:
            tried = self._tried(one, float("inf"))
        if fails_on_one and not (tried and tried.helped):
            if "TF_CONFIG" in os.environ:
                text += "\nIts environment has no TF_CONFIG."
            raise runs_lib.NotComparable(text + cause)
        print(f"\n{text[0].upper()}{text[1:]}")
        self._print_notes(one, many)
        if tried:
            self._print_tried(tried)
        print(
            f"\ndifferent: {self._number} replicas do not train as one.{cause}"
        )
        if tried:
            # The wrapper's cause is not this error's.
            causes = [name for name in tried.helped if name != "wrapper"]
            self._print_causes(tried, causes if known else tried.helped)
        return DIFFERENT

    def _tried(
        self, one: recording_lib.Recording, before: float
    ) -> diagnosis.Diagnosis:
        tried = diagnosis.Diagnosis(self._runs, one, self._allowed, before)
        tried.find()
        return tried

    def _print_tried(self, tried: diagnosis.Diagnosis) -> None:
        print(f"\n{'with':44} difference")
        for names, ratio in tried.tried.items():
            text = "fails" if ratio is None else f"{ratio:.1e}"
            star = " *" if [*names] == tried.helped else ""
            print(f"{' + '.join(names) + star:44} {text}")

    def _print_causes(
        self, tried: diagnosis.Diagnosis, names: list[str]
    ) -> None:
        for name in names:
            print(
                f"Cause: {cures.CURES[name].cause}.\n"
                f"Write: {cures.CURES[name].advice}"
            )
        if tried.ratio > self._allowed:
            print(
                "The rest has an unknown cause."
                if tried.helped
                else "Cause unknown: no cure has helped."
            )
