"""A collective that waits too long fails; what is watched is counted."""

import gc
import os
import sys
import threading
import weakref

import keras
import pytest

import tf_xshard
from tests.programs import watchdog_program as program
from tests.support import cluster
from tests.support import traced
from tf_xshard.collectives import watchdog
from tf_xshard.private.tensorflow import runtime

# A program that hangs fails its test after this time.
_LIMIT_SECONDS = 75


@pytest.fixture(scope="module")
def results_of():
    """A function: what a program returns, and all that it has printed."""
    programs = cluster.once(
        lambda: cluster.each_of(
            "tests.programs.watchdog_program", program.ALL, _LIMIT_SECONDS
        )
    )

    def results_of(name):
        result, said = programs()[name]
        assert result is not None, f"it failed or hangs:\n{said[-3000:]}"
        return *result, said

    return results_of


def test_time_in_which_a_process_is_stopped_does_not_count(results_of):
    """It is stopped in a collective, for longer than the timeout."""
    totals, seconds, _ = results_of("stopped")
    assert totals == [2.0, 2.0]
    assert seconds > 8


def test_threads_and_a_context_that_is_reset(results_of):
    in_threads, after_reset, _ = results_of("threads")
    assert in_threads == [[-11.0 * 50 * n] * 2 for n in (1, 2, 3)]
    assert after_reset == [-44.0, -44.0]


def test_only_a_missing_replica_is_an_error_after_the_timeout(results_of):
    """Neither time between steps, nor inputs, nor a step that failed."""
    totals, error, seconds, said = results_of("missing")
    assert totals == [2.0, 2.0]
    assert 2 <= seconds < 6
    # Also where nobody catches the error.
    for text in (error, said):
        assert "waited longer than 2.0 seconds for the other" in text


def test_a_batch_that_stands_still_is_an_error_after_the_timeout(results_of):
    error, seconds, _ = results_of("stuck")
    assert "A batch waited longer than 2.0 seconds" in error
    assert seconds >= 2


def test_looking_at_threads_collects_no_garbage(monkeypatch):
    """Before Python 3.11.9, all threads of the process would wait forever."""
    seen = []
    monkeypatch.setattr(sys, "version_info", (3, 11, 8))
    monkeypatch.setattr(
        sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {}
    )
    try:
        for switch in (gc.disable, gc.enable):
            switch()
            before = gc.isenabled()
            assert not runtime.a_function_runs()
            assert gc.isenabled() == before
    finally:
        gc.enable()
    assert set(seen) == {False}


_THREADS = "/proc/self/task"


@pytest.mark.skipif(not os.path.exists(_THREADS), reason="needs Linux")
def test_a_timeout_costs_no_threads():
    """TensorFlow's own starts two per collective, for the whole timeout."""
    make = lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
    one = traced.Traced(make, [0.0], num_replicas=2)
    one.step([1.0, 1.0])
    before = len(os.listdir(_THREADS))
    for _ in range(50):
        one.step([1.0, 1.0])
    assert len(os.listdir(_THREADS)) <= before + 10
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("tf_xshard_watchdog") == 1


def test_a_function_is_watched_until_it_is_gone():
    make = lambda: tf_xshard.CrossShardOptimizer(keras.optimizers.SGD())
    before = set(watchdog.WATCHDOG._waiting)
    one = traced.Traced(make, [0.0], num_replicas=2)
    one.step([1.0, 1.0])
    [graph] = map(weakref.ref, {*watchdog.WATCHDOG._waiting} - before)
    [first, second] = watchdog.WATCHDOG._waiting[graph()].values()
    assert first.lane.device != second.lane.device
    del one, first, second
    gc.collect()
    assert graph() is None


def test_a_failed_call_does_not_count_for_the_next_one(monkeypatch):
    """Even if the watchdog looks before the call has reset the count."""
    waiting = object.__new__(watchdog._Waiting)
    waiting._is_eager, waiting._count = False, None
    waiting._last, waiting._since = 0, 0.0
    monkeypatch.setattr(
        watchdog.runtime_variables, "read", lambda handle, dtype: 5
    )
    for now, runs, seconds in (
        (1.0, True, 0.0),
        (9.0, False, 0.0),
        (10.0, True, 1.0),
        (12.5, True, 3.5),
    ):
        monkeypatch.setattr(
            watchdog.runtime, "a_function_uses", lambda handle, runs=runs: runs
        )
        assert waiting.seconds(now) == seconds, now
