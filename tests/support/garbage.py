"""Python's garbage collector, which reads all of TensorFlow again and again.

TensorFlow and Keras make half a million objects when they are imported, and
every function that is traced makes thousands: without this, more than a tenth
of the suite's CPU time is the search for cycles among objects that stay.
Nothing is collected from the import of this module until `resume`.
"""

import gc

gc.disable()


def resume():
    """Collects again, but not what is there already, and less often."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    gc.enable()
