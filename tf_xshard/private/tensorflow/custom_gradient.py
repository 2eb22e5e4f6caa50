"""Replaces the gradient of tensors without keeping their graph alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.private import names

# Tells the tapes how to differentiate. tf.custom_gradient also uses it. Present
# in TensorFlow 2.20 to 2.22.
_TAPES = names.PrivateNames(
    "A gradient of GlobalMean or group_reduce",
    {"record": "tensorflow.python.eager.record.record_operation"},
)
_NAME = "TfXshardCustomGradient"
_ATTRIBUTE = "_tf_xshard_gradient"


def with_gradient(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    gradient: Callable[..., Sequence],
) -> list[tf.Tensor]:
    """Returns copies of `results`, whose gradients a function computes.

    `gradient` takes the upstream gradients of all results, and returns the
    gradients of all inputs. In a graph, tf.custom_gradient registers such a
    function forever, together with the graph. Here, the graph holds it.
    """
    num_results = len(results)

    @tf.autograph.experimental.do_not_convert
    def of_all(*upstream: Any) -> list:
        return [None] * num_results + list(gradient(*upstream[:num_results]))

    tensors = [*results, *inputs]
    if tf.executing_eagerly():
        copies = tf.identity_n(tensors)
    else:
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": _NAME}):
            copies = tf.identity_n(tensors)
        setattr(copies[0].op, _ATTRIBUTE, of_all)
    _TAPES.record(_NAME, copies, tensors, of_all)
    return copies[:num_results]


@tf.RegisterGradient(_NAME)
def _gradient(operation: tf.Operation | None, *upstream: Any) -> list:
    """Computes the gradient where tapes do not, such as in tf.gradients."""
    # A SavedModel asks without an operation for what it is to save.
    if operation is None:
        return [None] * len(upstream)
    return getattr(operation, _ATTRIBUTE)(*upstream)
