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


def random_stack(rng, num_replicas):
    """A random stack, of up to three wrappers, that the package accepts."""
    options = {
        "rate": float(rng.choice([0.25, 0.5, 1.0])),
        "momentum": float(rng.choice([0.0, 0.5])),
        "accumulation": _choice(rng, [None, None, 2, 3]),
    }
    stack = ("whole" if rng.random() < 0.5 else "sgd", options)
    num_wrappers = int(rng.integers(1, 4))
    # A loss scale is inside all wrappers, but not inside AGNOptimizer.
    has_scale = rng.random() < 0.4
    if has_scale:
        stack = ("scale", {}, stack)
    for depth in range(num_wrappers):
        is_local = depth == 0 and not has_scale
        kinds = stacks.WRAPPERS if is_local else stacks.WRAPPERS[:2]
        kind = str(rng.choice(kinds))
        stack = kind, _random_options(rng, kind, num_replicas, stack), stack
    return stack


def _choice(rng, values):
    return values[int(rng.integers(len(values)))]


def _random_options(rng, kind, num_replicas, inner):
    options = {"reduction": _choice(rng, ["mean", "sum"])}
    if kind == "tower":
        return options | {"num_towers": int(rng.integers(1, 4))}
    # One assignment for each size of groups, in a random order.
    groups = [
        rng.permutation(num_replicas).reshape(-1, size).tolist()
        for size in range(1, num_replicas + 1)
        if num_replicas % size == 0
    ]
    options["groups"] = _choice(rng, [None, *groups])
    if kind == "agn":
        return options | {"period": int(rng.integers(1, 4))}
    if not set(stacks.WRAPPERS) & set(stacks.names(inner)):
        options["shard_update"] = bool(rng.random() < 0.5)
    if rng.random() < 0.3:
        options[_choice(rng, ["pre_reduce", "post_reduce"])] = stacks.CLIP
    return options
