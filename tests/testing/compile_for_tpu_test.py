"""What the TPU compiler makes of a step: compiled for TPU, never run there."""

import functools
import math
import os
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import group_training
from tests.support import replicas
from tf_xshard import testing
from tf_xshard.testing import compiled as compiled_lib

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")

GROUPS = group_training.GROUPS
BATCH = group_training.data(16)
# Four rows on each replica, through two layers.
FLOPS = 2 * 4 * (4 * 6 + 6)


# For four cores.
_compiled = functools.partial(testing.compile_for_tpu, topology="v5e:2x2")


def _model(strategy, **kwargs):
    with strategy.scope():
        model = group_training.network()
        adam = keras.optimizers.Adam()
        optimizer = tf_xshard.CrossShardOptimizer(adam, **kwargs)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return model


def _assert_each_gradient_once(compiled, groups):
    """Every gradient is reduced over its group, once, and nothing else is."""
    operands = []
    for one in compiled.collectives:
        assert one.kind == "all-reduce"
        assert [list(g) for g in one.replica_groups] == groups
        operands += one.operands
    # The compiler may reshape a gradient; what it holds stays.
    shapes = [re.fullmatch(r"f32\[(.*)\]", one)[1] for one in operands]
    sizes = [math.prod(int(n) for n in one.split(",") if n) for one in shapes]
    assert sorted(sizes) == [1, 6, 6, 6, 6, 4 * 6]


def test_a_training_step():
    """The groups are exactly the assignment, and weights stay as they were."""
    model = _model(replicas.tpu(4), group_assignment=GROUPS)
    before = model.get_weights()
    compiled = _compiled(model, *BATCH)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    _assert_each_gradient_once(compiled, GROUPS)
    assert len(compiled.collectives) == 1
    assert compiled.topology == "v5e:2x2" and compiled.num_replicas == 4
    assert "v5" in compiled.device_kind
    assert compiled.hlo_text.startswith("HloModule")
    assert "stablehlo.all_reduce" in compiled.stablehlo_text
    memory = compiled.memory
    held = sum(v.numpy().nbytes for v in model.trainable_variables)
    assert memory.argument_bytes >= 3 * held  # Adam's slots, too.
    assert memory.peak_bytes >= memory.argument_bytes
    assert memory.alias_bytes >= 3 * held  # Variables are updated in place.
    assert compiled.flops >= FLOPS
    assert re.search(
        r"Compiled for TPU \(did not run\): v5e:2x2.*memory of one core.*"
        r"all-reduce of 6 arrays.*groups \[\[0, 2\], \[1, 3\]\]",
        str(compiled).replace("\n", " "),
    )


@replicas.in_full
@pytest.mark.parametrize(
    "topology, layout",
    replicas.in_turn(
        ("v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"),
        ("strided", "contiguous"),
    ),
)
def test_every_topology(topology, layout, report):
    groups = getattr(tf_xshard.GroupAssignment, layout)(8, 4)
    model = _model(replicas.tpu(8), group_assignment=groups)
    compiled = testing.compile_for_tpu(model, *BATCH, topology=topology)
    _assert_each_gradient_once(compiled, groups.to_list())
    assert len(compiled.collectives) == 1 or "tpu7x" in topology
    report(f"{layout}, compiled for TPU: {compiled}".replace("\n", "\n    "))


def test_a_sharded_update_is_two_all_reduces():
    """Of the gradients, and of the weights: README and the guide say so."""
    model = _model(replicas.tpu(4), shard_update=True)
    compiled = _compiled(model, *BATCH)
    assert [c.kind for c in compiled.collectives] == ["all-reduce"] * 2
    for collective in compiled.collectives:
        assert collective.num_bytes >= 4 * (4 * 6 + 6)


@pytest.mark.parametrize("step", ["test", "predict"])
def test_steps_of_a_model(step):
    environment = dict(os.environ)
    model = _model(replicas.tpu(4))
    compiled = _compiled(model, *BATCH, step=step)
    assert dict(os.environ) == environment
    assert compiled.collectives == ()
    assert compiled.flops >= FLOPS


