"""Sums over wrong groups, which a check of right ones has to notice."""

from unittest import mock

import numpy as np

from tf_xshard import group_assignment
from tf_xshard.reduction import reducer


def _rows_as_columns(groups):
    """What a reshape to the wrong order gives."""
    flat = np.ravel(groups.to_list())
    return group_assignment.GroupAssignment(
        flat.reshape(groups.group_size, -1).T
    )


_WRONG = {
    "groups_ignored": lambda groups: groups.single(groups.num_replicas),
    "contiguous": lambda groups: groups.contiguous(
        groups.num_replicas, groups.group_size
    ),
    "strided": lambda groups: groups.strided(
        groups.num_replicas, groups.group_size
    ),
    "rows_as_columns": _rows_as_columns,
}


def mutant(name):
    """Makes the groups of all sums wrong while this context is entered."""
    right = reducer.GradientReducer.sum

    def wrong(self, batch, site, groups, *args, **kwargs):
        return right(self, batch, site, _WRONG[name](groups), *args, **kwargs)

    return mock.patch.object(reducer.GradientReducer, "sum", wrong)
