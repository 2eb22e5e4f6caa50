"""Wrong reductions, which a test of a right one has to notice."""

import contextlib

import numpy as np

from tf_xshard import group_assignment
from tf_xshard.reduction import gradients
from tf_xshard.reduction import group_sum

_scaled = gradients.scaled
_sum = group_sum.GroupReducer.sum


def _with_groups(changed):
    """Sums over other groups than those of the optimizer."""

    def wrong(reducer, *args):
        groups = changed(reducer.group_assignment)
        other = group_sum.GroupReducer(groups, reducer.communication)
        # Each replica makes one, but they use collectives as one.
        other.owner = reducer.owner
        return _sum(other, *args)

    return wrong


def _contiguous(groups):
    return groups.contiguous(groups.num_replicas, groups.group_size)


def _strided(groups):
    return groups.strided(groups.num_replicas, groups.group_size)


def _rows_as_columns(groups):
    """What a reshape to the wrong order gives."""
    flat = np.ravel(groups.to_list())
    return group_assignment.GroupAssignment(
        flat.reshape(groups.group_size, -1).T
    )


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
        "groups_ignored": (reducer, "sum", _with_groups(lambda groups: None)),
        "contiguous": (reducer, "sum", _with_groups(_contiguous)),
        "strided": (reducer, "sum", _with_groups(_strided)),
        "rows_as_columns": (reducer, "sum", _with_groups(_rows_as_columns)),
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
