"""The v1 optimizers' documented formulas, in NumPy with float64."""

import numpy as np
import tensorflow as tf

tf1 = tf.compat.v1


class _Oracle:
    slots = ()
    start = 0.0  # The slots' initial value.

    def __init__(self, initial):
        self.x = np.array(initial, np.float64)
        start = np.full_like(self.x, self.start)
        self.state = {name: start.copy() for name in self.slots}
        self.t = 0

    def apply(self, g):
        self.t += 1
        self.x = self.x - self.step(np.asarray(g, np.float64))

    def values(self):
        """The variable and its slots."""
        return [self.x, *self.state.values()]


class GradientDescent(_Oracle):
    def step(self, g):
        return 0.1 * g


class Momentum(_Oracle):
    slots = ("momentum",)

    def step(self, g):
        self.state["momentum"] = 0.9 * self.state["momentum"] + g
        return 0.1 * self.state["momentum"]


class Adam(_Oracle):
    slots = ("m", "v")

    def step(self, g):
        s = self.state
        s["m"] = 0.9 * s["m"] + 0.1 * g
        s["v"] = 0.999 * s["v"] + 0.001 * g * g
        rate = 0.1 * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        return rate * s["m"] / (np.sqrt(s["v"]) + 1e-8)


class Adagrad(_Oracle):
    slots = ("accumulator",)
    start = 0.1

    def step(self, g):
        self.state["accumulator"] += g * g
        return 0.1 * g / np.sqrt(self.state["accumulator"])


OPTIMIZERS = {
    "sgd": (GradientDescent, lambda: tf1.train.GradientDescentOptimizer(0.1)),
    "momentum": (Momentum, lambda: tf1.train.MomentumOptimizer(0.1, 0.9)),
    "adam": (Adam, lambda: tf1.train.AdamOptimizer(0.1)),
    "adagrad": (Adagrad, lambda: tf1.train.AdagradOptimizer(0.1)),
}


def gradients(num_parts, step):
    """For each part: a dense gradient, and rows of another with duplicates."""
    rng = np.random.default_rng(100 * num_parts + step)
    dense = rng.normal(size=(num_parts, 3, 2)).astype(np.float32)
    # Shards differ in size and sign, so that none can stand for another.
    dense *= np.arange(1, num_parts + 1, dtype=np.float32)[:, None, None]
    indices = rng.integers(0, 4, size=(num_parts, 5)).astype(np.int32)
    values = rng.normal(size=(num_parts, 5, 2)).astype(np.float32)
    return dense, indices, values


def as_dense(indices, values):
    """What IndexedSlices of these add up to."""
    result = np.zeros((4, 2))
    np.add.at(result, indices, values)
    return result


class AGNWorker:
    """A worker of AGNOptimizer; the workers share the oracle of the center."""

    def __init__(self, center, period):
        self.center = center
        self.local = type(center)(center.x)
        self.num_steps = 0
        self._period = period
        self._total = np.zeros_like(center.x)
        self._num_updates = 0

    def _update(self, one, gradient):
        one.t = self._num_updates  # Adam's powers are the worker's.
        self._num_updates += 1
        one.apply(gradient)

    def step(self, gradient):
        self._update(self.local, gradient)
        self._total += gradient
        self.num_steps += 1
        if self.num_steps % self._period == 0:
            self._update(self.center, self._total / self._period)
            self.local.x = self.center.x.copy()
            self._total[:] = 0

    def values(self):
        """The local variable, the center and the accumulator."""
        return [self.local.x, self.center.x, self._total]
