"""TPUStrategy with no TPU: execute it with XLA:CPU, compile it for TPUs.

    your step -> TPUStrategy's trace -> TensorFlow's bridge -> StableHLO
                                                                  |
                 simulated_tpu_strategy: XLA:CPU, N replicas  <---+
                 compile_for_tpu: libtpu's compiler, HLO      <---+

Needs the extra `[testing]`, which pins the versions of jax and libtpu that are
tested; tensorflow-tpu can't be in the same environment.

- `simulated_strategy`: the strategy that users get.
- `strategy_run`: what its `run` does.
- `replicated_program`: the program that TPUStrategy traced, out of its graph.
- `stablehlo`: the program in StableHLO, for given shapes.
- `portable_stablehlo`: its text as every compiler accepts it; StableHLO where
  `tpu_operations` left custom calls.
- `tpu_operations`: replaces operations that only a TPU has.
- `refusals`: operations that the simulated TPU refuses, by name.
- `execution`: adds the execution to the user's graph.
- `xla_cpu`: executes a program on N devices of XLA:CPU.
- `fabricated_tpu`: a TPU system's topology and cluster resolver.
- `compile_for_tpu`: compiles a step with the TPU compiler.
- `compiled`: the compiler's result, and its report.
- `compiled_hlo`: reads the collectives out of an optimized module.
- `requirements`: the versions of jax and libtpu.
"""

from __future__ import annotations

from tf_xshard.testing import requirements

requirements.check_jax()

from tf_xshard.testing.compile_for_tpu import compile_for_tpu  # noqa: E402
from tf_xshard.testing.compiled import CompiledForTPU  # noqa: E402
from tf_xshard.testing.compiled import MemoryStatistics  # noqa: E402
from tf_xshard.testing.compiled_hlo import Collective  # noqa: E402
from tf_xshard.testing.simulated_strategy import simulated_tpu_strategy  # noqa: E402
from tf_xshard.testing.simulated_strategy import SimulatedTPUStrategy  # noqa: E402

__all__ = (
    "Collective",
    "CompiledForTPU",
    "MemoryStatistics",
    "SimulatedTPUStrategy",
    "compile_for_tpu",
    "simulated_tpu_strategy",
)
