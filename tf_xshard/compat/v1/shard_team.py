"""The shards of one computation while they are traced into one graph.

Shard 0 is traced by the caller's thread, each other shard by a thread of its
own. Only one runs at a time: where a shard needs the others' gradients, the
next one runs until it needs them too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1 import shard_copies
from tf_xshard.private import tensorflow_v1

# The shards' copies of variables, all but shard 0's.
SHARD_VARIABLES = "shard_variables"

# What shards add to these belongs to the graph, and not to one shard's view.
_SHARED_COLLECTIONS = (
    tf.compat.v1.GraphKeys.TABLE_INITIALIZERS,
    tf.compat.v1.GraphKeys.QUEUE_RUNNERS,
)
_this_thread = threading.local()


class _Cancelled(BaseException):
    """Ends the thread of a shard when another shard has failed."""


class Shard:
    """One shard while it is traced.

    Attributes:
      index: Its number.
      team: The `Team` that it belongs to.
    """

    def __init__(self, index: int, team: Team):
        self.index = index
        self.team = team
        self.contribution = None
        self.result = None
        self.error = None
        self.done = False
        self._collections = team.copies.translated(
            team.initial_collections, index
        )
        self._prepared = {}  # Copies that the computation has not yet made.
        self._go = threading.Event()
        self._paused = threading.Event()
        self._thread = None

    def owns(self, variable) -> bool:
        """Whether this shard updates a variable: its own, or a shared one."""
        return self.index == 0 or self.team.copies.is_of(variable, self.index)

    def exchange(self, contribution: Any, combine: Callable) -> Any:
        """Waits for the other shards' contributions.

        Args:
          contribution: What this shard gives.
          combine: A function of the list of all contributions that returns the
            list of what each shard gets. Shard 0's is called.

        Returns:
          What this shard gets.
        """
        self.team.check_place()
        self.contribution = contribution
        if self.index == 0:
            return self.team.gather(combine)
        self._hand_over()
        return self.result

    def run(self, function: Callable, state) -> None:
        """In the shard's thread: traces `function`."""
        _this_thread.shard = self
        self._go.wait()
        try:
            if not self.team.cancelled:
                with state, self.scope():
                    self._copy_global_step()
                    self.result = function(self.index)
        except BaseException as error:
            self.error = error
        self.done = True
        self._paused.set()

    def _hand_over(self):
        self._go.clear()
        self._paused.set()
        self._go.wait()
        if self.team.cancelled:
            raise _Cancelled()
        self._copy_global_step()

    def start(self, function, state) -> None:
        """In shard 0's thread: makes this shard's thread, which waits."""
        self._thread = threading.Thread(
            target=self.run, args=(function, state), daemon=True
        )
        self._thread.start()

    def resume(self) -> None:
        """In shard 0's thread: lets this shard run until it pauses or ends."""
        self._paused.clear()
        with self.team.collections_of(self):
            self._go.set()
            self._paused.wait()
        if self.done:
            self._thread.join()
        if self.error is not None and not self.team.cancelled:
            raise self.error

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
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

    def _got(self, getter, name, *args, **kwargs):
        """`get_variable` in another shard: its copy, or a shared variable."""
        prefix = f"shard_{self.index}/"
        if not name.startswith(prefix) and not self.team.is_shared(name):
            name = prefix + name
        return getter(name, *args, **kwargs)

    def _recorded(self, next_creator, **kwargs):
        if self.team.is_legacy_graph:
            kwargs["use_resource"] = True  # As tf.compat.v1.tpu.shard does.
        variable = next_creator(**kwargs)
        self.team.copies.add_original(variable)
        return variable

    def _copy_global_step(self):
        """TensorFlow finds a global step by name; here that is shard 0's."""
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

    def _copied(self, next_creator, **kwargs):
        """Makes this shard's copy of a variable that shard 0 has made."""
        team = self.team
        wanted = kwargs.get("name") or "Variable"
        for name in (wanted, f"{team.graph.get_name_scope()}/{wanted}"):
            for original, variable in list(self._prepared.items()):
                if name.endswith(variable.op.name):
                    return self._prepared.pop(original)
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
        self._check_alike(variable.shape, variable.dtype, original)
        if team.is_legacy_graph:
            team.initialize_first(variable, original)
        return variable

    def _check_alike(self, shape, dtype, original):
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


