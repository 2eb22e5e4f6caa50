"""GroupAssignment: layouts and hosts; every mistake has its own error."""

import copy
import pathlib
import pickle
from unittest import mock

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
        ((0, 2), (1, 3)),
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
    # It is frozen.
    with pytest.raises(AttributeError, match="cannot (assign|delete)"):
        made.num_groups = 3
    with pytest.raises(AttributeError, match="cannot (assign|delete)"):
        del made._groups
    made.to_list()[0].append(7)
    assert made == same


def test_layouts():
    assert GroupAssignment.contiguous(6, 3).to_list() == [[0, 1, 2], [3, 4, 5]]
    assert GroupAssignment.strided(6, 3).to_list() == [[0, 2, 4], [1, 3, 5]]
    assert GroupAssignment.contiguous(2, 1).to_list() == [[0], [1]]
    assert GroupAssignment.strided(2, 2).to_list() == [[0, 1]]
    assert GroupAssignment.single(3).to_list() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "error, message, mistakes",
    [
        (TypeError, "not a list of replica ids", [None, "01", np.array(3)]),
        (ValueError, "not two-dimensional", [[0, 1]]),
        (ValueError, "more than two dimensions", [[[[0, 1]], [[2, 3]]]]),
        (TypeError, r"0\.0 \(float\), which is not an int", [[[0.0, 1.0]]]),
        (
            TypeError,
            r"\(bool.*\), which is not an integer",
            [[[False, True]], np.eye(2, dtype=bool)],
        ),
        (ValueError, "negative replica id -1", [[[0, -1]]]),
        (ValueError, "replica 1 in groups 0 and 1", [[[0, 1], [1, 0]]]),
        (ValueError, "puts replica 0 twice in group 0", [[[0, 0], [1, 2]]]),
        (ValueError, "leaves out replica 0", [[[1, 2]]]),
        (ValueError, r"different sizes \[2, 1\]", [[[0, 1], [2]]]),
        (ValueError, "is empty", [[], [[]]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses_groups(error, message, mistakes):
    for groups in mistakes:
        with pytest.raises(error, match=message):
            GroupAssignment(groups)


def test_refuses_numbers():
    layouts = GroupAssignment.contiguous, GroupAssignment.strided
    groups = GroupAssignment([[0, 1], [2, 3]])
    for functions, arguments, error, message in (
        (layouts, (8, 3), ValueError, "3 does not divide num_replicas=8"),
        (layouts, (0, 1), ValueError, "num_replicas must be positive"),
        (layouts, (4, -2), ValueError, "group_size must be positive"),
        (layouts, (4.0, 2), TypeError, r"num_replicas must be an int, got 4"),
        ([GroupAssignment.single], [0], ValueError, "must be positive"),
        ([groups.group_of], [4], ValueError, "No group holds replica 4"),
    ):
        for function in functions:
            with pytest.raises(error, match=message):
                function(*arguments)


def test_assignments_together():
    joined = group_assignment_lib.joined
    pairs = GroupAssignment([[0, 1], [2, 3], [4, 5]])
    singles = GroupAssignment([[i] for i in range(6)])
    assert joined([pairs, singles]) == joined([singles, pairs]) == pairs
    columns = GroupAssignment([[0, 2, 4], [1, 3, 5]])
    assert joined([pairs, columns]).num_groups == 1
    overlapping = GroupAssignment([[0, 2], [1, 3], [4, 5]])
    with pytest.raises(ValueError, match="different sizes"):
        joined([pairs, overlapping])


def _strategy(kind, tasks, num_replicas, cluster):
    """What `by_host` sees of a strategy on hardware that is not here."""
    strategy = mock.Mock(num_replicas_in_sync=num_replicas)
    strategy.extended.worker_devices = [
        f"/job:worker/replica:0/task:{task}/device:{kind}:{index}"
        for index, task in enumerate(tasks)
    ]
    strategy.cluster_resolver.cluster_spec().as_dict.return_value = cluster
    return strategy


_FOUR = {"worker": ["a:1", "b:1", "a:2", "b:2"]}
_CHIEF = {"chief": ["[::1]:1"], "worker": ["[::2]:1"], "ps": ["p:1"]}
_HOSTS = {
    "gpus": ("GPU", [0, 0], {"worker": ["a:1", "b:1"]}, [[0, 1], [2, 3]]),
    # Two processes on each of two hosts, in turns.
    "processes": ("CPU", [0], _FOUR, [[0, 2], [1, 3]]),
    "chief": ("CPU", [0], _CHIEF, [[0], [1]]),
    # A TPU pod with cores in an order of its own.
    "tpu": ("TPU", [1, 0, 1, 0], None, [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("case", _HOSTS)
def test_by_host(case):
    kind, tasks, cluster, expected = _HOSTS[case]
    strategy = _strategy(kind, tasks, sum(map(len, expected)), cluster)
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
    strategy = _strategy("CPU", [0], 3, cluster)
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
