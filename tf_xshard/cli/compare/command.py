"""The runs of `python -m tf_xshard compare`, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile

from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import folder as folder_lib
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import verdict

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
# What launchers set, and what would make a cluster of the run.
_LAUNCHERS = (
    "TF_CONFIG OMPI_ PMI_ PMIX_ SLURM_ MPI_ RANK WORLD_SIZE LOCAL_RANK MASTER_"
)
_TWO_LINES = """\
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():  # around the model and compile"""


class _NotComparable(Exception):
    """Ends the command with exit code 2 and a sentence."""


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
            "a notebook can't be compared; pass `jupyter nbconvert --to script`"
            " of it"
        )
    if not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}")
    for name, least in (("replicas", 2), ("steps", 1), ("rows", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value}: must be at least {least}")
    with tempfile.TemporaryDirectory() as temporary:
        runs = Runs(options, pathlib.Path(temporary))
        try:
            return Comparison(runs, options.tolerance).print()
        except _NotComparable as reason:
            print(f"\nNot comparable: {reason}")
            return NOT_COMPARABLE
        finally:
            runs.print_files()


class Runs:
    """Runs the script in processes, with what the first runs have shown."""

    def __init__(
        self, options: argparse.Namespace, temporary: pathlib.Path
    ) -> None:
        self._options = options
        self._temporary = temporary
        self._number = 0
        self._new_files: list[str] = []
        self._kept = pathlib.Path(tempfile.mkdtemp(prefix="tf_xshard_compare_"))
        self._folder = pathlib.Path.cwd()
        script = os.path.abspath(options.script)
        if options.copy:
            copy = temporary / "copy"
            shutil.copytree(self._folder, copy, symlinks=True)
            with contextlib.suppress(ValueError):
                script = str(
                    copy / pathlib.Path(script).relative_to(self._folder)
                )
            self._folder = copy
        self._before = folder_lib.state(self._folder)
        self.settings = recording_lib.Settings(
            script,
            tuple(options.arguments),
            seen_replicas=options.replicas,
            num_steps=options.steps,
            rows=options.rows,
        )

    def run(self, num_replicas: int, **changes) -> recording_lib.Recording:
        """Runs the script once, as the runs before have shown it to need."""
        recording = self._once(num_replicas, **changes)
        if recording.status == recording_lib.NO_STRATEGY:
            self._change(default_strategy=True)
        elif recording.status == recording_lib.OWN_DTYPE or (
            recording.status == recording_lib.FAILED
            and self.settings.floatx
            and num_replicas == 1
        ):
            self._change(floatx=None)
        else:
            return recording
        return self.run(num_replicas, **changes)

    def _change(self, **changes) -> None:
        self.settings = dataclasses.replace(self.settings, **changes)

    def _once(self, num_replicas: int, **changes) -> recording_lib.Recording:
        settings = dataclasses.replace(
            self.settings, num_replicas=num_replicas, **changes
        )
        self._number += 1
        what = "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
        for name in settings.cures:
            what += f", {name}"
        with _Child(
            settings, self._temporary, self._number, self._folder
        ) as child:
            recording = child.recording(self._options.minutes, what)
            if (
                recording.status == recording_lib.FAILED
                or self._options.verbose
            ):
                sys.stdout.write(child.output())
        self._look_at_files()
        return recording

    def _look_at_files(self) -> None:
        after = folder_lib.state(self._folder)
        changed = folder_lib.changed(self._before, after)
        if changed:
            raise _NotComparable(
                f"the script changes {', '.join(changed[:5])}, so that its"
                " next run would begin in another way. Pass --copy, or keep it"
                " from writing."
            )
        self._new_files += folder_lib.move_new(
            self._folder, self._before, after, self._kept / str(self._number)
        )

    def print_files(self) -> None:
        """Says which files the script has written."""
        if self._new_files:
            print(
                f"Files that the script has written are in {self._kept}:"
                f" {', '.join(sorted(set(self._new_files))[:10])}"
            )
        else:
            shutil.rmtree(self._kept)


class _Child:
    """A process that runs the script once; its group ends with the block."""

    def __init__(
        self,
        settings: recording_lib.Settings,
        temporary: pathlib.Path,
        number: int,
        folder: pathlib.Path,
    ) -> None:
        self._num_steps = settings.num_steps
        self._result = temporary / f"{number}.result"
        self._output = temporary / f"{number}.output"
        given = temporary / f"{number}.settings"
        given.write_bytes(pickle.dumps(settings))
        self._progress, write = os.pipe()
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"{__package__}.child"),
                    *(str(given), str(self._result), str(write)),
                ],
                cwd=folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                start_new_session=True,
            )
        os.close(write)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._progress)

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def recording(self, minutes: float, what: str) -> recording_lib.Recording:
        """Waits for the end, and prints the steps on the way."""
        step = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._progress, selectors.EVENT_READ)
            while True:
                text = f"{what}: step {step} of {self._num_steps}"
                if sys.stdout.isatty():
                    print(f"\r{text}", end="", flush=True)
                if not selector.select(minutes * 60):
                    print()
                    raise _NotComparable(
                        f"no update within {minutes:g} minutes. Its last"
                        f" output:\n{self.output()[-1000:]}\nPass more"
                        " --minutes, fewer --rows or fewer --steps."
                    )
                lines = os.read(self._progress, 4096).decode()
                if not lines:
                    break
                step = int(lines.split()[-1])
        print("" if sys.stdout.isatty() else text, flush=True)
        code = self._process.wait()
        if self._result.exists():
            return pickle.loads(self._result.read_bytes())
        if code < 0:
            raise _NotComparable(
                f"the run was killed by {signal.Signals(-code).name}. If it"
                " took too much memory, pass --rows to keep fewer rows of each"
                " batch."
            )
        return recording_lib.Recording(
            recording_lib.FAILED, error=f"It ended with exit code {code}."
        )


