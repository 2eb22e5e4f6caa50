"""`tf.contrib.estimator.replicate_model_fn`, without the Estimator package."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1 import estimator_spec
from tf_xshard.compat.v1 import tower_optimizer
from tf_xshard.compat.v1.estimator_spec import ModeKeys
from tf_xshard.private import tensorflow as private_tensorflow

Reduction = tf.compat.v1.losses.Reduction
_METRICS = tf.compat.v1.GraphKeys.METRIC_VARIABLES
_VARIABLE_OPERATIONS = ("Variable", "VariableV2", "VarHandleOp")


def replicate_model_fn(
    model_fn: Callable,
    loss_reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[str] | None = None,
) -> Callable:
    """Replicates a model_fn over several devices, one tower on each.

    Features and labels are split along their first axis, the model_fn is called
    for each part, and towers share variables (of `tf.compat.v1.get_variable`).
    Optimizers in it must be wrapped with `TowerOptimizer`.

    Args:
      model_fn: A function of `features`, `labels` and `mode`, and if it has
        them `params` and `config`. It returns an `EstimatorSpec`, or any object
        with its fields.
      loss_reduction: How the towers' losses are combined, of
        `tf.compat.v1.losses.Reduction`: SUM is their sum, everything else their
        mean. NONE is refused. Default: SUM_BY_NONZERO_WEIGHTS.
      devices: The towers' devices. One can be there more than once. Default:
        all GPUs, or else the CPU.

    Returns:
      A function of `features`, `labels`, `mode`, `params` and `config`, the
      last two None by default. Features and labels are tensors,
      `tf.SparseTensor`s or nested structures of these. It returns a spec:
      for TRAIN the last tower's with the combined loss; for EVAL the first
      tower's with the combined loss and metrics over all towers' examples; for
      PREDICT the first tower's with the predictions and export outputs of all.
      With one device it returns model_fn's.

    Raises:
      ValueError: If loss_reduction is NONE or unknown. When the function is
        called: if a batch can't be split evenly, an optimizer is not wrapped,
        towers apply gradients or make metrics differently, or the mode or an
        export output is of an unknown kind.
      RuntimeError: If a replicated model_fn is called in another.

    Example: see `TowerOptimizer`.

    Source: tf.contrib.estimator.replicate_model_fn (TensorFlow 1.14).
    """
    if loss_reduction == Reduction.NONE:
        raise ValueError(
            "loss_reduction NONE leaves no scalar to train on: none reduction"
            " is specified. Use SUM or MEAN."
        )
    if loss_reduction not in Reduction.all():
        raise ValueError(
            f"loss_reduction must be one of {Reduction.all()}, got"
            f" {loss_reduction!r}."
        )
    if isinstance(devices, str):
        raise ValueError(f"devices must be a list of names, got {devices!r}.")
    devices = list(devices or _local_devices())

    @private_tensorflow.entry_point
    def replicated_model_fn(
        features, labels=None, mode=None, params=None, config=None
    ):
        if mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT):
            raise ValueError(
                f"mode must be 'train', 'eval' or 'infer' (ModeKeys), got"
                f" {mode!r}."
            )
        call = _with_arguments(model_fn, mode, params, config)
        if len(devices) == 1:
            with (
                tower_optimizer.building(1, loss_reduction),
                tf.device(devices[0]),
            ):
                return call(features, labels)
        with tower_optimizer.building(len(devices), loss_reduction) as towers:
            specs, metrics = _towers(call, features, labels, devices, towers)
            towers.check_equal_counts()
        with tf.device(_consolidation_device(devices)):
            if mode == ModeKeys.TRAIN:
                return estimator_spec.replaced(specs[-1], loss=_loss(specs))
            if mode == ModeKeys.EVAL:
                return _evaluation(specs, metrics)
            return _prediction(specs)

    return replicated_model_fn


def _local_devices() -> list[str]:
    gpus = tf.config.list_physical_devices("GPU")
    return [f"/device:GPU:{i}" for i in range(len(gpus))] or ["/device:CPU:0"]


def _consolidation_device(devices) -> str:
    if len(devices) == 1 and "GPU" in devices[0].upper():
        return devices[0]
    return "/CPU:0"


def _with_arguments(model_fn, mode, params, config) -> Callable:
    names = inspect.signature(model_fn).parameters
    # One copy for all towers, so that a model_fn can't change the caller's.
    optional = {
        name: copy.deepcopy(value)
        for name, value in (("params", params), ("config", config))
        if name in names
    }
    if "mode" in names:
        optional["mode"] = mode

    function = private_tensorflow.as_called_by_user(model_fn)

    def call(features, labels):
        if "labels" in names:
            return function(features=features, labels=labels, **optional)
        return function(features=features, **optional)

    return call


def _towers(call, features, labels, devices, towers) -> tuple[list, list]:
    num_towers = len(devices)
    variables_device = _consolidation_device(devices)
    with tf.device(variables_device), tf.name_scope("split_inputs"):
        features = _split(features, num_towers)
        labels = _split(labels, num_towers)
    specs, metrics = [], []
    for index, device in enumerate(devices):
        towers.index = index
        before = len(tf.compat.v1.get_collection(_METRICS))
        with (
            tf.compat.v1.variable_scope(
                tf.compat.v1.get_variable_scope(),
                reuse=True if index else None,
                auxiliary_name_scope=False,
            ),
            tf.name_scope(f"tower_{index}")
            if index
            else contextlib.nullcontext(),
            tf.compat.v1.device(_placed(device, variables_device)),
        ):
            spec = call(features[index], labels[index])
            if spec.train_op is not None and not (
                tower_optimizer.TowerOptimizer.has_been_used()
            ):
                raise ValueError(
                    "The model_fn trains without a TowerOptimizer, so each"
                    " tower would update the variables by itself. Please wrap"
                    " optimizers with tf_xshard.compat.v1.TowerOptimizer."
                )
            if spec.loss is not None and towers.averages:
                spec = estimator_spec.replaced(
                    spec,
                    loss=tower_optimizer.averaged_loss(spec.loss, num_towers),
                )
        specs.append(spec)
        metrics.append(tf.compat.v1.get_collection(_METRICS)[before:])
    return specs, metrics


def _placed(device: str, variables_device: str):
    """Variables on one device, everything else on the tower's."""
    if tf.executing_eagerly():
        return device

    def choose(operation):
        wanted = (
            variables_device
            if operation.type in _VARIABLE_OPERATIONS
            else device
        )
        explicit = tf.DeviceSpec.from_string(operation.device or "")
        wanted = tf.DeviceSpec.from_string(wanted)
        return wanted.make_merged_spec(explicit).to_string()

    return choose


