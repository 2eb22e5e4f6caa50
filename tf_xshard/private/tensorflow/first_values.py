"""Names the method that gives a tf.function's new variables their values."""

from __future__ import annotations

from tf_xshard.private import names

# A tf.function calls it between its first trace and its first run. Present in
# TensorFlow 2.20 to 2.22.
METHOD = "_initialize_uninitialized_variables"
names.attributes("compare with variables that the first step creates", METHOD)
