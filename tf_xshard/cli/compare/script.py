"""Runs a script in this process, and records the first steps that it trains.

Nothing of the script is changed. While it runs, strategies get logical CPUs,
and what fit, tf.function and optimizers do is looked at; both ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard import wire_formats
from tf_xshard.cli.compare import cures
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.cli.compare import rows as rows_lib
from tf_xshard.distribute import replica_variables
from tf_xshard.private.tensorflow import local_devices

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
_RANDOM = re.compile(
    "Random|Multinomial|TruncatedNormal|StatefulUniform|StatefulStandardNormal"
    "|StatefulTruncatedNormal|RngReadAndSkip"
)
# With accumulation, few calls make an update. So many times the steps are
# enough if there was one.
_MAX_CALLS_PER_STEP = 10


class _End(BaseException):
    """Leaves the script, whose `except Exception` does not catch it."""


class _Refused(_End):
    """The script can't be compared; the message says why."""


def trained(
    settings: recording_lib.Settings,
    progress: Callable[[int], None] = lambda step: None,
    finish: Callable[[recording_lib.Recording], None] = lambda recording: None,
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
    run = _Run(settings, progress, finish)
    recording = run.recording
    with contextlib.ExitStack() as stack:
        for change in (*run.changes(), *cures.changes(settings.cures)):
            stack.enter_context(change)
        if settings.default_strategy:
            tf.distribute.experimental_set_strategy(run.mirrored())
            stack.callback(tf.distribute.experimental_set_strategy, None)
        try:
            runpy.run_path(settings.script, run_name="__main__")
            run.check_ended()
        except _End as end:
            recording.message = str(end)
            if isinstance(end, _Refused):
                recording.status = recording_lib.REFUSED
        except SystemExit as end:
            if end.code:
                recording.status = recording_lib.FAILED
                recording.error = f"It ended with exit code {end.code}."
            else:
                run.check_ended()
        except Exception:
            recording.status = recording_lib.FAILED
            recording.error = "".join(traceback.format_exc()[-3000:])
    return recording


class _Run:
    """What is looked at, and what has been seen."""

    def __init__(
        self,
        settings: recording_lib.Settings,
        progress: Callable[[int], None],
        finish: Callable[[recording_lib.Recording], None],
    ) -> None:
        self.settings = settings
        self.recording = recording_lib.Recording()
        self._progress = progress
        self._finish = finish
        self._rows = rows_lib.Rows(settings, self.recording)
        self._devices = [f"CPU:{i}" for i in range(settings.num_replicas)]
        self._folder = os.path.dirname(os.path.abspath(settings.script))
        # Every optimizer that was built, with its variables.
        self._built: dict[int, tuple[Any, list[keras.Variable]]] = {}
        self._depth = 0
        self._num_calls = 0
        self._has_strategy = settings.default_strategy

    # What is changed while the script runs.

    def changes(self) -> Iterator[contextlib.AbstractContextManager]:
        """Yields what makes each change and takes it back."""
        script = self.settings.script
        yield mock.patch.object(sys, "argv", [script, *self.settings.arguments])
        yield mock.patch.object(sys, "path", [self._folder, *sys.path])
        yield from self._strategies()
        yield from self._data()
        yield from self._steps()
        yield from self._processes()
        for name in ("fit", "train_on_batch"):
            yield self._around(keras.Model, name, self._fit)
        yield self._around(keras.Model, "compile", self._compile)
        yield self._around(keras.layers.Layer, "__call__", self._call_layer)

    def _around(
        self, owner: type, name: str, function: Callable[..., Any]
    ) -> contextlib.AbstractContextManager:
        """Replaces a method by a function that gets the method first."""
        # A change of a class that inherits the method would hide later ones.
        owner = _defining(owner, name)
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(plain, *args, **kwargs)

        return mock.patch.object(owner, name, method)

    def mirrored(self) -> tf.distribute.Strategy:
        """Makes the strategy of a script that has none."""
        return tf.distribute.MirroredStrategy(self._devices)

    def _strategies(self) -> Iterator[contextlib.AbstractContextManager]:
        strategies = tf.distribute

        def mirrored(plain, strategy, devices=None, cross_device_ops=None):
            del devices, cross_device_ops
            self._has_strategy = True
            plain(strategy, self._devices)

        def multi_worker(plain, strategy, *args, **kwargs):
            self._has_strategy = True
            plain(strategy, *args, **kwargs)
            local_devices.use(strategy, self._devices)

        yield self._around(strategies.MirroredStrategy, "__init__", mirrored)
        yield self._around(
            strategies.MultiWorkerMirroredStrategy, "__init__", multi_worker
        )
        for owner, what in (
            (strategies.TPUStrategy, "TPUStrategy"),
            (strategies.cluster_resolver.TPUClusterResolver, "a TPU"),
        ):
            yield self._refusing(
                owner,
                "__init__",
                f"The script needs {what}. Make its strategy by `strategy ="
                " tf_xshard.testing.simulated_tpu_strategy(4)` and compare the"
                " runs by yourself, or use a MirroredStrategy.",
            )
        for name in ("OneDeviceStrategy", "ParameterServerStrategy"):
            yield self._refusing(
                getattr(strategies, name),
                "__init__",
                f"The script trains under a {name}. Use a MirroredStrategy or a"
                " MultiWorkerMirroredStrategy.",
            )
        plain = _defining(strategies.Strategy, "num_replicas_in_sync")
        number = plain.num_replicas_in_sync.fget

        def seen(strategy: tf.distribute.Strategy) -> int:
            if not self._is_scripts(sys._getframe(1).f_code.co_filename):
                return number(strategy)
            in_replica = (
                tf.distribute.has_strategy()
                and not tf.distribute.in_cross_replica_context()
            )
            return (
                number(strategy) if in_replica else self.settings.seen_replicas
            )

        yield mock.patch.object(plain, "num_replicas_in_sync", property(seen))

    def _is_scripts(self, file: str) -> bool:
        """Whether code is the script's, its modules' or made from it."""
        if "__autograph_generated_file" in file:
            return True
        path = os.path.abspath(file)
        return (
            path.startswith(self._folder + os.sep)
            and "site-packages" not in path
            and not path.startswith(os.path.dirname(tf_xshard.__file__))
        )

    def _refusing(
        self, owner: Any, name: str, text: str
    ) -> contextlib.AbstractContextManager:
        def refuse(plain, *args, **kwargs):
            raise _Refused(text)

        return self._around(owner, name, refuse)

    def _data(self) -> Iterator[contextlib.AbstractContextManager]:
        def of_dataset(plain, strategy, dataset, *args, **kwargs):
            return plain(
                strategy, self._rows.of_dataset(dataset), *args, **kwargs
            )

        def of_function(plain, strategy, dataset_fn, *args, **kwargs):
            return plain(
                strategy, self._rows.of_function(dataset_fn), *args, **kwargs
            )

        for name, function in (
            ("experimental_distribute_dataset", of_dataset),
            ("distribute_datasets_from_function", of_function),
        ):
            owner = _defining(tf.distribute.Strategy, name)
            yield self._around(owner, name, function)

    def _steps(self) -> Iterator[contextlib.AbstractContextManager]:
        function = type(tf.function(lambda: None))
        yield self._around(function, "__call__", self._outermost)
        strategy = _defining(tf.distribute.Strategy, "run")
        yield self._around(strategy, "run", self._replicas)
        owners = {_defining(one, "build") for one in _optimizers()}
        for owner in owners:
            yield self._around(owner, "build", self._build)

    def _processes(self) -> Iterator[contextlib.AbstractContextManager]:
        text = (
            "The script starts processes, whose training can't be seen. Pass"
            " the script that one of them runs."
        )
        yield self._refusing(multiprocessing.process.BaseProcess, "start", text)

        def popen(plain, process, command, *args, **kwargs):
            words = [command] if isinstance(command, str) else list(command)
            if any(sys.executable in str(word) for word in words):
                raise _Refused(text)
            plain(process, command, *args, **kwargs)

        yield self._around(subprocess.Popen, "__init__", popen)

    # What is seen.

    def _fit(self, plain: Callable, model: keras.Model, *args, **kwargs) -> Any:
        """Runs `fit` or `train_on_batch`."""
        if not self._has_strategy:
            self.recording.status = recording_lib.NO_STRATEGY
            raise _End
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        if "callbacks" in inspect.signature(plain).parameters:
            bound.arguments["callbacks"] = self._callbacks(
                bound.arguments.get("callbacks")
            )
            bound.arguments["verbose"] = 0
            if bound.arguments.get("steps_per_epoch") is None:
                self._rows.batches_per_update = _batches_per_update(
                    model.optimizer
                )
        try:
            return plain(*bound.args, **bound.kwargs)
        finally:
            self._rows.batches_per_update = None

    def _callbacks(self, callbacks: Any) -> Any:
        if callbacks is None or isinstance(
            callbacks, keras.callbacks.CallbackList
        ):
            return callbacks
        if isinstance(callbacks, keras.callbacks.Callback):
            callbacks = [callbacks]
        for one in callbacks:
            if isinstance(one, _LEFT_OUT):
                self.recording.note(
                    f"without the callback {type(one).__name__}"
                )
        return [one for one in callbacks if not isinstance(one, _LEFT_OUT)]

    def _compile(self, plain: Callable, model: keras.Model, *args, **kwargs):
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        for loss in tf.nest.flatten(bound.arguments.get("loss")):
            if loss is not None:
                self._see("loss")
            if callable(loss) and not isinstance(loss, keras.losses.Loss):
                self._see("loss function")
        return plain(model, *args, **kwargs)

    def _see(self, feature: str) -> None:
        self.recording.features.add(feature)

    def _call_layer(
        self, plain: Callable, layer: keras.layers.Layer, *args, **kwargs
    ) -> Any:
        self._see(type(layer).__name__)
        for name in _RATES:
            rate = getattr(layer, name, None)
            if isinstance(rate, float) and 0 < rate < 1:
                setattr(layer, name, 0.0)
                self.recording.note(
                    f"{type(layer).__name__} with {name} 0 instead of {rate}"
                )
        return plain(layer, *args, **kwargs)

    def _build(
        self,
        plain: Callable,
        optimizer: keras.optimizers.Optimizer,
        variables: Any,
    ) -> Any:
        variables = list(variables)
        _refuse_what_differs(optimizer)
        result = plain(optimizer, variables)
        if id(optimizer) not in self._built:
            self._built[id(optimizer)] = optimizer, variables
        return result

    def _replicas(self, plain: Callable, strategy: Any, *args, **kwargs) -> Any:
        result = self._outermost(plain, strategy, *args, **kwargs)
        if not tf.executing_eagerly():
            self._refuse_random(tf.compat.v1.get_default_graph())
        return result

    def _outermost(self, plain: Callable, *args, **kwargs) -> Any:
        """Calls a tf.function, or `strategy.run`, and looks at what moved."""
        if self._depth or not tf.executing_eagerly():
            return plain(*args, **kwargs)
        self._look()
        self._depth += 1
        try:
            result = plain(*args, **kwargs)
        finally:
            self._depth -= 1
        self._look(result)
        return result

    def _trained(self) -> list[tuple[Any, list[keras.Variable]]]:
        """Returns the outermost optimizers that were built."""
        outermost = {
            id(one)
            for one in recording_lib.outermost(
                optimizer for optimizer, _ in self._built.values()
            )
        }
        return [self._built[key] for key in self._built if key in outermost]

    def _look(self, result: Any = None) -> None:
        """Records a step if an optimizer has made an update."""
        trained = self._trained()
        steps = self.recording.steps
        if not trained:
            return
        now = [int(np.asarray(_first(one.iterations))) for one, _ in trained]
        before = steps[-1].iterations if steps else []
        self._num_calls += 1
        if now == before:
            limit = self.settings.num_steps * _MAX_CALLS_PER_STEP
            if self._num_calls > limit and len(steps) > 1:
                self._end()
            return
        if not self._has_strategy:
            raise _Refused(
                "The script trains in a loop of its own without a strategy."
                " Call its step by `strategy.run(step, args=(batch,))` under a"
                " tf.distribute.MirroredStrategy."
            )
        self._check_dtype(trained)
        step = recording_lib.capture(trained)
        step.loss = _loss(result)
        steps.append(step)
        self.recording.names = [type(one).__name__ for one, _ in trained]
        updates = sum(now) - sum(before)
        if len(steps) > 1:
            self._progress(len(steps) - 1)
            if updates > len(now):
                self.recording.note(
                    f"{updates} updates in one call, compared after the call"
                )
        if len(steps) > self.settings.num_steps:
            self._end()

    def _end(self) -> None:
        self._finish(self.recording)
        raise _End

    def _check_dtype(self, trained: list) -> None:
        dtypes = {v.dtype for _, variables in trained for v in variables}
        if self.settings.floatx and dtypes - {self.settings.floatx}:
            self.recording.status = recording_lib.OWN_DTYPE
            raise _End

    def _refuse_random(self, graph: Any) -> None:
        """Refuses a step with operations that draw numbers on each replica."""
        for operation in graph.get_operations():
            if _RANDOM.search(operation.type):
                frames = operation.traceback
                files = [frame.filename for frame in frames]
                if any("initializers" in file for file in files):
                    continue
                own = [f for f in frames if self._is_scripts(f.filename)]
                frame = (own or list(frames))[-1]
                raise _Refused(
                    f"The step draws random numbers: {operation.type} in"
                    f" {frame.filename}, line {frame.lineno}. Replicas draw"
                    " other numbers than one device. Take it out, or draw in"
                    " the dataset."
                )

    def check_ended(self) -> None:
        """Decides on a script that has ended by itself."""
        recording = self.recording
        if len(recording.steps) > 1:
            return
        recording.status = recording_lib.REFUSED
        if "tf_keras" in sys.modules and not self._built:
            recording.message = (
                "The script trains by Keras 2 (tf_keras). Move it to Keras 3."
            )
        else:
            recording.message = (
                "The script has ended, and no Keras optimizer has made an"
                " update that could be seen. Pass a script that trains when it"
                " is run."
            )


def _refuse_what_differs(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers that are not meant to equal one device."""
    period = getattr(optimizer, "communication_period", 1)
    groups = getattr(optimizer, "group_assignment", None)
    communication = getattr(optimizer, "communication", None)
    what = None
    if period != 1:
        what = f"communication_period={period}"
    elif groups is not None and len(groups) > 1:
        what = "several groups"
    elif wire_formats.TABLE[getattr(communication, "dtype", None)].loses:
        what = "gradients that travel in 8 or 16 bits"
    if what:
        raise _Refused(
            f"The script uses {what}: replicas are meant to differ from one"
            " device. Compare it without."
        )


def _batches_per_update(optimizer: keras.optimizers.Optimizer) -> int:
    number = 1
    for one in recording_lib.leaves(optimizer):
        number *= getattr(one, "num_towers", None) or 1
        number *= getattr(one, "gradient_accumulation_steps", None) or 1
    return number


def _optimizers() -> Iterator[type]:
    """Yields classes whose `build` does not call the one of a base class."""
    yield keras.optimizers.Optimizer
    yield keras.optimizers.LossScaleOptimizer
    if hasattr(keras.optimizers, "MultiOptimizer"):  # From Keras 3.14.
        yield keras.optimizers.MultiOptimizer
    yield tf_xshard.CrossShardOptimizer
    yield tf_xshard.TowerOptimizer
    yield tf_xshard.AGNOptimizer


def _defining(owner: type, name: str) -> type:
    return next(one for one in owner.__mro__ if name in vars(one))


def _first(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        return replica_variables.copies(value)[0]
    return value


def _loss(result: Any) -> float | None:
    """Returns the loss in what a step has returned, if there is one."""
    if isinstance(result, tf.experimental.Optional):  # What `fit` calls.
        result = result.get_value() if result.has_value() else None
    if isinstance(result, dict):
        result = result.get("loss")
    if isinstance(result, tf.Tensor) and result.shape.rank == 0:
        if result.dtype.is_floating:
            return float(result)
    return None
