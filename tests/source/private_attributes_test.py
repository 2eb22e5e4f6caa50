"""What TensorFlow and Keras do not export is touched in private/ only."""

import ast
import functools

import keras
import tensorflow as tf

from tests.source import layout_test
from tests.support import replicas

# Names of our own classes, or of Python's, that TensorFlow's have as well.
_OWN = set(
    "_devices _dtype _execute _exit _extended _finish _group _layers _lock"
    " _model _name _path _replace _variables".split()
)


@functools.cache
def _foreign():
    """Private names of the objects that this package has to do with."""
    strategy = replicas.mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((1,)), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(use_ema=True), "mse")
        model.optimizer.build(model.trainable_variables)
    graph, weight = tf.Graph(), model.weights[0]
    with graph.as_default():
        operation = tf.no_op()
    objects = (
        *(model, model.optimizer, model.layers[0], weight, weight.value),
        *(strategy, strategy.extended, graph, operation),
        *(tf.distribute.TPUStrategy, replicas.tpu(4).extended),
        *(keras.optimizers.LossScaleOptimizer, keras.callbacks.Callback()),
        tf.compat.v1.train.AdamOptimizer(),
    )
    return {name for one in objects for name in dir(one)}


@functools.cache
def _defined():
    """Every name that the package defines, and every string in it."""
    names = set()
    for tree in layout_test.MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Constant):
                names.add(node.value)  # For `_set_untracked("_name", ...)`.
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                names.add(getattr(node, "attr", getattr(node, "id", None)))
    return names


def touched(tree):
    """Private names of TensorFlow and Keras that a module touches."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in _foreign() or node.attr not in _defined():
                found.add(node.attr)
        elif isinstance(node, ast.FunctionDef) and node.name in _foreign():
            found.add(node.name)  # It overrides a method.
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("getattr", "hasattr", "setattr", "delattr"),
        ):
            found |= {getattr(one, "value", "") for one in node.args[1:2]}
    return {
        name
        for name in found - _OWN
        if str(name).startswith("_") and not name.startswith("__")
    }


def test_private_attributes():
    """Each has a function in private/, with a comment that says why."""
    found = {
        name: touched(tree)
        for name, tree in layout_test.MODULES.items()
        if not name.startswith("tf_xshard.private.")
    }
    assert not {name: names for name, names in found.items() if names}


def test_the_test_can_fail():
    for source, name in (
        ("optimizer._iterations", "_iterations"),
        ("self._trainable_variables", "_trainable_variables"),
        ("strategy.extended._device_assignment", "_device_assignment"),
        ("something._nobody_has_this", "_nobody_has_this"),
        ("getattr(optimizer, '_iterations', 0)", "_iterations"),
        ("def _get_control_flow_context(): pass", "_get_control_flow_context"),
    ):
        assert touched(ast.parse(source)) == {name}
