"""Names the Keras version, and skips tests that a version can't run."""

import keras
import pytest
import tensorflow as tf

# (major, minor)
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])

# They fail on one device.
BROKEN = ("Muon",) if KERAS == (3, 12) else ()


def needs_optimizer(name):
    """Skips a test where Keras does not have an optimizer."""
    return pytest.mark.skipif(
        not hasattr(keras.optimizers, name),
        reason=f"this Keras has no {name}",
    )


needs_multi_optimizer = needs_optimizer("MultiOptimizer")
writes_graphs = pytest.mark.skipif(
    tf.__version__.startswith("2.20."),
    reason="TensorFlow 2.20 can't write a graph with protobuf 7.34",
)
