"""Eager operations run as kernels, not as functions of one operation.

TensorFlow makes a function of each eager operation whose attributes (the name
of a variable is one) it has not met before, and optimizes it as a graph: half
a millisecond each, and two thirds of the time to create a variable under
a strategy. The kernels are the same. Of the programs that tests start, those of
four processes and Keras' own tests call this.
"""

from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context

if not hasattr(pywrap_tfe, "TFE_ContextOptionsSetRunEagerOpAsFunction"):
    raise ImportError(
        "This TensorFlow runs eager operations in another way; tests run"
        f" without {__name__}, but longer."
    )
_set = pywrap_tfe.TFE_ContextOptionsSetRunEagerOpAsFunction


def not_as_functions():
    """Sets it for this process, where TensorFlow must not have run yet."""
    if context.context()._context_handle is not None:
        raise RuntimeError("TensorFlow has run: call it earlier.")
    # TensorFlow's context always sets True.
    pywrap_tfe.TFE_ContextOptionsSetRunEagerOpAsFunction = (
        lambda options, is_on: _set(options, False)
    )
