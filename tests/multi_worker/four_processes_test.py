"""Four real processes under MultiWorkerMirroredStrategy."""

import itertools
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import multi_worker_fit_cases as fit_cases
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
def results(directory, request):
    """What the four workers hold after all cases, one launch for all."""
    full = ["--full"] if request.config.getoption("--full") else []
    return cluster.results_of(
        "tests.programs.multi_worker_program",
        NUM_WORKERS,
        [directory, *full],
        seconds=2500 if full else 540,
    )


@pytest.mark.parametrize("groups, mode", program.ORACLE_CASES)
def test_oracle(results, groups, mode):
    assignment = program.GROUPS[groups] or [[0, 1, 2, 3]]
    for rank, result in enumerate(results):
        [members] = [group for group in assignment if rank in group]
        dense, partly_none, table = result["oracle"][groups]
        total = sum(10**r for r in members)
        assert dense == [-total] * 3
        assert partly_none == -sum(10**r for r in members if r != 2)
        rows = sum((r + 1) * 10**r for r in members)
        assert table == [[0, 0], [-rows, -rows], [0, 0], [0, 0]]


def test_compat_v1(results):
    for rank, result in enumerate(results):
        [members] = [group for group in program.CROSSED if rank in group]
        weight, other, step = result["compat_v1"]
        mean = sum(10**r for r in members) / len(members)
        partly = sum(10**r for r in members if r != 2) / len(members)
        # g, and then 0.5 g + g.
        np.testing.assert_allclose(
            [weight, other], [-2.5 * mean, -2.5 * partly]
        )
        assert step == 2


def test_a_worker_that_traces_again_by_itself(results):
    for rank, result in enumerate(results):
        assert result["retrace"] == [-33 if rank < 2 else -3300]


def test_group_reduce(results):
    """The gradient is the sum of the group's upstream gradients."""
    for rank, result in enumerate(results):
        want = [[1010, 6], [101, 4]][rank % 2 == 0]
        assert result["group_reduce"] == [want] * 3


def test_global_mean(results, report):
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
    for result in results:
        mean, plain, towers = result["global_mean"]
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


def test_a_nan_on_one_worker_is_skipped_by_all(results):
    """As if the second step had not been."""
    for rank, result in enumerate(results):
        [members] = [group for group in program.CROSSED if rank in group]
        mean = sum(10.0**member for member in members) / len(members)
        weight = keras.Variable(np.zeros(3), dtype="float32")
        # Adam's step would be the same for any multiple of the gradients.
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        for number in (1, 3):
            sgd.apply([tf.fill([3], number * mean)], [weight])
        skipped, taken, got = result["skipped_steps"]
        assert (skipped, taken) == (1, 2)
        np.testing.assert_allclose(got, weight.numpy(), rtol=1e-6)


def test_local_variables(results):
    """The shared one has the group's mean, the own one a half of its own."""
    for rank, result in enumerate(results):
        [members] = [group for group in program.CROSSED if rank in group]
        shared = sum(10.0**member for member in members) / 2
        assert result["local_variables"] == [-shared, -(10.0**rank) / 2]


@pytest.mark.parametrize("name", ["towers", "agn"])
def test_bytes_on_the_wire(results, name, report):
    """Nothing but heartbeats until the last of four calls."""
    sent = np.array(results[0]["wire"][name])
    # Each worker sends every number but its own part, twice; all together:
    least = 2 * (NUM_WORKERS - 1) * 4 * program.NUM_FLOATS
    # The least of all rounds: others may use the interface, too.
    silent = sent[:, 1:3].min(axis=0)
    report(
        f"{name}: {least / 1e6:.1f} MB is a ring's bound, sent"
        f" {np.median(sent[:, 3]) / 1e6:.1f} MB, and before that"
        f" {silent.max() / 1e6:.3f} MB"
    )
    assert np.median(sent[:, 3]) > 0.98 * least
    assert sent[:, 3].min() < 1.2 * least
    assert silent.max() < 0.01 * least


def test_processes_wait_for_each_other(results):
    for rank, result in enumerate(results):
        assert result["processes"] == [rank, rank == 0, NUM_WORKERS]


def test_nested_optimizers(results):
    for seed in range(len(results[0]["nesting"])):
        stack, gradients = random_stacks.random_case(seed, NUM_WORKERS)
        stacks.check(
            np.stack([result["nesting"][seed] for result in results]),
            stack,
            gradients,
            f"seed {seed}",
        )


