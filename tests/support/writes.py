"""Reads in a traced step what each write to a variable waits for."""

import collections
import dataclasses

import tensorflow as tf

from tf_xshard.distribute import replica_variables

_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
_BRANCHES = ("If", "StatelessIf")


@dataclasses.dataclass(frozen=True)
class Write:
    """A write to a variable of a replica, and what it does not wait for."""

    variable: str
    replica: int
    missing_arguments: tuple[int, ...]
    # Collectives of the same replica and branch that no write comes before.
    missing_reductions: tuple[str, ...]


# An operation of a graph or a branch, all operations before it, and the pair of
# a variable and a replica that a write changes.
_Found = collections.namedtuple("_Found", "graph operation before target")


class _Graph:
    """A function's graph, inside the graph of the operation that calls it."""

    def __init__(self, graph, name, handles, arguments=(), always=()):
        self.graph, self.name, self.handles = graph, name, handles
        # Maps placeholders to all operations before them.
        self._arguments = dict(arguments)
        self._always = set(always)
        self._twins = _twins(graph)

    def found(self):
        """Yields the writes and collectives, also those in branches."""
        for one in self.graph.get_operations():
            if one.type.startswith("Collective"):
                yield _Found(self.name, one, self._before(one), None)
            elif one.type.startswith(_WRITES):
                for tensor in one.inputs:
                    if target := self.handles.get(tensor.op.name):
                        yield _Found(self.name, one, self._before(one), target)
            elif one.type in _BRANCHES:
                for branch in self._branches(one):
                    yield from branch.found()

    def _before(self, operation):
        seen, waiting = set(), [operation]
        result = set(self._always)
        while waiting:
            one = waiting.pop()
            if one.name in seen:
                continue
            seen.add(one.name)
            # A collective joins the members of its group.
            waiting += self._twins.get(one.name, [])
            waiting += [tensor.op for tensor in one.inputs]
            waiting += one.control_inputs
            result |= self._arguments.get(one.name, set())
        return result | {(self.name, name) for name in seen}

    def _branches(self, operation):
        predicate, *inputs = operation.inputs
        always = set(self._always)
        for one in (predicate.op, *operation.control_inputs):
            always |= self._before(one)
        for branch in ("then_branch", "else_branch"):
            graph, name = self.graph, operation.get_attr(branch).name
            while not graph._is_function(name):
                graph = graph.outer_graph
            graph = graph._get_function(name).graph
            inside = [tensor.op.name for tensor in graph.inputs]
            yield _Graph(
                graph,
                f"{self.name}/{name}",
                {
                    name: self.handles[tensor.op.name]
                    for name, tensor in zip(inside, inputs, strict=True)
                    if tensor.op.name in self.handles
                },
                {
                    name: self._before(tensor.op)
                    for name, tensor in zip(inside, inputs, strict=True)
                },
                always,
            )


def _twins(graph):
    """Maps each collective to the same one of the group's other members."""
    members = collections.defaultdict(list)
    counts = collections.Counter()
    for one in graph.get_operations():
        if one.type.startswith("Collective"):
            keys = tuple(
                tensor.name
                if (value := tf.get_static_value(tensor)) is None
                else int(value)
                for tensor in one.inputs
                if tensor.dtype == tf.int32 and tensor.shape.rank == 0
            )
            key = one.type, keys, one.device
            members[one.type, keys, counts[key]].append(one)
            counts[key] += 1
    return {one.name: same for same in members.values() for one in same}


def read(function, num_arguments, variables):
    """Reads the writes of a traced step to some variables.

    Args:
      function: A ConcreteFunction, of which the first arguments are the data.
      num_arguments: The number of these arguments, over all replicas.
      variables: The variables, of Keras or TensorFlow.

    Returns:
      A list of `Write`.
    """
    graph = function.graph
    arguments = [one.op.name for one in graph.inputs[:num_arguments]]
    names = {}
    for variable in variables:
        for replica, copy in enumerate(replica_variables.copies(variable)):
            name = getattr(variable, "path", variable.name)
            names.setdefault(copy.handle._id, (name, replica))
    handles = {
        inside.op.name: names[outside._id]
        for outside, inside in graph.captures
        if getattr(outside, "_id", None) in names
    }
    found = list(_Graph(graph, "", handles).found())
    writes = [one for one in found if one.target]
    keys = {(one.graph, one.operation.name) for one in writes}
    # The others send what this step has written.
    reductions = [
        one for one in found if not one.target and not one.before & keys
    ]
    return [
        Write(
            *one.target,
            tuple(
                index
                for index, name in enumerate(arguments)
                if ("", name) not in one.before
            ),
            tuple(
                other.operation.name
                for other in reductions
                if other.graph == one.graph
                and other.operation.device == one.operation.device
                and (other.graph, other.operation.name) not in one.before
            ),
        )
        for one in writes
    ]
