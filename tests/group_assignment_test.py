"""GroupAssignment: every mistake has its own error."""

import copy
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest

import tf_xshard
from tf_xshard import group_assignment as group_assignment_lib

GroupAssignment = tf_xshard.GroupAssignment


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 2], [1, 3]],
        ((0, 2), (1, 3)),
        np.array([[0, 2], [1, 3]]),
        np.array([[0, 2], [1, 3]], np.int32),
        [np.array([0, 2]), (np.int64(1), 3)],
        GroupAssignment([[0, 2], [1, 3]]),
    ],
    ids=str,
)
def test_accepts_nested_integers(groups):
    made = GroupAssignment(groups)
    assert made.to_list() == [[0, 2], [1, 3]]
    assert all(type(i) is int for row in made.to_list() for i in row)
    assert (made.num_groups, made.group_size, made.num_replicas) == (2, 2, 4)
    assert [made.group_of(r) for r in range(4)] == [0, 1, 0, 1]
    assert list(made) == [(0, 2), (1, 3)]


def test_is_a_value():
    made = GroupAssignment([[0, 1], [2, 3]])
    same = GroupAssignment.contiguous(4, 2)
    assert made == same and hash(made) == hash(same)
    assert made != GroupAssignment([[2, 3], [0, 1]])
    assert made != [[0, 1], [2, 3]]
    assert repr(made) == "GroupAssignment([[0, 1], [2, 3]])"
    assert eval(repr(made)) == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made


def test_is_frozen():
    made = GroupAssignment([[0, 1]])
    with pytest.raises(AttributeError, match="cannot (assign|delete)"):
        made.num_groups = 3
    with pytest.raises(AttributeError, match="cannot (assign|delete)"):
        del made._groups
    made.to_list()[0].append(7)
    assert made.to_list() == [[0, 1]]


def test_layouts():
    assert GroupAssignment.contiguous(6, 3).to_list() == [[0, 1, 2], [3, 4, 5]]
    assert GroupAssignment.strided(6, 3).to_list() == [[0, 2, 4], [1, 3, 5]]
    assert GroupAssignment.contiguous(2, 1).to_list() == [[0], [1]]
    assert GroupAssignment.strided(2, 2).to_list() == [[0, 1]]
    assert GroupAssignment.single(3).to_list() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "groups, error, message",
    [
        (None, TypeError, "not a list of replica ids"),
        ("01", TypeError, "not a list of replica ids"),
        (np.array(3), TypeError, "not a list of replica ids"),
        ([0, 1], ValueError, "not two-dimensional"),
        ([[[0, 1]], [[2, 3]]], ValueError, "more than two dimensions"),
        ([[0.0, 1.0]], TypeError, r"0\.0 \(float\), which is not an integer"),
        ([[False, True]], TypeError, r"False \(bool\), which is not an int"),
        (np.eye(2, dtype=bool), TypeError, "which is not an integer"),
        ([[0, -1]], ValueError, "negative replica id -1"),
        ([[0, 1], [1, 0]], ValueError, "replica 1 in groups 0 and 1"),
        ([[0, 0], [1, 2]], ValueError, "puts replica 0 twice in group 0"),
        ([[1, 2]], ValueError, "leaves out replica 0"),
        ([[0, 1], [2]], ValueError, r"different sizes \[2, 1\]"),
        ([], ValueError, "is empty"),
        ([[]], ValueError, "is empty"),
    ],
    ids=str,
)
def test_refuses(groups, error, message):
    with pytest.raises(error, match=message):
        GroupAssignment(groups)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((8, 3), ValueError, "group_size=3 does not divide num_replicas=8"),
        ((0, 1), ValueError, "num_replicas must be positive"),
        ((4, -2), ValueError, "group_size must be positive"),
        ((4.0, 2), TypeError, r"num_replicas must be an int, got 4\.0"),
    ],
    ids=str,
)
def test_layouts_refuse(arguments, error, message):
    for layout in (GroupAssignment.contiguous, GroupAssignment.strided):
        with pytest.raises(error, match=message):
            layout(*arguments)


def test_single_and_group_of_refuse():
    with pytest.raises(ValueError, match="num_replicas must be positive"):
        GroupAssignment.single(0)
    with pytest.raises(ValueError, match="No group holds replica 4"):
        GroupAssignment([[0, 1], [2, 3]]).group_of(4)


def test_assignments_together():
    pairs = GroupAssignment([[0, 1], [2, 3], [4, 5]])
    singles = GroupAssignment([[i] for i in range(6)])
    assert group_assignment_lib.joined([pairs, singles]) is pairs
    assert group_assignment_lib.joined([singles, pairs]) == pairs
    columns = GroupAssignment([[0, 2, 4], [1, 3, 5]])
    assert group_assignment_lib.joined([pairs, columns]).num_groups == 1
    with pytest.raises(ValueError, match="different sizes"):
        group_assignment_lib.joined(
            [pairs, GroupAssignment([[0, 2], [1, 3], [4, 5]])]
        )


def test_needs_no_tensorflow():
    # Without the package's __init__, which imports everything.
    program = """
import importlib, sys, types
package = sys.modules["tf_xshard"] = types.ModuleType("tf_xshard")
package.__path__ = [sys.argv[1]]
module = importlib.import_module("tf_xshard.group_assignment")
module.GroupAssignment([[0, 1]])
assert "tensorflow" not in sys.modules
"""
    folder = pathlib.Path(group_assignment_lib.__file__).parent
    subprocess.run(
        [sys.executable, "-c", program, str(folder)], check=True, timeout=500
    )
