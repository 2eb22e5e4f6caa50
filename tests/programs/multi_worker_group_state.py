"""What each process of four_processes_test.py does with GroupState."""

import os
import shutil

import numpy as np
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tf_xshard.group_state import divergence


def _learned(model):
    return [*model.weights, *model.optimizer.variables]


def _own(variables):
    return [np.float64(v.numpy()).tolist() for v in variables]


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _jsonable(weights):
    return {
        part: [np.float64(v).tolist() for v in values]
        for part, values in weights.items()
    }


def _add_one(state, variables):
    for variable in variables:
        state.replicas.assign(variable, [variable.numpy() + 1])


def run(strategy, directory, full):
    """Trains two groups, and looks at all of GroupState."""
    rank = strategy.cluster_resolver.task_id
    model = group_training.compiled(strategy)
    x, y = group_training.data()
    result = {}
    group_training.trainer(model)(2)
    state = tf_xshard.GroupState(model)
    learned = _learned(model)
    result["own"] = _own(learned)
    result["weights"] = [_jsonable(state.get_weights(g)) for g in (0, 1)]
    result["evaluate"] = full and list(
        state.evaluate(x[:50], y[:50], batch_size=16)
    )
    # The ensemble's needs those of the groups.
    result["predict"] = [
        state.predict(x[:50], g, batch_size=16).tolist()
        for g in ((0, 1, None) if full else (None,))
    ]
    result["unchanged"] = _own(learned) == result["own"]
    result["divergence"] = list(state.divergence())
    tf.config.run_functions_eagerly(True)
    result["eagerly"] = _jsonable(state.get_weights(1)) == result["weights"][1]
    tf.config.run_functions_eagerly(False)
    state.export(1, os.path.join(directory, "group_1.keras"))
    # Where only the chief, which writes, can fail.
    result["not_exported"] = _error(
        lambda: state.export(1, os.path.join(directory, "none", "group.keras"))
    )
    # Directories that the processes do not share, after a good save.
    own_directory = os.path.join(directory, f"own_{rank}")
    result["not_saved"] = _error(lambda: state.save(own_directory))
    result["not_committed"] = not os.path.exists(
        os.path.join(own_directory, "manifest.json")
    )
    # Each keeps its own files, of the last save only; then they are merged.
    for _ in range(2):
        state.save(own_directory, epoch=2, shared=False)
    result["kept_files"] = sorted(os.listdir(own_directory))
    tf_xshard.barrier(strategy)
    merged = os.path.join(directory, "merged")
    if rank == 0:
        for r in range(strategy.num_replicas_in_sync):
            part = os.path.join(directory, f"own_{r}")
            shutil.copytree(part, merged, dirs_exist_ok=True)
    tf_xshard.barrier(strategy)
    before = _own(learned)
    _add_one(state, learned)
    position = state.restore(merged)
    result["from_merged"] = [position.epoch, _own(learned) == before]
    path = os.path.join(directory, "save")
    state.save(path, epoch=3, step=1)
    own = _own(learned)
    _add_one(state, learned)
    changed = _own(learned)
    result["position"] = state.restore(path)
    result["restored"] = _own(learned) == own != changed
    # One process can't read it: nothing changes on any.
    elsewhere = os.path.join(directory, "none") if rank == 2 else path
    _add_one(state, learned)
    result["refused"] = _error(lambda: state.restore(elsewhere))
    result["kept"] = _own(learned) == changed
    state.restore(path)
    kernel = model.layers[0].kernel
    if rank == 3:
        state.replicas.assign(kernel, [kernel.numpy() + 0.5])
    result["unequal"] = list(
        divergence.unequal(state.catalog(), state.replicas, repair=True)
    )
    result["repaired"] = list(
        divergence.unequal(state.catalog(), state.replicas, repair=False)
    )
    weights = state.get_weights(0)
    state.set_weights(1, {"model": weights["model"]})
    result["set"] = _own(model.weights)
    state.merge()
    result["merged"] = _own(learned)
    return result
