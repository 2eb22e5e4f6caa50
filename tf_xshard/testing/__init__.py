"""TPUStrategy with no TPU: execute it with XLA:CPU, compile it for TPUs.

    your step -> TPUStrategy's trace -> TensorFlow's bridge -> StableHLO
                                                                  |
                 simulated_tpu_strategy: XLA:CPU, N replicas  <---+
                 compile_for_tpu: libtpu's compiler, HLO      <---+

Needs the extra `[testing]`, which pins jax and libtpu to the versions that this
is proven with; tensorflow-tpu can't be in the same environment.
"""

from __future__ import annotations

from tf_xshard.testing import requirements

requirements.check_jax()

from tf_xshard.testing.compiled_for_tpu import (  # noqa: E402
    CompiledForTPU,
    MemoryStatistics,
)
from tf_xshard.testing.compiled_hlo import Collective  # noqa: E402
from tf_xshard.testing.simulated_strategy import (  # noqa: E402
    SimulatedTPUStrategy,
    simulated_tpu_strategy,
)
from tf_xshard.testing.tpu_compiler import compile_for_tpu  # noqa: E402

__all__ = (
    "Collective",
    "CompiledForTPU",
    "MemoryStatistics",
    "SimulatedTPUStrategy",
    "compile_for_tpu",
    "simulated_tpu_strategy",
)
