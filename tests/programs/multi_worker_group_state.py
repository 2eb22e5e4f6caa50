"""What each process of four_processes_test.py does with GroupState."""

import os
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import training
from tf_xshard.group_state import divergence


def _own(variables):
    return [np.float64(v.numpy()).tolist() for v in variables]


def _jsonable(weights):
    return {
        part: [np.float64(v).tolist() for v in values]
        for part, values in weights.items()
    }


def group_state(strategy):
    """Trains two groups, and looks at all of GroupState; what is gathered."""
    model = group_training.compiled(strategy)
    training.run_steps(model, [group_training.data(16)] * 2)
    state = tf_xshard.GroupState(model)
    learned = [*model.weights, *model.optimizer.variables]
    x, _ = group_training.data()
    result = {
        "own": _own(learned),
        "weights": [_jsonable(state.get_weights(g)) for g in (0, 1)],
        # The ensemble's need those of the groups.
        "predict": state.predict(x[:50], batch_size=16).tolist(),
        "divergence": list(state.divergence()),
    }
    assert _own(learned) == result["own"]
    tf.config.run_functions_eagerly(True)
    assert _jsonable(state.get_weights(1)) == result["weights"][1]
    tf.config.run_functions_eagerly(False)
    rank = tf_xshard.rank(strategy)
    _export(state, rank)
    _save_apart(state, learned, strategy)
    _save_together(state, learned, rank)
    _repair(state, model.layers[0].kernel, rank)
    state.set_weights(1, {"model": state.get_weights(0)["model"]})
    result["set"] = _own(model.weights)
    state.merge()
    result["merged"] = _own(learned)
    return result


def _export(state, rank):
    """What fails on the chief, which alone writes, fails on all."""
    state.export(1, "group_1.keras")
    with pytest.raises(Exception) as info:
        state.export(1, "none/group.keras")
    assert ("failed on worker 0" in str(info.value)) == (rank != 0)


def _save_apart(state, learned, strategy):
    """Directories that the processes do not share, and then merge."""
    rank = tf_xshard.rank(strategy)
    own = f"own_{rank}"
    text = "another process wrote, is missing here(?s:.*)pass shared=False"
    with pytest.raises(Exception, match=text):
        state.save(own)
    assert not os.path.exists(os.path.join(own, "manifest.json"))
    for _ in range(2):
        state.save(own, epoch=2, shared=False)
    # Of the last save only. Rank 0 has the manifest; each has values that no
    # other has.
    files = os.listdir(own)
    name = rf"(state-[0-9a-f]{{16}}-{rank:05d}\..*|manifest\.json)"
    assert len(files) == (2 if rank else 3)
    assert all(re.fullmatch(name, file) for file in files)
    tf_xshard.barrier(strategy)
    if rank == 0:
        for r in range(strategy.num_replicas_in_sync):
            shutil.copytree(f"own_{r}", "merged", dirs_exist_ok=True)
    tf_xshard.barrier(strategy)
    before = _own(learned)
    _add_one(state, learned)
    assert state.restore("merged").epoch == 2
    assert _own(learned) == before


def _save_together(state, learned, rank):
    state.save("save", epoch=3, step=1)
    saved = _own(learned)
    _add_one(state, learned)
    # One process can't read it: nothing changes on any.
    error = "FileNotFoundError" if rank == 2 else "failed on worker 2"
    changed = _own(learned)
    with pytest.raises(Exception) as info:
        state.restore("none" if rank == 2 else "save")
    assert error in f"{type(info.value).__name__}: {info.value}"
    assert _own(learned) == changed != saved
    assert tuple(state.restore("save")) == (3, 1)
    assert _own(learned) == saved


def _add_one(state, variables):
    for variable in variables:
        state.replicas.assign(variable, [variable.numpy() + 1])


def _repair(state, kernel, rank):
    """Worker 3's kernel differs, until it gets its group's."""
    if rank == 3:
        state.replicas.assign(kernel, [kernel.numpy() + 0.5])
    [found] = divergence.unequal(state.catalog(), state.replicas, repair=True)
    assert found["variable"].endswith("/kernel")
    assert (found["group"], found["replicas"]) == (1, [3])
    np.testing.assert_allclose(found["largest_difference"], 0.5, rtol=1e-5)
    assert not list(
        divergence.unequal(state.catalog(), state.replicas, repair=False)
    )
