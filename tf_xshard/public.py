"""Imports each public name from the module that defines it."""

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
from tf_xshard.multi_worker.connect import connect as connect
from tf_xshard.multi_worker.fit import multi_worker_fit as multi_worker_fit
from tf_xshard.multi_worker.processes import barrier as barrier
from tf_xshard.multi_worker.processes import is_chief as is_chief
from tf_xshard.multi_worker.processes import rank as rank
from tf_xshard.optimizers.agn import AGNOptimizer as AGNOptimizer
from tf_xshard.optimizers.cross_shard import (
    CrossShardOptimizer as CrossShardOptimizer,
)
from tf_xshard.optimizers.fit.global_mean import GlobalMean as GlobalMean
from tf_xshard.optimizers.fit.scalar_loss import ScalarLoss as ScalarLoss
from tf_xshard.optimizers.fit.tower_train_step import (
    tower_train_step as tower_train_step,
)
from tf_xshard.optimizers.tower import TowerOptimizer as TowerOptimizer
from tf_xshard.optimizers.update.kinds import elementwise as elementwise
from tf_xshard.optimizers.update.kinds import per_variable as per_variable
from tf_xshard.planning.communication_plan import (
    communication_plan as communication_plan,
)
from tf_xshard.reduction.clipping import (
    clip_by_global_norm as clip_by_global_norm,
)
from tf_xshard.reduction.clipping import clip_by_norm as clip_by_norm
from tf_xshard.reduction.clipping import clip_by_value as clip_by_value
from tf_xshard.reduction.group_reduce import group_reduce as group_reduce
