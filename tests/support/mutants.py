"""Sums over wrong groups, which a check of right ones has to notice."""

from unittest import mock

import numpy as np

from tf_xshard import group_assignment
from tf_xshard.reduction import reducer


def rows_as_columns():
    """Gives sums the groups of a reshape to the wrong order, in a context."""
    right = reducer.GradientReducer.sum

    def wrong(self, batch, site, groups, *args, **kwargs):
        flat = np.ravel(groups.to_list())
        columns = flat.reshape(groups.group_size, -1).T
        groups = group_assignment.GroupAssignment(columns)
        return right(self, batch, site, groups, *args, **kwargs)

    return mock.patch.object(reducer.GradientReducer, "sum", wrong)
