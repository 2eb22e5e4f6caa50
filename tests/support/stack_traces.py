"""Where operations were made, which TensorFlow writes down for each of them."""

import functools
import inspect

from tensorflow.python.framework import ops


def not_recorded():
    """Makes operations without stack traces, as `tf.import_graph_def` does.

    TensorFlow reads all frames of Python for each operation, and in a test
    there are a hundred: a tenth of the suite's CPU time. Errors of Python are
    shown as ever; only what TensorFlow adds to those of a graph, the line that
    made the operation, is missing.
    """
    ops._create_c_op = functools.partial(
        ops._create_c_op, extract_traceback=False
    )


if "extract_traceback" not in inspect.signature(ops._create_c_op).parameters:
    raise ImportError(
        "This TensorFlow records stack traces elsewhere; tests run without "
        f"{__name__}, but longer."
    )
