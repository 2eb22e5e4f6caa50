"""Nested optimizers from a description, and what they compute, in NumPy.

A stack is a nested tuple, the outermost optimizer first:

    ("cross", {"groups": [[0, 1], [2, 3]]}, ("tower", {"num_towers": 2},
     ("sgd", {"rate": 0.5})))

In the oracle all replicas are one array axis: a gradient has shape [N, size].
"""

import functools

import keras
import numpy as np

import tf_xshard

SIZE = 2  # Of the weights.
WRAPPERS = ("cross", "tower", "agn")
BOUND = 1.5
# What a stack has as `pre_reduce` or `post_reduce`.
CLIP = tf_xshard.clip_by_norm(BOUND)


@tf_xshard.per_variable
class WholeSGD(keras.optimizers.SGD):
    """Makes shard_update=True update whole variables."""


_CLASSES = {
    "sgd": keras.optimizers.SGD,
    "whole": WholeSGD,
    "scale": functools.partial(
        keras.optimizers.LossScaleOptimizer, initial_scale=8.0
    ),
    "cross": tf_xshard.CrossShardOptimizer,
    "tower": tf_xshard.TowerOptimizer,
    "agn": tf_xshard.AGNOptimizer,
}
# Options are the arguments of these classes, some under shorter names.
_ARGUMENTS = {
    "rate": "learning_rate",
    "accumulation": "gradient_accumulation_steps",
    "groups": "group_assignment",
    "period": "communication_period",
}


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
    kwargs |= {_ARGUMENTS.get(key, key): one for key, one in options.items()}
    if "local_optimizer" in options:
        kwargs["local_optimizer"] = optimizer_of(options["local_optimizer"])
    return _CLASSES[name](*map(optimizer_of, inner), **kwargs)


def oracle_of(stack, weights, groups=None, is_reduced=False):
    """The oracle of a stack: a function of gradients.

    Args:
      stack: The description.
      weights: Every replica's weights, a float64 array of shape [N, size] that
        the oracle updates.
      groups: The groups of the wrappers around it.
      is_reduced: Whether a wrapper around it reduces.
    """
    name, options, *inner = stack
    return _ORACLES[name](options, *inner, weights, groups, is_reduced)


def reduced(gradients, groups, reduction):
    """The gradients of all replicas, [N, ...], after a reduction."""
    result = np.empty_like(gradients)
    for members in groups or [list(range(len(gradients)))]:
        combine = np.mean if reduction == "mean" else np.sum
        result[members] = combine(gradients[members], axis=0)
    return result


def _clipped(gradients):
    norms = np.sqrt(np.sum(gradients**2, axis=1, keepdims=True))
    return gradients * np.minimum(1.0, BOUND / np.maximum(norms, 1e-300))


class _Round:
    """The sum of the gradients of several calls."""

    def __init__(self, num_calls):
        self._num_calls = num_calls
        self._gradients = []

    def add(self, gradients):
        """The sum after the last call of a round, and None before."""
        self._gradients.append(gradients)
        if len(self._gradients) < self._num_calls:
            return None
        total = np.sum(self._gradients, axis=0)
        self._gradients.clear()
        return total


def _sgd(options, weights, *_):
    num_calls = options.get("accumulation") or 1
    momentum = options.get("momentum", 0.0)
    velocity, pending = np.zeros_like(weights), _Round(num_calls)

    def apply(gradients):
        total = pending.add(gradients)
        if total is None:
            return
        change = -options["rate"] * total / num_calls
        velocity[:] = momentum * velocity + change
        is_nesterov = options.get("nesterov", False)
        weights[:] += momentum * velocity + change if is_nesterov else velocity

    return apply


def _scale(_, inner, *around):
    """Skips a step of all replicas if one has an overflow."""
    apply_inner = oracle_of(inner, *around)

    def apply(gradients):
        if np.isfinite(gradients).all():
            apply_inner(gradients)

    return apply


def _cross(options, inner, weights, *_):
    groups = options.get("groups")
    apply_inner = oracle_of(inner, weights, groups, True)
    has_scale = "scale" in names(inner)

    def apply(gradients):
        if has_scale and not np.isfinite(gradients).all():
            gradients = np.full_like(gradients, np.nan)
        if "pre_reduce" in options:
            gradients = _clipped(gradients)
        gradients = reduced(gradients, groups, options.get("reduction", "mean"))
        if "post_reduce" in options:
            gradients = _clipped(gradients)
        apply_inner(gradients)

    return apply


def _tower(options, inner, weights, groups, is_reduced):
    # It reduces over all replicas if nothing in the stack does.
    reduces = not (is_reduced or set(names(inner)) & set(WRAPPERS))
    apply_inner = oracle_of(inner, weights, groups, is_reduced or reduces)
    num_towers = options["num_towers"]
    pending = _Round(num_towers)

    def apply(gradients):
        total = pending.add(gradients)
        if total is None:
            return
        if options.get("reduction", "mean") == "mean":
            total /= num_towers
        apply_inner(reduced(total, None, "mean") if reduces else total)

    return apply


def _agn(options, inner, weights, groups, _):
    period, center = options["period"], weights.copy()
    apply_to_center = oracle_of(inner, center)
    local = options.get("local_optimizer", inner)
    apply_locally, pending = oracle_of(local, weights), _Round(period)

    def apply(gradients):
        apply_locally(gradients)
        total = pending.add(gradients)
        if total is None:
            return
        if options.get("accumulate") == "updates":
            total = center - weights
        if options.get("normalize", True):
            total /= period
        reduction = options.get("reduction", "mean")
        of_groups = options.get("groups") or groups
        apply_to_center(reduced(total, of_groups, reduction))
        weights[:] = center

    return apply


_ORACLES = {
    "sgd": _sgd,
    "whole": _sgd,
    "scale": _scale,
    "cross": _cross,
    "tower": _tower,
    "agn": _agn,
}


def check(got, stack, gradients, context):
    """Holds every replica's weights, which began at zero, against the oracle.

    Args:
      got: The weights, of shape [replicas, SIZE].
      stack: The description.
      gradients: g_r, of shape [steps, replicas, SIZE].
      context: What to say of a failure.
    """
    want = np.zeros(gradients.shape[1:])
    apply = oracle_of(stack, want)
    for gradient in gradients.astype(np.float64):
        apply(gradient)
    finite = np.where(np.isfinite(gradients), gradients, 0)
    error = np.abs(got - want).max() / np.abs(finite).sum()
    tolerance = {"float32": 3e-6, "float64": 1e-12}[gradients.dtype.name]
    assert error <= tolerance, (context, stack, got, want)
