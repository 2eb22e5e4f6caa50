"""Trains a digit classifier, and checks the promises of one optimizer.

- `cross_shard`: compares all replicas, and groups, with one device, including
  with `shard_update=True` and 1/g of the slot variables.
- `tower`: compares k towers with one batch k times as large.
- `agn`: compares period 1 with one device, and checks local SGD.
- `training`: the runs; collects and prints their table, and failed promises.
- `digits`: the data, the model and its inner optimizers.
"""

from __future__ import annotations

import argparse

from tf_xshard.cli import logical_devices
from tf_xshard.cli import numbers
from tf_xshard.cli.demo import agn
from tf_xshard.cli.demo import cross_shard
from tf_xshard.cli.demo import digits as digits_lib
from tf_xshard.cli.demo import tower
from tf_xshard.cli.demo import training

WRAPPERS = {
    "cross_shard": cross_shard.show,
    "tower": tower.show,
    "agn": agn.show,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--optimizer-wrapper",
        choices=list(WRAPPERS),
        default="cross_shard",
        help="the optimizer to compare with its references; default:"
        " cross_shard",
    )
    for name, default, text in (
        ("--replicas", 8, "the number of replicas"),
        ("--groups", 2, "the number of groups (for cross_shard)"),
        ("--towers", 4, "the number of towers (for tower)"),
        ("--period", 5, "the steps between two exchanges (for agn)"),
        ("--epochs", training.DEFAULT_EPOCHS, "the number of epochs per run"),
        ("--seed", 0, "the seed for the weights and the order of the rows"),
    ):
        parser.add_argument(
            name, type=int, default=default, help=f"{text}; default: {default}"
        )
    parser.add_argument(
        "--optimizer",
        choices=sorted(digits_lib.OPTIMIZERS),
        default="adam",
        help="the inner optimizer; default: adam",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="save a plot of the groups' loss curves (for cross_shard)",
    )
    parser.add_argument(
        "--shard-update",
        action="store_true",
        help="also check shard_update=True (for cross_shard)",
    )
    parser.set_defaults(run=run)


def _check_arguments(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    batch_size = digits_lib.BATCH_SIZE
    if options.replicas < 2 or batch_size % options.replicas:
        parser.error(
            f"--replicas {options.replicas}: must be at least 2 and divide the"
            f" batch of {batch_size}"
        )
    if options.groups < 1 or options.replicas % options.groups:
        parser.error(
            f"--groups {options.groups}: must be at least 1 and divide the"
            f" {options.replicas} replicas"
        )
    if options.towers < 1 or batch_size // options.replicas % options.towers:
        parser.error(
            f"--towers {options.towers}: must be at least 1 and divide the"
            f" {batch_size // options.replicas} rows of a replica's batch"
        )
    for name in ("period", "epochs"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    if options.plot and options.optimizer_wrapper != "cross_shard":
        parser.error("--plot shows groups, which only cross_shard has")
    if options.shard_update and options.optimizer_wrapper != "cross_shard":
        parser.error("--shard-update is an argument of cross_shard")


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Trains, prints the table and checks the promises."""
    _check_arguments(options, parser)
    strategy = logical_devices.best_strategy(options.replicas)
    num_replicas = strategy.num_replicas_in_sync
    if num_replicas != options.replicas:
        print(f"This machine's strategy has {num_replicas} replicas.")
        options.replicas = num_replicas
        _check_arguments(options, parser)
    digits = digits_lib.load(options.epochs, options.seed)
    print(
        f"{logical_devices.describe(strategy)}; {options.optimizer};"
        f" {options.epochs} epochs of {digits.steps_per_epoch} batches of"
        f" {digits_lib.BATCH_SIZE} handwritten digits"
    )
    with numbers.double_precision(strategy) as tolerance:
        runs = training.Runs(digits, options, strategy, tolerance)
        found = WRAPPERS[options.optimizer_wrapper](runs)
        found.print_table()
    return found.exit_code()
