"""The fixture that most tests of TF1's names use."""

import pytest
import tensorflow as tf


@pytest.fixture
def graph():
    with tf.Graph().as_default() as made:
        yield made
