"""Seeds of Python and NumPy, from which Keras takes all of its own."""

import random

import numpy as np


def seed(number):
    """Does what `keras.utils.set_random_seed` does, but for TensorFlow's seed.

    Setting that makes TensorFlow create all kernels and functions of the
    process anew: an eighth of the suite's CPU time. Only operations that draw
    numbers by themselves use it, and conftest.py sets it once a process.
    """
    random.seed(number)
    np.random.seed(number)
