"""Seeds of Python and NumPy, from which Keras takes all of its own."""

import random

import numpy as np


def seed(number):
    """`keras.utils.set_random_seed` without `tf.random.set_seed`.

    Which has TensorFlow make all kernels and functions of the process anew: an
    eighth of the suite's CPU time. Only operations that draw numbers by
    themselves read its seed, which is set once for each process.
    """
    random.seed(number)
    np.random.seed(number)
