"""Sees when a script's optimizers have made an update, and records it."""

from __future__ import annotations

import collections
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

import tf_xshard
from tf_xshard import wire_formats
from tf_xshard.cli.compare import patches
from tf_xshard.cli.compare import recording as recording_lib
from tf_xshard.private import frames
from tf_xshard.private.tensorflow import first_values
from tf_xshard.private.tensorflow import operations

_RANDOM = re.compile(
    "Random|Multinomial|TruncatedNormal|StatefulUniform|StatefulStandardNormal"
    "|StatefulTruncatedNormal|RngReadAndSkip|CandidateSampler"
    "|SampleDistorted|Fractional"
)
# Accumulation makes an update in few calls, and a learning rate that begins at
# 0 moves no weight: so many times the steps are enough.
_MAX_CALLS_PER_STEP = 10
_LOOP_ADVICE = (
    "Call the step by `strategy.run(step, args=(batch,))` under a"
    " tf.distribute.MirroredStrategy."
)


class Steps:
    """Looks at the optimizers around each call that may train.

    Such a call is the outermost eager one of a tf.function, of `strategy.run`
    or of an optimizer's `apply`.

    Args:
      settings: How many steps are recorded, and in which dtype.
      recording: Gets the steps.
      take_step: Called with the number of batches of a step; returns its rows.
      progress: Called with the number of each step.
      finish: Called with the recording after the last step.
    """

    def __init__(
        self,
        settings: recording_lib.Settings,
        recording: recording_lib.Recording,
        take_step: Callable[[int], int | None],
        progress: Callable[[int], None],
        finish: Callable[[recording_lib.Recording], None],
    ) -> None:
        self._settings = settings
        self._recording = recording
        self._take_step = take_step
        self._progress = progress
        self._finish = finish
        # Every optimizer that was built, with its variables and its state when
        # it was built.
        self._built: dict[int, tuple[Any, list[keras.Variable], Any]] = {}
        # Those that the script has created, and those that `compile` has.
        self._created: list[weakref.ref] = []
        self._default: set[int] = set()
        self._before: dict[int, int] = {}
        self._depth = 0
        # Of each function, in all and since the last step. `evaluate` calls
        # another function.
        self._all_calls: collections.Counter[int] = collections.Counter()
        self._calls: collections.Counter[int] = collections.Counter()
        # The most replicas that `strategy.run` has run on.
        self._ran_on = 0

    def changes(self) -> Iterator[patches.Patch]:
        """Yields the context managers that replace methods."""
        function = type(tf.function(lambda: None))
        yield patches.around(function, "__call__", self._outermost)
        yield patches.around(
            function, first_values.METHOD, self._read_first_values
        )
        yield patches.around(tf.distribute.Strategy, "run", self._run)
        owner = patches.defining(keras.optimizers.Optimizer, "__init__")
        yield patches.around(owner, "__init__", self._create)
        kinds = list(_optimizers())
        for owner in {patches.defining(one, "build") for one in kinds}:
            yield patches.around(owner, "build", self._build)
        for owner in {patches.defining(one, "apply") for one in kinds}:
            yield patches.around(owner, "apply", self._outermost)
        for kind in (tf_xshard.CrossShardOptimizer, tf_xshard.AGNOptimizer):
            yield patches.around_argument(
                kind, "__init__", "group_assignment", self._one_group
            )
        yield patches.around_argument(
            tf_xshard.CrossShardOptimizer, "__init__", "local", _no_local
        )
        yield patches.around(keras.Model, "compile", self._compile)
        yield operations.seen(_refuse_random)

    def _one_group(self, groups: Any) -> None:
        """Returns None for one group of all replicas, of both runs."""
        if groups is None:
            return
        groups = tf_xshard.GroupAssignment(groups)
        if groups.num_groups > 1:
            raise patches.Refused(
                f"The script uses {groups.num_groups} groups, meant to"
                " differ from one device. Compare it without group_assignment."
            )

    def _create(
        self, plain: Callable, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        plain(optimizer, *args, **kwargs)
        if patches.is_called_by_script():
            self._created.append(weakref.ref(optimizer))

    def _idle(self, trained: list) -> list[str]:
        """Lists optimizers of the script that have made no update."""
        updated = [
            one
            for (one, _, _), start in zip(
                trained, self._recording.starts, strict=True
            )
            if recording_lib.iterations(one) > start.iterations
        ]
        used = {
            id(one) for outer in updated for one in recording_lib.all_of(outer)
        }
        created = [one for made in self._created if (one := made()) is not None]
        inner = {
            id(one)
            for outer in created
            for one in recording_lib.all_of(outer)
            if one is not outer
        }
        unused = [
            one
            for one in [*(one for one, _, _ in trained), *created]
            if id(one) not in used | inner | self._default
        ]
        return list(dict.fromkeys(one.name for one in unused))

    def _compile(
        self, plain: Callable, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        result = plain(model, *args, **kwargs)
        if not args and "optimizer" not in kwargs:
            self._default.add(id(model.optimizer))
        return result

    def _build(self, plain: Callable, optimizer: Any, variables: Any) -> Any:
        variables = list(variables)
        _refuse_what_differs(optimizer)
        if id(optimizer) not in self._built:
            with tf.init_scope():
                start = recording_lib.State(0, [], {}, {})
                if tf.executing_eagerly():
                    start = recording_lib.state(optimizer, variables)
            self._built[id(optimizer)] = optimizer, variables, start
        return plain(optimizer, variables)

    def _run(
        self, plain: Callable, strategy: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._ran_on = max(self._ran_on, strategy.num_replicas_in_sync)
        return self._outermost(plain, strategy, *args, **kwargs)

    def _read_first_values(
        self, plain: Callable, *args: Any, **kwargs: Any
    ) -> Any:
        """Gives new variables their values, and reads them."""
        result = plain(*args, **kwargs)
        if tf.executing_eagerly():
            self._read_starts()
        return result

    def _outermost(
        self, plain: Callable, owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a function, strategy or optimizer, and looks before and after.

        Args:
          plain: The method.
          owner: Whose method it is.
          *args: Passed on.
          **kwargs: Passed on.
        """
        if self._depth or not tf.executing_eagerly():
            return plain(owner, *args, **kwargs)
        if "tf_keras" in sys.modules:
            _refuse_keras_2()
        self._look_before()
        self._depth += 1
        try:
            result = plain(owner, *args, **kwargs)
        finally:
            self._depth -= 1
        self._all_calls[id(owner)] += 1
        self._calls[id(owner)] += 1
        self._look_after(result, id(owner))
        return result

    def _trained(self) -> list[tuple[Any, list[keras.Variable], Any]]:
        """Returns the built optimizers that are inside of no other one."""
        built = [one for one, _, _ in self._built.values()]
        hidden = {
            id(one)
            for outer in built
            for one in recording_lib.all_of(outer)
            if one is not outer
        }
        return [self._built[id(one)] for one in built if id(one) not in hidden]

    def _look_before(self) -> None:
        self._before = {
            id(one): recording_lib.iterations(one)
            for one, _, _ in self._trained()
        }
        # The script may have restored a checkpoint since the last call.
        self._read_starts()

    def _read_starts(self) -> None:
        if not self._recording.steps:
            self._recording.starts = [
                recording_lib.state(one, variables)
                for one, variables, _ in self._trained()
            ]

    def _look_after(self, result: Any, owner: int) -> None:
        """Records a step if an optimizer has made an update."""
        trained = self._trained()
        if not trained:
            return
        recording = self._recording
        updates = [
            recording_lib.iterations(one) - self._before.get(id(one), 0)
            for one, _, _ in trained
        ]
        if any(updates):
            self._check(trained)
            # Those that were built in this call.
            recording.starts += [
                start for _, _, start in trained[len(recording.starts) :]
            ]
            recording.steps.append(
                recording_lib.Step(
                    [
                        recording_lib.state(one, variables)
                        for one, variables, _ in trained
                    ],
                    _loss(result),
                    self._take_step(max(self._calls[owner], *updates)),
                )
            )
            self._calls.clear()
            recording.idle = self._idle(trained)
            self._progress(len(recording.steps))
            if max(updates) > 1:
                recording.note(
                    f"{max(updates)} updates in one call, compared after it"
                )
        self._end_if_enough(self._all_calls[owner])

    def _end_if_enough(self, num_calls: int) -> None:
        recording, number = self._recording, self._settings.num_steps
        if not recording.steps:
            return
        is_last = num_calls >= number * _MAX_CALLS_PER_STEP
        if is_last or (len(recording.steps) >= number and recording.moved()):
            self._finish(recording)
            raise patches.End

    def _check(self, trained: list) -> None:
        """Ends a script that trains in another way."""
        backend = os.environ.get("KERAS_BACKEND", "tensorflow")
        if backend != "tensorflow":
            raise patches.Refused(
                f"The script sets KERAS_BACKEND to {backend}. Set it to"
                " tensorflow."
            )
        if not self._ran_on:
            raise patches.Refused(
                "The script trains in a loop without `strategy.run`."
                f" {_LOOP_ADVICE}"
            )
        if self._ran_on < self._settings.num_replicas:
            raise patches.Refused(
                "The script has a strategy, but trains on one device. Create"
                " the model and compile it in `with strategy.scope():`."
            )
        floatx = self._settings.floatx
        dtypes = {v.dtype for _, variables, _ in trained for v in variables}
        if floatx and dtypes - {floatx}:
            self._recording.status = recording_lib.OWN_DTYPE
            raise patches.End


def _optimizers() -> Iterator[type]:
    """Yields classes that do not call the `build` of a base class."""
    yield keras.optimizers.Optimizer
    yield keras.optimizers.LossScaleOptimizer
    if hasattr(keras.optimizers, "MultiOptimizer"):  # From Keras 3.14.
        yield keras.optimizers.MultiOptimizer
    yield tf_xshard.CrossShardOptimizer
    yield tf_xshard.TowerOptimizer
    yield tf_xshard.AGNOptimizer


def _refuse_what_differs(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses optimizers that are not meant to equal one device."""
    period = getattr(optimizer, "communication_period", 1)
    communication = getattr(optimizer, "communication", None)
    what = None
    if period != 1:
        what = f"communication_period={period}"
    elif wire_formats.TABLE[getattr(communication, "dtype", None)].loses:
        what = "gradients sent in 8 or 16 bits"
    if what:
        raise patches.Refused(
            f"The script uses {what}: its replicas are meant to differ from one"
            " device. Compare it without."
        )


def _no_local(local: Any) -> None:
    """Refuses variables that each replica trains separately."""
    if local:
        raise patches.Refused(
            "The script uses local=..., meant to differ from one device."
            " Compare it without local."
        )


def _refuse_random(op_type: str) -> None:
    """Refuses operations that draw numbers on each replica."""
    if not (_RANDOM.search(op_type) and patches.in_replica()):
        return
    # Only the frames tell which layer and which line add an operation.
    layer = line = ""
    for frame in frames.callers():
        file = frame.f_code.co_filename
        if "initializers" in file:
            return
        owner = frame.f_locals.get("self")
        if not layer and isinstance(owner, keras.layers.Layer):
            layer = f" in the layer {owner.name} ({type(owner).__name__})"
        if not line and patches.is_scripts(file):
            line = f" in {file}, line {frame.f_lineno}"
    raise patches.Refused(
        f"The step draws random numbers: {op_type}{layer}{line}. Replicas draw"
        " other numbers than one device. Take it out, or draw in the dataset."
    )


def _refuse_keras_2() -> None:
    for frame in frames.callers():
        if "/tf_keras/" in frame.f_code.co_filename.replace("\\", "/"):
            raise patches.Refused(
                "The script trains by Keras 2 (tf_keras). Move it to Keras 3."
            )


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
