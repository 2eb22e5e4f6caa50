"""The genuine TPU kernels lower the same step, with the same result.

The simulated TPU writes `CrossReplicaSum` as XLA's all-reduce, because only
tensorflow-tpu has the TPU's kernel. Here tensorflow-tpu 2.20 lowers a momentum
step for the platform "TPU", with no TPU, in an environment of its own; both
programs then run on the CPU replicas and must agree: `python -m
tests.programs.tpu_kernels_check`.
"""

import os
import pathlib
import pickle
import sys
import tempfile

import numpy as np
import tensorflow as tf

from tests.support import paths
from tests.support import processes

NUM_REPLICAS = 4
GROUPS = [[0, 2], [1, 3]]
SHAPES = ([5, 3], [3], [5, 3], [8, 5], [8, 3])


def _print_with_tpu_kernels(path):
    """Runs under tensorflow-tpu; imports nothing of tf_xshard."""
    graph, names, results = pickle.loads(pathlib.Path(path).read_bytes())
    specs = [tf.TensorSpec(shape, tf.float32) for shape in SHAPES]

    @tf.function(jit_compile=True, autograph=False, input_signature=specs)
    def function(*parameters):
        return tf.graph_util.import_graph_def(
            tf.compat.v1.GraphDef.FromString(graph),
            input_map=dict(zip(names, parameters, strict=True)),
            return_elements=results,
            name="",
        )

    lower = function.experimental_get_compiler_ir(*specs)
    print(lower(stage="stablehlo", platform_name="TPU"))


def _as_on_a_tpu(program):
    """The graph with the operation that only TPUs have a kernel for."""
    assert not program.variables, "tensorflow-tpu lowers no resources"
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(program.graph_def)
    for node in graph_def.node:
        if node.op == "XlaAllReduce":
            node.op = "CrossReplicaSum"
            del node.attr["reduce_op"], node.attr["mode"]
    return graph_def.SerializeToString()


def _program(arguments):
    """A momentum step with group sums; each replica's arguments are rows."""
    import tf_xshard
    from tf_xshard import testing

    strategy = testing.simulated_tpu_strategy(NUM_REPLICAS)

    def on_replica(kernel, bias, moment, x, y):
        with tf.GradientTape() as tape:
            tape.watch([kernel, bias])
            errors = tf.tanh(x @ kernel) + bias - y
            loss = tf.reduce_mean(tf.square(errors))
        gradients = tape.gradient(loss, [kernel, bias])
        gradients = tf_xshard.group_reduce(gradients, GROUPS, "sum")
        (gradient, of_bias), _ = tf.clip_by_global_norm(gradients, 1.0)
        moment = 0.9 * moment - 0.1 * gradient
        return loss, kernel + moment, bias - 0.1 * of_bias, moment

    data = strategy.experimental_distribute_values_from_function(
        lambda c: tuple(
            tf.constant(rows[c.replica_id_in_sync_group]) for rows in arguments
        )
    )
    step = tf.function(lambda data: strategy.run(on_replica, args=data))
    with strategy.capture() as extractions:
        step.get_concrete_function(data)
    return extractions[0].program


def _lowered_by_tensorflow_tpu(program, folder):
    """The step in StableHLO, from an environment that is made in a folder."""
    python, step = os.path.join(folder, "bin", "python"), f"{folder}/step"
    names = program.argument_names, program.output_names
    pathlib.Path(step).write_bytes(
        pickle.dumps((_as_on_a_tpu(program), *names))
    )
    # No libtpu is loaded: lowering needs none.
    settings = {"PYTHONPATH": str(paths.ROOT), "TPU_LIBRARY_PATH": "/none"}
    for command in (
        processes.python("-m", "venv", folder),
        [python, "-m", "pip", "install", "-q", "tensorflow-tpu==2.20.*"],
        [python, __file__, step],
    ):
        ended = processes.run(
            command, 1800, check=True, env={**os.environ, **settings}
        )
    return ended.stdout


def main():
    from tf_xshard.testing import stablehlo
    from tf_xshard.testing import xla_cpu

    rng = np.random.default_rng(0)
    arguments = [
        rng.normal(size=[NUM_REPLICAS, *shape]).astype("float32")
        for shape in SHAPES
    ]
    program = _program(arguments)
    ours = stablehlo.lower(program, tuple(map(tuple, SHAPES)))
    with tempfile.TemporaryDirectory() as folder:
        theirs = _lowered_by_tensorflow_tpu(program, folder)
    assert "stablehlo.all_reduce" in theirs and str(GROUPS) in theirs
    got, want = (
        xla_cpu.Executable(text, NUM_REPLICAS)([*map(list, arguments)])
        for text in (ours.text, stablehlo.portable(theirs))
    )
    results = [got[output.data] for output in ours.outputs]
    assert np.abs(results[-1][0] - results[-1][1]).max() > 1e-3
    for of_replicas in zip(results, want, strict=True):
        for mine, other in zip(*of_replicas, strict=True):
            np.testing.assert_array_equal(mine, other)
    print("The genuine TPU kernels give the same bits.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _print_with_tpu_kernels(sys.argv[1])
    else:
        main()