class Team:
    """The shards of one call of `shard`.

    Args:
      devices: A device name for each shard.
    """

    def __init__(self, devices: Sequence[str | None]):
        self.graph = tf.compat.v1.get_default_graph()
        self.is_legacy_graph = not isinstance(
            self.graph, tf.__internal__.FuncGraph
        )
        self.copies = shard_copies.of(self.graph)
        self.devices = devices
        self.variable_scope = tf.compat.v1.get_variable_scope()
        self.name_scope = self.graph.get_name_scope()
        self.cancelled = False
        # All operations of all shards run after what this one waits for.
        start = tf.no_op("shards_start")
        self.start = [start]
        self.outer_device = start.device or None
        self.initial_collections = self._collections()
        self._outside = {
            variable.op.name
            for variable in (
                tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
                if self.is_legacy_graph
                else []
            )
            if not self.copies.is_of(variable, 0)
        }
        self.shards = [Shard(i, self) for i in range(len(devices))]

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self.shards)

    def is_shared(self, name: str) -> bool:
        """Whether a variable was made outside of all computations."""
        return any(
            one == name or one.startswith(f"{name}/part_")
            for one in self._outside
        )

    def run(self, function: Callable) -> list:
        """Traces `function(index)` for each shard; returns what it returned."""
        first, *others = self.shards
        if self.is_legacy_graph:
            self.graph.switch_to_thread_local()
            for original, copy in self.copies.pairs():
                self.initialize_first(copy, original)
        for shard in others:
            shard.start(function, tensorflow_v1.thread_state(self.graph))
        outer = current()
        _this_thread.shard = first
        try:
            with first.scope():
                first.result = function(0)
            first.done = True
            for shard in others:
                shard.resume()
            waiting = [s.index for s in others if not s.done]
            if waiting:
                raise self._unequal(waiting)
        finally:
            _this_thread.shard = outer
            self.cancelled = True
            for shard in others:
                if not shard.done:
                    shard.resume()
        known = tf.compat.v1.get_collection_ref(SHARD_VARIABLES)
        known[:] = [copy for _, copy in self.copies.pairs()]
        return [shard.result for shard in self.shards]

    def gather(self, combine: Callable) -> Any:
        """In shard 0: lets all others come to the same point."""
        for shard in self.shards[1:]:
            shard.resume()
        done = [shard.index for shard in self.shards if shard.done]
        if done:
            raise self._unequal([0])
        results = combine([shard.contribution for shard in self.shards])
        for shard, result in zip(self.shards, results, strict=True):
            shard.result = result
        return results[0]

    def _unequal(self, waiting):
        return ValueError(
            f"Shards {waiting} wait for the others' gradients, which do not"
            " apply as often. Every shard must apply gradients the same number"
            " of times."
        )

    def check_place(self) -> None:
        """Refuses a place where shards cannot communicate.

        Raises:
          RuntimeError: In a branch, a loop or a function inside the
            computation.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph or tensorflow_v1.in_control_flow(graph):
            raise RuntimeError(
                "Gradients are applied in tf.cond, tf.while_loop or a"
                " tf.function that is inside the computation of shard(), or"
                " around it in control flow v1, where shards cannot"
                " communicate. Apply them outside of it; to skip an update,"
                " multiply the gradients by zero."
            )

    def initialize_first(self, variable, original) -> None:
        """Gives a copy shard 0's value, in the first run that needs it."""
        with tf.control_dependencies(None), tf.name_scope("initialize/"):
            has_value, can_have_one = (
                tf.raw_ops.VarIsInitializedOp(resource=v.handle)
                for v in (variable, original)
            )
            ready = tf.cond(
                # While shard 0's is initialized itself there is no value yet.
                tf.logical_or(has_value, tf.logical_not(can_have_one)),
                tf.no_op,
                lambda: variable.assign(original.read_value()).op,
            )
        tensorflow_v1.run_before(
            ready if isinstance(ready, tf.Operation) else ready.op,
            self.start[0],
        )

    def _collections(self) -> dict:
        return {
            name: list(self.graph.get_collection_ref(name))
            for name in self.graph.get_all_collection_keys()
            if isinstance(name, str) and name not in _SHARED_COLLECTIONS
        }

    @contextlib.contextmanager
    def collections_of(self, shard: Shard) -> Iterator[None]:
        """Each shard finds its own variables in the graph's collections."""
        outer = self._collections()
        self._set_collections(shard._collections)
        try:
            yield
        finally:
            shard._collections = self._collections()
            self._set_collections(outer)

    def _set_collections(self, collections):
        for name in {*collections, *self._collections()}:
            self.graph.get_collection_ref(name)[:] = collections.get(name, [])


def current() -> Shard | None:
    """The shard that this thread traces, if it does."""
    return getattr(_this_thread, "shard", None)