def test_functions():
    strategy = replicas.tpu(4)
    groups = [[0, 3], [1, 2]]
    reduce = lambda x: tf.raw_ops.CrossReplicaSum(
        input=x, group_assignment=groups
    )
    step = lambda x: strategy.run(reduce, args=(x,))
    signature = [tf.TensorSpec([4, 128])]
    with_signature = tf.function(step, input_signature=signature)
    for arguments in ((step, tf.ones([4, 128])), (with_signature,)):
        [collective] = _compiled(*arguments).collectives
        assert collective.kind == "all-reduce"
        assert [list(g) for g in collective.replica_groups] == groups
        assert collective.num_bytes == 4 * 128 * 4
        assert collective.operands == ("f32[4,128]",)
    # Recording is over: functions run again.
    total = strategy.experimental_local_results(tf.function(step)(tf.ones([2])))
    assert [v.numpy().tolist() for v in total] == [[2, 2]] * 4


def test_a_program_that_computes_nothing():
    strategy = replicas.tpu(8)
    compiled = testing.compile_for_tpu(lambda: strategy.run(lambda: None))
    assert compiled.flops is None
    assert "flops of one replica: unknown" in str(compiled)


def _run_once(x):
    return replicas.tpu(8).run(lambda x: x + 1.0, args=(x,))


def test_refusals():
    """Of functions, of topologies, and of models and their batches."""
    ones, few, (x, y) = tf.ones([2]), group_training.data(12), BATCH
    twice = lambda x: (_run_once(x), _run_once(x))
    unknown_shape = lambda x: _run_once(tf.boolean_mask(x, x > 0))
    concrete = tf.function(_run_once).get_concrete_function(ones)
    model, mirrored = _model(replicas.tpu(8)), _model(replicas.mirrored(2))
    with replicas.tpu(8).scope():
        bare = keras.Sequential([keras.layers.Input((4,)), keras.layers.ReLU()])
    topology = lambda name: {"topology": name}
    for args, kwargs, error, match in (
        (("model",), {}, TypeError, "or a Keras model, got str"),
        ((lambda x: x, 1.0), {}, ValueError, r"run\(\) 0 times"),
        ((twice, ones), {}, ValueError, "2 times"),
        ((unknown_shape, ones), {}, ValueError, "unknown shape"),
        ((concrete,), {}, TypeError, "which is already traced"),
        ((_run_once, ones), topology(None), TypeError, "must be a str"),
        ((_run_once, ones), topology("v9:2x2"), ValueError, "y 'v9:2x2'"),
        ((_run_once, ones), topology("v5e:4x4"), ValueError, "16 cores, but"),
        ((model, x, y), {"step": "fit"}, ValueError, "step must be one of"),
        ((model,), {}, ValueError, "the batch is missing"),
        *(
            ((model, *batch), {}, ValueError, "multiple of 8.*NumPy arrays")
            for batch in (few, (x, y[:8]), (x, y.tolist()), (x, y[:0]))
        ),
        ((mirrored, x, y), {}, ValueError, "created under MirroredStrategy"),
        ((bare, x, x), {}, ValueError, "is not compiled"),
    ):
        with pytest.raises(error, match=match):
            testing.compile_for_tpu(*args, **kwargs)


HLO = """
HloModule m, is_scheduled=true
ENTRY %main (p: f32[4,2], q: bf16[8]) -> f32[4,2] {
  %p = f32[4,2]{1,0:T(8,128)} parameter(0)
  %q = bf16[8]{0} parameter(1)
  %s = (f32[4,2]{1,0:T(8,128)S(1)}, bf16[8]{0}) all-reduce-start(%p, /*i=1*/%q), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum
  %d = (f32[4,2]{1,0}, bf16[8]{0}) all-reduce-done(%s)
  %g = f32[16,2]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %r = f32[1,2]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%sum
  %c = f32[4,2]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  ROOT %e = f32[4,2]{1,0} all-reduce(%p), replica_groups={}, to_apply=%sum
}
"""  # noqa: E501


def test_reading_hlo():
    start, gather, scatter, permute, everyone = compiled_lib.collectives(HLO)
    assert start.kind == "all-reduce" and start.name == "s"
    assert start.replica_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert start.operands == ("f32[4,2]", "bf16[8]")
    assert start.num_bytes == 32 + 16
    assert gather.replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert gather.num_bytes == scatter.num_bytes == 32
    assert permute.replica_groups == ((0, 1), (1, 0))
    assert everyone.replica_groups == ()
    with pytest.raises(ValueError, match="unknown replica groups"):
        compiled_lib.collectives(HLO.replace("=[8], dim", "=?, dim"))
