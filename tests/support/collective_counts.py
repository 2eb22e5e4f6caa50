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


def in_graph(graph_def) -> tuple[int, int]:
    """Those that always run, and those in branches, which are functions."""
    branches = [node for f in graph_def.library.function for node in f.node_def]
    return tuple(
        sum(node.op in OPERATIONS for node in nodes)
        for nodes in (graph_def.node, branches)
    )


def trained(strategy, optimizer_fn, num_steps):
    """Applies ones to a weight; its graph, and group sums run per replica."""
    with counting.group_sums(strategy) as ran:
        with strategy.scope():
            weight = keras.Variable([1.0, 2.0])
            optimizer = optimizer_fn()
            optimizer.build([weight])

        def step():
            strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight]))

        if replicas.is_tpu(strategy):
            with strategy.capture() as extractions:
                tf.function(step, autograph=False).get_concrete_function()
            [extraction] = extractions
            graph_def = extraction.program.graph_def
        else:
            traced = tf.function(step, autograph=False).get_concrete_function()
            graph_def = traced.graph.as_graph_def()
        run = tf.function(step, autograph=False)
        for _ in range(num_steps):
            run()
        return in_graph(graph_def), [count for count, _ in ran()]
