"""Gives MultiWorkerMirroredStrategy of one process several devices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tf_xshard.private import names

# `_from_local_devices` of the same class does this for TensorFlow's own tests.
# Present in TensorFlow 2.20 to 2.22.
names.attributes(
    "compare with MultiWorkerMirroredStrategy", "_initialize_local"
)


def use(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
    """Makes each device a replica of a strategy without a cluster."""
    strategy.extended._initialize_local(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        devices=[f"/device:{device}" for device in devices],
    )
