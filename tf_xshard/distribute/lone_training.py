"""Raises an error if one of several started processes would train alone."""

from __future__ import annotations

import os

import tensorflow as tf

from tf_xshard.distribute import engines
from tf_xshard.distribute import site

_EVALUATOR = "evaluator"


def is_evaluator() -> bool:
    """Returns True in a task that TF_CONFIG calls an evaluator."""
    task = engines.task()
    return task is not None and task.type == _EVALUATOR


def num_started() -> tuple[str, int]:
    """Returns the engine of this process, and the number that train."""
    if os.environ.get(engines.ALONE) == "1":
        return "", 1
    task = engines.task()
    if task is not None and task.type in ("chief", "worker"):
        return "TF_CONFIG", task.num_workers
    if task is not None:
        return "", 1
    return engines.size_of_step()


def refuse(strategy: tf.distribute.Strategy, what: str) -> None:
    """Raises RuntimeError if this process would train alone by mistake."""
    if site.spans_processes(strategy):
        return
    escape = (
        "If this process is to train alone, call tf_xshard.connect(alone=True)"
        f" first, or set {engines.ALONE}=1."
    )
    if is_evaluator() and os.environ.get(engines.ALONE) != "1":
        raise RuntimeError(
            f"{what} in an evaluator (the task type in TF_CONFIG), which is not"
            " one of the workers. Call model.evaluate in the evaluator. Train"
            f" and save in the workers. {escape}"
        )
    engine, size = num_started()
    if size > 1:
        own = (
            "code outside of any strategy's scope"
            if site.is_default(strategy)
            else f"its {type(strategy).__name__}"
        )
        raise RuntimeError(
            f"{what} in one of {size} processes ({engine}), but {own} has only"
            " this one: each process would train alone and write the same"
            " files. Call tf_xshard.connect() at the start of the program, and"
            " create the model in the scope of"
            f" tf.distribute.MultiWorkerMirroredStrategy(). {escape}"
        )
