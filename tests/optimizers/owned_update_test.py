"""shard_update=True for optimizers that need whole variables."""

import keras
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import replicas
from tests.support import sharded

O = keras.optimizers  # noqa: E741


@tf_xshard.per_variable
class Normalized(O.SGD):
    """Has a norm of each row, which has no reference variable."""

    def build(self, variables):
        super().build(variables)
        self.norms = [
            self.add_variable(v.shape[:1], name="norms") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        norms = self.norms[self._get_variable_index(variable)]
        square = tf.reduce_sum(tf.square(gradient))
        self.assign_add(norms, tf.fill(norms.shape, square))
        self.assign_sub(variable, 0.01 * gradient / (1e-3 + tf.sqrt(square)))


OPTIMIZERS = {
    "muon": lambda: O.Muon(0.02),
    "lamb": lambda: O.Lamb(0.05),
    "adafactor": lambda: O.Adafactor(0.05),
    "users": lambda: Normalized(0.1),
}
SETTINGS = {
    "clipnorm": lambda: O.Lamb(0.05, clipnorm=0.02),
    "global_clipnorm": lambda: O.Muon(0.02, global_clipnorm=0.1),
    "clipvalue": lambda: O.Lamb(0.05, clipvalue=0.01),
    "decay": lambda: O.Muon(0.02, weight_decay=0.1, adam_weight_decay=0.2),
    "decay_but_names": lambda: _without_decay(),
    "ema": lambda: O.Lamb(
        0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "averages": lambda: O.Lamb(0.05, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: O.Lamb(
        0.05, gradient_accumulation_steps=3, global_clipnorm=0.05
    ),
    "accumulation_ema": lambda: O.Adafactor(
        0.05,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.9,
        ema_overwrite_frequency=3,
    ),
    "static_scale": lambda: O.Lamb(0.05, clipnorm=0.1, loss_scale_factor=16.0),
    "scale": lambda: O.LossScaleOptimizer(
        O.Lamb(0.05, global_clipnorm=0.1), initial_scale=64.0
    ),
    "relative": lambda: O.Adafactor(
        0.05, relative_step=False, clip_threshold=0.5
    ),
}
if hasattr(O, "MultiOptimizer"):
    SETTINGS["multi"] = lambda: O.MultiOptimizer(
        O.OptimizerMap(
            O.AdamW(0.05, global_clipnorm=0.05),
            {"kernel": O.Muon(0.02), "row": O.Lamb(0.05)},
        )
    )
    SETTINGS["multi_function"] = lambda: O.MultiOptimizer(
        lambda v: O.Lamb(0.05) if len(v.shape) > 1 else O.SGD(0.1, momentum=0.5)
    )
ALL = {**OPTIMIZERS, **SETTINGS}
PAIRS = [[0, 2], [3, 1]]


def _without_decay():
    optimizer = O.Lamb(0.05, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias", "^row"])
    return optimizer


@pytest.mark.parametrize(
    "name, kind, num_replicas, groups",
    [
        *((name, "mirrored", 2, None) for name in OPTIMIZERS),
        *((name, "mirrored", 4, PAIRS) for name in SETTINGS),
        ("muon", "mirrored", 3, None),
        ("adafactor", "mirrored", 8, [[7, 1, 2, 0], [3, 5, 4, 6]]),
        ("muon", "tpu", 4, None),
        ("adafactor", "tpu_permuted", 4, PAIRS),
        ("accumulation", "tpu", 4, PAIRS),
        ("scale", "tpu_permuted", 4, None),
    ],
    ids=str,
)
def test_is_one_device(name, kind, num_replicas, groups):
    is_compared = num_replicas == 2 or name in ("accumulation_ema", "multi")
    sharded.check(
        ALL[name],
        replicas.STRATEGIES[kind](num_replicas),
        groups,
        whole=is_compared,
    )


@replicas.in_full
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "kind, num_replicas, groups",
    [
        ("mirrored", 2, None),
        ("mirrored", 3, None),
        ("mirrored", 4, None),
        ("mirrored", 8, [[7, 1, 2, 0], [3, 5, 4, 6]]),
        ("tpu", 4, None),
        ("tpu_permuted", 4, PAIRS),
    ],
    ids=str,
)
def test_all_of_them_everywhere(name, kind, num_replicas, groups):
    sharded.check(
        ALL[name], replicas.STRATEGIES[kind](num_replicas), groups, whole=True
    )
