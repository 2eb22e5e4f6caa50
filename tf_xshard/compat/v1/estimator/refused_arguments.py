"""Unsupported arguments of TPUEstimator and RunConfig, with alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OF_RUN_CONFIG = {
    "master": "It names a TPU, but the shards run on this machine.",
    "cluster": "It names a TPU, but the shards run on this machine.",
    "evaluation_master": "It names a TPU, but the shards run on this machine.",
    "save_checkpoints_secs": "Use save_checkpoints_steps.",
    "keep_checkpoint_every_n_hours": "Use keep_checkpoint_max=0 to keep all.",
    "train_distribute": "The shards of tpu_config are what distributes.",
    "eval_distribute": "Evaluation runs once, for the whole batch.",
}
OF_TPU_ESTIMATOR = {
    "batch_axis": "Batches are split along their first axis.",
    "warm_start_from": (
        "Call tf.train.init_from_checkpoint in the spec's scaffold_fn."
    ),
    "embedding_config_spec": "There are no TPU embeddings.",
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
                f"{owner}({name}={value!r}) has no meaning here. {known[name]}"
            )
