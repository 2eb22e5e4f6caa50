"""Wrong reductions, which a test of a right one has to notice."""

import contextlib

import numpy as np

from tf_xshard import group_assignment
from tf_xshard.reduction import gradients
from tf_xshard.reduction import reducer

_scaled = gradients.scaled
_sum = reducer.GradientReducer.sum


def _with_groups(changed):
    """Sums over other groups than those of the optimizer."""

    def wrong(self, batch, site, groups, carry=None, **kwargs):
        return _sum(self, batch, site, changed(groups), carry, **kwargs)

    return wrong


def _all(groups):
    return groups.single(groups.num_replicas)


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


def _replaced():
    """Owner, attribute and what it is instead."""
    of = reducer.GradientReducer
    return {
        "factor_2": (gradients, "scaled", lambda g, f: _scaled(g, f * 2)),
        "no_reduction": (of, "sum", lambda self, b, *_, **__: (b, None)),
        "groups_ignored": (of, "sum", _with_groups(_all)),
        "contiguous": (of, "sum", _with_groups(_contiguous)),
        "strided": (of, "sum", _with_groups(_strided)),
        "rows_as_columns": (of, "sum", _with_groups(_rows_as_columns)),
    }


@contextlib.contextmanager
def mutant(name, num_replicas=1):
    """Makes the reduction wrong until this is left."""
    del num_replicas  # No mutant depends on it.
    owner, attribute, wrong = _replaced()[name]
    right = getattr(owner, attribute)
    setattr(owner, attribute, wrong)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
