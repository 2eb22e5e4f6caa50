"""Executes TPUStrategy with XLA:CPU, and compiles it for TPUs, without a TPU.

    your step -> TPUStrategy's trace -> TensorFlow's bridge -> StableHLO
                                                                  |
                 simulated_tpu_strategy: XLA:CPU, N replicas  <---+
                 compile_for_tpu: libtpu's compiler, HLO      <---+

The extra `[testing]` pins the tested versions of jax and libtpu. tensorflow-tpu
can't be in the same environment.

- `simulated_strategy`: the strategy that users create, its topology and its
  cluster resolver.
- `replicated_program`: extracts the replicas' program from a traced graph;
  raises an error for operations that the simulated TPU can't execute.
- `stablehlo`: lowers the program to StableHLO, for given shapes, in a syntax
  that every compiler reads.
- `tpu_operations`: TPU operations that the simulated TPU executes. Add a new
  operation here first; if XLA has no operation for it, also to `stablehlo`.
- `execution`: replaces `strategy.run()`; adds the program's execution to the
  user's graph.
- `xla_cpu`: executes a program on N devices of XLA:CPU.
- `compile_for_tpu`: compiles a step with the TPU compiler.
- `requirements`: checks the versions of jax and libtpu.
- `compiled`: the compiler's result, its report, and its program's collectives.
"""

from __future__ import annotations

from tf_xshard.testing import requirements

requirements.check_jax()

from tf_xshard.testing.compile_for_tpu import compile_for_tpu  # noqa: E402
from tf_xshard.testing.compiled import Collective  # noqa: E402
from tf_xshard.testing.compiled import CompiledForTPU  # noqa: E402
from tf_xshard.testing.compiled import MemoryStatistics  # noqa: E402
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
