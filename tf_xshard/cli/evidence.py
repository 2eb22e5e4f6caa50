"""Writes a one-page report of what tf_xshard does on this machine's devices."""

from __future__ import annotations

import argparse
import pathlib
import platform
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_xshard
from tf_xshard.cli import checks
from tf_xshard.cli import logical_devices
from tf_xshard.cli import numbers
from tf_xshard.cli import timing

_MAX_REPLICAS = 8
_NUM_STEPS = 20
_ROWS_PER_REPLICA = 8
_NUM_FEATURES = 32
_PLAIN = "plain Keras"
_WRAPPERS: dict[str, numbers.Wrap] = {
    _PLAIN: lambda optimizer: optimizer,
    "CrossShardOptimizer": tf_xshard.CrossShardOptimizer,
    "shard_update=True": lambda optimizer: tf_xshard.CrossShardOptimizer(
        optimizer, shard_update=True
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE",
        help="write the report to FILE (default: print it)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        default=_MAX_REPLICAS,
        help="at most this many GPUs or CPUs (default: 8)",
    )
    parser.add_argument(
        "--split-gpu",
        type=int,
        metavar="MB",
        help="divide the first GPU into logical GPUs of this memory",
    )
    parser.add_argument(
        "--width",
        type=int,
        default=1024,
        help="units of each of the timed model's 12 layers (default: 1024)",
    )
    parser.add_argument(
        "--megabytes",
        type=int,
        nargs="+",
        default=[1, 16, 256],
        metavar="MB",
        help="sizes of the timed sums (default: 1 16 256)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.5,
        help=f"of each of a timing's {timing.NUM_BLOCKS} blocks (default: 0.5)",
    )
    parser.set_defaults(run=run)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _devices(strategy: tf.distribute.Strategy) -> str:
    """Describes the strategy and the model of its devices."""
    names = {
        tf.config.experimental.get_device_details(device).get("device_name")
        for device in tf.config.list_physical_devices("GPU")
    } - {None}
    return ", ".join([logical_devices.describe(strategy), *sorted(names)])


def _trained(
    strategy: tf.distribute.Strategy,
    wrap: numbers.Wrap,
    rows: tuple[np.ndarray, np.ndarray],
    batch_size: int,
) -> list[np.ndarray]:
    """Returns the weights after one epoch of clipped Adam."""

    def create_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [
                keras.layers.Input((_NUM_FEATURES,)),
                keras.layers.Dense(64, "tanh"),
                keras.layers.Dense(1),
            ]
        )

    return numbers.trained(
        create_model,
        lambda: keras.optimizers.Adam(3e-3, global_clipnorm=1.0),
        tf.data.Dataset.from_tensor_slices(rows).batch(batch_size),
        strategy,
        wrap,
        compiled={"loss": "mse"},
        verbose=0,
    ).weights[0]


def differences(strategy: tf.distribute.Strategy) -> dict[str, float]:
    """Returns the largest difference of a weight from one device's, by case."""
    num_replicas = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    shape = (_NUM_STEPS, num_replicas, _ROWS_PER_REPLICA, _NUM_FEATURES)
    x = rng.normal(size=shape).astype("float32")
    y = x.sum(-1, keepdims=True) + 3 * rng.normal(size=(*shape[:3], 1))

    def rows(num_kept: int) -> tuple[np.ndarray, np.ndarray]:
        flat = [
            np.concatenate(a[:, :num_kept].reshape(-1, *a.shape[2:]))
            for a in (x, y)
        ]
        return flat[0], flat[1].astype("float32")

    has_gpu = "GPU" in strategy.extended.worker_devices[0]
    one_device = tf.distribute.OneDeviceStrategy(
        "GPU:0" if has_gpu else "CPU:0"
    )
    batch_size = num_replicas * _ROWS_PER_REPLICA
    one = _trained(
        one_device, _WRAPPERS[_PLAIN], rows(num_replicas), batch_size
    )
    found = {
        name: numbers.difference(
            _trained(strategy, wrap, rows(num_replicas), batch_size), one
        )
        for name, wrap in _WRAPPERS.items()
    }
    found["TowerOptimizer, two calls of half the rows"] = numbers.difference(
        _trained(
            strategy,
            lambda optimizer: tf_xshard.TowerOptimizer(optimizer, 2),
            rows(num_replicas),
            batch_size // 2,
        ),
        one,
    )
    if num_replicas % 2 == 0:
        half = num_replicas // 2
        groups = tf_xshard.GroupAssignment.contiguous(num_replicas, half)
        found["two groups, the first one's rows"] = numbers.difference(
            _trained(
                strategy,
                lambda optimizer: tf_xshard.CrossShardOptimizer(
                    optimizer, group_assignment=groups
                ),
                rows(num_replicas),
                batch_size,
            ),
            _trained(
                one_device, _WRAPPERS[_PLAIN], rows(half), batch_size // 2
            ),
        )
    return found


