"""Defines `RunConfig` and `TPUConfig`, and lists unsupported arguments."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from tf_xshard import checks

OF_RUN_CONFIG = {
    "master": "It names a TPU, but the shards run on this machine.",
    "cluster": "It names a TPU, but the shards run on this machine.",
    "evaluation_master": "It names a TPU, but the shards run on this machine.",
    "save_checkpoints_secs": "Use save_checkpoints_steps.",
    "keep_checkpoint_every_n_hours": "Use keep_checkpoint_max=0 to keep all.",
    "train_distribute": "Set the number of shards in tpu_config instead.",
    "eval_distribute": "Evaluation runs once, for the whole batch.",
}
OF_TPU_ESTIMATOR = {
    "batch_axis": "Batches are split along their first axis.",
    "warm_start_from": (
        "Call tf.train.init_from_checkpoint in the spec's scaffold_fn."
    ),
    "embedding_config_spec": "TPU embeddings are not supported.",
    # These arguments are accepted, since they change nothing without a TPU.
    "eval_on_tpu": None,
    "export_to_cpu": None,
    "export_to_tpu": None,
}


def refuse(
    owner: str, given: Mapping[str, Any], known: Mapping[str, str | None]
) -> None:
    """Raises an error for an unknown or unsupported argument."""
    for name, value in given.items():
        if name not in known:
            raise TypeError(
                f"{owner}() got an unexpected keyword argument {name!r}."
            )
        if value and known[name] is not None:
            raise ValueError(
                f"{owner}({name}={value!r}) is not supported. {known[name]}"
            )


class InputPipelineConfig(enum.IntEnum):
    """Selects how often `input_fn` is called, and for how many rows.

    All shards are on one host, so PER_HOST_V1 and PER_HOST_V2 call `input_fn`
    once, for the global batch. `TPUConfig` raises ValueError for the other
    options.

    Source: tf.compat.v1.estimator.tpu.InputPipelineConfig.
    """

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class TPUConfig:
    """Sets the number of shards that train, and their input.

    Args:
      iterations_per_loop: No effect; each step returns to Python. Default: 2.
      num_shards: The number of shards in training. Default: 1.
      per_host_input_for_training: See `InputPipelineConfig`. Default: True,
        once per host.

    Raises:
      TypeError, ValueError: If num_shards is not a positive int.
      ValueError: If per_host_input_for_training is not True, PER_HOST_V1 or
        PER_HOST_V2.

    Example:

    >>> tf_xshard.compat.v1.TPUConfig(num_shards=8).num_shards
    8

    Source: tf.compat.v1.estimator.tpu.TPUConfig.
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None
    per_host_input_for_training: bool | InputPipelineConfig = True

    def __post_init__(self) -> None:
        if self.num_shards is not None:
            checks.positive_integer("num_shards", self.num_shards)
        # PER_SHARD_V1 is equal to True, so `==` would accept it.
        per_host = self.per_host_input_for_training
        if per_host is not True and per_host not in (
            InputPipelineConfig.PER_HOST_V1,
            InputPipelineConfig.PER_HOST_V2,
        ):
            raise ValueError(
                "per_host_input_for_training must be True, PER_HOST_V1 or"
                f" PER_HOST_V2, got {self.per_host_input_for_training!r}."
                " input_fn is called once for all shards."
            )


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class RunConfig:
    """Configures a `TPUEstimator`, for example how often it saves.

    Args:
      tpu_config: A `TPUConfig`. Default: one shard.
      model_dir: The directory of checkpoints and summaries. Default: None.
      tf_random_seed: The graph's seed. Default: None.
      save_summary_steps: Steps between summaries; 0 writes none. Default: 100.
      save_checkpoints_steps: Steps between checkpoints. The last step is always
        saved. Default: None, no checkpoints in between.
      keep_checkpoint_max: Checkpoints to keep; 0 keeps all. Default: 5.
      log_step_count_steps: Steps between log lines with the loss; 0 logs
        nothing. Default: 100.
      session_config: A `tf.compat.v1.ConfigProto`. Default: None.
      **kwargs: Other arguments of the original. Unless they are None or empty,
        they raise an error that says what to use instead.

    Raises:
      TypeError: If tpu_config is not a `TPUConfig`, a number is not an int, or
        an argument is unknown.
      ValueError: If an argument of the original is not supported, or a number
        of steps or checkpoints is negative.

    Example:

    >>> config = tf_xshard.compat.v1.RunConfig(
    ...     tpu_config=tf_xshard.compat.v1.TPUConfig(num_shards=8))
    >>> config.keep_checkpoint_max
    5

    Source: tf.compat.v1.estimator.tpu.RunConfig.
    """

    tpu_config: TPUConfig
    model_dir: str | None
    tf_random_seed: int | None
    save_summary_steps: int
    save_checkpoints_steps: int | None
    keep_checkpoint_max: int
    log_step_count_steps: int
    session_config: Any

    def __init__(
        self,
        tpu_config: TPUConfig | None = None,
        *,
        model_dir: str | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int = 100,
        save_checkpoints_steps: int | None = None,
        keep_checkpoint_max: int = 5,
        log_step_count_steps: int = 100,
        session_config: Any = None,
        **kwargs: Any,
    ) -> None:
        refuse("RunConfig", kwargs, OF_RUN_CONFIG)
        tpu_config = TPUConfig() if tpu_config is None else tpu_config
        if not isinstance(tpu_config, TPUConfig):
            raise TypeError(
                "tpu_config must be a tf_xshard.compat.v1.TPUConfig, got"
                f" {tpu_config!r}."
            )
        counts = {
            "save_summary_steps": save_summary_steps,
            "save_checkpoints_steps": save_checkpoints_steps,
            "keep_checkpoint_max": keep_checkpoint_max,
            "log_step_count_steps": log_step_count_steps,
        }
        for name, count in counts.items():
            if count is not None and checks.integer(name, count) < 0:
                raise ValueError(f"{name} must not be negative, got {count!r}.")
        values = {
            **counts,
            "tpu_config": tpu_config,
            "model_dir": model_dir,
            "tf_random_seed": tf_random_seed,
            "session_config": session_config,
        }
        if tf_random_seed is not None:
            checks.integer("tf_random_seed", tf_random_seed)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def replace(self, **kwargs: Any) -> RunConfig:
        """Returns a copy of this `RunConfig` with other values.

        Args:
          **kwargs: The arguments to change, with their new values.

        Returns:
          A `RunConfig`.
        """
        return dataclasses.replace(self, **kwargs)
