"""AGNOptimizer in NumPy: what every replica holds after every step."""

import keras
import numpy as np


class SGD:
    """Keras' formulas in NumPy."""

    def __init__(self, rate=0.1, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.m = 0.0

    def step(self, g):
        if not self.momentum:
            return -self.rate * g
        self.m = self.momentum * self.m - self.rate * g
        if self.nesterov:
            return self.momentum * self.m - self.rate * g
        return self.m


class Adam:
    def __init__(self):
        self.m = self.v = self.t = 0

    def step(self, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        rate = 0.1 * np.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        return -rate * self.m / (np.sqrt(self.v) + 1e-7)


class Adagrad:
    def __init__(self):
        self.v = 0.1

    def step(self, g):
        self.v = self.v + g * g
        return -0.1 * g / np.sqrt(self.v + 1e-7)


OPTIMIZERS = {
    "sgd": (SGD, lambda: keras.optimizers.SGD(0.1)),
    "momentum": (
        lambda: SGD(momentum=0.9),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    ),
    "nesterov": (
        lambda: SGD(momentum=0.9, nesterov=True),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (Adam, lambda: keras.optimizers.Adam(0.1)),
    "adagrad": (Adagrad, lambda: keras.optimizers.Adagrad(0.1)),
}


def gradient(r, step):
    return np.array([(r + 1.0) * step, np.sin(3.0 * r + step)])


def history(
    inner,
    local,
    num_replicas,
    groups,
    period,
    num_steps,
    accumulate="gradients",
    normalize=True,
    reduction="mean",
):
    """(local, center) of each replica after every step."""
    start = np.array([10.0, -2.0])
    x = [start.copy() for _ in range(num_replicas)]
    center = [start.copy() for _ in range(num_replicas)]
    sums = [np.zeros(2) for _ in range(num_replicas)]
    locals_ = [local() for _ in range(num_replicas)]
    inners = [inner() for _ in groups]
    result = []
    for step in range(1, num_steps + 1):
        for r in range(num_replicas):
            g = gradient(r, step)
            sums[r] += g
            x[r] = x[r] + locals_[r].step(g)
        if step % period == 0:
            for one, members in zip(inners, groups, strict=True):
                total = sum(
                    sums[r] if accumulate == "gradients" else center[r] - x[r]
                    for r in members
                )
                if normalize:
                    total = total / period
                if reduction == "mean":
                    total = total / len(members)
                moved = center[members[0]] + one.step(total)
                for r in members:
                    center[r] = moved
            for r in range(num_replicas):
                x[r], sums[r] = center[r].copy(), np.zeros(2)
        result.append(([v.copy() for v in x], [v.copy() for v in center]))
    return result
