"""Defines TF1's `replicate_model_fn`, without the Estimator package."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_xshard.compat.v1.estimator import estimator_spec
from tf_xshard.compat.v1.estimator.estimator_spec import ModeKeys
from tf_xshard.compat.v1.towers import build_state as towers_lib
from tf_xshard.compat.v1.towers import tower as tower_optimizer
from tf_xshard.private.tensorflow import autograph


def training(specs: Sequence[Any]) -> Any:
    """Returns the last tower's spec, with all towers' update and loss."""
    return estimator_spec.replaced(specs[-1], loss=_loss(specs))


def evaluation(
    specs: Sequence[Any], metrics: Sequence[Sequence[tf.Variable]]
) -> Any:
    """Returns the first tower's spec, with all towers' loss and metrics."""
    shapes = [[(v.shape, v.dtype.base_dtype) for v in vs] for vs in metrics]
    if any(of_tower != shapes[0] for of_tower in shapes):
        raise ValueError(
            "Towers make different metric variables. Expected the same local"
            f" variables in each, but got {[len(vs) for vs in metrics]}:"
            f" {[[v.name for v in vs] for vs in metrics]}. model_fn must make"
            " the same metrics each time it is called."
        )
    first = specs[0].eval_metric_ops or {}
    updates = []
    for spec in specs:
        for name, pair in (spec.eval_metric_ops or {}).items():
            estimator_spec.check_metric(name, pair)
            updates.append(pair[1])
    with tf.control_dependencies(updates):
        # All metric variables are read before the other towers' variables are
        # set to zero.
        additions = [
            (variables, [tf.identity(v.read_value()) for v in variables[1:]])
            for variables in zip(*metrics, strict=True)
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


def prediction(specs: Sequence[Any]) -> Any:
    """Returns the first tower's spec, with all outputs, [batch, ...]."""
    fields = {"predictions": _concatenated([s.predictions for s in specs])}
    if specs[0].export_outputs is not None:
        fields["export_outputs"] = {
            key: _export_output(key, [s.export_outputs[key] for s in specs])
            for key in specs[0].export_outputs
        }
    return estimator_spec.replaced(specs[0], **fields)


def _concatenated(structures: Sequence[Any]) -> Any:
    """Joins the towers' [batch / num_towers, ...] tensors to [batch, ...]."""
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else tf.concat(parts, 0),
        *structures,
    )


def _export_output(key: str, outputs: Sequence[Any]) -> Any:
    """Concatenates the towers' outputs in an object of the same type."""
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


def _loss(specs: Sequence[Any]) -> tf.Tensor | None:
    """Returns the towers' summed loss, or None if a tower has no loss."""
    if any(spec.loss is None for spec in specs):
        return None
    return tf.add_n([spec.loss for spec in specs], name="loss")


Reduction = tf.compat.v1.losses.Reduction
_METRICS = tf.compat.v1.GraphKeys.METRIC_VARIABLES
_VARIABLE_OPERATIONS = ("Variable", "VariableV2", "VarHandleOp")


