"""Creates strategies with several replicas, for demo, doctor and benchmarks."""

from __future__ import annotations

import tensorflow as tf

from tf_xshard.distribute import site


def use_logical_cpus(count: int) -> list[str]:
    """Splits the CPU into logical devices, and returns their names."""
    [cpu, *_] = tf.config.list_physical_devices("CPU")
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"{count} logical CPUs must be configured before TensorFlow runs"
            " its first operation."
        ) from error
    return [f"CPU:{index}" for index in range(count)]


def split_gpu(count: int, megabytes: int) -> tf.distribute.Strategy:
    """Creates a strategy over logical GPUs of the first GPU."""
    [gpu, *_] = tf.config.list_physical_devices("GPU")
    tf.config.set_visible_devices([gpu], "GPU")
    tf.config.set_logical_device_configuration(
        gpu,
        [tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)] * count,
    )
    return tf.distribute.MirroredStrategy([f"GPU:{i}" for i in range(count)])


def best_strategy(num_replicas: int) -> tf.distribute.Strategy:
    """Creates the best strategy with several replicas on this machine."""
    if tf.config.list_physical_devices("TPU"):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        assignment = tf.tpu.experimental.DeviceAssignment.build(
            topology, num_replicas=len(tf.config.list_logical_devices("TPU"))
        )
        return tf.distribute.TPUStrategy(
            resolver, experimental_device_assignment=assignment
        )
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) > 1:
        return tf.distribute.MirroredStrategy(
            [f"GPU:{index}" for index in range(min(len(gpus), num_replicas))]
        )
    return tf.distribute.MirroredStrategy(use_logical_cpus(num_replicas))


def describe(strategy: tf.distribute.Strategy) -> str:
    """Describes a strategy, such as "MirroredStrategy over 4 logical CPUs"."""
    devices = strategy.extended.worker_devices
    kinds = sorted({device.split(":")[-2] for device in devices})
    logical = {"CPU", "GPU"} if site.has_split_gpus() else {"CPU"}
    kind = "/".join(f"logical {k}" if k in logical else k for k in kinds)
    return f"{type(strategy).__name__} over {len(devices)} {kind}s"
