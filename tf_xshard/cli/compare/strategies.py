"""Gives the strategies of a script logical CPUs, and tells it their number."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tf_xshard.cli.compare import patches
from tf_xshard.private import frames
from tf_xshard.private.tensorflow import local_devices


class _Number(int):
    """The number of replicas that a script reads outside of replicas."""

    in_replicas: int


@contextlib.contextmanager
def _real_numbers(function: Callable[..., Any]) -> Iterator[None]:
    """Gives a step the real number of replicas, for `loss / N`.

    Replaces global variables of the script and those that the step encloses.
    """
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if patches.is_scripts(getattr(module, "__file__", None) or ""):
                for name, value in list(vars(module).items()):
                    if isinstance(value, _Number):
                        stack.enter_context(
                            patches.replaced(module, name, value.in_replicas)
                        )
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # It may be empty.
                if isinstance(cell.cell_contents, _Number):
                    number = cell.cell_contents.in_replicas
                    stack.enter_context(
                        patches.replaced(cell, "cell_contents", number)
                    )
        yield


class Strategies:
    """Replaces what strategies are made of.

    Args:
      num_replicas: The logical CPUs of each strategy.
      seen_replicas: What the script reads as `num_replicas_in_sync`.
    """

    def __init__(self, num_replicas: int, seen_replicas: int) -> None:
        self._devices = [f"CPU:{index}" for index in range(num_replicas)]
        self._seen_replicas = seen_replicas
        # Whether the script has a strategy, its own or the default one.
        self.made = False

    def changes(self) -> Iterator[patches.Patch]:
        """Yields the context managers that replace methods."""
        of = tf.distribute
        yield patches.around(of.MirroredStrategy, "__init__", self._mirrored)
        yield patches.around(
            of.MultiWorkerMirroredStrategy, "__init__", self._multi_worker
        )
        simulated = (
            "Make its strategy by `strategy ="
            " tf_xshard.testing.simulated_tpu_strategy(4)` to run it without a"
            " TPU, and use a MirroredStrategy to compare it."
        )
        other = "Use a MirroredStrategy or a MultiWorkerMirroredStrategy."
        for owner, advice in (
            (of.TPUStrategy, simulated),
            (of.cluster_resolver.TPUClusterResolver, simulated),
            (of.OneDeviceStrategy, other),
            (of.ParameterServerStrategy, other),
        ):
            yield patches.refusing(
                owner, "__init__", f"The script uses {owner.__name__}. {advice}"
            )
        yield self._number()
        yield patches.around(of.Strategy, "run", self._run)
        # The script gets this run's logical devices instead of its own.
        for owner, name in (
            (tf.config, "set_logical_device_configuration"),
            (tf.config.experimental, "set_virtual_device_configuration"),
            (tf.config, "set_visible_devices"),
            (tf.config.experimental, "set_visible_devices"),
        ):
            yield patches.replaced(owner, name, lambda *args, **kwargs: None)

    def _mirrored(
        self,
        plain: Callable,
        strategy: Any,
        devices: Any = None,
        cross_device_ops: Any = None,
    ) -> None:
        del devices, cross_device_ops
        self.made = True
        plain(strategy, self._devices)

    def _multi_worker(
        self,
        plain: Callable,
        strategy: Any,
        cluster_resolver: Any = None,
        communication_options: Any = None,
    ) -> None:
        resolver = cluster_resolver or (
            tf.distribute.cluster_resolver.TFConfigClusterResolver()
        )
        cluster = resolver.cluster_spec().as_dict()
        number = sum(len(cluster.get(name, [])) for name in ("chief", "worker"))
        if number > 1:
            raise patches.Refused(
                f"The script sets TF_CONFIG to {number} workers. Take it"
                " out: one process with several replicas is compared."
            )
        self.made = True
        with mock.patch.dict(os.environ):
            os.environ.pop("TF_CONFIG", None)
            plain(strategy, communication_options=communication_options)
            local_devices.use(strategy, self._devices)

    def _run(
        self,
        plain: Callable,
        strategy: Any,
        fn: Callable,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with _real_numbers(fn):
            return plain(strategy, fn, *args, **kwargs)

    def _number(self) -> patches.Patch:
        """Changes what the script reads outside of replicas."""
        owner = patches.defining(tf.distribute.Strategy, "num_replicas_in_sync")
        number = vars(owner)["num_replicas_in_sync"].fget

        def seen(strategy: tf.distribute.Strategy) -> int:
            # Only the frames tell who reads it.
            reader = next(frames.callers()).f_code.co_filename
            if patches.is_scripts(reader) and not patches.in_replica():
                seen = _Number(self._seen_replicas)
                seen.in_replicas = number(strategy)
                return seen
            return number(strategy)

        return patches.replaced(owner, "num_replicas_in_sync", property(seen))
