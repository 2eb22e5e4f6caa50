"""Runs a script in this process, and records the first steps that it trains.

Nothing of the script is changed. While it runs, methods of TensorFlow and Keras
are replaced, and the replacements end with it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import patches
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import rows as rows_lib
from tf_xshard.cli.compare import steps as steps_lib
from tf_xshard.cli.compare import strategies as strategies_lib

# They write files, or read what an earlier run has written.
_LEFT_OUT = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
    tf_xshard.GroupCheckpoint,
)
# Attributes of layers that drop units at random.
_RATES = ("rate", "dropout", "recurrent_dropout")
_PROCESSES = (
    "The script starts processes, whose training can't be seen. Pass the script"
    " that one of them runs."
)


def _ignore(what: Any) -> None:
    """Does nothing."""


def trained(
    settings: recording_lib.Settings,
    progress: Callable[[int], None] = _ignore,
    finish: Callable[[recording_lib.Recording], None] = _ignore,
) -> recording_lib.Recording:
    """Runs the script until it has made its steps.

    Args:
      settings: The script, its replicas and what is changed.
      progress: Called with the number of each step.
      finish: Called right after the last step, before `finally` of the script
        can write a file. It may end the process.

    Returns:
      The recording, whose status says what came out.
    """
    recording = recording_lib.Recording()
    strategies = strategies_lib.Strategies(
        settings.num_replicas, settings.seen_replicas
    )
    rows = rows_lib.Rows(settings, recording)
    steps = steps_lib.Steps(
        *(settings, recording, rows.take_step, progress, finish)
    )
    models = _Models(recording, rows, strategies)
    folder = os.path.dirname(os.path.abspath(settings.script))
    with contextlib.ExitStack() as stack:
        # One at a time: a method that is replaced twice calls both.
        for patch in itertools.chain(
            strategies.changes(),
            rows.changes(),
            steps.changes(),
            models.changes(),
            _processes(),
            cures.patches_of(settings.cures),
        ):
            stack.enter_context(patch)
        arguments = [settings.script, *settings.arguments]
        stack.enter_context(patches.replaced(sys, "argv", arguments))
        stack.enter_context(patches.replaced(sys, "path", [folder, *sys.path]))
        if settings.default_strategy:
            strategy = tf.distribute.MirroredStrategy()
            tf.distribute.experimental_set_strategy(strategy)
            stack.callback(tf.distribute.experimental_set_strategy, None)
        try:
            runpy.run_path(settings.script, run_name="__main__")
        except patches.End as end:
            recording.message = str(end)
            if isinstance(end, patches.Refused):
                recording.status = recording_lib.REFUSED
            return recording
        except SystemExit as end:
            if end.code:
                recording.status = recording_lib.FAILED
                recording.error = f"It ended with exit code {end.code}."
        except Exception as error:
            recording.status = recording_lib.FAILED
            recording.error = _error_text(error)
    if recording.status == recording_lib.TRAINED and not recording.steps:
        recording.status = recording_lib.REFUSED
        recording.message = (
            "The script has ended, and no Keras optimizer has made an update"
            " that could be seen. Pass a script that trains when it is run."
        )
    return recording


def _error_text(error: Exception) -> str:
    """Returns the lines of the script, the innermost line, and the error."""
    *frames, last = traceback.extract_tb(error.__traceback__)
    kept = [frame for frame in frames if patches.is_scripts(frame.filename)]
    lines = traceback.format_list([*kept, last])
    if last.filename.startswith(os.path.dirname(__file__)):
        lines.insert(
            0, "An error of `compare`, not of the script; report it:\n"
        )
    return "".join([*lines, *traceback.format_exception_only(error)])[-3000:]


def _processes() -> Iterator[patches.Patch]:
    """Refuses scripts that start processes of their own."""
    yield patches.refusing(
        multiprocessing.process.BaseProcess, "start", _PROCESSES
    )

    def popen(plain, process, command, *args, **kwargs):
        words = [command] if isinstance(command, str) else list(command)
        if any(sys.executable in str(word) for word in words):
            raise patches.Refused(_PROCESSES)
        plain(process, command, *args, **kwargs)

    yield patches.around(subprocess.Popen, "__init__", popen)


class _Models:
    """Looks at models: their callbacks, their losses and their layers."""

    def __init__(
        self,
        recording: recording_lib.Recording,
        rows: rows_lib.Rows,
        strategies: strategies_lib.Strategies,
    ) -> None:
        self._recording = recording
        self._rows = rows
        self._strategies = strategies

    def changes(self) -> Iterator[patches.Patch]:
        """Yields the context managers that replace methods."""
        for name in ("fit", "train_on_batch"):
            yield patches.around(keras.Model, name, self._fit)
        yield patches.around(keras.Model, "compile", self._compile)
        yield patches.around(keras.layers.Layer, "__call__", self._call_layer)

    def _fit(
        self, plain: Callable, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs `fit` or `train_on_batch`."""
        if not self._strategies.made:
            self._recording.status = recording_lib.NO_STRATEGY
            raise patches.End
        signature = inspect.signature(plain)
        if "callbacks" not in signature.parameters:
            return plain(model, *args, **kwargs)
        bound = signature.bind(model, *args, **kwargs)
        bound.arguments["verbose"] = 0
        bound.arguments["callbacks"] = self._callbacks(
            bound.arguments.get("callbacks")
        )
        epoch = None
        if bound.arguments.get("steps_per_epoch") is None:
            data = tf.nest.flatten(bound.arguments.get("x"))
            epoch = rows_lib.Epoch(
                _batches_per_update(model.optimizer),
                all(isinstance(one, (np.ndarray, tf.Tensor)) for one in data),
            )
        with self._rows.of_epoch(epoch):
            return plain(*bound.args, **bound.kwargs)

    def _callbacks(self, callbacks: Any) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        kept = []
        for one in tf.nest.flatten(callbacks or []):
            if isinstance(one, _LEFT_OUT):
                self._recording.note(
                    f"without the callback {type(one).__name__}"
                )
            else:
                kept.append(one)
        return kept

    def _compile(
        self, plain: Callable, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        for loss in tf.nest.flatten(bound.arguments.get("loss")):
            if loss is not None:
                self._recording.features.add("loss")
            if callable(loss) and not isinstance(loss, keras.losses.Loss):
                self._recording.features.add("loss function")
        return plain(model, *args, **kwargs)

    def _call_layer(
        self,
        plain: Callable,
        layer: keras.layers.Layer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._recording.features.add(type(layer).__name__)
        # LSTM has a property for the rate of its cell.
        for owner in (layer, getattr(layer, "cell", layer)):
            for name in _RATES:
                rate = vars(owner).get(name)
                if isinstance(rate, float) and 0 < rate < 1:
                    setattr(owner, name, 0.0)
                    kind = type(owner).__name__
                    self._recording.note(
                        f"{kind} with {name} 0 instead of {rate}"
                    )
        return plain(layer, *args, **kwargs)


def _batches_per_update(optimizer: keras.optimizers.Optimizer) -> int:
    number = 1
    for one in recording_lib.all_of(optimizer):
        number *= getattr(one, "num_towers", None) or 1
        number *= getattr(one, "gradient_accumulation_steps", None) or 1
    return number
