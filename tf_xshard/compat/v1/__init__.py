"""The documented TF1 optimizers, which run where the originals cannot."""

from tf_xshard.compat.v1.agn_custom_getter import AGNCustomGetter
from tf_xshard.compat.v1.agn_optimizer import AGNOptimizer
from tf_xshard.compat.v1.cross_shard_optimizer import CrossShardOptimizer
from tf_xshard.compat.v1.estimator_spec import ClassificationOutput
from tf_xshard.compat.v1.estimator_spec import EstimatorSpec
from tf_xshard.compat.v1.estimator_spec import ModeKeys
from tf_xshard.compat.v1.estimator_spec import PredictOutput
from tf_xshard.compat.v1.estimator_spec import RegressionOutput
from tf_xshard.compat.v1.load_into_keras import load_into_keras
from tf_xshard.compat.v1.replicate_model_fn import replicate_model_fn
from tf_xshard.compat.v1.shard import shard
from tf_xshard.compat.v1.shard import shard_initializer
from tf_xshard.compat.v1.shard_team import SHARD_VARIABLES
from tf_xshard.compat.v1.tower_optimizer import TowerOptimizer
from tf_xshard.compat.v1.tpu_config import InputPipelineConfig
from tf_xshard.compat.v1.tpu_config import RunConfig
from tf_xshard.compat.v1.tpu_config import TPUConfig
from tf_xshard.compat.v1.tpu_estimator import TPUEstimator
from tf_xshard.compat.v1.tpu_estimator_spec import TPUEstimatorSpec

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
    "load_into_keras",
    "replicate_model_fn",
    "shard",
    "shard_initializer",
)
