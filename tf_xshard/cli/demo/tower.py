"""TowerOptimizer's promises: k towers train like one batch k times as large."""

from __future__ import annotations

import argparse

import tensorflow as tf

import tf_xshard
from tf_xshard.cli.demo import digits as digits_lib
from tf_xshard.cli.demo import promises as promises_lib
from tf_xshard.cli.demo import training


def show(
    options: argparse.Namespace,
    strategy: tf.distribute.Strategy,
    digits: digits_lib.Digits,
) -> promises_lib.Promises:
    """Trains one device, plain Keras' accumulation, and towers."""
    num_towers = options.towers
    parts = digits.in_parts(num_towers)
    print(
        f"{num_towers} towers of {parts.batch_size} make a batch of"
        f" {digits_lib.BATCH_SIZE}"
    )

    def towers(inner):
        return tf_xshard.TowerOptimizer(inner, num_towers)

    one = training.Trained("One device, the same batches", digits, options)
    tolerance = one.tolerance()
    over_time = training.Trained(
        f"TowerOptimizer, {num_towers} steps per update",
        parts,
        options,
        strategy,
        towers,
    )
    at_once = training.Trained(
        f"tower_train_step, {num_towers} towers in each step",
        digits,
        options,
        strategy,
        towers,
        train_step=tf_xshard.tower_train_step(),
    )
    wrong = training.Trained(
        "Without towers: one update per small batch",
        parts,
        options,
        strategy,
        tf_xshard.CrossShardOptimizer,
    )

    promises = promises_lib.Promises("one device")
    promises.show("one device", one, "reference")
    promises.show(
        "plain Keras under the strategy",
        remark=_plain_accumulation(parts, options, strategy),
    )
    for row, trained in (
        ("TowerOptimizer", over_time),
        ("tower_train_step", at_once),
    ):
        promises.check(row, trained, one.weights[0], tolerance)
        updates = int(trained.model.optimizer.iterations.numpy())
        expected = int(one.model.optimizer.iterations.numpy())
        promises.check_that(
            updates == expected, f"{row}: {updates} updates, not {expected}"
        )
    promises.check(
        "no accumulation (on purpose)",
        wrong,
        one.weights[0],
        tolerance,
        right=False,
    )
    promises.check_accuracy([one, over_time, at_once], options.epochs)
    return promises


def _plain_accumulation(
    parts: digits_lib.Digits,
    options: argparse.Namespace,
    strategy: tf.distribute.Strategy,
) -> str:
    """Trains with Keras' own accumulation; the accuracy, or the error."""

    def accumulating(inner):
        config = inner.get_config()
        config["gradient_accumulation_steps"] = options.towers
        return type(inner).from_config(config)

    try:
        plain = training.Trained(
            "Plain Keras with gradient_accumulation_steps",
            parts,
            options,
            strategy,
            accumulating,
        )
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        why = next((line for line in lines if "merge_call" in line), lines[0])
        print(f"{type(error).__name__}: {why.strip()}")
        return f"gradient_accumulation_steps: {type(error).__name__}"
    return f"gradient_accumulation_steps: accuracy {plain.accuracy():.4f}"
