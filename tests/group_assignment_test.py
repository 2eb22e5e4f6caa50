"""GroupAssignment: layouts and hosts; every mistake has its own error."""

import copy
import pathlib
import pickle
import types

import numpy as np
import pytest

import tf_xshard
from tests.support import processes
from tests.support import replicas
from tf_xshard import group_assignment as group_assignment_lib
from tf_xshard import testing

GroupAssignment = tf_xshard.GroupAssignment


def test_accepts_nested_integers():
    for groups in (
        [[0, 2], [1, 3]],
        ((0, 2), (1, 3)),
        np.array([[0, 2], [1, 3]]),
        np.array([[0, 2], [1, 3]], np.int32),
        [np.array([0, 2]), (np.int64(1), 3)],
        GroupAssignment([[0, 2], [1, 3]]),
    ):
        made = GroupAssignment(groups)
        assert made.to_list() == [[0, 2], [1, 3]]
        assert all(type(i) is int for row in made.to_list() for i in row)
        sizes = (made.num_groups, made.group_size, made.num_replicas)
        assert sizes == (2, 2, 4)
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


_REFUSED = [
    (GroupAssignment, *case)
    for case in [
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
    ]
] + [
    (lambda arguments, layout=layout: layout(*arguments), *case)
    for layout in (GroupAssignment.contiguous, GroupAssignment.strided)
    for case in [
        ((8, 3), ValueError, "group_size=3 does not divide num_replicas=8"),
        ((0, 1), ValueError, "num_replicas must be positive"),
        ((4, -2), ValueError, "group_size must be positive"),
        ((4.0, 2), TypeError, r"num_replicas must be an int, got 4\.0"),
    ]
]
_REFUSED += [
    (GroupAssignment.single, 0, ValueError, "num_replicas must be positive"),
    (
        GroupAssignment([[0, 1], [2, 3]]).group_of,
        4,
        ValueError,
        "No group holds replica 4",
    ),
]


@pytest.mark.parametrize("function, argument, error, message", _REFUSED)
def test_refuses(function, argument, error, message):
    with pytest.raises(error, match=message):
        function(argument)


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


def _strategy(devices, num_replicas, cluster=None):
    """What `by_host` sees of a strategy on hardware that is not here."""
    spec = types.SimpleNamespace(as_dict=lambda: cluster)
    return types.SimpleNamespace(
        num_replicas_in_sync=num_replicas,
        extended=types.SimpleNamespace(worker_devices=devices),
        cluster_resolver=types.SimpleNamespace(cluster_spec=lambda: spec),
    )


def _devices(kind, *tasks_and_indices):
    return [
        f"/job:worker/replica:0/task:{task}/device:{kind}:{index}"
        for task, index in tasks_and_indices
    ]


_HOSTS = {
    "gpus": (
        _devices("GPU", (0, 0), (0, 1)),
        {"worker": ["a:1", "b:1"]},
        [[0, 1], [2, 3]],
    ),
    # Two processes on each of two hosts, in turns.
    "processes": (
        _devices("CPU", (0, 0)),
        {"worker": ["a:1", "b:1", "a:2", "b:2"]},
        [[0, 2], [1, 3]],
    ),
    "chief": (
        _devices("CPU", (0, 0)),
        {"chief": ["[::1]:1"], "worker": ["[::2]:1"], "ps": ["p:1"]},
        [[0], [1]],
    ),
    # A TPU pod with cores in an order of its own.
    "tpu": (
        _devices("TPU", (1, 0), (0, 0), (1, 1), (0, 1)),
        None,
        [[0, 2], [1, 3]],
    ),
}


@pytest.mark.parametrize("case", _HOSTS)
def test_by_host(case):
    devices, cluster, expected = _HOSTS[case]
    strategy = _strategy(devices, sum(map(len, expected)), cluster)
    groups = GroupAssignment.by_host(strategy)
    assert groups.to_list() == expected
    columns = [list(row) for row in zip(*expected, strict=True)]
    assert groups.transposed().to_list() == columns
    assert groups.transposed().transposed() == groups


def test_by_host_of_real_strategies():
    by_host = GroupAssignment.by_host
    assert by_host(replicas.mirrored(4)).to_list() == [[0, 1, 2, 3]]
    pod = testing.simulated_tpu_strategy(8, num_hosts=2)
    assert by_host(pod).to_list() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_hosts_of_different_sizes_are_refused():
    cluster = {"worker": ["a:1", "a:2", "b:1"]}
    strategy = _strategy(_devices("CPU", (0, 0)), 3, cluster)
    with pytest.raises(ValueError, match="different numbers of replicas"):
        GroupAssignment.by_host(strategy)


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
    command = processes.python("-c", program, str(folder))
    processes.run(command, check=True, tensorflow=0)
