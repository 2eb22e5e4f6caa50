"""Four real processes under MultiWorkerMirroredStrategy."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs import multi_worker_ledger as ledger_cases
from tests.programs import multi_worker_program as program
from tests.programs import multi_worker_sharded as sharded_cases
from tests.support import cluster
from tests.support import group_training
from tests.support import random_stacks
from tests.support import replicas
from tests.support import sharded
from tests.support import stacks
from tests.support import training

NUM_WORKERS = program.NUM_WORKERS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """What all workers write into."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def launched(directory, request):
    """A function: what the four workers hold after all cases, of one launch."""
    full = request.config.getoption("--full")
    return cluster.once(
        lambda: cluster.results_of(
            "tests.programs.multi_worker_program",
            NUM_WORKERS,
            [str(directory), *["--full"] * full],
            1200 if full else 300,
        )
    )


@pytest.fixture
def of(launched):
    """A function: what each worker holds after one case, by rank."""
    return lambda *names: [_at(result, names) for result in launched()]


def _at(result, names):
    for name in names:
        result = result[name]
    return result


def _members(rank, groups=program.CROSSED):
    [members] = [group for group in groups if rank in group]
    return members


def _few(few, every):
    """Parameters, of which only a few run without --full."""
    return [
        one if one in few else pytest.param(one, marks=replicas.in_full)
        for one in every
    ]


@pytest.mark.parametrize("groups", _few(("pairs", "crossed"), program.GROUPS))
def test_oracle(of, groups):
    check_oracle(of("oracle", groups), program.GROUPS[groups])


def check_oracle(results, groups):
    """Powers of ten; worker 2 lacks one of three gradients."""
    for rank, (dense, partly_none, table) in enumerate(results):
        members = _members(rank, groups or [[0, 1, 2, 3]])
        total = sum(10**r for r in members)
        assert dense == [-total] * 3
        assert partly_none == -sum(10**r for r in members if r != 2)
        rows = sum((r + 1) * 10**r for r in members)
        assert table == [[0, 0], [-rows, -rows], [0, 0], [0, 0]]


def test_compat_v1(of):
    for rank, (weight, other, step) in enumerate(of("compat_v1")):
        mean = sum(10**r for r in _members(rank)) / 2
        partly = sum(10**r for r in _members(rank) if r != 2) / 2
        # g, and then 0.5 g + g.
        np.testing.assert_allclose(
            [weight, other], [-2.5 * mean, -2.5 * partly]
        )
        assert step == 2


def test_a_worker_that_traces_again_by_itself(of):
    assert of("retrace") == [[-33], [-33], [-3300], [-3300]]


def test_group_reduce(of):
    """The gradient is the sum of the group's upstream gradients."""
    even, odd = [[101, 4]] * 3, [[1010, 6]] * 3
    assert of("group_reduce") == [even, odd, even, odd]


def test_global_mean(of, report):
    """The numbers of one process with all rows; Keras' loss has others."""
    every = [
        [program.rows_of(rank, call) for rank in range(NUM_WORKERS)]
        for call in range(2)
    ]
    joined = [
        tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        for parts in every
    ]
    whole = tuple(np.concatenate(c) for c in zip(*joined, strict=True))
    in_two_steps, in_one_step = (
        program.linear_training(
            lambda: keras.optimizers.SGD(0.1),
            keras.losses.MeanSquaredError(),
            calls,
            tf.distribute.get_strategy(),
        )
        for calls in (joined, [whole])
    )
    for mean, plain, towers in of("global_mean"):
        worst, without, of_towers = (
            np.abs(np.subtract(one, expected)).max()
            for one, expected in (
                (mean, in_two_steps),
                (plain, in_two_steps),
                (towers, in_one_step),
            )
        )
        report(
            f"GlobalMean on 4 processes: {worst:.1e}, in a round"
            f" {of_towers:.1e}, Keras {without:.1e}"
        )
        assert max(worst, of_towers) <= 1e-6 < 1e-2 < without


def test_a_nan_on_one_worker_is_skipped_by_all(of):
    """As if the second step had not been."""
    for rank, (skipped, taken, got) in enumerate(of("skipped_steps")):
        mean = sum(10.0**member for member in _members(rank)) / 2
        # Momentum of 0.9 at a rate of 0.1, with gradients of 1 and 3 means.
        assert (skipped, taken) == (1, 2)
        np.testing.assert_allclose(got, [-0.49 * mean] * 3, rtol=1e-6)


def test_local_variables(of):
    """The shared one has the group's mean, the own one a half of its own."""
    for rank, got in enumerate(of("local_variables")):
        shared = sum(10.0**member for member in _members(rank)) / 2
        assert got == [-shared, -(10.0**rank) / 2]


def test_rank_chief_and_barrier(of):
    """All see what the chief, the last at the barrier, has written."""
    assert of("processes") == [[r, r == 0, 4] for r in range(NUM_WORKERS)]


