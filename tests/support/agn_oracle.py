"""AGNOptimizer in NumPy: what every replica holds after every step."""

import keras
import numpy as np


class SGD:
    """Keras' formulas in NumPy."""

    def __init__(self, rate=0.1, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.m = 0.0

    def step(self, g):
        self.m = self.momentum * self.m - self.rate * g
        return (
            self.momentum * self.m - self.rate * g if self.nesterov else self.m
        )


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
    x = np.array([[10.0, -2.0]] * num_replicas)
    center, sums = x.copy(), np.zeros_like(x)
    locals_ = [local() for _ in x]
    inners = [inner() for _ in groups]
    result = []
    for step in range(1, num_steps + 1):
        for r in range(num_replicas):
            g = gradient(r, step)
            sums[r] += g
            x[r] += locals_[r].step(g)
        if step % period == 0:
            own = sums if accumulate == "gradients" else center - x
            combine = np.mean if reduction == "mean" else np.sum
            for one, members in zip(inners, groups, strict=True):
                total = combine(own[members], axis=0)
                center[members] += one.step(
                    total / period if normalize else total
                )
            x, sums = center.copy(), np.zeros_like(x)
        result.append((x.copy(), center.copy()))
    return result
