"""Eager operations run as kernels, not as functions of one operation.

TensorFlow makes a function of each eager operation whose attributes (the name
of a variable is one) it has not met before, and optimizes it as a graph: half
a millisecond each, and two thirds of the time to create a variable under
a strategy. The kernels are the same. Of the programs that tests start, those of
four processes call this.
"""

from tensorflow.python import pywrap_tfe

if not hasattr(pywrap_tfe, "TFE_ContextOptionsSetRunEagerOpAsFunction"):
    raise ImportError(
        "This TensorFlow runs eager operations in another way; tests run"
        f" without {__name__}, but longer."
    )
_set = pywrap_tfe.TFE_ContextOptionsSetRunEagerOpAsFunction


def not_as_functions():
    """Sets it for this process, whose TensorFlow must not have run yet."""
    # TensorFlow's context always sets True.
    pywrap_tfe.TFE_ContextOptionsSetRunEagerOpAsFunction = (
        lambda options, is_on: _set(options, False)
    )
