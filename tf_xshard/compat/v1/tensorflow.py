"""Provides `tensorflow.compat.v1` plus names that TF1's TPU scripts use.

In a script, replace `import tensorflow as tf` (or `tensorflow.compat.v1`) with
`import tf_xshard.compat.v1.tensorflow as tf`. No other change is needed if the
script uses no removed names except these, which replace TensorFlow's:

tf.estimator       ModeKeys, EstimatorSpec, export, tpu
tf.estimator.tpu   TPUEstimator, TPUEstimatorSpec, RunConfig, TPUConfig,
                   InputPipelineConfig
tf.tpu             CrossShardOptimizer, cross_replica_sum, shard; the rest is
                   TensorFlow's
tf.contrib         tpu (tf.tpu and tf.estimator.tpu together), opt, estimator
tf.layers          layers of tf_keras; without it, an error says what to install
"""

from __future__ import annotations

import types as _types
import typing as _typing

import tensorflow as _tensorflow

from tf_xshard.compat import v1 as _v1


class _Names(_types.SimpleNamespace):
    """Holds names of tf_xshard, and can fall back to a module."""

    def __init__(
        self,
        path: str,
        names: dict[str, _typing.Any],
        module: _typing.Any = None,
    ) -> None:
        super().__init__(**names)
        self._prefix = path
        self._listed = list(names)
        self._module = module

    def __getattr__(self, name: str) -> _typing.Any:
        if name.startswith("__") or self._module is None:
            raise AttributeError(
                f"{self._prefix} has no {name!r} in"
                f" tf_xshard.compat.v1.tensorflow, only {self._listed}."
            )
        return getattr(self._module, name)


def _of_v1(*names: str) -> dict[str, _typing.Any]:
    return {name: getattr(_v1, name) for name in names}


_ESTIMATOR_TPU = _of_v1(
    "InputPipelineConfig",
    "RunConfig",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
)
_TPU = _of_v1("CrossShardOptimizer", "cross_replica_sum", "shard")

tpu = _Names("tf.tpu", _TPU, _tensorflow.compat.v1.tpu)
estimator = _Names(
    "tf.estimator",
    {
        **_of_v1("EstimatorSpec", "ModeKeys"),
        "export": _Names(
            "tf.estimator.export",
            _of_v1("ClassificationOutput", "PredictOutput", "RegressionOutput"),
        ),
        "tpu": _Names("tf.estimator.tpu", _ESTIMATOR_TPU),
    },
)
contrib = _Names(
    "tf.contrib",
    {
        "estimator": _Names(
            "tf.contrib.estimator",
            _of_v1("TowerOptimizer", "replicate_model_fn"),
        ),
        "opt": _Names(
            "tf.contrib.opt", _of_v1("AGNCustomGetter", "AGNOptimizer")
        ),
        "tpu": _Names(
            "tf.contrib.tpu",
            {**_TPU, **_ESTIMATOR_TPU},
            _tensorflow.compat.v1.tpu,
        ),
    },
)


def __getattr__(name: str) -> _typing.Any:
    if name == "layers":
        return _layers()
    # With TensorFlow's __path__, this module would be a package, and its
    # submodules would be TensorFlow's.
    if name.startswith("__") and name != "__version__":
        raise AttributeError(name)
    return getattr(_tensorflow.compat.v1, name)


def __dir__() -> list[str]:
    return sorted({*globals(), "layers", *dir(_tensorflow.compat.v1)})


def _layers() -> _typing.Any:
    """Returns `tf.layers`, which needs tf_keras because Keras 3 lacks it."""
    layers = _tensorflow.compat.v1.layers
    try:
        layers.Dense  # noqa: B018
    except (AttributeError, ImportError) as error:
        version = ".".join(_tensorflow.__version__.split(".")[:2])
        raise ImportError(
            "tf.layers is part of Keras 2. Install it with `pip install"
            f" tf_keras=={version}.*`, and set the environment variable"
            " TF_USE_LEGACY_KERAS=1 before Python starts."
        ) from error
    return layers
