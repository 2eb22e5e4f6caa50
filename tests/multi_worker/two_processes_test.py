"""Two real processes: data of their own, no seed, and saves to one path."""

import os

import keras
import numpy as np
import pytest

from tests.programs import two_workers_program as program
from tests.support import cluster
from tests.support import replicas


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory that all workers write into."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def results(directory, request):
    """A function: the workers' values after all cases, of one launch."""
    full = request.config.getoption("--full")
    return cluster.once(
        lambda: cluster.results_of(
            "tests.programs.two_workers_program",
            program.NUM_WORKERS,
            [str(directory), *["--full"] * full],
        )
    )


def test_each_row_is_trained_on_once(results):
    """However the processes are seeded, or not; `fit` leaves that as it is."""
    for result in results():
        seeded, _ = result["shuffled"]
        for counts, is_kept in seeded:
            np.testing.assert_allclose(counts, np.ones(32), rtol=1e-6)
            assert is_kept


def test_freed_memory_is_kept_in_fit(results):
    """TensorFlow undoes the settings of `launch` when it reads the data."""
    for result in results():
        _, faults = result["shuffled"]
        assert faults < program.NUM_ARRAYS * 256 / 4


def _steps():
    """The rows of each step: a batch of each worker that still has one."""
    x, y = program.data()
    for start in range(0, 31, program.BATCH_SIZE):
        rows = [
            np.arange(program.NUM_ROWS)[rank :: program.NUM_WORKERS][
                start : start + program.BATCH_SIZE
            ]
            for rank in range(program.NUM_WORKERS)
        ]
        rows = np.concatenate(rows)
        yield x[rows], y[rows]


@pytest.fixture(scope="module")
def one_device():
    """Weights and history of two epochs on one device."""
    model = program.model(program.sgd())
    history = {"loss": [], "val_loss": []}
    for _ in range(2):
        sums = [
            (model.train_on_batch(*batch), len(batch[0]))
            for batch in _steps()
            if not model.reset_metrics()
        ]
        history["loss"].append(
            sum(loss * count for loss, count in sums) / program.NUM_ROWS
        )
        history["val_loss"].append(model.evaluate(*program.data(), verbose=0))
    return model.get_weights(), history


@pytest.mark.parametrize(
    "name",
    [
        "fit",
        pytest.param("in_twos", marks=replicas.in_full),
        "undivided",
    ],
)
def test_fit_on_different_numbers_of_batches(results, one_device, name):
    """One device's numbers, for the validation data as well."""
    weights, history = one_device
    for result in results():
        got = result["different_batches"][name]
        assert got["steps"] == 8
        # What callbacks see after a batch is of all workers, too.
        assert (
            got["batches"] == results()[0]["different_batches"][name]["batches"]
        )
        for value, expected in zip(got["weights"], weights, strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-6)
        for metric, expected in history.items():
            np.testing.assert_allclose(
                got["history"][metric], expected, rtol=1e-5, err_msg=metric
            )


def test_fit_on_data_of_unknown_size(results):
    """The step that meets the end of the data changes nothing."""
    model = program.model(program.sgd())
    x, y = program.data()
    for _ in range(3):
        for start in range(0, 24, 8):
            rows = slice(start, start + 8)
            model.train_on_batch(x[rows], y[rows])
    for result in results():
        found = result["unknown_size"]
        steps = {name: one["steps"] for name, one in found.items()}
        assert steps == {"cross": 9, "tower": 4, "agn": 9}
        for got, want in zip(
            found["cross"]["weights"], model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(got, want, atol=1e-6)
    # AGN's center, after the early exchange at the end, and the tower's update.
    for name in ("tower", "agn"):
        first, second = (one["unknown_size"][name] for one in results())
        assert first["weights"] == second["weights"]


def test_different_counts_are_refused_on_all_workers(results):
    for rank, result in enumerate(results()):
        error, count = result["different_counts"]
        assert "made different numbers of steps" in error
        assert "by worker: [[3], [4]]. Restore" in error
        assert count == 3 + rank


def test_evaluate_and_predict_on_different_numbers_of_batches(results):
    model = program.model(program.sgd())
    loss = model.evaluate(*program.data(), verbose=0)
    outputs = np.concatenate([model.predict(x, verbose=0) for x, _ in _steps()])
    for result in results():
        got = result["different_batches"]
        np.testing.assert_allclose(got["evaluate"], loss, rtol=1e-5)
        np.testing.assert_allclose(got["predict"], outputs.ravel(), rtol=1e-5)


@pytest.mark.parametrize(
    "name, text",
    [
        *(
            (
                name,
                "worker 0 has 61 rows in batches of 16, worker 1 has 60 rows in"
                " batches of 16. Pass the same data on all workers.",
            )
            for name in ("arrays", "evaluate", "predict")
        ),
        (
            "validation",
            "worker 0 has 61 rows in batches of 32, worker 1 has 60",
        ),
        ("dataset", "worker 0 has 4 batches, worker 1 has 3 batches. Pass"),
        (
            "infinite",
            "infinite: worker 0 has 16 batches, worker 1 has infinitely many"
            " batches. Call repeat()",
        ),
        ("steps", "differs between the workers: [1, 2]. Pass the same number"),
    ],
)
def test_different_data_are_refused_on_all_workers(results, name, text):
    for result in results():
        error, seed = result["refused"][name]
        assert error is not None and text in error
        assert seed is None


def test_the_chiefs_files_are_whole(results, directory):
    """Each that all workers save, by the code in the guide."""
    expected = results()[0]["saved"]
    assert results()[1]["saved"] == expected
    assert len(os.listdir(directory)) == 2 * program.NUM_SAVES
    for number in range(program.NUM_SAVES):
        loaded = keras.saving.load_model(directory / f"{number}.keras")
        again = program.model(keras.optimizers.Adam())
        again.optimizer.build(again.trainable_variables)
        again.load_weights(directory / f"{number}.weights.h5")
        for model in (loaded, again):
            for value, want in zip(model.get_weights(), expected, strict=True):
                np.testing.assert_array_equal(value, np.float32(want))
            assert int(model.optimizer.iterations.numpy()) == 4
