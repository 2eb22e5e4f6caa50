"""Checks AGNOptimizer against one device at period 1, and as local SGD."""

from __future__ import annotations

import argparse

import keras
import numpy as np

import tf_xshard
from tf_xshard.cli import numbers
from tf_xshard.cli.demo import digits as digits_lib
from tf_xshard.cli.demo import training


def show(runs: training.Runs) -> training.Promises:
    """Trains with AGNOptimizer and its references, and compares."""
    options, digits, period = runs.options, runs.digits, runs.options.period
    num_replicas = runs.strategy.num_replicas_in_sync
    num_steps = options.epochs * digits.steps_per_epoch
    print(f"an exchange every {period} steps")

    def agn(**kwargs):
        return lambda inner: tf_xshard.AGNOptimizer(inner, **kwargs)

    def local_sgd(**kwargs):
        return lambda local: tf_xshard.AGNOptimizer(
            keras.optimizers.SGD(1.0),
            local_optimizer=local,
            communication_period=period,
            accumulate="updates",
            normalize=False,
            **kwargs,
        )

    one = runs.on_one_device("One device, the same global batch")
    each_step = runs.replicated(
        "AGNOptimizer with an exchange after each step",
        agn(communication_period=1),
    )
    averaged = _replicas_one_by_one(digits, options, num_replicas)
    updates = runs.replicated(
        f"AGNOptimizer as local SGD, period {period}", local_sgd()
    )
    singles = tf_xshard.GroupAssignment.contiguous(num_replicas, 1)
    wrong = runs.replicated(
        "The same in groups of one, which never average",
        local_sgd(group_assignment=singles),
    )
    documented = runs.replicated(
        f"AGNOptimizer with its defaults, period {period}",
        agn(communication_period=period),
    )
    promises = training.Promises("its reference", runs)
    promises.show("one device", one, "reference of the next row")
    promises.check("AGN, period 1", each_step, one.weights[0])
    promises.check(f"local SGD, period {period}", updates, averaged)
    promises.check("never averaged (on purpose)", wrong, averaged, right=False)
    promises.show(f"AGN, period {period}", documented, "another algorithm")
    expected = -(-num_steps // period)  # `fit` ends with an exchange.
    for row, trained in (("local SGD", updates), ("AGN", documented)):
        apart = numbers.deviation(trained.weights, trained.weights[0])
        promises.check_that(
            apart == 0, f"{row}: replicas differ by {apart:.1e} after fit"
        )
        exchanges = int(trained.model.optimizer.exchanges.numpy())
        promises.check_that(
            exchanges == expected,
            f"{row}: {exchanges} exchanges, not {expected}",
        )
    promises.check_accuracy([one, each_step, updates], options.epochs)
    return promises


def _replicas_one_by_one(
    digits: digits_lib.Digits,
    options: argparse.Namespace,
    num_replicas: int,
) -> list[np.ndarray]:
    """Trains local SGD on one device, averaging the replicas in NumPy."""
    print(
        "\nEach replica alone on one device, averaged every"
        f" {options.period} steps",
        flush=True,
    )
    shards = [
        digits.of_shards([replica], num_replicas)
        for replica in range(num_replicas)
    ]
    models = [
        digits_lib.compiled(
            digits_lib.create_model(options.seed),
            digits_lib.OPTIMIZERS[options.optimizer](),
        )
        for _ in shards
    ]
    size = shards[0].batch_size
    num_steps = options.epochs * digits.steps_per_epoch
    progress = keras.utils.Progbar(num_steps)
    for step in range(num_steps):
        rows = slice(step * size, (step + 1) * size)
        for model, shard in zip(models, shards, strict=True):
            model.train_on_batch(shard.x[rows], shard.y[rows])
        if (step + 1) % options.period == 0 or step + 1 == num_steps:
            average = [
                np.mean(of_models, axis=0)
                for of_models in zip(
                    *(model.get_weights() for model in models), strict=True
                )
            ]
            for model in models:
                model.set_weights(average)
        progress.update(step + 1)
    return average