def test_nested_optimizers(of):
    every = of("nesting")
    for seed in every[0]:
        stack, gradients = random_stacks.random_case(int(seed), NUM_WORKERS)
        got = np.stack([one[seed] for one in every])
        stacks.check(got, stack, gradients, f"seed {seed}")


@pytest.mark.parametrize("mode", _few(["momentum"], sharded_cases.MODES))
def test_sharded_update(of, mode):
    """Weights and whole slots are those of one process, on every worker."""
    reference = sharded.Trained(
        sharded_cases.MODES[mode],
        replicas.mirrored(NUM_WORKERS),
        sharded_cases.GROUPS,
        num_steps=sharded_cases.NUM_STEPS,
    )
    weights = [w for w in reference.weights if w.size]
    # Without the counter, the learning rate, and those of the empty variable.
    slots = [
        np.stack(replicas.values(reference.strategy, v))
        for v in reference.optimizer.variables[2:]
        if v.shape.num_elements()
        # Adafactor's whole placeholders for the means of a vector.
        and v.dtype != "int32"
    ]
    parts = 1 if mode == "owned" else 2
    for rank, got in enumerate(of("sharded", "steps", mode)):
        for values, wanted in (
            (got["weights"], weights),
            (got["slots"], slots),
        ):
            for value, want in zip(values, wanted, strict=True):
                np.testing.assert_allclose(value, want[rank], atol=1e-6)
        assert got["sizes"] == [
            max(1, -(-want[rank].size // parts)) for want in slots
        ]


def test_sharded_update_saves_and_restores(of, directory):
    """Every file holds whole slots, which plain Keras takes up."""
    plain = sharded_cases.model(replicas.mirrored(1))
    sharded_cases.train(plain, 3)
    expected = sharded_cases.train(plain, 2)

    def check(got):
        for value, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(value, want, atol=2e-6)

    for saved in of("sharded", "saved"):
        for got in saved:
            check(got)
    loaded = sharded_cases.model(replicas.mirrored(1))
    loaded.optimizer.build(loaded.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
    path = str(directory / "sharded_3_state")
    checkpoint.read(path).expect_partial()
    check(sharded_cases.train(loaded, 2))


def test_one_worker_that_reads_sharded_state_alone_gets_an_error(of):
    for rank, (error, shape) in enumerate(of("sharded", "alone")):
        assert shape == [5, 3]
        assert (error is not None) == (rank == 2)
        if rank == 2:
            assert re.search(
                r"Worker 0 \(127\.0\.0\.1:\d+\) did not call this method"
                " within 8 seconds",
                error,
            )
            assert "call it on every worker" in error


@pytest.mark.parametrize(
    "name", _few(ledger_cases.FEW, ledger_cases.OPTIMIZERS)
)
def test_plan_ledger_and_wire_agree(of, name, report):
    """On the sockets of each worker, which nothing else uses."""
    sent = of("ledger", name)
    [planned] = [one["planned"] for one in sent if one["planned"]]
    wire = np.array([one["wire"] for one in sent])
    share = wire.sum() / (NUM_WORKERS * planned[1])
    report(f"{name}: {share:.3f} of the planned bytes on the wire")
    assert [one["counted"] for one in sent] == [planned] * NUM_WORKERS
    assert 0.99 < share < 1.02
    if name in ("towers", "agn"):
        # Nothing but the barrier until the last call of a round.
        assert wire[:, :-1].max() < 0.01 * wire[:, -1].min()
    if name in ("all", "sharded", "towers", "agn"):
        # A ring: every number but a worker's own part is sent twice.
        least = 2 * (NUM_WORKERS - 1) * 4 * ledger_cases.NUM_FLOATS
        calls = wire.sum(axis=0)[-1]
        assert 0.98 * least < calls < 1.05 * least


def test_fit_of_groups_equals_one_device_on_their_shards(of):
    """With momentum and clipping; each group's numbers are its own."""
    x, y = training.data()
    fits = of("fit_of_groups")
    for members in program.CROSSED:
        rows = training.shard_rows(len(x), 64, NUM_WORKERS, members)
        _, reference = training.train(
            program.momentum,
            xy=(x[rows], y[rows]),
            batch_size=16 * len(members),
            num_steps=8,
        )
        for rank, got in enumerate(fits):
            got = [[np.array(value)] for value in got]
            deviation = training.deviation(got, reference)
            assert (deviation <= 1e-6) == (rank in members), (rank, deviation)


def test_group_state_gathers_every_group(of):
    """Weights and slots of a group's first replica; the mean of statistics."""
    states = of("group_state")
    names = [v.path for v in group_training.network().weights]
    statistics = [i for i, name in enumerate(names) if "moving" in name]
    assert len(statistics) == 2
    for group, members in enumerate(group_training.GROUPS):
        expected = [states[members[0]]["own"], states[members[1]]["own"]]
        for state in states:
            got = state["weights"][group]
            for index, value in enumerate(got["model"] + got["optimizer"]):
                first, second = (np.array(one[index]) for one in expected)
                if index in statistics:
                    assert not np.array_equal(first, second)
                    np.testing.assert_allclose(
                        value, (first + second) / 2, rtol=1e-6
                    )
                else:
                    np.testing.assert_array_equal(value, first)
                    np.testing.assert_array_equal(value, second)
    assert states[0]["own"] != states[1]["own"]


def _networks(states):
    """A network with each group's weights, on one device."""
    for group in range(2):
        network = group_training.network()
        network.compile(loss="binary_crossentropy", metrics=["accuracy"])
        network.set_weights(
            [np.array(v) for v in states[0]["weights"][group]["model"]]
        )
        yield network


def test_group_state_predicts(of):
    """On 50 rows in batches of 16, which four workers can't share evenly."""
    states = of("group_state")
    x, _ = group_training.data()
    outputs = [np.array(one(x[:50])) for one in _networks(states)]
    outputs.append(np.mean(outputs, axis=0))
    for state in states:
        got = state["predict"]
        for one, want in zip(got, outputs[-len(got) :], strict=True):
            np.testing.assert_allclose(one, want, atol=1e-6)
        assert state["unchanged"]


@pytest.mark.full
def test_group_state_evaluates(of):
    states = of("group_state")
    x, y = (one[:50] for one in group_training.data())
    expected, outputs = [], []
    for one in _networks(states):
        expected.append(one.evaluate(x, y, verbose=0, return_dict=True))
        outputs.append(np.array(one(x)))
    hits = (np.mean(outputs, axis=0) > 0.5) == y
    expected.append({"accuracy": np.mean(hits)})
    for state in states:
        for row, want in zip(state["evaluate"], expected, strict=True):
            for name, value in want.items():
                np.testing.assert_allclose(row[name], value, rtol=1e-5)


def test_group_state_saves_and_restores(of, directory):
    states = of("group_state")
    for rank, state in enumerate(states):
        assert state["position"] == [3, 1]
        assert state["restored"]
        assert state["kept"]
        error = "FileNotFoundError" if rank == 2 else "failed on worker 2"
        assert error in state["refused"]
        assert state["eagerly"]
        # What fails on one process fails on all, and nothing is half done.
        assert ("failed on worker 0" in state["not_exported"]) == (rank != 0)
        assert "another process wrote, is missing here" in state["not_saved"]
        assert "pass shared=False" in state["not_saved"]
        assert state["not_committed"]
        # Rank 0 has the manifest; each has values that no other has.
        own = rf"(state-[0-9a-f]{{16}}-{rank:05d}\..*|manifest\.json)"
        assert len(state["kept_files"]) == (3 if rank == 0 else 2)
        assert all(re.fullmatch(own, name) for name in state["kept_files"])
        assert state["from_merged"] == [2, True]
    loaded = keras.models.load_model(directory / "group_1.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD
    for value, expected in zip(
        loaded.get_weights(), states[0]["weights"][1]["model"], strict=True
    ):
        np.testing.assert_array_equal(np.float64(value), expected)


def test_divergence_over_processes(of):
    states = of("group_state")
    for state in states:
        assert state["divergence"] == states[0]["divergence"]
        for row in state["divergence"]:
            assert not row["within_group"]
            if row["kind"] == "statistic":
                assert row["statistic"] > 0
        assert state["divergence"][0]["between_groups"] > 0.01
        [found] = state["unequal"]
        assert found["variable"].endswith("/kernel")
        assert (found["group"], found["replicas"]) == (1, [3])
        np.testing.assert_allclose(found["largest_difference"], 0.5, rtol=1e-5)
        assert not state["repaired"]


def test_set_and_merge_over_processes(of):
    """Group 1 gets group 0's weights; then all have the groups' mean."""
    states = of("group_state")
    first, second = states[0]["weights"]
    merged = [
        *first["model"],
        *(
            np.mean(pair, axis=0)
            for pair in zip(
                first["optimizer"], second["optimizer"], strict=True
            )
        ),
    ]
    for rank, state in enumerate(states):
        own = state["own"][: len(first["model"])]
        assert state["set"] == (first["model"] if rank in (1, 3) else own)
        for value, want in zip(state["merged"], merged, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_worker_that_does_not_take_part_is_named(of):
    """And its barrier ends in time; the next one does not wait."""
    waited = []
    for (_, text, _), (_, read, _), barrier, (_, _, again) in of("absent")[:3]:
        name, cause, seconds = barrier
        assert re.search(
            r"Worker 3 \(127\.0\.0\.1:\d+\) did not say within 4 seconds", text
        )
        assert "the_weight" in text
        assert re.search(
            r"the state of groups: Worker 3 \(127\.0\.0\.1:\d+\) did not call"
            " this method within 4 seconds",
            read,
        )
        assert name == "DeadlineExceededError"
        assert re.search(
            r"different steps, probably Worker 3 \(127\.0\.0\.1:\d+\)\. ", cause
        )
        assert again < 4
        waited.append(seconds)
    # The first to end tells the others.
    assert 4 <= max(waited) < 12
