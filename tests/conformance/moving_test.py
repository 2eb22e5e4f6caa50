"""A running training moves into a wrapper, between wrappers, and back."""

import itertools
import pickle
import warnings

import keras
import pytest

import tf_xshard
from tests.support import filled
from tests.support import replicas
from tests.support.versions import needs_multi_optimizer

O = keras.optimizers  # noqa: E741
CROSS = tf_xshard.CrossShardOptimizer
OPTIMIZERS = {
    "plain": lambda: O.Adam(0.05),
    "cross": lambda: CROSS(O.Adam(0.05)),
    "sharded": lambda: CROSS(O.Adam(0.05), shard_update=True),
    "tower": lambda: tf_xshard.TowerOptimizer(O.Adam(0.05), 1),
    "towers": lambda: CROSS(tf_xshard.TowerOptimizer(O.Adam(0.05), 1)),
    "cross_scale": lambda: CROSS(O.LossScaleOptimizer(O.Adam(0.05))),
    "sharded_scale": lambda: CROSS(
        O.LossScaleOptimizer(O.Adam(0.05)), shard_update=True
    ),
    "scale": lambda: O.LossScaleOptimizer(O.Adam(0.05)),
}
# By a file of weights, by tf.train.Checkpoint, and by one that is restored
# before the optimizer is built.
WAYS = ["weights.h5", "built", "unbuilt"]
on_every_way = pytest.mark.parametrize("way", WAYS)


def _two_towers():
    return tf_xshard.TowerOptimizer(O.Adam(0.05), 2)


def _agn():
    return tf_xshard.AGNOptimizer(O.Adam(0.05), communication_period=2)


def _loaded(optimizer_fn, path, way, num_replicas=1):
    """A model that has loaded a file, and the text of all warnings."""
    strategy = replicas.mirrored(num_replicas)
    with warnings.catch_warnings(record=True, action="always") as warned:
        model = filled.load(optimizer_fn, strategy, way, path)
    return model, [
        str(one.message) for one in warned if one.category is UserWarning
    ]


def _of_built(way):
    """The way for plain Keras, which restores what is built."""
    return "built" if way == "unbuilt" else way


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of models with each optimizer, and the values in them."""
    directory = tmp_path_factory.mktemp("saved")
    files = {}
    for name, optimizer_fn in OPTIMIZERS.items():
        # A training that moves from one device to two replicas.
        number = 1 if name == "plain" else 2
        model = filled.model(optimizer_fn, replicas.mirrored(number))
        values = filled.fill(model)
        for way in ("weights.h5", "built"):
            files[name, way] = filled.save(model, way, directory / name), values
    return files


@pytest.mark.parametrize(
    "pair, way",
    replicas.in_turn(
        [
            pair
            for pair in itertools.permutations(OPTIMIZERS, 2)
            if ("scale" in pair[0]) == ("scale" in pair[1])
        ],
        WAYS,
    ),
)
def test_nothing_is_lost_between_two_optimizers(pair, way, saved):
    """Each variable of the target has its value, on both replicas."""
    source, target = pair
    if target in ("plain", "scale"):
        way = _of_built(way)
    path, values = saved[source, _of_built(way)]
    moved, warned = _loaded(OPTIMIZERS[target], path, way, 2)
    assert not warned
    filled.check(moved, values)


@on_every_way
def test_an_open_round_moves_between_towers_and_is_named_elsewhere(
    way, tmp_path
):
    model = filled.model(_two_towers)
    values = filled.fill(model)
    path = filled.save(model, way, tmp_path / "towers")
    nested, warned = _loaded(lambda: CROSS(_two_towers()), path, way)
    assert not warned
    filled.check(nested, values)

    cross, warned = _loaded(OPTIMIZERS["cross"], path, way)
    lost = "for 5 of the file" if way == "weights.h5" else "['TowerOptimizer']"
    assert any("no place for" in one and lost in one for one in warned)
    plain, _ = _loaded(OPTIMIZERS["plain"], path, _of_built(way))
    for one in (cross, plain):
        # Without the round's five variables, after two weights.
        filled.check(one, [*values[:2], *values[7:]])

    path = filled.save(
        filled.model(OPTIMIZERS["plain"]), way, tmp_path / "plain"
    )
    _, warned = _loaded(_two_towers, path, way)
    assert any("['TowerOptimizer'] start fresh" in one for one in warned)


@on_every_way
def test_into_and_out_of_agn(way, tmp_path):
    """The local optimizer's slots are those of the training."""
    plain = filled.model(OPTIMIZERS["plain"])
    values = filled.fill(plain)
    path = filled.save(plain, way, tmp_path / "plain")
    agn, warned = _loaded(_agn, path, way)
    # A second warning would be Keras', of the center's optimizer.
    center = [agn.optimizer.inner_optimizer.name] * (way == "weights.h5")
    [warning] = warned
    assert f"{['AGNOptimizer', *center]} start fresh" in warning
    assert int(agn.optimizer.iterations.numpy()) == values[2]
    filled.check(
        agn, values[4:], lambda one: one.optimizer.local_optimizer.variables[2:]
    )
    values = filled.fill(agn, seed=6)
    path = filled.save(agn, way, tmp_path / "agn")
    again, warned = _loaded(_agn, path, way)
    assert not warned
    filled.check(again, values)
    back, _ = _loaded(OPTIMIZERS["plain"], path, _of_built(way))
    steps = [int(one.optimizer.iterations.numpy()) for one in (back, agn)]
    assert steps[0] == steps[1]


@needs_multi_optimizer
def test_a_checkpoint_of_several_optimizers(tmp_path):
    """tf.train.Checkpoint does not follow a MultiOptimizer; wrappers do."""
    multi = lambda: O.MultiOptimizer(lambda _: O.Adam(0.05))
    cross = lambda: CROSS(multi())
    towers = lambda: tf_xshard.TowerOptimizer(multi(), 1)
    model = filled.model(cross)
    values = filled.fill(model)
    path = filled.save(model, "built", tmp_path / "state")
    # Any wrapper around it has them, so nothing is lost and nothing named.
    for target in (towers, cross):
        moved, warned = _loaded(target, path, "built")
        assert not warned
        filled.check(moved, values)
        path = filled.save(moved, "built", tmp_path / "moved")
    # Without a wrapper only Keras' files have them.
    plain = filled.model(multi)
    values = filled.fill(plain)
    path = filled.save(plain, "weights.h5", tmp_path / "plain")
    moved, warned = _loaded(cross, path, "weights.h5")
    assert not warned
    filled.check(moved, values)


def test_pickling():
    for make in (*OPTIMIZERS.values(), _two_towers, _agn):
        optimizer = make()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_config() == optimizer.get_config()
    model = filled.model(_two_towers)
    values = filled.fill(model)
    filled.check(pickle.loads(pickle.dumps(model)), values)
