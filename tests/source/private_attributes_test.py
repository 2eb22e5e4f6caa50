"""What TensorFlow and Keras do not export is touched in private/ only."""

import ast
import functools

import keras
import tensorflow as tf

from tests.source import layout_test
from tests.support import replicas

# Of Python's own: a documented function, and a method of named tuples.
_PYTHONS = {"_exit", "_replace"}


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
    graph = tf.Graph()
    with graph.as_default():
        operation = tf.no_op()
    weight = model.weights[0]
    objects = (
        *(model, model.optimizer, model.layers[0], weight, weight.value),
        *(strategy, strategy.extended, graph, operation),
        *(tf.distribute.TPUStrategy, replicas.tpu(4).extended),
        *(keras.optimizers.LossScaleOptimizer, keras.callbacks.Callback()),
        tf.compat.v1.train.AdamOptimizer(),
    )
    return {
        name
        for one in objects
        for name in dir(one)
        if name.startswith("_") and not name.startswith("__")
    }


def _classes(tree):
    return [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


_BASES = {
    one.name: [ast.unparse(base) for base in one.bases]
    for tree in layout_test.MODULES.values()
    for one in _classes(tree)
}


def _is_ours(name):
    """Whether a class, and all that it derives from, is ours or Python's."""
    if name.startswith(("keras.", "tf.")):
        return False
    name = name.split(".")[-1]
    if name not in _BASES:
        return name in ("ABC", "NamedTuple", "list", "BaseException", "local")
    return all(_is_ours(base) for base in _BASES[name])


def _stored(tree):
    """The attributes and functions that code defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            yield node.attr


def _defined(one):
    """Names of a class: methods, fields, and attributes that it assigns."""
    yield from _stored(one)
    for node in ast.walk(one):
        if isinstance(node, ast.AnnAssign) and isinstance(
            node.target, ast.Name
        ):
            yield node.target.id


@functools.cache
def _own():
    """Names that our own classes define."""
    return {
        name
        for tree in layout_test.MODULES.values()
        for one in _classes(tree)
        if _is_ours(one.name)
        for name in _defined(one)
    }


@functools.cache
def _defined_anywhere():
    names = set()
    for tree in layout_test.MODULES.values():
        names |= {*_stored(tree), *(one.name for one in _classes(tree))}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # For `_set_untracked("_name", ...)`.
    return names


def _is_private(name):
    return (
        isinstance(name, str)
        and name.startswith("_")
        and not name.startswith("__")
        and name not in _PYTHONS
    )


def touched(tree):
    """Private names of TensorFlow and Keras that a module touches."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_foreign = node.attr in _foreign() and node.attr not in _own()
            if is_foreign or node.attr not in _defined_anywhere():
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            *("getattr", "hasattr", "setattr", "delattr"),
        ):
            # A string names it.
            named = [getattr(one, "value", "") for one in node.args[1:2]]
            found |= set(filter(_is_private, named))
    for one in _classes(tree):
        if not _is_ours(one.name):
            found |= set(_defined(one)) & _foreign()
    return sorted(found)


def test_private_attributes():
    """Each has a function in private/, with a comment that says why."""
    found = {
        name: touched(tree)
        for name, tree in layout_test.MODULES.items()
        if not name.startswith("tf_xshard.private.")
    }
    assert not {name: names for name, names in found.items() if names}


def test_the_test_can_fail():
    for source in (
        "optimizer._iterations",
        "optimizer._distribution_strategy",
        "self._trainable_variables",
        "strategy.extended._device_assignment",
        "graph._get_control_flow_context",
        "something._nobody_has_this",
    ):
        assert touched(ast.parse(source)) == [source.split(".")[-1]]
    for source, name in (
        ('getattr(optimizer, "_iterations", 0)', "_iterations"),
        (
            "class One(keras.optimizers.Optimizer):\n"
            "    def _all_reduce_sum_gradients(self): pass",
            "_all_reduce_sum_gradients",
        ),
    ):
        assert touched(ast.parse(source)) == [name]
