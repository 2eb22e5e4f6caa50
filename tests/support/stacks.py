"""Nested optimizers from a description, and what they compute, in NumPy.

A stack is a nested tuple, the outermost optimizer first:

    ("cross", {"groups": [[0, 1], [2, 3]]}, ("tower", {"num_towers": 2},
     ("sgd", {"rate": 0.5})))

In the oracle all replicas are one array axis: a gradient has shape [N, size].
"""

import keras
import numpy as np

import tf_xshard

SIZE = 2  # Of the weights.
WRAPPERS = ("cross", "tower", "agn")


@tf_xshard.per_variable
class WholeSGD(keras.optimizers.SGD):
    """Makes shard_update=True update whole variables."""


def names(stack):
    """The names of a stack's optimizers, the outermost first."""
    name, _, *inner = stack
    return [name, *(names(inner[0]) if inner else [])]


def optimizer_of(stack, **kwargs):
    """The Keras optimizer of a stack.

    Args:
      stack: The description.
      **kwargs: Further arguments of the outermost optimizer.
    """
    name, options, *inner = stack
    if name == "sgd":
        kind = WholeSGD if options.get("whole") else keras.optimizers.SGD
        return kind(
            options.get("rate", 1.0),
            momentum=options.get("momentum", 0.0),
            nesterov=options.get("nesterov", False),
            gradient_accumulation_steps=options.get("accumulation"),
        )
    inner = optimizer_of(*inner)
    reduction = options.get("reduction", "mean")
    groups = options.get("groups")
    if name == "scale":
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    if name == "tower":
        return tf_xshard.TowerOptimizer(
            inner, options["num_towers"], reduction, **kwargs
        )
    if name == "agn":
        return tf_xshard.AGNOptimizer(
            inner,
            communication_period=options["period"],
            reduction=reduction,
            group_assignment=groups,
            accumulate=options.get("accumulate", "gradients"),
            normalize=options.get("normalize", True),
            local_optimizer=options.get("local")
            and optimizer_of(options["local"]),
            **kwargs,
        )
    clip = options.get("clip")
    hook = clip and {clip: tf_xshard.clip_by_norm(options["bound"])}
    return tf_xshard.CrossShardOptimizer(
        inner,
        reduction,
        groups,
        shard_update=options.get("shard_update", False),
        **(hook or {}),
        **kwargs,
    )


def oracle_of(stack, weights, groups=None, is_reduced=False):
    """The oracle of a stack: an object with `apply(gradients)`.

    Args:
      stack: The description.
      weights: Every replica's weights, a float64 array of shape [N, size] that
        the oracle updates.
      groups: The groups of the wrappers around it.
      is_reduced: Whether a wrapper around it reduces.
    """
    return _ORACLES[stack[0]](stack, weights, groups, is_reduced)


def _reduced(gradients, groups, reduction):
    result = np.empty_like(gradients)
    for members in groups or [list(range(len(gradients)))]:
        combine = np.mean if reduction == "mean" else np.sum
        result[members] = combine(gradients[members], axis=0)
    return result


def _clipped(gradients, bound):
    norms = np.sqrt(np.sum(gradients**2, axis=1, keepdims=True))
    return gradients * np.minimum(1.0, bound / np.maximum(norms, 1e-300))


class _SGD:
    def __init__(self, stack, weights, *_):
        _, options = stack
        self._rate = options.get("rate", 1.0)
        self._momentum = options.get("momentum", 0.0)
        self._nesterov = options.get("nesterov", False)
        self._steps = options.get("accumulation") or 1
        self._weights = weights
        self._velocity = np.zeros_like(weights)
        self._sum = np.zeros_like(weights)
        self._calls = 0

    def apply(self, gradients):
        self._calls += 1
        self._sum += gradients
        if self._calls % self._steps:
            return
        mean = self._sum / self._steps
        self._sum[:] = 0
        self._velocity = self._momentum * self._velocity - self._rate * mean
        step = self._velocity
        if self._nesterov:
            step = self._momentum * self._velocity - self._rate * mean
        self._weights += step


