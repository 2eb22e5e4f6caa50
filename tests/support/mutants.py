"""Wrong reductions, which a test of a right one has to notice."""

import contextlib

from tf_xshard.reduction import gradients
from tf_xshard.reduction import group_sum

_scaled = gradients.scaled
_sum = group_sum.GroupReducer.sum


def _groups_ignored(reducer, *args):
    everyone = group_sum.GroupReducer(None, reducer.communication)
    # Each replica makes one, but they use collectives as one.
    everyone.owner = reducer.owner
    return _sum(everyone, *args)


def _replaced(num_replicas):
    """Owner, attribute and what it is instead."""
    reducer = group_sum.GroupReducer
    return {
        "factor_2": (gradients, "scaled", lambda g, f: _scaled(g, f * 2)),
        "factor_1_n": (
            gradients,
            "scaled",
            lambda g, f: _scaled(g, f / num_replicas),
        ),
        "no_reduction": (reducer, "sum", lambda self, g, *_: list(g)),
        "groups_ignored": (reducer, "sum", _groups_ignored),
    }


@contextlib.contextmanager
def mutant(name, num_replicas=1):
    """Makes the reduction wrong until this is left."""
    owner, attribute, wrong = _replaced(num_replicas)[name]
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