@pytest.mark.parametrize("mode", ["graph", "eager", "owned"])
def test_sharded_update(results, mode):
    """Weights and whole slots are those of one process, on every worker."""
    inner_fn = {
        "graph": sharded_cases.adam,
        "eager": sharded_cases.momentum,
        "owned": sharded_cases.adafactor,
    }
    reference = sharded.Trained(
        inner_fn[mode],
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
    for rank, result in enumerate(results):
        got = result["sharded"]["steps"][mode]
        for value, want in zip(got["weights"], weights, strict=True):
            np.testing.assert_allclose(value, want[rank], atol=1e-6)
        for value, want in zip(got["slots"], slots, strict=True):
            np.testing.assert_allclose(value, want[rank], atol=1e-6)
        parts = 1 if mode == "owned" else 2
        assert got["sizes"] == [
            max(1, -(-want[rank].size // parts)) for want in slots
        ]


def test_sharded_update_saves_and_restores(results, directory):
    """Every file holds whole slots, which plain Keras takes up."""
    plain = sharded_cases.model(replicas.mirrored(1))
    sharded_cases.train(plain, 3)
    expected = sharded_cases.train(plain, 2)
    for result in results:
        saved = result["sharded"]["saved"]
        assert len(saved) == 5
        for got in saved:
            for value, want in zip(got, expected, strict=True):
                np.testing.assert_allclose(value, want, atol=2e-6)
    best = keras.saving.load_model(directory / "sharded_best.keras")
    assert int(best.optimizer.iterations.numpy()) == 3
    loaded = sharded_cases.model(replicas.mirrored(1))
    loaded.optimizer.build(loaded.trainable_variables)
    for load in (
        lambda: loaded.load_weights(directory / "sharded_0.weights.h5"),
        lambda: (
            tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
            .read(str(directory / "sharded_3_state"))
            .expect_partial()
        ),
    ):
        load()
        for value, want in zip(
            sharded_cases.train(loaded, 2), expected, strict=True
        ):
            np.testing.assert_allclose(value, want, atol=2e-6)


def test_one_worker_that_reads_sharded_state_alone_gets_an_error(results):
    for rank, result in enumerate(results):
        error, shape = result["sharded"]["alone"]
        assert shape == [5, 3]
        if rank == 2:
            assert re.search(
                r"Worker 0 \(127\.0\.0\.1:\d+\) did not call this method"
                " within 4 seconds",
                error,
            )
            assert "call it on every worker" in error
        else:
            assert error is None


@pytest.mark.parametrize("name", ledger_cases.OPTIMIZERS)
def test_plan_ledger_and_wire_agree(results, name, report):
    sent = results[0]["ledger"]["sent"][name]
    planned, counted, wire = (
        sent[key] for key in ("planned", "counted", "wire")
    )
    report(f"{name}: {wire / planned:.3f} of the planned bytes on the wire")
    assert counted == planned
    assert sent["collectives"][0] == sent["collectives"][1]
    assert 0.99 * planned < wire < 1.01 * planned
    if name in ("all", "sharded"):
        # A ring: every number but a worker's own part is sent twice.
        least = 2 * (NUM_WORKERS - 1) * 4 * ledger_cases.NUM_FLOATS
        assert 0.98 * least < wire / ledger_cases.NUM_STEPS < 1.05 * least


def test_the_ledger_of_fit(results):
    for result in results:
        planned, logged = (
            result["ledger"]["fit"][key] for key in ("planned", "logged")
        )
        collectives, *sizes, seconds = logged
        # `multi_worker_fit` averages the replicas' metrics after each step.
        assert collectives == [2 * planned[0]] * 2
        for logged_bytes, planned_bytes in zip(sizes, planned[1:], strict=True):
            np.testing.assert_allclose(logged_bytes, planned_bytes, rtol=0.01)
        assert min(seconds) > 0


@pytest.fixture(scope="module")
def fits(results):
    return [result["fit"] for result in results]


def test_plain_keras_fit_fails(fits):
    for fit in fits:
        assert fit["plain"] is not None, "Keras mended this: remove it"
        assert "PerReplica" in fit["plain"]
        assert "unsupported type" in fit["plain"]


def _deviation(got, reference):
    return training.deviation([[np.array(v)] for v in got], reference)


def test_fit_equals_one_device(fits, report):
    """20 steps with momentum and clipping; and mutants do not."""
    one_device = training.train(fit_cases.momentum)[1]
    for name in ("all", "towers"):
        largest = max(_deviation(fit[name], one_device) for fit in fits)
        report(f"{name} on 4 processes: {largest:.1e} from one device")
        assert largest <= 1e-6
    with_sgd = training.train(fit_cases.sgd)[1]
    assert max(_deviation(fit["sgd"], with_sgd) for fit in fits) <= 1e-6
    for mutant in ("mutant_factor_2", "mutant_no_reduction"):
        assert _deviation(fits[1][mutant], with_sgd) > 1e-3


def test_fit_of_groups_equals_one_device_on_their_shards(fits):
    x, y = training.data()
    for members in fit_cases.GROUPS["crossed"]:
        rows = training.shard_rows(len(x), 64, NUM_WORKERS, members)
        reference = training.train(
            fit_cases.momentum,
            xy=(x[rows], y[rows]),
            batch_size=16 * len(members),
        )[1]
        for rank in range(NUM_WORKERS):
            deviation = _deviation(fits[rank]["crossed"], reference)
            assert (deviation <= 1e-6) == (rank in members), (rank, deviation)


def test_fit_of_agn_equals_one_process(fits):
    """Under MirroredStrategy, whose numbers agn_optimizer_test holds."""
    reference = training.train(
        fit_cases.local_sgd, replicas.mirrored(NUM_WORKERS)
    )[1]
    for fit in fits:
        assert _deviation(fit["agn"], reference) <= 1e-6


def test_metrics_are_over_all_workers(fits):
    """Class weights, ragged batches and validation: MirroredStrategy's.

    However many steps a call takes.
    """
    expected = fit_cases.fit_classifier(
        replicas.mirrored(NUM_WORKERS),
        lambda: tf_xshard.CrossShardOptimizer(fit_cases.sgd()),
    )
    for fit, name in itertools.product(fits, ["classifier", "in_twos"]):
        assert fit[name] == fits[0][name]
        for part in ("history", "evaluate"):
            assert list(fit[name][part]) == list(expected[part])
            for metric, value in expected[part].items():
                np.testing.assert_allclose(
                    fit[name][part][metric], value, rtol=1e-5, err_msg=metric
                )
        np.testing.assert_allclose(
            fit[name]["predict"], expected["predict"], atol=1e-6
        )


def test_each_row_is_trained_on_once(fits):
    """However the processes are seeded."""
    for fit in fits:
        weights, _, has_own_seed = fit["shuffled"]
        np.testing.assert_allclose(weights, np.ones(32), rtol=1e-6)
        assert has_own_seed


def test_freed_memory_is_kept_in_fit(fits):
    """TensorFlow undoes the settings of `launch` when it reads the data."""
    for fit in fits:
        assert fit["shuffled"][1] < fit_cases.NUM_ARRAYS * 256 / 4


@pytest.fixture(scope="module")
def states(results):
    return [result["group_state"] for result in results]


def test_group_state_gathers_every_group(states):
    """Weights and slots of a group's first replica; the mean of statistics."""
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


def test_group_state_evaluates_and_predicts(states):
    """On 50 rows in batches of 16, which four workers can't share evenly."""
    x, y = (one[:50] for one in group_training.data())
    outputs = []
    for group, row in enumerate(states[0]["evaluate"][:2]):
        single = group_training.network()
        single.compile(loss="binary_crossentropy", metrics=["accuracy"])
        single.set_weights(
            [np.array(v) for v in states[0]["weights"][group]["model"]]
        )
        expected = single.evaluate(x, y, verbose=0, return_dict=True)
        for name, value in expected.items():
            np.testing.assert_allclose(row[name], value, rtol=1e-5)
        outputs.append(single.predict(x, verbose=0))
    outputs.append(np.mean(outputs, axis=0))
    accuracy = np.mean((outputs[2] > 0.5) == y)
    np.testing.assert_allclose(
        states[0]["evaluate"][2]["accuracy"], accuracy, rtol=1e-5
    )
    for state in states:
        assert state["evaluate"] == states[0]["evaluate"]
        assert state["unchanged"]
        for got, expected in zip(state["predict"], outputs, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-6)


def test_group_callbacks_over_processes(states, directory):
    for state in states:
        assert state["history"] == states[0]["history"]
        assert len(state["history"]["val_ensemble_loss"]) == 2
        last = [history[-1] for history in state["history"].values()]
        assert np.isfinite(last).all()
    assert os.listdir(directory / "fit") == ["epoch-00002-step-00000000"]


def test_group_state_saves_and_restores(states, directory):
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


def test_divergence_over_processes(states):
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


def test_set_and_merge_over_processes(states):
    for state in states:
        assert state["merged"] == states[0]["merged"]
        expected = states[0]["weights"][0]["model"]
        for rank in (1, 3):
            assert states[rank]["set"] == expected
        assert states[0]["set"] == states[0]["own"][: len(expected)]
        assert state["undone"]


def test_a_worker_that_does_not_take_part_is_named(results):
    """And its barrier ends in time; the next one does not wait."""
    waited = []
    for result in results[:3]:
        (_, text, _), (_, read, _), barrier, (_, _, again) = result["absent"]
        name, cause, seconds = barrier
        assert re.search(
            r"Worker 3 \(127\.0\.0\.1:\d+\) did not say within 3 seconds",
            text,
        )
        assert "the_weight" in text
        assert re.search(
            r"the state of groups: Worker 3 \(127\.0\.0\.1:\d+\) did not call"
            " this method within 3 seconds",
            read,
        )
        assert name == "DeadlineExceededError"
        assert re.search(
            r"different steps, probably Worker 3 \(127\.0\.0\.1:\d+\)\. ", cause
        )
        assert again < 3
        waited.append(seconds)
    # The first to end tells the others.
    assert 3 <= max(waited) < 10
