"""Random nested optimizers and gradients, for the oracle in `stacks`."""

import numpy as np

from tests.support import stacks


def random_gradients(rng, num_steps, num_replicas, dtype, overflows=False):
    """g_r of several steps, tenfold from replica to replica."""
    result = rng.normal(size=[num_steps, num_replicas, stacks.SIZE]).astype(
        dtype
    )
    result *= 10.0 ** np.arange(num_replicas)[:, np.newaxis] / 100
    if overflows:
        result[rng.integers(num_steps), rng.integers(num_replicas), 0] = np.inf
    return result


def random_case(seed, num_replicas):
    """A stack, and its gradients in float32, for one seed."""
    rng = np.random.default_rng(seed)
    stack = random_stack(rng, num_replicas)
    num_steps = int(rng.integers(1, 7))
    has_scale = "scale" in stacks.names(stack)
    return stack, random_gradients(
        rng, num_steps, num_replicas, "float32", has_scale
    )


def random_stack(rng, num_replicas, max_wrappers=3):
    """A random stack that the package accepts.

    Args:
      rng: A NumPy generator.
      num_replicas: For the groups.
      max_wrappers: The largest number of tf_xshard optimizers.
    """
    stack = (
        "sgd",
        {
            "rate": float(rng.choice([0.25, 0.5, 1.0])),
            "momentum": float(rng.choice([0.0, 0.5])),
            "accumulation": _choice(rng, [None, None, 2, 3]),
            "whole": bool(rng.random() < 0.5),
        },
    )
    num_wrappers = int(rng.integers(1, max_wrappers + 1))
    # A loss scale is set inside of some wrapper, but not inside AGNOptimizer.
    scale_at = int(rng.integers(num_wrappers)) if rng.random() < 0.4 else None
    for depth in range(num_wrappers):
        kinds = (
            stacks.WRAPPERS
            if depth == 0 and scale_at != 0
            else stacks.WRAPPERS[:2]
        )
        if depth == scale_at:
            stack = ("scale", {}, stack)
        stack = _random_wrapper(
            rng, str(rng.choice(kinds)), num_replicas, stack
        )
    return stack


def _choice(rng, values):
    return values[int(rng.integers(len(values)))]


def _random_wrapper(rng, kind, num_replicas, inner):
    options = {"reduction": _choice(rng, ["mean", "sum"])}
    if kind == "tower":
        options["num_towers"] = int(rng.integers(1, 4))
        return kind, options, inner
    options["groups"] = _choice(rng, [None, *random_groups(rng, num_replicas)])
    if kind == "agn":
        options["period"] = int(rng.integers(1, 4))
        return kind, options, inner
    if not any(name in stacks.WRAPPERS for name in stacks.names(inner)):
        options["shard_update"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        options["clip"] = _choice(rng, ["pre_reduce", "post_reduce"])
        options["bound"] = 1.5
    return kind, options, inner


def random_groups(rng, num_replicas):
    """One assignment for each size of groups, in a random order."""
    return [
        rng.permutation(num_replicas).reshape(-1, size).tolist()
        for size in range(1, num_replicas + 1)
        if num_replicas % size == 0
    ]
