"""Cross-replica optimizers for Keras 3 on `tf.distribute`.

Gradients are reduced exactly once, at the right scale, over the groups of
replicas that you choose.

    gradients of each replica, from `fit` or a training loop
        |
        v
    optimizers      pre_reduce                  the user's hook, unscaled
        |
        v
    reduction       presence                    who has which gradient; with
        |           |                           several processes, exchanged
        |           buckets, wire               packed, in the wire dtype
        |           collectives                 one path per kind of strategy
        |           scale                       mean or sum, 1/N undone, once
        v
    optimizers      post_reduce                 the user's hook, unscaled
        |
        |           finite vote                 with a LossScaleOptimizer: on an
        |                                       overflow anywhere, all skip
        v
    update.whole    no second reduction         (or `update.sharded`: a reduce-
        |                                       scatter above, each replica its
        v                                       shard, then an all-gather)
    inner optimizer -> variables -> group_state, callbacks
                                                what each group holds

`TowerOptimizer` accumulates before all of this, `AGNOptimizer` between local
updates. `compat.v1` has the documented TF1 optimizers, on the same stages.
`multi_worker` launches several processes and makes Keras' `fit` work on them.

Each folder's docstring says what it is for; docs/CONTRIBUTING.md says where a
change belongs.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, TYPE_CHECKING

from tf_xshard.version import __version__

# Public names, and where they are defined.
_PUBLIC = {
    "AGNOptimizer": "optimizers.agn",
    "Communication": "communication",
    "CommunicationLedger": "callbacks.communication_ledger",
    "CrossShardOptimizer": "optimizers.cross_shard",
    "DivergenceSentinel": "callbacks.divergence_sentinel",
    "GroupAssignment": "group_assignment",
    "GroupCheckpoint": "callbacks.group_checkpoint",
    "GroupState": "group_state.state",
    "GroupValidation": "callbacks.group_validation",
    "LearningRateWarmup": "callbacks.learning_rate_warmup",
    "ScalarLoss": "optimizers.fit.scalar_loss",
    "SwapCenterWeights": "callbacks.swap_center_weights",
    "TowerOptimizer": "optimizers.tower",
    "barrier": "multi_worker.processes",
    "clip_by_global_norm": "reduction.clipping",
    "clip_by_norm": "reduction.clipping",
    "clip_by_value": "reduction.clipping",
    "communication_plan": "planning.communication_plan",
    "compat": "compat",
    "elementwise": "optimizers.update.elementwise",
    "group_reduce": "reduction.group_reduce",
    "is_chief": "multi_worker.processes",
    "multi_worker_fit": "multi_worker.fit",
    "rank": "multi_worker.processes",
    "tower_train_step": "optimizers.fit.tower_train_step",
}
__all__ = ("__version__", *_PUBLIC)

if TYPE_CHECKING:
    from tf_xshard import compat as compat
    from tf_xshard.callbacks.communication_ledger import (
        CommunicationLedger as CommunicationLedger,
    )
    from tf_xshard.callbacks.divergence_sentinel import (
        DivergenceSentinel as DivergenceSentinel,
    )
    from tf_xshard.callbacks.group_checkpoint import (
        GroupCheckpoint as GroupCheckpoint,
    )
    from tf_xshard.callbacks.group_validation import (
        GroupValidation as GroupValidation,
    )
    from tf_xshard.callbacks.learning_rate_warmup import (
        LearningRateWarmup as LearningRateWarmup,
    )
    from tf_xshard.callbacks.swap_center_weights import (
        SwapCenterWeights as SwapCenterWeights,
    )
    from tf_xshard.communication import Communication as Communication
    from tf_xshard.group_assignment import GroupAssignment as GroupAssignment
    from tf_xshard.group_state.state import GroupState as GroupState
    from tf_xshard.multi_worker.fit import multi_worker_fit as multi_worker_fit
    from tf_xshard.multi_worker.processes import barrier as barrier
    from tf_xshard.multi_worker.processes import is_chief as is_chief
    from tf_xshard.multi_worker.processes import rank as rank
    from tf_xshard.optimizers.agn import AGNOptimizer as AGNOptimizer
    from tf_xshard.optimizers.cross_shard import (
        CrossShardOptimizer as CrossShardOptimizer,
    )
    from tf_xshard.optimizers.fit.scalar_loss import ScalarLoss as ScalarLoss
    from tf_xshard.optimizers.fit.tower_train_step import (
        tower_train_step as tower_train_step,
    )
    from tf_xshard.optimizers.tower import TowerOptimizer as TowerOptimizer
    from tf_xshard.optimizers.update.elementwise import (
        elementwise as elementwise,
    )
    from tf_xshard.planning.communication_plan import (
        communication_plan as communication_plan,
    )
    from tf_xshard.reduction.clipping import (
        clip_by_global_norm as clip_by_global_norm,
    )
    from tf_xshard.reduction.clipping import clip_by_norm as clip_by_norm
    from tf_xshard.reduction.clipping import clip_by_value as clip_by_value
    from tf_xshard.reduction.group_reduce import group_reduce as group_reduce


# TF1's optimizers, which few need: a private name of TF1 that moves must not
# break the import for the others.
_ON_REQUEST = ("compat",)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_public_names()
    if name in _ON_REQUEST:
        _import(name)
    return globals()[name]


def _import_public_names() -> None:
    from tf_xshard import dependencies

    dependencies.check()
    for name in _PUBLIC:
        if name not in _ON_REQUEST:
            _import(name)


def _import(name: str) -> None:
    found = importlib.import_module(f"{__name__}.{_PUBLIC[name]}")
    globals()[name] = getattr(found, name, found)


def _is_command_line() -> bool:
    """Whether this is imported for `python -m tf_xshard` or `tf-xshard`.

    Help and `launch` need no TensorFlow, whose import takes seconds.
    """
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
        # Python is still looking for the module to run.
        after = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
        return after[:1] == [__name__]
    return (
        os.path.splitext(os.path.basename((sys.argv or [""])[0]))[0]
        == "tf-xshard"
    )


# Not lazily: Keras finds the classes of a saved model only if they have been
# imported.
if not _is_command_line():
    _import_public_names()
