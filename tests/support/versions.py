"""What depends on the version of Keras."""

import keras

# (major, minor)
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
