"""How TensorFlow is told to communicate; the sums have tests of their own."""

import types

import pytest
import tensorflow as tf

from tf_xshard.collectives import subgroups

WHOLE = None
ONE = [tf.config.LogicalDeviceConfiguration(1024)]
GPU = "/job:localhost/replica:0/task:0/device:GPU:1"
CPU = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.mark.parametrize(
    "kind, device, gpus, hint",
    [
        ("mirrored", GPU, [WHOLE, WHOLE], "nccl"),
        ("mirrored", GPU, [ONE, ONE], "nccl"),
        ("mirrored", GPU, [2 * ONE], "auto"),
        ("mirrored", GPU, [WHOLE, 2 * ONE], "auto"),
        ("mirrored", CPU, [WHOLE, WHOLE], "auto"),
        # Its CommunicationOptions decide, which "auto" leaves to TensorFlow.
        ("multi_worker", GPU, [WHOLE, WHOLE], "auto"),
    ],
)
def test_nccl_is_for_whole_gpus(kind, device, gpus, hint, monkeypatch):
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind: range(len(gpus))
    )
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda index: gpus[index]
    )
    site = types.SimpleNamespace(kind=kind, device=device)
    assert subgroups._hint(site) == hint
