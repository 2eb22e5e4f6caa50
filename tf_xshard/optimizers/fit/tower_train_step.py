"""Defines `tower_train_step`, which computes towers on separate devices."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_xshard import reductions
from tf_xshard.distribute import site as site_lib
from tf_xshard.optimizers import stack
from tf_xshard.optimizers import tower
from tf_xshard.optimizers.fit import global_mean
from tf_xshard.private.keras import fit_internals
from tf_xshard.private.tensorflow import autograph
from tf_xshard.reduction import gradients as gradients_lib
from tf_xshard.reduction import loss_records


def tower_train_step(
    devices: Sequence[str] | Callable[[int], Sequence[str]] | None = None,
) -> Callable:
    """Makes a `train_step` that splits each batch into towers.

    Use it in a `keras.Model` compiled with a `TowerOptimizer`. The batch (under
    a strategy, each replica's batch) is split into `num_towers` parts whose
    sizes differ by at most one row. Each part's loss and gradients are computed
    on its own device and passed to `apply_towers`, which updates once per
    batch. This function is the counterpart of `replicate_model_fn`.

    With the optimizer's `reduction="mean"`, towers are weighted by their rows,
    or by the items of a `tf_xshard.GlobalMean`. If losses are means over rows
    (Keras's default), the update equals the unsplit batch's update, up to
    rounding. This is true even if parts differ in size. Losses that divide by
    another number (masks) need a GlobalMean. With the optimizer's
    `reduction="sum"`, the towers' losses are summed.

    Metrics are updated with one tower after another. The state of layers such
    as BatchNormalization, which normalize by the tower's rows, is updated in
    the same order. With fewer rows than towers, some towers are empty. With
    Keras's own losses, empty towers add nothing, but layers such as
    BatchNormalization can't handle them. Use `drop_remainder=True`.

    Args:
      devices: A list of device names, reused in turn if there are fewer names
        than towers. For several replicas in one process, a callable from a
        replica's id to such a list. None (default) for the replica's own
        device.

    Returns:
      A function of a model and the data of `train_step` that returns the
      metrics. Assign it in a model class, as below, or to one model with
      `model.train_step = functools.partial(step, model)`.

    Raises:
      TypeError: If `devices` is not a list of names, or, when the step is
        traced, if the model's optimizer is not a `TowerOptimizer`.
      ValueError: When the step is traced, if `devices` is given under a
        TPUStrategy or with `jit_compile=True`, whose programs have one device.

    Example:

    >>> class TowerModel(keras.Model):
    ...     train_step = tf_xshard.tower_train_step(["CPU:0", "CPU:0"])
    >>> x = keras.Input((2,))
    >>> model = TowerModel(x, keras.layers.Dense(1)(x))
    >>> model.compile(
    ...     tf_xshard.TowerOptimizer(keras.optimizers.SGD(0.1), num_towers=2),
    ...     "mse", jit_compile=False)
    >>> history = model.fit(np.ones([8, 2]), np.ones([8, 1]), verbose=0)
    >>> int(model.optimizer.iterations)
    1

    Source: `tf.contrib.estimator.replicate_model_fn` (TensorFlow 1.14); Keras's
    guide "Customizing what happens in fit() with TensorFlow".
    """
    if not callable(devices):
        _check_names(devices)

    @autograph.entry_point
    def train_step(model: keras.Model, data) -> dict:
        optimizer = model.optimizer
        if not isinstance(optimizer, tower.TowerOptimizer):
            raise TypeError(
                "tower_train_step() needs a model that is compiled with a"
                f" TowerOptimizer (outermost), got {type(optimizer).__name__}."
            )
        site = site_lib.current()
        names = _names_of(devices, site)
        if names:
            _check_devices(model, site)
        parts, shares = _split(data, optimizer.num_towers)
        is_mean = reductions.checked(optimizer.reduction) is reductions.MEAN
        gradients, predictions, losses = [], [], []
        records: list[loss_records.LossRecord] = []
        for index, part in enumerate(parts):
            with tf.device(names[index % len(names)] if names else None):
                of_tower, y_pred, loss = _compute(model, part)
            gradients.append(of_tower)
            predictions.append(y_pred)
            losses.append(loss)
            records += loss_records.take(site)
        stack.StackPlan(optimizer).check_losses(records, site)
        weights = shares
        if optimizer.weights_by_items:
            global_mean.refuse_beside_other_losses(
                fit_internals.compiled_losses(model)
            )
            weights = (
                loss_records.num_items_of_towers(records, len(parts)) or shares
            )
        _record_loss(model, losses, weights, _num_rows(data))
        if model.trainable_variables:
            optimizer.apply_towers(
                gradients,
                model.trainable_variables,
                weights if is_mean else None,
            )
        else:
            warnings.warn("The model has no trainable weights.", stacklevel=2)
        for part, y_pred in zip(parts, predictions, strict=True):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
            metrics = model.compute_metrics(
                x, y, y_pred, sample_weight=sample_weight
            )
        return metrics

    return train_step


def _names_of(devices: Any, site: site_lib.Site) -> Sequence[str] | None:
    """Returns the devices of this replica's towers."""
    if not callable(devices):
        return devices
    names = autograph.as_called_by_user(devices)(site.replica_id)
    _check_names(names)
    return names


def _check_names(devices: Any) -> None:
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)) or not all(
        isinstance(device, str) for device in devices
    ):
        raise TypeError(
            "devices must be a list of device names such as ['GPU:0', 'GPU:1'],"
            f" got {devices!r}."
        )
    if not devices:
        raise TypeError(
            "devices is empty; pass None for the replica's own device."
        )


