"""Runs the documented TF1 optimizers where the originals can't run.

- `optimizers`: CrossShardOptimizer and AGNOptimizer.
- `sharding`: `shard`, which builds several shards into one graph.
- `towers`: TowerOptimizer and replicate_model_fn.
- `estimator`: TPUEstimator, its configuration and its specs.
- `load_into_keras`: reads checkpoints of TF1's optimizers into Keras models.
- `tensorflow`: `tensorflow.compat.v1` plus names that TF1's TPU scripts use.
"""

from tf_xshard.compat.v1.estimator.estimator_spec import ClassificationOutput
from tf_xshard.compat.v1.estimator.estimator_spec import EstimatorSpec
from tf_xshard.compat.v1.estimator.estimator_spec import ModeKeys
from tf_xshard.compat.v1.estimator.estimator_spec import PredictOutput
from tf_xshard.compat.v1.estimator.estimator_spec import RegressionOutput
from tf_xshard.compat.v1.estimator.estimator_spec import TPUEstimatorSpec
from tf_xshard.compat.v1.estimator.tpu_config import InputPipelineConfig
from tf_xshard.compat.v1.estimator.tpu_config import RunConfig
from tf_xshard.compat.v1.estimator.tpu_config import TPUConfig
from tf_xshard.compat.v1.estimator.tpu_estimator import TPUEstimator
from tf_xshard.compat.v1.load_into_keras import load_into_keras
from tf_xshard.compat.v1.optimizers.agn import AGNOptimizer
from tf_xshard.compat.v1.optimizers.agn_custom_getter import AGNCustomGetter
from tf_xshard.compat.v1.optimizers.cross_shard import CrossShardOptimizer
from tf_xshard.compat.v1.sharding.cross_replica_sum import cross_replica_sum
from tf_xshard.compat.v1.sharding.shard import shard
from tf_xshard.compat.v1.sharding.shard import shard_initializer
from tf_xshard.compat.v1.sharding.traced_shards import SHARD_VARIABLES
from tf_xshard.compat.v1.towers.replicate_model_fn import replicate_model_fn
from tf_xshard.compat.v1.towers.tower import TowerOptimizer

__all__ = (
    "AGNCustomGetter",
    "AGNOptimizer",
    "ClassificationOutput",
    "CrossShardOptimizer",
    "EstimatorSpec",
    "InputPipelineConfig",
    "ModeKeys",
    "PredictOutput",
    "RegressionOutput",
    "RunConfig",
    "SHARD_VARIABLES",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
    "TowerOptimizer",
    "cross_replica_sum",
    "load_into_keras",
    "replicate_model_fn",
    "shard",
    "shard_initializer",
)
