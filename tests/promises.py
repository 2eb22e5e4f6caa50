"""What the package promises, the test that holds it, and what it must notice.

Each row names a promise of README.md or of a guide, a test of the default run,
and a mutant: one change of one file, after which the package still runs and
gives a wrong number, hangs or loses something, and with which that test fails.
`python -m tests.programs.mutation_check` applies the mutants one by one. When a
file is rewritten, its rows are replaced, never dropped.
"""

from typing import NamedTuple


class Promise(NamedTuple):
    """A row.

    Attributes:
      text: The promise.
      test: The id of the test.
      file: The file that the mutant changes, below tf_xshard/.
      old: Text that occurs once in that file.
      new: What the mutant has in its place.
      cluster: Whether the test starts several processes; such rows are checked
        one at a time.
    """

    text: str
    test: str
    file: str
    old: str
    new: str
    cluster: bool = False


C = "tests/conformance/"
O = "tests/optimizers/"  # noqa: E741

COLLECTIVES_AND_REDUCTION: list[Promise] = []

CROSS_SHARD: list[Promise] = []

TOWER_AND_LOSSES: list[Promise] = []

AGN_AND_STEPS: list[Promise] = []

COMPAT_AND_TF_KERAS: list[Promise] = []

MULTI_WORKER: list[Promise] = []

STATE_AND_TOOLS: list[Promise] = []

PAGES: list[Promise] = []

PROMISES = [
    *COLLECTIVES_AND_REDUCTION,
    *CROSS_SHARD,
    *TOWER_AND_LOSSES,
    *AGN_AND_STEPS,
    *COMPAT_AND_TF_KERAS,
    *MULTI_WORKER,
    *STATE_AND_TOOLS,
    *PAGES,
]
