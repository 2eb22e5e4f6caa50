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


class _Step:
    """The operations of a step's graph and of its branches.

    Attributes:
      parents: Maps each operation to those that come directly before it.
      reductions: The collectives.
      writes: Each write, with the variable and the replica that it changes.
    """

    def __init__(self, graph, handles):
        self.parents, self.reductions, self.writes = {}, [], []
        self._add(graph, handles, {}, [])

    def _add(self, graph, handles, outside, always):
        """Adds a graph.

        Args:
          graph: The graph.
          handles: Maps placeholders of variables to what a write changes.
          outside: Maps placeholders to operations of the graph around it.
          always: What comes before all operations of a branch.
        """
        twins = _twins(graph)
        for one in graph.get_operations():
            inputs = [tensor.op for tensor in one.inputs]
            self.parents[one] = {
                *(*inputs, *one.control_inputs, *always),
                *(*twins.get(one, []), *outside.get(one, [])),
            }
            if one.type.startswith("Collective"):
                self.reductions.append(one)
            elif one.type.startswith(_WRITES):
                self.writes += [
                    (one, handles[own]) for own in inputs if own in handles
                ]
            elif one.type in _BRANCHES:
                predicate, *passed = inputs
                for branch in ("then_branch", "else_branch"):
                    inner = _function(graph, one.get_attr(branch).name)
                    pairs = [*zip(inner.inputs, passed, strict=True)]
                    self._add(
                        inner,
                        {i.op: handles[o] for i, o in pairs if o in handles},
                        {i.op: [o] for i, o in pairs},
                        [predicate, *one.control_inputs],
                    )

    def before(self, operation):
        """An operation, and all that come before it."""
        found, waiting = set(), [operation]
        while waiting:
            if (one := waiting.pop()) not in found:
                found.add(one)
                waiting += self.parents[one]
        return found


def _function(graph, name):
    while not graph._is_function(name):
        graph = graph.outer_graph
    return graph._get_function(name).graph


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
    return {one: same for same in members.values() for one in same}


def read(function, num_arguments, variables):
    """Reads the writes of a traced step to some variables.

    Args:
      function: A ConcreteFunction, of which the first arguments are the data.
      num_arguments: The number of these arguments, over all replicas.
      variables: The variables, of Keras or TensorFlow.

    Returns:
      A list of `Write`.
    """
    graph, names = function.graph, {}
    for variable in variables:
        for replica, copy in enumerate(replica_variables.copies(variable)):
            name = getattr(variable, "path", variable.name)
            names.setdefault(copy.handle._id, (name, replica))
    step = _Step(
        graph,
        {
            inside.op: names[outside._id]
            for outside, inside in graph.captures
            if getattr(outside, "_id", None) in names
        },
    )
    writes = {one for one, _ in step.writes}
    # The others send what this step has written.
    reductions = [
        one for one in step.reductions if not step.before(one) & writes
    ]
    result = []
    for one, target in step.writes:
        before = step.before(one)
        data = enumerate(graph.inputs[:num_arguments])
        result.append(
            Write(
                *target,
                tuple(i for i, tensor in data if tensor.op not in before),
                tuple(
                    other.name
                    for other in reductions
                    if other.graph is one.graph
                    and other.device == one.device
                    and other not in before
                ),
            )
        )
    return result
