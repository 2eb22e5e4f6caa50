"""Iterators of several devices whose functions are traced once.

Every `fit`, `evaluate` and `predict` under a strategy makes two or three of
them, and TensorFlow traces six functions a replica for each, the same ones each
time. Here they are traced once for a device and a type of element. `fit` over
several processes, the demo and `launch` are tested with TensorFlow's own.
"""

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.data.util import structure
from tensorflow.python.eager import context
from tensorflow.python.framework import type_utils
from tensorflow.python.ops import functional_ops
from tensorflow.python.ops import gen_dataset_ops

if not hasattr(multi_device_iterator_ops, "_create_device_dataset"):
    raise ImportError(
        "This TensorFlow makes iterators of several devices elsewhere; tests"
        f" run without {__name__}, but longer."
    )
_TheirGenerator = multi_device_iterator_ops._PerDeviceGenerator
_their_dataset = multi_device_iterator_ops._create_device_dataset
_FUNCTIONS = {}


def traced_once():
    """Replaces TensorFlow's in this process."""
    multi_device_iterator_ops._PerDeviceGenerator = _Generator
    multi_device_iterator_ops._create_device_dataset = _dataset


def _dataset(generator, incarnation_id, prefetch_buffer_size, slack):
    """Theirs makes a second generator, with the same id."""
    if generator.is_theirs:
        return _their_dataset(
            generator, incarnation_id, prefetch_buffer_size, slack
        )
    assert prefetch_buffer_size and not slack, "Never asked for."
    return generator.prefetch(prefetch_buffer_size)


class _Generator(dataset_ops.DatasetV2):
    """What arrives on one device: `_PerDeviceGenerator`."""

    def __init__(self, *arguments, **options):
        # In a function their functions are a part of it.
        self.is_theirs = not tf.executing_eagerly()
        make = _TheirGenerator.__init__ if self.is_theirs else _Generator._make
        make(self, *arguments, **options)

    def _make(
        self,
        shard_num,
        resource,
        incarnation_id,
        source,
        element_spec,
        iterator_is_anonymous,
    ):
        del iterator_is_anonymous  # The resource is kept in either case.
        self._element_spec = element_spec
        key = (context.context().device_name, shard_num, repr(element_spec))
        if key not in _FUNCTIONS:
            _FUNCTIONS[key] = _functions(shard_num, element_spec)
        first, following, last = _FUNCTIONS[key]
        handle = gen_dataset_ops.multi_device_iterator_to_string_handle(
            resource
        )
        super().__init__(
            gen_dataset_ops.generator_dataset(
                [handle],
                # The function has no argument for the resource, which lives
                # as long as this.
                [incarnation_id, source, resource],
                [],
                init_func=first,
                next_func=following,
                finalize_func=last,
                **self._flat_structure,
            )
        )

    def _inputs(self):
        return []

    @property
    def element_spec(self):
        return self._element_spec


def _functions(shard_num, element_spec):
    """What begins, goes on and ends, as GeneratorDataset calls them."""
    types = structure.get_flat_tensor_types(element_spec)
    shapes = structure.get_flat_tensor_shapes(element_spec)
    string = tf.TensorSpec([], tf.string)

    @tf.function(input_signature=[string], autograph=False)
    def first(handle):
        return handle

    @tf.function(
        input_signature=[string, tf.TensorSpec([], tf.int64)], autograph=False
    )
    def at_source(handle, incarnation_id):
        return gen_dataset_ops.multi_device_iterator_get_next_from_shard(
            gen_dataset_ops.multi_device_iterator_from_string_handle(
                handle, output_types=types, output_shapes=shapes
            ),
            shard_num,
            incarnation_id,
            output_types=types,
            output_shapes=shapes,
        )

    at_source = at_source.get_concrete_function()

    @tf.function(
        input_signature=[string, tf.TensorSpec([], tf.int64), string],
        autograph=False,
        experimental_attributes={"experimental_ints_on_device": True},
    )
    def following(handle, incarnation_id, source):
        values = functional_ops.remote_call(
            source, [handle, incarnation_id], types, at_source
        )
        for value in values:
            value.op.experimental_set_type(
                type_utils.fulltype_list_to_product(
                    type_utils.fulltypes_for_flat_tensors(element_spec)
                )
            )
        return values

    @tf.function(input_signature=[string], autograph=False)
    def last(handle):
        del handle
        return tf.constant(0, tf.int64)

    return [one.get_concrete_function() for one in (first, following, last)]
