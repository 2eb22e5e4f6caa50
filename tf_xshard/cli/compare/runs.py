"""The runs of a script, each in a process of its own."""

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
from typing import Any

from tf_xshard.cli.compare import folder as folder_lib
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.distribute import engines

# What launchers set, and what would make a cluster of the run.
_LAUNCHERS = (
    *("TF_CONFIG", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MPI_", "RANK"),
    *("WORLD_SIZE", "LOCAL_RANK", "MASTER_", "CUDA_VISIBLE_DEVICES"),
)


# After the last step.
_SECONDS_TO_END = 60


class NotComparable(Exception):
    """Ends the command with exit code 2 and a sentence."""


class FilesChanged(NotComparable):
    """The script has changed a file of the user, so no other run follows."""


class Runs:
    """Runs the script, with what the runs before have shown it to need."""

    def __init__(
        self, options: argparse.Namespace, temporary: pathlib.Path
    ) -> None:
        self._options = options
        self._temporary = temporary
        self._number = 0
        self._new_files: set[str] = set()
        self._kept = pathlib.Path(tempfile.mkdtemp(prefix="tf_xshard_compare_"))
        self._folder = pathlib.Path.cwd()
        self._copy = temporary / "copy" if options.copy else None
        script = os.path.relpath(options.script)
        if script.startswith(os.pardir):
            script = os.path.abspath(script)
        self.settings = recording_lib.Settings(
            script,
            tuple(options.arguments),
            seen_replicas=options.replicas,
            num_steps=options.steps,
            rows=options.rows,
        )

    def change(self, **changes: Any) -> None:
        """Changes the settings of the next runs."""
        self.settings = dataclasses.replace(self.settings, **changes)

    def run(self, num_replicas: int, **changes: Any) -> recording_lib.Recording:
        """Runs the script once."""
        recording = self._once(num_replicas, **changes)
        if recording.status == recording_lib.NO_STRATEGY:
            print("The script has no strategy. Again, with one:")
            self.change(default_strategy=True)
        elif recording.status == recording_lib.OWN_DTYPE:
            print("The script sets its own dtype. Again, with it:")
            self.change(floatx=None)
        elif recording.status == recording_lib.REFUSED:
            raise NotComparable(recording.message)
        else:
            return recording
        return self.run(num_replicas, **changes)

    def _once(
        self, num_replicas: int, **changes: Any
    ) -> recording_lib.Recording:
        settings = dataclasses.replace(
            self.settings, num_replicas=num_replicas, **changes
        )
        self._number += 1
        what = "1 replica" if num_replicas == 1 else f"{num_replicas} replicas"
        what = ", ".join([what, *settings.cures])
        if self._copy:  # Each run begins with the files as they are now.
            shutil.rmtree(self._copy, ignore_errors=True)
            shutil.copytree(self._folder, self._copy, symlinks=True)
        before = folder_lib.state(self._folder)
        try:
            with _Child(
                settings,
                self._temporary,
                self._number,
                self._copy or self._folder,
            ) as child:
                recording = child.recording(self._options.minutes, what)
                if self._options.verbose:
                    print(child.output())
        finally:
            self._move_new_files(before)
        return recording

    def _move_new_files(self, before: folder_lib.State) -> None:
        after = folder_lib.state(self._folder)
        self._new_files |= set(
            folder_lib.move_new(
                self._folder,
                before,
                after,
                self._kept / str(self._number),
            )
        )
        if changed := folder_lib.changed(before, after):
            raise FilesChanged(
                f"the script changes {', '.join(changed[:5])}, so that its"
                " next run would begin in another way. Pass --copy, or keep it"
                " from writing."
            )

    def print_files(self) -> None:
        """Says which files the script has written."""
        if self._new_files:
            print(
                f"Files that the script has written are in {self._kept}:"
                f" {', '.join(sorted(self._new_files)[:10])}"
            )
        elif not any(self._kept.iterdir()):
            self._kept.rmdir()


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

    def __exit__(self, *error: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._progress)

    def output(self) -> str:
        """Returns what the script has printed so far."""
        return self._output.read_text(errors="replace")

    def recording(self, minutes: float, what: str) -> recording_lib.Recording:
        """Waits for the end, and prints the steps on the way."""
        text = f"{what}: step 0 of {self._num_steps}"
        with selectors.DefaultSelector() as selector:
            selector.register(self._progress, selectors.EVENT_READ)
            while True:
                if sys.stdout.isatty():
                    print(f"\r{text}", end="", flush=True)
                if not selector.select(minutes * 60):
                    raise NotComparable(
                        f"no update within {minutes:g} minutes, {what}. Pass"
                        " more --minutes, or fewer --rows or --steps. It was"
                        f" here:\n{self._where()}"
                    )
                lines = os.read(self._progress, 4096).decode()
                if not lines:
                    break
                step = int(lines.split()[-1])
                text = f"{what}: step {step} of {self._num_steps}"
        print("" if sys.stdout.isatty() else text, flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It has closed the pipe, so it ends now; `__exit__` kills it.
            self._process.wait(_SECONDS_TO_END)
        code = self._process.returncode
        if self._result.exists():
            recording = pickle.loads(self._result.read_bytes())
            if recording.status == recording_lib.FAILED:
                recording.error += f"Its last output:\n{self._last_lines()}"
            return recording
        if code is None:
            raise NotComparable(
                f"{what}: the script closes files that it has not opened, and"
                f" does not end.\n{self._last_lines()}"
            )
        if code < 0:
            raise NotComparable(
                f"{what}: killed by {signal.Signals(-code).name}. If it"
                " took too much memory, pass --rows to keep fewer rows of"
                " each batch, or fewer --steps or --replicas."
            )
        return recording_lib.Recording(
            recording_lib.FAILED,
            error=f"It ended with exit code {code}. Its last output:\n"
            f"{self._last_lines()}",
        )

    def _last_lines(self) -> str:
        return "\n".join(self.output()[-2000:].splitlines()[-10:])

    def _where(self) -> str:
        """Returns the lines that the script is in."""
        self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        return self.output()[-2000:]


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHERS)
    }
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "-1",
        engines.ALONE: "1",
        # The order of sets is that of the run before, and no file is new.
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
