"""Cross-replica optimizers for Keras 3 on `tf.distribute`.

Gradients are reduced exactly once, at the right scale, over the groups of
replicas that you choose.

    gradients of each replica
        |   group_assignment     who reduces with whom
        v
    reduction                    pre_reduce, a sum per group, scale, post_reduce
        |   transports           how a group sum travels, chosen per strategy
        v
    inner_update                 no second reduction
        v
    inner optimizer -> variables

`compat.v1` has the documented TF1 optimizers, on the same stages.
"""

from tf_xshard import dependencies as _versions

_versions.check()

# The rest needs what the line above has found.
from tf_xshard import compat  # noqa: E402
from tf_xshard.callbacks.divergence_sentinel import DivergenceSentinel  # noqa: E402
from tf_xshard.callbacks.group_checkpoint import GroupCheckpoint  # noqa: E402
from tf_xshard.callbacks.group_validation import GroupValidation  # noqa: E402
from tf_xshard.callbacks.swap_center_weights import SwapCenterWeights  # noqa: E402
from tf_xshard.communication import Communication  # noqa: E402
from tf_xshard.group_assignment import GroupAssignment  # noqa: E402
from tf_xshard.group_state.state import GroupState  # noqa: E402
from tf_xshard.multi_worker.fit import multi_worker_fit  # noqa: E402
from tf_xshard.optimizers.agn_optimizer import AGNOptimizer  # noqa: E402
from tf_xshard.optimizers.cross_shard_optimizer import CrossShardOptimizer  # noqa: E402
from tf_xshard.optimizers.tower_optimizer import TowerOptimizer  # noqa: E402
from tf_xshard.optimizers.tower_train_step import tower_train_step  # noqa: E402
from tf_xshard.reduction.clipping import clip_by_global_norm  # noqa: E402
from tf_xshard.reduction.clipping import clip_by_norm  # noqa: E402
from tf_xshard.reduction.clipping import clip_by_value  # noqa: E402
from tf_xshard.version import __version__  # noqa: E402

__all__ = (
    "AGNOptimizer",
    "Communication",
    "CrossShardOptimizer",
    "DivergenceSentinel",
    "GroupAssignment",
    "GroupCheckpoint",
    "GroupState",
    "GroupValidation",
    "SwapCenterWeights",
    "TowerOptimizer",
    "__version__",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "compat",
    "multi_worker_fit",
    "tower_train_step",
)
