"""Steps that are taken once."""

import gc
import weakref

import keras
import tensorflow as tf

from tests.support import replicas


def run(strategy, on_replica, graph=True):
    """Returns a function's results on all replicas."""
    step = lambda: strategy.run(on_replica)
    found = (tf.function(step, autograph=False) if graph else step)()
    return tf.nest.map_structure(strategy.experimental_local_results, found)


def stepped(
    make,
    gradients_of,
    initial=(0.0,),
    kind="mirrored",
    num_replicas=4,
    graph=True,
    dtype="float32",
):
    """Makes variables and an optimizer, and applies a gradient to each, once.

    Args:
      make: Makes the optimizer, in the scope of the strategy.
      gradients_of: The gradients, of a replica id.
      initial: A value of each variable, or a function that makes the variable.
      kind: The strategy, or its kind.
      num_replicas: Of a strategy of this kind.
      graph: Whether the step is a tf.function.
      dtype: Of the variables.

    Returns:
      The values of all replicas, of each variable.
    """
    strategy = kind
    if isinstance(kind, str):
        strategy = replicas.STRATEGIES[kind](num_replicas)
    with strategy.scope():
        variables = [
            value() if callable(value) else keras.Variable(value, dtype=dtype)
            for value in initial
        ]
        optimizer = make()
    replicas.apply_once(strategy, optimizer, gradients_of, variables, graph)
    return [replicas.values(strategy, variable) for variable in variables]


def check_no_graph_is_kept(on_replica):
    """The graph of a step on two replicas is gone with its function."""
    step = tf.function(
        lambda: replicas.mirrored(2).run(on_replica), autograph=False
    )
    graph = weakref.ref(step.get_concrete_function().graph)
    assert graph() is not None
    del step
    gc.collect()
    assert graph() is None
