"""Trains Model Garden's models; compares each group with one device.

It runs in an environment that has Model Garden, in processes of its own for
each kind of replicas. Each group must end with the weights of one device that
gets its rows.
"""

import types
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import tf_keras
from official.core import base_trainer
from official.core import config_definitions as definitions
from official.modeling import optimization
from official.nlp.configs import encoders
from official.nlp.tasks import sentence_prediction
from official.vision.configs import image_classification as image_configs
from official.vision.tasks import image_classification

import tf_xshard
from tests.support import fitting
from tests.support import keras_2
from tests.support import replicas
from tf_xshard.distribute import site

NUM_STEPS = 3
BATCH_SIZE = 8
# Adam's default enlarges rounding errors: the gradient of BERT's key biases is
# exactly zero.
EPSILON = 0.01
ROWS = BATCH_SIZE // keras_2.NUM_REPLICAS


class Case(NamedTuple):
    """A model, its optimizer, and how it gets an aggregator."""

    model: str
    optimizer: dict
    groups: list | None = None
    # The optimizer of one device, if it is another one.
    reference: dict | None = None
    options: Mapping = types.MappingProxyType({})
    # with_aggregator, in place of build_optimizer's argument.
    afterwards: bool = False
    legacy: bool = True


def _optimizer(name, rate, ema=None, **options):
    constant = {"learning_rate": rate}
    return {
        "optimizer": {"type": name, name: options},
        "learning_rate": {"type": "constant", "constant": constant},
        "ema": ema,
    }


CASES = {
    "bert, adamw": Case(
        "bert",
        _optimizer("adamw", 0.01, epsilon=EPSILON, gradient_clip_norm=0.0),
        keras_2.GROUPS,
        # It clips each replica's gradient, and one device's is the group's.
        _optimizer("adamw", 0.01, epsilon=EPSILON, gradient_clip_norm=0.05),
        {"post_reduce": tf_xshard.clip_by_global_norm(0.05)},
    ),
    "bert, new adam": Case(
        "bert",
        _optimizer("adam_experimental", 0.01, epsilon=EPSILON),
        keras_2.GROUPS,
        afterwards=True,
        legacy=False,
    ),
    "bert, ema": Case(
        "bert",
        _optimizer("sgd", 0.1, {"average_decay": 0.9}),
        keras_2.GROUPS,
        afterwards=True,
    ),
    "resnet, sgd": Case("resnet", _optimizer("sgd", 0.02, momentum=0.9)),
}


def _bert_task():
    encoder = encoders.EncoderConfig(type="bert")
    bert = encoder.bert
    bert.num_layers, bert.hidden_size, bert.vocab_size = 1, 8, 50
    bert.num_attention_heads, bert.intermediate_size = 2, 16
    bert.max_position_embeddings = 6
    # Devices draw different numbers.
    bert.dropout_rate = bert.attention_dropout_rate = 0.0
    config = sentence_prediction.SentencePredictionConfig()
    config.model.encoder, config.model.num_classes = encoder, 3
    return sentence_prediction.SentencePredictionTask(config)


def _resnet_task():
    config = image_configs.ImageClassificationTask()
    config.model.num_classes = 4
    config.model.input_size = [16, 16, 3]
    config.model.backbone.type = "resnet"
    config.model.backbone.resnet.model_id = 10
    config.model.backbone.resnet.depth_multiplier = 0.25
    config.model.norm_activation.use_sync_bn = True
    # Metrics of a few classes.
    config.evaluation.top_k = 2
    return image_classification.ImageClassificationTask(config)


TASKS = {"bert": _bert_task, "resnet": _resnet_task}


def _data(model, members):
    """The batches of replicas, one after another, or of their one device."""
    rng = np.random.default_rng(5)
    shape = (NUM_STEPS, keras_2.NUM_REPLICAS, ROWS)
    labels = rng.integers(0, 3, size=shape, dtype="int32")
    if model == "bert":
        # No token occurs twice in a step, since Model Garden's norm of a
        # gradient squares each occurrence.
        tokens = [rng.permutation(50)[: BATCH_SIZE * 6] for _ in labels]
        features = {
            "input_word_ids": np.int32(tokens).reshape(*shape, 6),
            "input_mask": np.ones((*shape, 6), "int32"),
            "input_type_ids": np.zeros((*shape, 6), "int32"),
            "label_ids": labels[..., None],
        }
    else:
        images = rng.normal(size=(*shape, 16, 16, 3)).astype("float32")
        features = (images, labels)

    mine = tf.nest.map_structure(
        lambda one: one[:, members].reshape(-1, *one.shape[3:]), features
    )
    return tf.data.Dataset.from_tensor_slices(mine)


def _build_optimizer(case, is_one_device):
    config = (is_one_device and case.reference) or case.optimizer
    factory = optimization.OptimizerFactory(
        optimization.OptimizationConfig(config)
    )
    how, aggregator = {"group_assignment": case.groups, **case.options}, None
    if not is_one_device and not case.afterwards:
        aggregator = tf_xshard.tf_keras.gradient_aggregator(**how)
    optimizer = factory.build_optimizer(
        factory.build_learning_rate(),
        gradient_aggregator=aggregator,
        use_legacy_optimizer=case.legacy,
    )
    if not is_one_device and case.afterwards:
        tf_xshard.tf_keras.with_aggregator(optimizer, **how)
    return optimizer


def _trained(case, strategy, members=None):
    """Trains through Model Garden's Trainer; returns values by replica.

    Without `members`, each replica gets its own rows.
    """
    batch_size = ROWS * len(members or [0])
    with strategy.scope():
        tf_keras.utils.set_random_seed(1)
        task = TASKS[case.model]()
        model = task.build_model()
        for layer in model.submodules:
            if isinstance(layer, tf_keras.layers.Dropout):
                layer.rate = 0.0
        data = _data(case.model, members or site.local_replica_ids(strategy))
        data = data.batch(batch_size, drop_remainder=True).repeat()
        trainer = base_trainer.Trainer(
            definitions.ExperimentConfig(
                task=task.task_config,
                trainer=definitions.TrainerConfig(
                    train_tf_while_loop=True, train_tf_function=True
                ),
            ),
            task,
            model,
            _build_optimizer(case, members is not None),
            evaluate=False,
            train_dataset=strategy.distribute_datasets_from_function(
                lambda _: fitting.untuned(data)
            ),
        )
        logs = trainer.train(tf.constant(NUM_STEPS))
    assert np.isfinite(logs["training_loss"])
    return [
        np.stack(replicas.values(strategy, v))
        for v in model.trainable_variables
    ]


def _difference(strategy, case):
    """The largest difference of a replica from its group's device."""

    got = _trained(case, strategy)

    def expected_of(members):
        alone = _trained(case, tf.distribute.get_strategy(), members)
        return [one for [one] in alone]

    return keras_2.largest_difference(strategy, got, case.groups, expected_of)


def main(kind):
    """Returns the difference of each case under one kind of replicas."""
    strategy = keras_2.strategy_of(kind)
    # Each of four processes also trains what it is compared with.
    names = ["bert, adamw"] if kind == "workers" else CASES
    return {name: _difference(strategy, CASES[name]) for name in names}


if __name__ == "__main__":
    for kind in ("mirrored", "tpu", "workers"):
        found = keras_2.found_by("model_garden_program", kind)
        print(kind, found, flush=True)
        assert max(found.values()) < 1e-6
