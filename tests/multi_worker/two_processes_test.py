"""Two real processes: data of their own, no seed, and saves to one path."""

import os

import keras
import numpy as np
import pytest

from tests.programs import two_workers_program as program


@pytest.mark.parametrize(
    "case",
    [
        "each_row_is_trained_on_once",
        "different_counts_are_refused",
        "different_data_are_refused",
    ],
)
def test_each_worker_holds_what_it_must(of, case):
    of(case)


def test_freed_memory_is_kept_in_fit(of):
    """TensorFlow undoes the settings of `launch` when it reads the data."""
    faults = of("each_row_is_trained_on_once")
    assert max(faults) < program.NUM_ARRAYS * 256 / 4


def _steps():
    """The rows of each step: a batch of each worker that still has one."""
    x, y = program.data()
    for start in range(0, 31, program.BATCH_SIZE):
        batch = slice(start, start + program.BATCH_SIZE)
        own = [np.arange(program.NUM_ROWS)[r::2][batch] for r in range(2)]
        rows = np.concatenate(own)
        yield x[rows], y[rows]


def test_fit_on_different_numbers_of_batches(of):
    """One device's numbers, for the validation data as well."""
    model = program.model(program.sgd())
    history = {"loss": [], "val_loss": []}
    for _ in range(2):
        total = 0.0
        for x, y in _steps():
            model.reset_metrics()
            total += model.train_on_batch(x, y) * len(x)
        history["loss"].append(total / program.NUM_ROWS)
        history["val_loss"].append(model.evaluate(*program.data(), verbose=0))
    fits = [
        one[name]
        for one in of("different_batches")
        for name in ("fit", "undivided")
    ]
    for got in fits:
        assert got["steps"] == 8
        # What callbacks see after a batch is of all workers, too.
        assert got["batches"] == fits[0]["batches"]
        np.testing.assert_allclose(
            got["weights"], program.flat(model), atol=1e-6
        )
        for metric, want in history.items():
            np.testing.assert_allclose(
                got["history"][metric], want, rtol=1e-5, err_msg=metric
            )


def test_fit_on_data_of_unknown_size(of):
    """One device's weights; both workers have the same of towers and AGN."""
    model = program.model(program.sgd())
    x, y = program.data()
    for start in (0, 8, 16) * 3:
        rows = slice(start, start + 8)
        model.train_on_batch(x[rows], y[rows])
    first, second = of("unknown_size")
    assert first == second and len(first) == 3
    np.testing.assert_allclose(
        first["CrossShardOptimizer"], program.flat(model), atol=1e-6
    )


def test_evaluate_and_predict_on_different_numbers_of_batches(of):
    model = program.model(program.sgd())
    loss = model.evaluate(*program.data(), verbose=0)
    outputs = np.concatenate([model.predict(x, verbose=0) for x, _ in _steps()])
    for got in of("different_batches"):
        np.testing.assert_allclose(got["evaluate"], loss, rtol=1e-5)
        np.testing.assert_allclose(got["predict"], outputs.ravel(), rtol=1e-5)


def test_the_chiefs_files_are_whole(of, directory):
    """Each that all workers save, by the code in the guide."""
    expected, other = of("saves")
    assert other == expected
    assert len(os.listdir(directory)) == 2 * program.NUM_SAVES
    for number in range(program.NUM_SAVES):
        loaded = keras.saving.load_model(directory / f"{number}.keras")
        again = program.model(keras.optimizers.Adam())
        again.optimizer.build(again.trainable_variables)
        again.load_weights(directory / f"{number}.weights.h5")
        for model in (loaded, again):
            assert program.flat(model) == expected
            assert int(model.optimizer.iterations.numpy()) == 4
