"""One shard of a computation while it is traced, in a thread of its own.

Only one shard runs at a time: where it needs the others' gradients it pauses,
and the next one runs until it needs them too. See `shard_team`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TYPE_CHECKING

import tensorflow as tf

from tf_xshard.private import tensorflow_v1

if TYPE_CHECKING:
    from tf_xshard.compat.v1 import shard_team

_this_thread = threading.local()


class _Cancelled(BaseException):
    """Ends the thread of a shard when another shard has failed."""


class Shard:
    """One shard while it is traced.

    Args:
      index: Its number.
      team: The `Team` that it belongs to.

    Attributes:
      index: Its number.
      team: The `Team` that it belongs to.
      num_exchanges: How many times it has called `exchange`.
      contribution: What it gave in the last `exchange`.
      result: What it got in the last `exchange`; in the end, its outputs.
      done: Whether it has ended.
      operations: What it has made, if it is not shard 0.
      collections: The graph's collections, with this shard's variables.
    """

    def __init__(self, index: int, team: shard_team.Team) -> None:
        self.index = index
        self.team = team
        self.contribution: Any = None
        self.result: Any = None
        self.done = False
        self.num_exchanges = 0
        self.operations: list[tf.Operation] = []
        self.collections = team.copies.translated(
            team.initial_collections, index
        )
        # Copies that the computation has not yet made, by the originals' ids.
        self._prepared: dict[int, tf.Variable] = {}
        self._error: BaseException | None = None
        self._may_run = threading.Event()
        self._paused = threading.Event()
        self._thread: threading.Thread | None = None

    def owns(self, variable: tf.Variable) -> bool:
        """Whether this shard updates a variable: its own, or a shared one."""
        return self.index == 0 or self.team.copies.is_of(variable, self.index)

    def exchange(
        self, contribution: Any, combine: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """Waits for the other shards' contributions.

        Args:
          contribution: What this shard gives.
          combine: A function from the list of all contributions to the list of
            what each shard gets. Only shard 0's is called.

        Returns:
          What this shard gets.
        """
        self.team.check_place()
        self.num_exchanges += 1
        self.contribution = contribution
        if self.index == 0:
            return self.team.gather(combine)
        self._pause()
        return self.result

    def run_here(self, function: Callable[[int], Any]) -> None:
        """Traces `function` in this thread; for shard 0."""
        outer = current()
        _this_thread.shard = self
        try:
            with self._building():
                self.result = function(self.index)
            self.done = True
        finally:
            _this_thread.shard = outer

    def start(
        self,
        function: Callable[[int], Any],
        state: contextlib.AbstractContextManager[None],
    ) -> None:
        """In shard 0's thread: starts this shard's thread, which waits.

        Args:
          function: What the thread traces, a function of the shard's index.
          state: What the thread enters first.
        """
        self._thread = threading.Thread(
            target=self._run, args=(function, state), daemon=True
        )
        self._thread.start()

    def resume(self) -> None:
        """In shard 0's thread: lets this shard run until it pauses or ends."""
        self._paused.clear()
        num_operations = len(self.team.graph.get_operations())
        with self.team.collections_of(self):
            self._may_run.set()
            self._paused.wait()
        self.operations += self.team.graph.get_operations()[num_operations:]
        if self.done:
            assert self._thread is not None, "start() was not called"
            self._thread.join()
        if self._error is not None and not self.team.cancelled:
            raise self._error

    def _run(
        self,
        function: Callable[[int], Any],
        state: contextlib.AbstractContextManager[None],
    ) -> None:
        """In this shard's thread: traces `function`."""
        _this_thread.shard = self
        self._may_run.wait()
        try:
            if not self.team.cancelled:
                with state, self._building():
                    self._copy_global_step()
                    self.result = function(self.index)
        except BaseException as error:
            self._error = error
        self.done = True
        self._paused.set()

    def _pause(self) -> None:
        self._may_run.clear()
        self._paused.set()
        self._may_run.wait()
        if self.team.cancelled:
            raise _Cancelled()
        self._copy_global_step()

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """Names and places what this shard makes."""
        team = self.team
        if self.index == 0:
            with (
                tf.variable_creator_scope(self._recorded),
                tf.control_dependencies(team.start),
                tf.device(team.devices[0]),
            ):
                yield
            return
        name_scope = f"shard_{self.index}/{team.name_scope}".rstrip("/") + "/"
        with (
            tf.device(None),
            tf.device(team.outer_device),
            tf.device(team.devices[self.index]),
            tf.control_dependencies(None),
            tf.control_dependencies(team.start),
            tf.compat.v1.variable_scope(
                team.variable_scope,
                custom_getter=self._got,
                use_resource=True,
                auxiliary_name_scope=False,
            ),
            tf.name_scope(name_scope),
            tf.variable_creator_scope(self._copied),
        ):
            yield

    def _got(
        self,
        getter: Callable[..., tf.Variable],
        name: str,
        *args: Any,
        **kwargs: Any,
    ) -> tf.Variable:
        """`get_variable` in another shard: its copy, or a shared variable."""
        prefix = f"shard_{self.index}/"
        if not name.startswith(prefix) and not self.team.is_shared(name):
            name = prefix + name
        return getter(name, *args, **kwargs)

    def _recorded(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        """Makes a variable of shard 0."""
        if self.team.is_legacy_graph:
            kwargs["use_resource"] = True  # As tf.compat.v1.tpu.shard does.
        variable = next_creator(**kwargs)
        self.team.copies.add_original(variable)
        return variable

    def _copied(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        """Makes this shard's copy of a variable that shard 0 has made."""
        team = self.team
        wanted = kwargs.get("name") or "Variable"
        for name in (wanted, f"{team.graph.get_name_scope()}/{wanted}"):
            for key, variable in list(self._prepared.items()):
                if name.endswith(variable.op.name):
                    return self._prepared.pop(key)
        original = team.copies.original_for(
            wanted, team.graph.get_name_scope(), self.index
        )
        self._check_alike(kwargs.get("shape"), kwargs.get("dtype"), original)
        if team.is_legacy_graph:
            kwargs["initial_value"] = lambda: original.read_value()
            kwargs["name"] = f"shard_{self.index}/{original.op.name}/"
            kwargs["use_resource"] = True
        with tf.control_dependencies(None):
            variable = next_creator(**kwargs)
        team.copies.add_copy(original, self.index, variable)
        tensorflow_v1.show_name(variable, original.name)
        self._check_alike(variable.shape, variable.dtype, original)
        if team.is_legacy_graph:
            team.initialize_first(variable, original)
        return variable

    def _copy_global_step(self) -> None:
        """Makes a copy of shard 0's global step, before it is asked for.

        TensorFlow looks a global step up by name, and would find shard 0's.
        """
        if not self.team.is_legacy_graph:
            return
        copies = self.team.copies
        for original in copies.missing(self.index):
            if original.op.name.split("/")[-1] == "global_step":
                self._prepared[id(original)] = tf.compat.v1.Variable(
                    0,
                    trainable=False,
                    collections=[
                        tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
                        tf.compat.v1.GraphKeys.GLOBAL_STEP,
                    ],
                    dtype=original.dtype.base_dtype,
                    use_resource=True,
                    name=original.op.name.split("/")[-1],
                )

    def _check_alike(
        self, shape: Any, dtype: Any, original: tf.Variable
    ) -> None:
        """Refuses a copy of another shape or type; None is the original's."""
        shape = original.shape if shape is None else tf.TensorShape(shape)
        dtype = tf.as_dtype(dtype or original.dtype).base_dtype
        expected = original.shape, original.dtype.base_dtype
        if (shape, dtype) != expected:
            raise ValueError(
                f"Shard {self.index} makes a variable of shape {shape} and type"
                f" {dtype.name} where shard 0 has made {original.name!r} of"
                f" shape {original.shape} and type {original.dtype.name}. All"
                " shards must run the same computation."
            )


def current() -> Shard | None:
    """The shard that this thread traces; None outside of `shard`."""
    return getattr(_this_thread, "shard", None)