def _step(
    strategy: tf.distribute.Strategy, wrap: numbers.Wrap, width: int
) -> Callable[[], tf.Tensor]:
    """Returns a traced training step of twelve dense layers with Adam."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((width,))]
            + [keras.layers.Dense(width, "relu") for _ in range(12)]
            + [keras.layers.Dense(1)]
        )
        model.compile(wrap(keras.optimizers.Adam(1e-3)), "mse")
        model.optimizer.build(model.trainable_variables)
    x = tf.ones([_ROWS_PER_REPLICA, width])
    y = tf.ones([_ROWS_PER_REPLICA, 1])

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        logs = strategy.run(model.train_step, (((x, y)),))
        return logs["loss"]

    return step


def _sum(
    strategy: tf.distribute.Strategy, ours: bool, megabytes: int
) -> Callable[[], tf.Tensor]:
    """Returns a traced sum over all replicas."""
    with strategy.scope():
        variable = tf.Variable(tf.ones([megabytes * 250_000]))

    def on_replica() -> tf.Tensor:
        if ours:
            total = tf_xshard.group_reduce(variable.value(), reduction="sum")
        else:
            total = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, variable.value()
            )
        # Returning a number keeps the sum from being optimized away.
        return total[-1]

    return tf.function(lambda: strategy.run(on_replica), autograph=False)


def _seconds(
    strategy: tf.distribute.Strategy,
    functions: dict[str, Callable],
    seconds: float,
) -> dict[str, np.ndarray]:
    def wait(result: Any) -> None:
        strategy.experimental_local_results(result)[0].numpy()

    return timing.interleaved(functions, wait, seconds)


def _times(strategy: tf.distribute.Strategy, width: int, seconds: float) -> str:
    again = f"{_PLAIN} again"
    wrappers = {**_WRAPPERS, again: _WRAPPERS[_PLAIN]}
    found = _seconds(
        strategy,
        {name: _step(strategy, wrap, width) for name, wrap in wrappers.items()},
        seconds,
    )
    lines = ["| step | ms | of plain Keras's (quartiles) |", "|---|---|---|"]
    for name in (_PLAIN, again, *list(_WRAPPERS)[1:]):
        ratios = found[name] / found[_PLAIN]
        milliseconds = 1e3 * np.median(found[name])
        lines.append(
            f"| {name} | {milliseconds:.2f} | {timing.quartiles(ratios)} |"
        )
    return "\n".join(lines)


def _sums(
    strategy: tf.distribute.Strategy, sizes: list[int], seconds: float
) -> str:
    num_replicas = strategy.num_replicas_in_sync
    lines = [
        "| MB | ms | GB/s sent | of the strategy's own sum (quartiles) |",
        "|---|---|---|---|",
    ]
    for size in sizes:
        found = _seconds(
            strategy,
            {
                name: _sum(strategy, name == "ours", size)
                for name in ("theirs", "ours")
            },
            seconds,
        )
        median = np.median(found["ours"])
        sent = 2 * (num_replicas - 1) / num_replicas * size / 1e3 / median
        ratio = timing.quartiles(found["ours"] / found["theirs"])
        lines.append(f"| {size} | {1e3 * median:.2f} | {sent:.2f} | {ratio} |")
    return "\n".join(lines)


def report(
    strategy: tf.distribute.Strategy,
    width: int,
    sizes: list[int],
    seconds: float,
) -> tuple[bool, str]:
    """Returns whether all numbers are right, and the report in Markdown."""
    _progress("1 of 4: comparing group sums with NumPy")
    sums = list(checks.of_strategy(strategy))
    right = all(ok for ok, _ in sums)
    _progress("2 of 4: comparing trainings with one device")
    with numbers.double_precision(strategy) as tolerance:
        found = differences(strategy)
    dtype = "float32" if np.isinf(tolerance) else "float64"
    right &= all(
        difference <= tolerance
        for name, difference in found.items()
        if name != _PLAIN
    )
    rows = [f"| {name} | {each:.1e} |" for name, each in found.items()]
    _progress("3 of 4: timing steps")
    times = _times(strategy, width, seconds)
    _progress("4 of 4: timing sums")
    verdict = "All numbers are right." if right else "SOME NUMBERS ARE WRONG."
    return right, "\n".join(
        [
            f"# {_devices(strategy)}",
            "",
            f"tf_xshard {tf_xshard.__version__}, TensorFlow {tf.__version__},"
            f" Keras {keras.__version__}, Python {platform.python_version()},"
            f" {platform.system()} {platform.machine()}. {verdict}",
            "",
            "## Group sums, compared with NumPy",
            "",
            "```",
            *(f"{'ok  ' if ok else 'FAIL'}  {text}" for ok, text in sums),
            "```",
            "",
            f"## Weights after {_NUM_STEPS} steps of clipped Adam in {dtype}",
            "",
            "| | largest difference from one device |",
            "|---|---|",
            *rows,
            "",
            f"## Time of a step, 12 layers of {width} units, Adam",
            "",
            times,
            "",
            "## Time of a sum over all replicas, float32",
            "",
            _sums(strategy, sizes, seconds),
            "",
        ]
    )


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Writes the report, and returns 1 if a number is wrong."""
    if options.width < 1 or min(options.megabytes) < 1:
        parser.error("--width and --megabytes must be positive")
    if options.replicas < 2:
        parser.error("--replicas must be at least 2")
    if options.split_gpu is None:
        strategy = logical_devices.best_strategy(options.replicas)
    elif options.split_gpu < 1 or not tf.config.list_physical_devices("GPU"):
        parser.error("--split-gpu needs a GPU and a positive number")
    else:
        strategy = logical_devices.split_gpu(
            options.replicas, options.split_gpu
        )
    if "CPU" in strategy.extended.worker_devices[0]:
        _progress(
            "This machine has no TPU and fewer than two GPUs: using CPUs."
        )
    right, text = report(
        strategy, options.width, options.megabytes, options.seconds
    )
    if options.output:
        options.output.write_text(text)
        _progress(f"The report is in {options.output}.")
    else:
        print(text)
    return 0 if right else 1