def _split(structure: Any, num_towers: int) -> list:
    """A structure for each tower, with a part of each tensor."""
    flat = tf.nest.flatten(structure)
    parts = [_split_tensor(value, num_towers) for value in flat]
    return [
        tf.nest.pack_sequence_as(structure, [part[index] for part in parts])
        for index in range(num_towers)
    ]


def _split_tensor(value, num_towers) -> list:
    if value is None:
        return [None] * num_towers
    is_sparse = isinstance(value, tf.SparseTensor)
    if not is_sparse:
        value = tf.convert_to_tensor(value)
    size = value.shape[0] if value.shape.rank else None
    if value.shape.rank == 0 or (size is not None and size % num_towers):
        raise ValueError(
            f"Batch size {size} of shape {value.shape} needs to be divisible by"
            f" the number of towers, {num_towers}."
        )
    if not is_sparse:
        return tf.split(value, num_towers)
    with tf.control_dependencies(
        [
            tf.debugging.assert_equal(
                value.dense_shape[0] % num_towers,
                tf.constant(0, tf.int64),
                "The batch size of a SparseTensor needs to be divisible by the"
                f" number of towers, {num_towers}.",
            )
        ]
        if size is None and not tf.executing_eagerly()
        else []
    ):
        value = tf.SparseTensor(
            tf.identity(value.indices), value.values, value.dense_shape
        )
    return tf.sparse.split(value, num_split=num_towers, axis=0)


def _loss(specs):
    if any(spec.loss is None for spec in specs):
        return None
    return tf.add_n([spec.loss for spec in specs], name="loss")


def _evaluation(specs, metrics) -> Any:
    shapes = [[(v.shape, v.dtype.base_dtype) for v in vs] for vs in metrics]
    if any(of_tower != shapes[0] for of_tower in shapes):
        raise ValueError(
            "Towers make different metric variables. Expected the same local"
            f" variables in each, but got {[len(vs) for vs in metrics]}:"
            f" {[[v.name for v in vs] for vs in metrics]}."
        )
    first = specs[0].eval_metric_ops or {}
    updates = []
    for spec in specs:
        for name, pair in (spec.eval_metric_ops or {}).items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(
                    f"Metric {name!r} must be a (value, update operation) pair,"
                    f" as tf.compat.v1.metrics makes them, got {pair!r}."
                )
            updates.append(pair[1])
    with tf.control_dependencies(updates):
        # Reads before any of the others is set to zero.
        additions = [
            (variables, [tf.identity(v.read_value()) for v in variables[1:]])
            for variables in zip(*metrics)
        ]
    pooled = []
    for (target, *others), values in additions:
        with tf.control_dependencies(values):
            pooled.append(target.assign_add(tf.add_n(values)))
            pooled += [v.assign(tf.zeros_like(v)) for v in others]
    with tf.control_dependencies([tf.group(*updates)]):
        update = tf.group(*pooled, name="eval_metric_reduction")
    return estimator_spec.replaced(
        specs[0],
        loss=_loss(specs),
        eval_metric_ops={
            name: (value, update) for name, (value, _) in first.items()
        },
    )


def _prediction(specs) -> Any:
    fields = {"predictions": _concatenated([s.predictions for s in specs])}
    if specs[0].export_outputs is not None:
        fields["export_outputs"] = {
            key: _export_output(key, [s.export_outputs[key] for s in specs])
            for key in specs[0].export_outputs
        }
    return estimator_spec.replaced(specs[0], **fields)


def _concatenated(structures):
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else tf.concat(parts, 0),
        *structures,
    )


def _export_output(key, outputs):
    """Of the same type as the towers', TensorFlow's own classes included."""
    kind = type(outputs[0])
    for fields in (("scores", "classes"), ("value",), ("outputs",)):
        if all(hasattr(outputs[0], field) for field in fields):
            return kind(
                **{
                    field: _concatenated([getattr(o, field) for o in outputs])
                    for field in fields
                }
            )
    raise ValueError(
        f"Export output {key!r} is a {kind.__name__}. Supported: PredictOutput,"
        " ClassificationOutput and RegressionOutput."
    )
