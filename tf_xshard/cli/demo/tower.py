"""Checks that k towers train like one batch k times as large."""

from __future__ import annotations

import tf_xshard
from tf_xshard.cli.demo import digits as digits_lib
from tf_xshard.cli.demo import training


def show(runs: training.Runs) -> training.Promises:
    """Trains with TowerOptimizer and its references, and compares."""
    num_towers = runs.options.towers
    parts = runs.digits.in_parts(num_towers)
    print(
        f"{num_towers} towers of {parts.batch_size} make a batch of"
        f" {digits_lib.BATCH_SIZE}"
    )

    def towers(inner):
        return tf_xshard.TowerOptimizer(inner, num_towers)

    one = runs.on_one_device("One device, the same batches")
    over_time = runs.replicated(
        f"TowerOptimizer, {num_towers} steps per update", towers, parts
    )
    at_once = runs.replicated(
        f"tower_train_step, {num_towers} towers in each step",
        towers,
        train_step=tf_xshard.tower_train_step(),
    )
    wrong = runs.replicated(
        "Without towers: one update per small batch",
        tf_xshard.CrossShardOptimizer,
        parts,
    )
    promises = training.Promises("one device", runs)
    promises.show("one device", one, "reference")
    promises.show(
        "plain Keras under the strategy",
        remark=_plain_accumulation(runs, parts),
    )
    for row, trained in (
        ("TowerOptimizer", over_time),
        ("tower_train_step", at_once),
    ):
        promises.check(row, trained, one.weights[0])
        updates = int(trained.model.optimizer.iterations.numpy())
        expected = int(one.model.optimizer.iterations.numpy())
        promises.check_that(
            updates == expected, f"{row}: {updates} updates, not {expected}"
        )
    promises.check(
        "no accumulation (on purpose)",
        wrong,
        one.weights[0],
        right=False,
    )
    promises.check_accuracy([one, over_time, at_once], runs.options.epochs)
    return promises


def _plain_accumulation(runs: training.Runs, parts: digits_lib.Digits) -> str:
    """Trains with Keras's accumulation; describes the accuracy or the error."""

    def accumulating(inner):
        config = inner.get_config()
        config["gradient_accumulation_steps"] = runs.options.towers
        return type(inner).from_config(config)

    try:
        plain = runs.replicated(
            "Plain Keras with gradient_accumulation_steps", accumulating, parts
        )
    except RuntimeError as error:
        lines = str(error).strip().splitlines()
        why = next((line for line in lines if "merge_call" in line), lines[0])
        print(f"{type(error).__name__}: {why.strip()}")
        return f"gradient_accumulation_steps: {type(error).__name__}"
    accuracy = runs.accuracy(plain.weights[0])
    return f"gradient_accumulation_steps: accuracy {accuracy:.4f}"