def replicate_model_fn(
    model_fn: Callable[..., Any],
    loss_reduction: str = Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Replicates a model_fn over several devices, one tower on each.

    The batch is split along its first axis, and model_fn is called for each
    part. Towers share the variables of `tf.compat.v1.get_variable`. Optimizers
    in the model_fn must be wrapped with `TowerOptimizer`.

    Args:
      model_fn: A function of `features`, `labels` and `mode`, and optionally of
        `params` and `config`. It returns an `EstimatorSpec`, or any object with
        the same fields.
      loss_reduction: The combination of the towers' losses. With
        `tf.compat.v1.losses.Reduction.SUM`, the losses are added. With other
        values, they are averaged. NONE raises ValueError. Default:
        SUM_BY_NONZERO_WEIGHTS.
      devices: The towers' devices; a device can have several towers. Default:
        all GPUs, or the CPU if there are none.

    Returns:
      A function of `features`, `labels`, `mode`, `params` and `config`, the
      last two None by default. Features and labels are `tf.Tensor`s or
      `tf.SparseTensor`s [batch, ...], or nested structures of tensors. Each
      tower gets [batch / num_towers, ...]. With one device, the function
      returns model_fn's result. With several devices, it returns:

      - for TRAIN, the last tower's spec with the combined loss, a scalar;
      - for EVAL, the first tower's spec with the combined loss, and with
        metrics over all towers' examples;
      - for PREDICT, the first tower's spec with all towers' predictions and
        export outputs, [batch, ...].

    Raises:
      ValueError: If loss_reduction is NONE or unknown, or devices is a str.
        When the function is called, if a batch can't be split evenly, or an
        optimizer is not wrapped. If towers apply different gradients or make
        different metrics. If the mode or an export output's type is unknown.
      RuntimeError: If a replicated model_fn is called inside another replicated
        model_fn.

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

    @autograph.entry_point
    def replicated_model_fn(
        features: Any,
        labels: Any = None,
        mode: str | None = None,
        params: Any = None,
        config: Any = None,
    ) -> Any:
        if mode not in (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT):
            raise ValueError(
                f"mode must be 'train', 'eval' or 'infer' (ModeKeys), got"
                f" {mode!r}."
            )
        call = _with_arguments(model_fn, mode, params, config)
        if len(devices) == 1:
            with (
                towers_lib.building(1, loss_reduction),
                tf.device(devices[0]),
            ):
                return call(features, labels)
        with towers_lib.building(len(devices), loss_reduction) as towers:
            specs, metrics = _towers(call, features, labels, devices, towers)
            towers.check_equal_counts()
        with tf.device(_consolidation_device(devices)):
            if mode == ModeKeys.TRAIN:
                return training(specs)
            if mode == ModeKeys.EVAL:
                return evaluation(specs, metrics)
            return prediction(specs)

    return replicated_model_fn


def _local_devices() -> list[str]:
    gpus = tf.config.list_physical_devices("GPU")
    return [f"/device:GPU:{i}" for i in range(len(gpus))] or ["/device:CPU:0"]


def _consolidation_device(devices: Sequence[str]) -> str:
    """Returns the device of variables, inputs and combined outputs."""
    if len(devices) == 1 and "GPU" in devices[0].upper():
        return devices[0]
    return "/CPU:0"


def _with_arguments(
    model_fn: Callable[..., Any], mode: str, params: Any, config: Any
) -> Callable[[Any, Any], Any]:
    """Makes the model_fn a function of features and labels only."""
    names = inspect.signature(model_fn).parameters
    # All towers get one copy, so that a model_fn can't change the caller's
    # params and config.
    optional = {
        name: copy.deepcopy(value)
        for name, value in (("params", params), ("config", config))
        if name in names
    }
    if "mode" in names:
        optional["mode"] = mode

    function = autograph.as_called_by_user(model_fn)

    def call(features: Any, labels: Any) -> Any:
        if "labels" in names:
            return function(features=features, labels=labels, **optional)
        return function(features=features, **optional)

    return call


def _towers(
    call: Callable[[Any, Any], Any],
    features: Any,
    labels: Any,
    devices: Sequence[str],
    towers: towers_lib.Towers,
) -> tuple[list[Any], list[list[tf.Variable]]]:
    """Builds all towers; returns their specs and metric variables."""
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
            if spec.train_op is not None and not (towers_lib.is_used()):
                raise ValueError(
                    "The model_fn trains without a TowerOptimizer, so each"
                    " tower would update the variables separately. Please wrap"
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


def _placed(
    device: str, variables_device: str
) -> str | Callable[[tf.Operation], str]:
    """Returns a device function, for variables and for other operations."""
    if tf.executing_eagerly():
        return device

    def choose(operation: tf.Operation) -> str:
        wanted = (
            variables_device
            if operation.type in _VARIABLE_OPERATIONS
            else device
        )
        explicit = tf.DeviceSpec.from_string(operation.device or "")
        wanted = tf.DeviceSpec.from_string(wanted)
        return wanted.make_merged_spec(explicit).to_string()

    return choose


def _split(structure: Any, num_towers: int) -> list[Any]:
    """Splits a structure's tensors into [batch / num_towers, ...] per tower."""
    flat = tf.nest.flatten(structure)
    parts = [_split_tensor(value, num_towers) for value in flat]
    return [
        tf.nest.pack_sequence_as(structure, [part[index] for part in parts])
        for index in range(num_towers)
    ]


def _split_tensor(value: Any, num_towers: int) -> list[Any]:
    """Splits [batch, ...], or None, into parts [batch / num_towers, ...]."""
    if value is None:
        return [None] * num_towers
    is_sparse = isinstance(value, tf.SparseTensor)
    if not is_sparse:
        value = tf.convert_to_tensor(value)
    size = value.shape[0] if value.shape.rank else None
    if value.shape.rank == 0:
        raise ValueError(
            f"A feature or label is a scalar, which can't be split over"
            f" {num_towers} towers. Give it a batch dimension."
        )
    if size is not None and size % num_towers:
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
