"""XLA compiles the programs of the simulated TPU without optimizing them.

Most run a few small steps: tests of `fit` there take 7.4 instead of 10.4 CPU
seconds. Programs that tests start have XLA's optimizations.
"""

import functools
import importlib.metadata

from tf_xshard.private.jax import tpu_simulation

_OPTIONS: dict[str, object] = {"xla_backend_optimization_level": 0}
if importlib.metadata.version("jax").startswith("0.10."):
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False


@functools.cache
def without_optimizations():
    """Sets it for this process, once."""
    client = tpu_simulation.xla_client
    make = client.CompileOptions

    def options():
        made = make()
        made.env_option_overrides = list(_OPTIONS.items())
        return made

    client.CompileOptions = options
