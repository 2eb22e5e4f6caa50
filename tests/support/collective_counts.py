"""How many collectives a step has in its graph, and how many it runs."""

import keras
import tensorflow as tf

from tests.support import counting
from tests.support import replicas

OPERATIONS = (
    "AllToAll",
    "CollectiveAllToAllV2",
    "CollectiveAllToAllV3",
    "CollectiveGatherV2",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "CrossReplicaSum",
    "NcclAllReduce",
    "XlaAllReduce",  # A TPU's, where no kernel is needed.
    "XlaCustomCallV2",  # Stands for a TPU's AllToAll.
)


def _in(nodes):
    return sum(node.op in OPERATIONS for node in nodes)


def trained(strategy, optimizer_fn, num_steps):
    """Applies ones to a weight, as often as `num_steps` says.

    Returns:
      The collectives of the graph that always run, those in its branches, which
      are functions, and how many group sums each replica has run.
    """
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = optimizer_fn()
        optimizer.build([weight])

    def step():
        strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight]))

    traced, run = (tf.function(step, autograph=False) for _ in range(2))
    with counting.group_sums(strategy) as ran:
        if replicas.is_tpu(strategy):
            with strategy.capture() as extractions:
                traced.get_concrete_function()
            [extraction] = extractions
            graph_def = extraction.program.graph_def
        else:
            graph_def = traced.get_concrete_function().graph.as_graph_def()
        for _ in range(num_steps):
            run()
    branches = [node for f in graph_def.library.function for node in f.node_def]
    counts = [count for count, _ in ran()]
    return _in(graph_def.node), _in(branches), counts
