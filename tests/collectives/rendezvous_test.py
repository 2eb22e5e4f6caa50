"""Processes exchange values outside of a step, and miss who is absent."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tf_xshard.collectives import process_gather
from tf_xshard.collectives import silent_workers
from tf_xshard.private.tensorflow import runtime


class Store(dict):
    """The key-value store of two processes; rank 1 says its round."""

    publish = dict.__setitem__
    withdraw = dict.pop

    def lookup(self, key, seconds):
        del seconds
        if key in self:
            return self[key]
        *_, number, rank = key.split("/")
        if rank == "1" and number != "2":
            return f"round {number}"
        raise tf.errors.DeadlineExceededError(None, None, key)

    def worker(self, rank):
        return f"worker {rank}"

    def cluster(self):
        return 0, ["a:1", "b:1"]


@pytest.fixture
def gather(monkeypatch):
    """A ProcessGather of rank 0 of two."""
    store = Store()
    for name in ("publish", "lookup", "withdraw", "worker", "cluster"):
        monkeypatch.setattr(runtime, name, getattr(store, name))
    monkeypatch.setattr(runtime, "_rounds", {})
    one = process_gather.ProcessGather(
        tf.distribute.get_strategy(), tf_xshard.Communication(), "Saving"
    )
    one.num_processes = 2
    return one


def test_texts_of_each_round(gather):
    assert gather.exchange("a") == ["a", "round 0"]
    assert gather.exchange("b") == ["b", "round 1"]
    for _ in range(2):  # It can be called again after a timeout.
        with pytest.raises(RuntimeError, match="Saving: worker 1 did not call"):
            gather.exchange("c")


def test_an_interrupted_call_can_be_repeated(gather, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            runtime, "lookup", mock.Mock(side_effect=KeyboardInterrupt)
        )
        gather.exchange("a")
    assert gather.exchange("b") == ["b", "round 0"]


def test_payloads_of_any_length(gather, monkeypatch):
    other = bytes(range(21))

    def all_gather(numbers):
        its = [len(other)]
        if numbers.size > 1:
            its = np.frombuffer(other.ljust(numbers.nbytes, b"\0"), np.int64)
        return np.stack([numbers, its])

    monkeypatch.setattr(gather, "_all_gather", all_gather)
    assert gather.gather(b"four") == [b"four", other]


def test_workers_that_do_not_wait_are_named(monkeypatch):
    store = Store()
    monkeypatch.setattr(silent_workers, "runtime", store)
    for rank in (0, 2, 3):
        silent_workers.say_waits("key", rank)
    silent_workers.say_continues("key", 3)
    store["key/1"] = ""
    assert silent_workers.silent("key", range(5)) == [3, 4]
    assert silent_workers.named([3, 4]) == "worker 3, worker 4"
    assert silent_workers.named(range(7)).endswith("worker 4, and 2 more")
