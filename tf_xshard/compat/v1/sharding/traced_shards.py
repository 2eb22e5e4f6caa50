"""Traces the shards of one computation into one graph.

The caller's thread traces shard 0, and another thread traces each other shard.
Only one thread runs at a time. Where a shard needs the others' gradients, it
pauses, and the next shard runs up to the same exchange:

shard 0   runs | gather: resume 1, resume 2, combine | runs | ended
shard 1        |         runs to exchange            |      | runs, ends
shard 2        |                   runs to exchange  |      |      runs, ends
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.sharding import copies as shard_copies
from tf_xshard.compat.v1.sharding import shared_variables
from tf_xshard.distribute import site as site_lib
from tf_xshard.private.tensorflow import v1 as tensorflow_v1

# The collection that holds the copies of all shards except shard 0.
SHARD_VARIABLES = "shard_variables"

# Entries that shards add to these collections belong to the graph, not to one
# shard's view.
_SHARED_COLLECTIONS = (
    tf.compat.v1.GraphKeys.TABLE_INITIALIZERS,
    tf.compat.v1.GraphKeys.QUEUE_RUNNERS,
)


class Team:
    """Holds the shards of one call of `shard`."""

    def __init__(self, devices: Sequence[str | None]) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        # A session runs a legacy graph; a `tf.function` has a FuncGraph.
        self.is_legacy_graph = not isinstance(
            self.graph, tf.__internal__.FuncGraph
        )
        self.copies = shard_copies.of(self.graph)
        self.devices = devices
        # The variable, name and device scopes are the scopes around `shard`.
        self.variable_scope = tf.compat.v1.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        # True once all shards have ended or must end.
        self.cancelled = False
        # All other operations of all shards run after this operation.
        start = tf.no_op("shards_start")
        self.start = [start]
        self.outer_device = start.device or None
        # The graph's collections before the first shard.
        self.initial_collections = self._collections()
        self._outside = [
            variable
            for variable in (
                tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
                if self.is_legacy_graph
                else []
            )
            if not self.copies.is_of(variable, 0)
        ]
        self._num_before = len(self.graph.get_operations())
        self.shards = [Shard(i, self) for i in range(len(devices))]

    @property
    def refusal(self) -> str | None:
        """An error for code that reduces over replicas; None for one shard."""
        if self.num_shards == 1:
            return None
        return (
            "group_reduce and the Keras optimizers of tf_xshard reduce over a"
            " strategy's replicas, not over the shards of shard() or of a"
            " TPUEstimator's model_fn. Use tf_xshard.compat.v1."
            "cross_replica_sum and tf_xshard.compat.v1.CrossShardOptimizer."
        )

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self.shards)

    def is_shared(self, name: str) -> bool:
        """Returns True if a variable was made outside all computations."""
        return any(
            one.op.name == name or one.op.name.startswith(f"{name}/part_")
            for one in self._outside
        )

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Traces the computation of all shards; returns their outputs."""
        first, *others = self.shards
        if self.is_legacy_graph:
            self.graph.switch_to_thread_local()
            for original, copy in self.copies.pairs():
                self.initialize_first(copy, original)
        for shard in others:
            shard.start(function, tensorflow_v1.thread_state(self.graph))
        self.copies.show_plain_names(True)
        try:
            with tensorflow_v1.collections_by_plain_names(
                self.graph, lambda name: re.sub(r"^shard_\d+/", "", name)
            ):
                first.run_here(function)
                for shard in others:
                    shard.resume()
            waiting = [s.index for s in others if not s.done]
            if waiting:
                raise _unequal(waiting)
        finally:
            self.cancelled = True
            for shard in others:
                if not shard.done:
                    shard.resume()
            self.copies.show_plain_names(False)
        self._separate_shared_variables()
        known = tf.compat.v1.get_collection_ref(SHARD_VARIABLES)
        known[:] = [copy for _, copy in self.copies.pairs()]
        return [shard.result for shard in self.shards]

    def _separate_shared_variables(self) -> None:
        if not self.is_legacy_graph:
            for shard in self.shards[1:]:
                shared_variables.refuse_assignments(
                    self.graph, shard.operations, self.copies.is_any
                )
            return
        if self._outside:
            shared_variables.separate(
                self._outside, self.operations(), self.start[0]
            )

    def operations(self) -> dict[int, list[tf.Operation]]:
        """Lists each shard's operations, in the order of their creation."""
        operations = {shard.index: shard.operations for shard in self.shards}
        others = {one for of_shard in operations.values() for one in of_shard}
        made = self.graph.get_operations()[self._num_before :]
        operations[0] = [one for one in made if one not in others]
        return operations

    def gather(self, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Runs the other shards up to shard 0's exchange, and combines."""
        for shard in self.shards[1:]:
            shard.resume()
        done = [shard.index for shard in self.shards if shard.done]
        if done:
            raise _unequal([0])
        results = combine([shard.contribution for shard in self.shards])
        for shard, result in zip(self.shards, results, strict=True):
            shard.result = result
        return results[0]

    def check_place(self) -> None:
        """Raises RuntimeError where shards can't communicate."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph or tensorflow_v1.in_control_flow(graph):
            raise RuntimeError(
                "Gradients are applied, or cross_replica_sum is called, in"
                " tf.cond, tf.while_loop or a tf.function inside the"
                " computation of shard(), or shard() is called in control flow"
                " v1. Shards can't communicate there. Move the call to the top"
                " level of the computation, and call shard() outside of control"
                " flow v1. To skip an update, give CrossShardOptimizer an"
                " optimizer whose apply_gradients calls tf.cond."
            )

    def initialize_first(
        self, variable: tf.Variable, original: tf.Variable
    ) -> None:
        """Gives a copy shard 0's value, in the first run that needs it."""
        with tf.control_dependencies(None), tf.name_scope("initialize/"):
            has_value, can_have_one = (
                tf.raw_ops.VarIsInitializedOp(resource=v.handle)
                for v in (variable, original)
            )
            ready = tf.cond(
                # Shard 0's variable has no value while a run initializes it.
                tf.logical_or(has_value, tf.logical_not(can_have_one)),
                tf.no_op,
                lambda: variable.assign(original.read_value()).op,
            )
        tensorflow_v1.run_before(
            ready if isinstance(ready, tf.Operation) else ready.op,
            self.start[0],
        )

    @contextlib.contextmanager
    def collections_of(self, shard: Shard) -> Iterator[None]:
        """Puts a shard's own variables into the graph's collections."""
        outer = self._collections()
        self._set_collections(shard.collections)
        try:
            yield
        finally:
            shard.collections = self._collections()
            self._set_collections(outer)

    def _collections(self) -> dict[str, list[Any]]:
        return {
            name: list(self.graph.get_collection_ref(name))
            for name in self.graph.get_all_collection_keys()
            if isinstance(name, str) and name not in _SHARED_COLLECTIONS
        }

    def _set_collections(self, collections: dict[str, list[Any]]) -> None:
        for name in {*collections, *self._collections()}:
            self.graph.get_collection_ref(name)[:] = collections.get(name, [])


def _read_there(variable: tf.Variable) -> tf.Tensor:
    """Reads a variable on its own device."""
    # TensorFlow puts a variable's initial value on the new variable's device.
    with variable.handle.graph.colocate_with(variable.handle):
        return tf.raw_ops.ReadVariableOp(
            resource=variable.handle, dtype=variable.dtype.base_dtype
        )


def _unequal(waiting: list[int]) -> ValueError:
    return ValueError(
        f"Shards {waiting} wait for the others' gradients, but the other shards"
        " apply gradients fewer times. Every shard must apply gradients the"
        " same number of times."
    )


_this_thread = threading.local()


class _Cancelled(BaseException):
    """Ends a shard's thread after another shard failed."""


class Shard:
    """Traces one shard."""

    def __init__(self, index: int, team: Team) -> None:
        self.index = index
        self.team = team
        # The shard's input to its last `exchange`, and the result. When the
        # shard has ended, `result` is the shard's outputs.
        self.contribution: Any = None
        self.result: Any = None
        self.done = False
        self.num_exchanges = 0
        # This shard's operations. The list stays empty for shard 0.
        self.operations: list[tf.Operation] = []
        # The graph's collections, with this shard's variables.
        self.collections = team.copies.translated(
            team.initial_collections, index
        )
        # Maps the id of a variable of shard 0 to a copy made in advance.
        self._prepared: dict[int, tf.Variable] = {}
        self._error: BaseException | None = None
        self._may_run = threading.Event()
        self._paused = threading.Event()
        self._thread: threading.Thread | None = None

    def owns(self, variable: tf.Variable) -> bool:
        """Returns True for the shard's own variables; in shard 0, for all."""
        return self.index == 0 or self.team.copies.is_of(variable, self.index)

    def exchange(
        self, contribution: Any, combine: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """Waits for the other shards, and returns this shard's result."""
        self.team.check_place()
        self.num_exchanges += 1
        self.contribution = contribution
        if self.index == 0:
            return self.team.gather(combine)
        self._pause()
        return self.result

    def run_here(self, function: Callable[[int], Any]) -> None:
        """Traces `function` for shard 0, in the caller's thread."""
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
        """Starts this shard's thread, which waits; runs in shard 0's thread."""
        self._thread = threading.Thread(
            target=self._run, args=(function, state), daemon=True
        )
        self._thread.start()

    def resume(self) -> None:
        """Runs this shard until it pauses or ends, from shard 0's thread."""
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
        """Traces `function` in this shard's thread."""
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
        """Names and places the operations and variables of this shard."""
        team = self.team
        if self.index == 0:
            with (
                site_lib.refused(team.refusal),
                tf.variable_creator_scope(self._recorded),
                tf.control_dependencies(team.start),
                tf.device(team.devices[0]),
            ):
                yield
            return
        name_scope = f"shard_{self.index}/{team.name_scope}".rstrip("/") + "/"
        with (
            site_lib.refused(team.refusal),
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
        """Gets this shard's copy, or a shared variable, for `get_variable`."""
        prefix = f"shard_{self.index}/"
        if not name.startswith(prefix) and not self.team.is_shared(name):
            name = prefix + name
        return getter(name, *args, **kwargs)

    def _recorded(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        """Makes and records a variable of shard 0."""
        if self.team.is_legacy_graph:
            # tf.compat.v1.tpu.shard does the same.
            kwargs["use_resource"] = True
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
            kwargs["initial_value"] = lambda: _read_there(original)
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
        """Copies shard 0's global step before the computation asks for it."""
        # TensorFlow looks up a global step by name, and would find shard 0's.
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
        """Raises ValueError if a copy's given shape or type is different."""
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
    """Returns the shard that this thread traces, or None outside `shard`."""
    return getattr(_this_thread, "shard", None)