def _environment() -> dict[str, str]:
    prefixes = tuple(_LAUNCHERS.split())
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes)
    }


class Comparison:
    """Compares the runs of a script."""

    def __init__(self, runs: Runs, tolerance: float) -> None:
        self._runs = runs
        self._tolerance = tolerance
        self._num_replicas = runs.settings.seen_replicas

    def print(self) -> int:
        """Runs the script, prints the table and the verdict."""
        runs = self._runs
        self._one = runs.run(1)
        self._check(self._one)
        if self._one.status == recording_lib.FAILED:
            raise _NotComparable(
                "the script fails on one replica:\n" + self._one.error
            )
        many = runs.run(self._num_replicas)
        self._check(many)
        if many.status == recording_lib.FAILED and runs.settings.floatx:
            # It may take float32 only.
            runs._change(floatx=None)
            self._one = runs.run(1)
            many = runs.run(self._num_replicas)
        rounding = self._rounding()
        if many.status == recording_lib.FAILED:
            return self._explain(many, rounding)
        self._check_same_data(many)
        found = verdict.differences(self._one, many)
        self._print_table(many, found)
        if self._is_equal(found, rounding):
            return self._print_equal(many, found, rounding)
        return self._explain(many, rounding)

    def _check(self, recording: recording_lib.Recording) -> None:
        if recording.status == recording_lib.REFUSED:
            raise _NotComparable(recording.message)

    def _rounding(self) -> float:
        """Returns what counts as different, for the dtype of the script."""
        if self._runs.settings.floatx:
            return self._tolerance
        permuted = self._runs.run(1, permuted=True)
        if permuted.status != recording_lib.TRAINED:
            raise _NotComparable("the script fails with permuted rows.")
        found = verdict.differences(self._one, permuted)
        return verdict.TIMES_ROUNDING * max(each.ratio for each in found)

    def _check_same_data(self, many: recording_lib.Recording) -> None:
        if not any(self._one.rows):
            again = self._runs.run(1)
            found = verdict.differences(self._one, again)
            if max(each.ratio for each in found) > self._tolerance:
                raise _NotComparable(
                    "your script feeds different data in two runs on one"
                    " replica. Seed what makes its data."
                )
        step = verdict.first_different_rows(self._one, many)
        if step is not None:
            raise _NotComparable(
                "your script feeds different data in its two runs, first in"
                f" batch {step}. Set the seed of what shuffles or makes it, for"
                " example dataset.shuffle(size, seed=1)."
            )
        rates = verdict.different_rates(self._one, many)
        if rates:
            step, mine, theirs = rates
            raise _NotComparable(
                f"the learning rates differ: {mine} on one replica and"
                f" {theirs} on {self._num_replicas}. Use"
                " strategy.num_replicas_in_sync for what depends on the number."
            )

    def _print_table(
        self, many: recording_lib.Recording, found: list[verdict.Difference]
    ) -> None:
        print(
            f"\n{'step':>4}  {'largest difference':18}  {'weights moved':13}"
            f"  {'loss on 1':>10}  {'on ' + str(self._num_replicas):>10}"
        )
        for index, each in enumerate(found, 1):
            losses = [run.steps[index].loss for run in (self._one, many)]
            shown = ["" if loss is None else f"{loss:.6g}" for loss in losses]
            print(
                f"{index:4}  {each.ratio:<18.1e}  {each.moved:<13.1e}"
                f"  {shown[0]:>10}  {shown[1]:>10}  {_where(each)}"
            )
        print(
            "A difference is a part of the largest movement of a weight since"
            " the start."
        )

    def _is_equal(
        self, found: list[verdict.Difference], rounding: float
    ) -> bool:
        return max(each.ratio for each in found) <= rounding

    def _print_equal(
        self,
        many: recording_lib.Recording,
        found: list[verdict.Difference],
        rounding: float,
    ) -> int:
        last = self._one.steps[-1]
        if not all(last.iterations):
            raise _NotComparable("an optimizer has made no update.")
        if not found[-1].moved:
            raise _NotComparable("no weight has moved.")
        what = (
            "equal"
            if self._runs.settings.floatx
            else ("no difference above rounding")
        )
        self._print_notes(many)
        print(
            f"\n{what}: after {len(found)} steps, {self._num_replicas} replicas"
            f" and one have the same weights (at most"
            f" {max(each.ratio for each in found):.1e} of the movement, and"
            f" {rounding:.0e} is allowed). Not tried: other numbers of"
            " replicas, several processes, GPUs, what comes after these steps."
        )
        return EQUAL

    def _print_notes(self, many: recording_lib.Recording) -> None:
        settings = self._runs.settings
        notes = list(dict.fromkeys([*self._one.notes, *many.notes]))
        if settings.default_strategy:
            print(
                "\nThe script has no strategy, so it ran under a"
                f" MirroredStrategy. Add:\n{_TWO_LINES}"
            )
        if notes:
            print("Changed in both runs: " + "; ".join(notes) + ".")

    def _explain(self, many: recording_lib.Recording, rounding: float) -> int:
        """Tries the cures, and names the causes whose cure helps."""
        failed = many.status == recording_lib.FAILED
        before = (
            float("inf")
            if failed
            else max(e.ratio for e in verdict.differences(self._one, many))
        )
        if failed:
            print(f"\nIt fails on {self._num_replicas} replicas:\n{many.error}")
        self._print_notes(many)
        helped: list[str] = []
        one = self._one
        lines = []
        for name, cure in cures.CURES.items():
            if cure.needs and cure.needs not in one.features:
                continue
            tried = (*helped, name)
            if name == "undivided loss" and "wrapper" in helped:
                tried = tuple(n for n in helped if n != "wrapper") + (name,)
            cured = self._runs.run(self._num_replicas, cures=tried)
            reference = (
                self._runs.run(1, cures=tried) if cure.on_one_device else one
            )
            if recording_lib.TRAINED != cured.status or (
                reference.status != recording_lib.TRAINED
            ):
                lines.append((name, "fails"))
                continue
            ratio = max(e.ratio for e in verdict.differences(reference, cured))
            lines.append((name, f"{ratio:.1e}"))
            if ratio <= rounding or ratio * 10 <= before:
                helped = list(tried)
                before, one = ratio, reference
            if ratio <= rounding:
                break
        print(f"\n{'with the cure':24}largest difference")
        for name, text in lines:
            print(f"{name + ' *' * (name in helped):24}{text}")
        print(
            f"\ndifferent: {self._num_replicas} replicas do not train as one."
        )
        if not helped:
            self._print_unknown(many, failed)
        for name in helped:
            print(f"Cause: {cures.CURES[name].cause}.")
            print(f"Write: {cures.CURES[name].advice}.")
        if helped and before > rounding:
            print("The rest has an unknown cause.")
        return DIFFERENT

    def _print_unknown(
        self, many: recording_lib.Recording, failed: bool
    ) -> None:
        print("Cause unknown: no cure has helped.")
        if failed:
            return
        found = verdict.differences(self._one, many)
        step = next(
            i for i, e in enumerate(found, 1) if e.ratio > self._tolerance
        )
        print(
            f"It begins in step {step}: {_where(found[step - 1])}. Compare the"
            " gradients of this variable on one and on all replicas."
        )


def _where(each: verdict.Difference) -> str:
    where = f"{each.variable}"
    if each.among_replicas:
        where += f", replica {each.replica} differs from replica 0"
    return where
