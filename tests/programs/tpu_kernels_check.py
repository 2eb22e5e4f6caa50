"""The genuine TPU kernels lower the same step, with the same result.

The simulated TPU writes `CrossReplicaSum` as XLA's all-reduce, because only
tensorflow-tpu has the TPU's kernel. Here tensorflow-tpu 2.20 lowers a momentum
step for the platform "TPU", with no TPU, in an environment of its own; both
programs then run on the CPU replicas and must agree: `python -m
tests.programs.tpu_kernels_check [--python PYTHON_WITH_TENSORFLOW_TPU]`.
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

_PYTHON = flags.DEFINE_string(
    "python", None, "of an environment with tensorflow-tpu; made if not given"
)
_LOWER = flags.DEFINE_string("lower", None, "for the program's own use")

NUM_REPLICAS = 4
GROUPS = [[0, 2], [1, 3]]


def _lower_with_tpu_kernels(path):
    """Runs under tensorflow-tpu; imports nothing of tf_xshard."""
    import tensorflow as tf

    with open(path, "rb") as file:
        step = pickle.load(file)
    graph_def = tf.compat.v1.GraphDef.FromString(step["graph_def"])
    specs = [tf.TensorSpec(s, d) for s, d in step["parameters"]]

    @tf.function(jit_compile=True, autograph=False, input_signature=specs)
    def function(*parameters):
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(step["names"], parameters, strict=True)),
            return_elements=step["results"],
            name="",
        )

    text = function.experimental_get_compiler_ir(*specs)(
        stage="stablehlo", platform_name="TPU"
    )
    with open(path + ".mlir", "w") as file:
        file.write(text)


def _functional(program):
    """The program with its variables as parameters and results.

    tensorflow-tpu lowers for the platform "TPU" only what has no resources.
    """
    import tensorflow as tf

    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(program.graph_def)
    assert not graph_def.library.function, "the step has control flow"
    current = {v.name: v.name for v in program.variables}
    roots = {v.name: v.name for v in program.variables}
    kept = []
    for node in graph_def.node:
        inputs = [n for n in node.input if not n.startswith("^")]
        del node.input[:]
        node.input.extend(inputs)
        # "name" and "name:0" are the same tensor.
        root = roots.get(_full(inputs[0])) if inputs else None
        if root is None:
            if node.op == "XlaAllReduce":
                node.op = "CrossReplicaSum"
                del node.attr["reduce_op"], node.attr["mode"]
            kept.append(node)
        elif node.op == "Identity":
            roots[_full(node.name)] = root
        elif node.op == "ReadVariableOp":
            dtype = node.attr["dtype"].type
            node.op = "Identity"
            node.attr.clear()
            node.attr["T"].type = dtype
            node.input[0] = current[root]
            kept.append(node)
        elif node.op == "AssignVariableOp":
            current[root] = _full(inputs[1])
        elif node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            dtype = node.attr["dtype"].type
            node.op = "AddV2" if node.op.startswith("AssignAdd") else "Sub"
            node.attr.clear()
            node.attr["T"].type = dtype
            node.input[0] = current[root]
            current[root] = _full(node.name)
            kept.append(node)
        else:
            raise AssertionError(f"no functional form of {node.op}")
    nodes = [
        tf.compat.v1.NodeDef.FromString(n.SerializeToString()) for n in kept
    ]
    del graph_def.node[:]
    graph_def.node.extend(nodes)
    updates = [current[program.variables[i].name] for i in program.written]
    return graph_def, [*program.output_names, *updates]


def _full(name):
    return name if ":" in name else f"{name}:0"


def _step():
    """A momentum step with group sums, and what feeds it on each replica."""
    import keras
    import tensorflow as tf

    import tf_xshard
    from tf_xshard import testing

    strategy = testing.simulated_tpu_strategy(NUM_REPLICAS)
    rng = np.random.default_rng(0)
    with strategy.scope():
        kernel = keras.Variable(rng.normal(size=[5, 3]), dtype="float32")
        bias = keras.Variable(np.zeros(3), dtype="float32")
        optimizer = tf_xshard.CrossShardOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0),
            group_assignment=GROUPS,
        )
        optimizer.build([kernel, bias])

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            errors = tf.tanh(x @ kernel.value) + bias.value - y
            loss = tf.reduce_mean(tf.square(errors))
        variables = [kernel.value, bias.value]
        optimizer.apply(tape.gradient(loss, variables), [kernel, bias])
        return loss

    x = rng.normal(size=[NUM_REPLICAS, 8, 5]).astype("float32")
    y = rng.normal(size=[NUM_REPLICAS, 8, 3]).astype("float32")
    data = strategy.experimental_distribute_values_from_function(
        lambda c: (
            tf.constant(x[c.replica_id_in_sync_group]),
            tf.constant(y[c.replica_id_in_sync_group]),
        )
    )
    with strategy.capture() as extractions:
        tf.function(
            lambda data: strategy.run(on_replica, args=data)
        ).get_concrete_function(data)
    return extractions[0].program, x, y


def _tensorflow_tpu(folder):
    if _PYTHON.value:
        return _PYTHON.value
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

    program, x, y = _step()
    shapes = tuple(tuple(s.shape) for s in program.argument_specs)
    ours = stablehlo.lower(program, shapes)
    graph_def, results = _functional(program)
    specs = [*program.argument_specs, *(v.spec for v in program.variables)]
    path = os.path.join(folder, "step")
    with open(path, "wb") as file:
        pickle.dump(
            {
                "graph_def": graph_def.SerializeToString(),
                "names": [
                    *program.argument_names,
                    *(v.name for v in program.variables),
                ],
                "parameters": [
                    (s.shape.as_list(), s.dtype.name) for s in specs
                ],
                "results": results,
            },
            file,
        )
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
    rng = np.random.default_rng(1)
    parameters = []
    for spec in specs:
        shape = tuple(spec.shape)
        if shape == x.shape[1:]:
            values = list(x)
        elif shape == y.shape[1:]:
            values = list(y)
        elif spec.dtype.is_integer:
            values = [np.full(shape, 3, spec.dtype.as_numpy_dtype)] * len(x)
        else:
            values = [np.asarray(rng.random(shape), "float32")] * len(x)
        parameters.append(values)
    got = xla_cpu.Executable(ours.text, NUM_REPLICAS)(parameters)
    want = xla_cpu.Executable(stablehlo.portable(theirs), NUM_REPLICAS)(
        parameters
    )
    order = [output.data for output in ours.outputs]
    order += [ours.updates[index] for index in program.written]
    largest, moved = 0.0, 0.0
    for index, theirs_of_replica in zip(order, want, strict=True):
        for mine, other in zip(got[index], theirs_of_replica, strict=True):
            difference = np.abs(mine.astype("float64") - other)
            largest = max(largest, float(difference.max()))
        moved = max(moved, float(np.abs(got[index][0] - got[index][1]).max()))
    assert moved > 1e-3, "the groups got the same"
    return largest


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
