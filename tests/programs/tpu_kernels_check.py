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
import tempfile

import numpy as np
from absl import app
from absl import flags

from tests.support import paths
from tests.support import processes

_LOWER = flags.DEFINE_string("lower", None, "for the program's own use")

NUM_REPLICAS = 4
GROUPS = [[0, 2], [1, 3]]


def _lower_with_tpu_kernels(path):
    """Runs under tensorflow-tpu; imports nothing of tf_xshard."""
    import tensorflow as tf

    with open(path, "rb") as file:
        serialized, names, parameters, results = pickle.load(file)
    graph_def = tf.compat.v1.GraphDef.FromString(serialized)
    specs = [tf.TensorSpec(s, d) for s, d in parameters]

    @tf.function(jit_compile=True, autograph=False, input_signature=specs)
    def function(*parameters):
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(names, parameters, strict=True)),
            return_elements=results,
            name="",
        )

    text = function.experimental_get_compiler_ir(*specs)(
        stage="stablehlo", platform_name="TPU"
    )
    with open(path + ".mlir", "w") as file:
        file.write(text)


def _as_on_a_tpu(program):
    """The graph with the operation that only TPUs have a kernel for."""
    import tensorflow as tf

    assert not program.variables, "tensorflow-tpu lowers no resources"
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(program.graph_def)
    for node in graph_def.node:
        if node.op == "XlaAllReduce":
            node.op = "CrossReplicaSum"
            del node.attr["reduce_op"], node.attr["mode"]
    return graph_def


def _program(arguments):
    """A momentum step with group sums; each replica's arguments are rows."""
    import tensorflow as tf

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
    with strategy.capture() as extractions:
        tf.function(
            lambda data: strategy.run(on_replica, args=data)
        ).get_concrete_function(data)
    return extractions[0].program


def _tensorflow_tpu(folder):
    """Makes an environment with tensorflow-tpu, and returns its Python."""
    environment = os.path.join(folder, "tensorflow_tpu")
    processes.run(
        processes.python("-m", "venv", environment), check=True, tensorflow=0
    )
    python = os.path.join(environment, "bin", "python")
    processes.run(
        [python, "-m", "pip", "install", "-q", "tensorflow-tpu==2.20.*"]
        + ["absl-py", "numpy"],
        1800,
        check=True,
        tensorflow=0,
    )
    return python


def check(folder) -> float:
    """Lowers and runs both; returns the largest difference of any result."""
    from tf_xshard.testing import stablehlo
    from tf_xshard.testing import xla_cpu

    rng = np.random.default_rng(0)
    arguments = [
        rng.normal(size=[NUM_REPLICAS, *shape]).astype("float32")
        for shape in ([5, 3], [3], [5, 3], [8, 5], [8, 3])
    ]
    program = _program(arguments)
    specs = program.argument_specs
    ours = stablehlo.lower(program, tuple(tuple(s.shape) for s in specs))
    path = os.path.join(folder, "step")
    graph_def = _as_on_a_tpu(program).SerializeToString()
    parameters = [(s.shape.as_list(), s.dtype.name) for s in specs]
    step = graph_def, program.argument_names, parameters, program.output_names
    pathlib.Path(path).write_bytes(pickle.dumps(step))
    processes.run(
        [_tensorflow_tpu(folder), __file__, f"--lower={path}"],
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": str(paths.ROOT),
            # No libtpu is loaded: lowering needs none.
            "TPU_LIBRARY_PATH": "/nonexistent",
        },
    )
    theirs = pathlib.Path(path + ".mlir").read_text()
    assert "stablehlo.all_reduce" in theirs and "[[0, 2], [1, 3]]" in theirs
    got, want = (
        xla_cpu.Executable(text, NUM_REPLICAS)([*map(list, arguments)])
        for text in (ours.text, stablehlo.portable(theirs))
    )
    results = [got[output.data] for output in ours.outputs]
    assert np.abs(results[-1][0] - results[-1][1]).max() > 1e-3
    return max(
        float(np.abs(mine - other).max())
        for of_replicas in zip(results, want, strict=True)
        for mine, other in zip(*of_replicas, strict=True)
    )


def main(argv):
    del argv
    if _LOWER.value:
        _lower_with_tpu_kernels(_LOWER.value)
        return
    with tempfile.TemporaryDirectory() as folder:
        largest = check(folder)
    print(
        f"Largest difference from the genuine TPU kernels' program: {largest}"
    )
    assert largest == 0.0


if __name__ == "__main__":
    app.run(main)