def _check_devices(model: keras.Model, site: site_lib.Site) -> None:
    if isinstance(site.strategy, tf.distribute.TPUStrategy):
        raise ValueError(
            "A TPU program has one device. Leave `devices` out to compute the"
            " towers one after the other."
        )
    if model.jit_compile:
        raise ValueError(
            "XLA puts a whole step on one device. To compute towers on several"
            " devices, compile the model with jit_compile=False."
        )


def _compute(model: keras.Model, data: Any) -> tuple:
    """Returns a tower's gradients, predictions and loss."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True)
        # As in Keras, an overridden compute_loss may omit `training`.
        parameters = inspect.signature(model.compute_loss).parameters
        training = {"training": True} if "training" in parameters else {}
        compute_loss = autograph.as_called_by_user(model.compute_loss)
        loss = compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, **training
        )
        scaled = model.optimizer.scale_loss(loss)
    return tape.gradient(scaled, model.trainable_weights), y_pred, loss


def _record_loss(
    model: keras.Model, losses: Sequence, weights: Sequence, num_rows: Any
) -> None:
    """Adds the weighted mean of the towers' losses to the metric of `fit`."""
    total = tf.add_n(
        [
            loss * gradients_lib.as_dtype(weight, loss.dtype)
            for loss, weight in zip(losses, weights, strict=True)
        ]
    )
    divisor = gradients_lib.as_dtype(sum(weights), total.dtype)
    fit_internals.update_loss_metric(
        model, tf.math.divide_no_nan(total, divisor), num_rows
    )


def _num_rows(data: Any) -> Any:
    """Returns the number of rows, an int if known, else a tensor."""
    first = next(one for one in tf.nest.flatten(data) if one is not None)
    return first.shape[0] or tf.shape(first)[0]


def _split(data: Any, num_towers: int) -> tuple[list, list]:
    """Returns the towers' parts, and their sizes relative to the mean size."""
    num_rows = _num_rows(data)
    parts, shares, start = [], [], 0
    for index in range(num_towers):
        size = (num_rows + num_towers - 1 - index) // num_towers
        parts.append(
            tf.nest.map_structure(
                lambda tensor, first=start, n=size: _rows(tensor, first, n),
                data,
            )
        )
        shares.append(_share(size * num_towers, num_rows))
        start += size
    return parts, shares


def _share(part: Any, whole: Any) -> Any:
    """Returns `part / whole`, for numbers or scalar tensors."""
    if not tf.is_tensor(whole):
        return part / whole if whole else 1.0
    # A replica without rows still has losses of weights (regularizers), so its
    # share is 1.
    part, whole = tf.cast(part, tf.float64), tf.cast(whole, tf.float64)
    return tf.where(whole > 0, part / tf.maximum(whole, 1.0), 1.0)


def _rows(tensor: Any, start: Any, size: Any) -> Any:
    """Returns a slice of a dense or sparse tensor's rows; None stays None."""
    if tensor is None:
        return None
    if isinstance(tensor, tf.SparseTensor):
        shape = tf.cast(tensor.dense_shape, tf.int64)
        return tf.sparse.slice(
            tensor,
            tf.concat([[start], tf.zeros_like(shape[1:])], 0),
            tf.concat([[size], shape[1:]], 0),
        )
    return tensor[start : start + size]
