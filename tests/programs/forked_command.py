"""`python -m tf_xshard`, whose workers begin with TensorFlow imported.

Its arguments are those of `tf_xshard`.
"""

import runpy

from tests.support import forked

if __name__ == "__main__":
    with forked.instead_of_started():
        runpy.run_module("tf_xshard", run_name="__main__", alter_sys=True)
