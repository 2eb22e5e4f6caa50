"""Four real processes under MultiWorkerMirroredStrategy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.programs import multi_worker_ledger as ledger_cases
from tests.programs import multi_worker_program as program
from tests.programs import multi_worker_sharded as sharded_cases
from tests.support import group_training
from tests.support import random_stacks
from tests.support import replicas
from tests.support import stacks

NUM_WORKERS = program.NUM_WORKERS


@pytest.mark.parametrize(
    "case", ["sums_of_groups", "group_reduce", "rank_chief_and_barrier"]
)
def test_each_worker_holds_what_it_must(of, case):
    assert of(case) == [None] * NUM_WORKERS


def test_nested_optimizers(of):
    every = of("nesting")
    for seed in every[0]:
        stack, gradients = random_stacks.random_case(int(seed), NUM_WORKERS)
        got = np.stack([one[seed] for one in every])
        stacks.check(got, stack, gradients, f"seed {seed}")


@pytest.mark.parametrize("name", sharded_cases.OPTIMIZERS)
def test_sharded_update_saves_and_restores(of, name, directory):
    """Every file holds whole slots, which plain Keras takes up."""
    of_workers = sum((one[name] for one in of("sharded")), [])
    plain = sharded_cases.model(replicas.mirrored(1), name)
    sharded_cases.train(plain, 3)
    expected = sharded_cases.train(plain, 2)
    loaded = sharded_cases.model(replicas.mirrored(1), name)
    loaded.optimizer.build(loaded.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
    path = str(directory / f"{name}_3_state")
    checkpoint.read(path).expect_partial()
    for got in (*of_workers, sharded_cases.train(loaded, 2)):
        for value, want in zip(got, expected, strict=True):
            np.testing.assert_allclose(value, want, atol=2e-6)


@pytest.mark.parametrize("name", ledger_cases.OPTIMIZERS)
def test_plan_ledger_and_wire_agree(of, name, report):
    """On the sockets of each worker, which nothing else uses."""
    sent = [one[name] for one in of("ledger")]
    [planned] = [one["planned"] for one in sent if one["planned"]]
    wire = np.array([one["wire"] for one in sent])
    share = wire.sum() / (NUM_WORKERS * planned[1])
    report(f"{name}: {share:.3f} of the planned bytes on the wire")
    assert [one["counted"] for one in sent] == [planned] * NUM_WORKERS
    assert 0.99 < share < 1.02
    if name == "towers":
        # Nothing but the barrier until the last call of a round.
        assert wire[:, :-1].max() < 0.01 * wire[:, -1].min()
        # A ring: every number but a worker's own part is sent twice.
        least = 2 * (NUM_WORKERS - 1) * 4 * ledger_cases.NUM_FLOATS
        assert 0.98 * least < wire.sum(axis=0)[-1] < 1.05 * least


def test_fit_of_groups_equals_one_device_on_their_shards(of):
    """With momentum and clipping; each group's numbers are its own."""
    program.check_fit_of_groups(of("fit_of_groups"), program.CROSSED)


def test_group_state_gathers_every_group(of):
    """Weights and slots of a group's first replica; the mean of statistics."""
    states = of("group_state")
    statistics = {
        index
        for index, v in enumerate(group_training.network().weights)
        if "moving" in v.path
    }
    assert len(statistics) == 2
    for group, members in enumerate(group_training.GROUPS):
        held = zip(*(states[r]["own"] for r in members), strict=True)
        expected = [np.array(pair) for pair in held]
        for state in states:
            got = state["weights"][group]
            for index, value in enumerate(got["model"] + got["optimizer"]):
                first, second = expected[index]
                is_statistic = index in statistics
                assert np.array_equal(first, second) != is_statistic
                np.testing.assert_allclose(
                    value, (first + second) / 2, rtol=1e-6 * is_statistic
                )
    assert states[0]["own"] != states[1]["own"]


def test_group_state_predicts(of):
    """On 50 rows in batches of 16, which four workers can't share evenly."""
    states = of("group_state")
    x, _ = group_training.data()
    expected = np.mean(
        [
            group_training.outputs(map(np.array, one["model"]), x[:50])
            for one in states[0]["weights"]
        ],
        axis=0,
    )
    for state in states:
        np.testing.assert_allclose(state["predict"], expected, atol=1e-6)


def test_group_state_exports_one_device_s_model(of, directory):
    [[_, weights], *_] = [one["weights"] for one in of("group_state")]
    loaded = keras.models.load_model(directory / "group_1.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD
    for value, want in zip(loaded.get_weights(), weights["model"], strict=True):
        np.testing.assert_array_equal(np.float64(value), want)


def test_divergence_over_processes(of):
    first, *others = [one["divergence"] for one in of("group_state")]
    assert others == [first] * (NUM_WORKERS - 1)
    assert first[0]["between_groups"] > 0.01
    for row in first:
        assert not row["within_group"]
        assert row["kind"] != "statistic" or row["statistic"] > 0


def test_set_and_merge_over_processes(of):
    """Group 1 gets group 0's weights; then all have the groups' mean."""
    states = of("group_state")
    first, second = states[0]["weights"]
    slots = zip(first["optimizer"], second["optimizer"], strict=True)
    merged = [*first["model"], *(np.mean(pair, axis=0) for pair in slots)]
    for rank, state in enumerate(states):
        own = state["own"][: len(first["model"])]
        assert state["set"] == (first["model"] if rank in (1, 3) else own)
        for value, want in zip(state["merged"], merged, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_worker_that_does_not_take_part_is_named(of):
    """Soon after the timeout of the first to end, who tells the others."""
    assert 4 <= max(of("absent")) < 12
