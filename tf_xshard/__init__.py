"""Cross-replica optimizers for Keras 3 on `tf.distribute`.

Gradients are reduced exactly once, at the right scale, over the groups of
replicas that you choose.

    gradients of each replica, from `fit` or a training loop
        |
        v
    optimizers      pre_reduce                  your hook, unscaled gradients
        |
        v
    reduction       presence                    which replica has which gradient
        |           |                           (exchanged across processes)
        |           buckets, wire               packed, in the wire dtype
        |           collectives                 one path per kind of strategy
        |           scale                       mean or sum; 1/N undone, once
        v
    optimizers      post_reduce                 your hook, unscaled gradients
        |
        |           finite check                with a LossScaleOptimizer: on an
        |                                       overflow anywhere, all skip
        v
    update.whole    no second reduction         (or `update.sharded`: a reduce-
        |                                       scatter above; each replica
        v                                       updates its shard; all-gather)
    inner optimizer -> variables -> group_state, callbacks
                                                what each group holds

`TowerOptimizer` accumulates first, and runs these stages once a round.
`AGNOptimizer` updates each replica locally, and runs the stages at an exchange.
`compat.v1` has the documented TF1 optimizers, on the same stages.
`tf_keras` reduces on the same stages for optimizers of Keras 2.
`multi_worker` launches processes and makes Keras's `fit` work across them.

To change something, read docs/CONTRIBUTING.md and the folders' docstrings.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, TYPE_CHECKING

from tf_xshard.version import __version__

__all__ = (
    "__version__",
    "AGNOptimizer",
    "Communication",
    "CommunicationLedger",
    "CrossShardOptimizer",
    "DivergenceSentinel",
    "GlobalMean",
    "GroupAssignment",
    "GroupCheckpoint",
    "GroupState",
    "GroupValidation",
    "LearningRateWarmup",
    "ScalarLoss",
    "SwapCenterWeights",
    "TowerOptimizer",
    "barrier",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "communication_plan",
    "compat",
    "connect",
    "elementwise",
    "group_reduce",
    "is_chief",
    "multi_worker_fit",
    "per_variable",
    "rank",
    "tf_keras",
    "tower_train_step",
)


def __getattr__(name: str) -> Any:
    if name in ("compat", "tf_keras"):
        # Few users need TF1's or tf_keras's optimizers, so import them on
        # request. A private name that moves must not break the import for
        # other users.
        return importlib.import_module(f"tf_xshard.{name}")
    if name in __all__:
        _check_versions()
        return getattr(importlib.import_module("tf_xshard.public"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_versions() -> None:
    from tf_xshard import dependencies

    dependencies.check()


def _is_command_line() -> bool:
    """Returns whether `python -m tf_xshard` or `tf-xshard` imports this."""
    # Help and `launch` need no TensorFlow, whose import takes seconds.
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
        # sys.argv is ["-m"] while Python looks for the module to run.
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        return after[:1] == [__name__]
    return (
        os.path.splitext(os.path.basename((sys.argv or [""])[0]))[0]
        == "tf-xshard"
    )


if TYPE_CHECKING:
    from tf_xshard import compat as compat
    from tf_xshard import tf_keras as tf_keras
    from tf_xshard.public import *
# Import eagerly. Keras finds the classes of a saved model only if they have
# been imported.
elif not _is_command_line():
    _check_versions()
    from tf_xshard.public import *