class _Scale:
    """Skips a step of all replicas if one has an overflow."""

    def __init__(self, stack, *around):
        self._inner = oracle_of(stack[2], *around)

    def apply(self, gradients):
        if np.isfinite(gradients).all():
            self._inner.apply(gradients)


class _Cross:
    def __init__(self, stack, weights, groups, is_reduced):
        del groups, is_reduced
        _, self._options, inner = stack
        self._has_scale = "scale" in names(inner)
        self._inner = oracle_of(
            inner, weights, self._options.get("groups"), True
        )

    def apply(self, gradients):
        options = self._options
        if self._has_scale and not np.isfinite(gradients).all():
            self._inner.apply(np.full_like(gradients, np.nan))
            return
        if options.get("clip") == "pre_reduce":
            gradients = _clipped(gradients, options["bound"])
        gradients = _reduced(
            gradients, options.get("groups"), options.get("reduction", "mean")
        )
        if options.get("clip") == "post_reduce":
            gradients = _clipped(gradients, options["bound"])
        self._inner.apply(gradients)


class _Tower:
    def __init__(self, stack, weights, groups, is_reduced):
        _, self._options, inner = stack
        # It reduces over all replicas if nothing in the stack does.
        self._reduces = not (is_reduced or set(names(inner)) & set(WRAPPERS))
        is_reduced = is_reduced or self._reduces
        self._inner = oracle_of(inner, weights, groups, is_reduced)
        self._sum = np.zeros_like(weights)
        self._calls = 0

    def apply(self, gradients):
        self._calls += 1
        self._sum = self._sum + gradients
        num_towers = self._options["num_towers"]
        if self._calls % num_towers:
            return
        is_mean = self._options.get("reduction", "mean") == "mean"
        total = self._sum / (num_towers if is_mean else 1)
        self._sum = np.zeros_like(self._sum)
        self._inner.apply(
            _reduced(total, None, "mean") if self._reduces else total
        )


class _AGN:
    def __init__(self, stack, weights, groups, is_reduced):
        _, self._options, inner = stack
        self._groups = self._options.get("groups") or groups
        self._weights = weights
        self._center = weights.copy()
        self._of_center = oracle_of(inner, self._center, None, True)
        local = self._options.get("local") or inner
        self._local = oracle_of(local, weights, None, True)
        self._sum = np.zeros_like(weights)
        self._calls = 0

    def apply(self, gradients):
        if self._calls % self._options["period"] == 0:
            self._center[:] = self._weights
        self._local.apply(gradients)
        self._sum += gradients
        self._calls += 1
        period = self._options["period"]
        if self._calls % period:
            return
        total = self._sum
        if self._options.get("accumulate") == "updates":
            total = self._center - self._weights
        if self._options.get("normalize", True):
            total = total / period
        reduction = self._options.get("reduction", "mean")
        self._of_center.apply(_reduced(total, self._groups, reduction))
        self._sum[:] = 0
        self._weights[:] = self._center


_ORACLES = {
    "sgd": _SGD,
    "scale": _Scale,
    "cross": _Cross,
    "tower": _Tower,
    "agn": _AGN,
}


def expected(stack, gradients):
    """Every replica's weights after all steps, which begin at zero."""
    weights = np.zeros(gradients.shape[1:])
    oracle = oracle_of(stack, weights)
    for gradient in gradients.astype(np.float64):
        oracle.apply(gradient)
    return weights


def check(got, stack, gradients, context):
    """Holds every replica's weights against the oracle.

    Args:
      got: The weights, of shape [replicas, SIZE].
      stack: The description.
      gradients: g_r, of shape [steps, replicas, SIZE].
      context: What to say of a failure.
    """
    want = expected(stack, gradients)
    finite = np.where(np.isfinite(gradients), gradients, 0)
    error = np.abs(got - want).max() / np.abs(finite).sum()
    tolerance = {"float32": 3e-6, "float64": 1e-12}[gradients.dtype.name]
    assert error <= tolerance, (context, stack, got, want)
