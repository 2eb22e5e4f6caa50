"""What the package promises, the test that holds it, and what it must notice.

Each row of promises.txt names a promise of README.md or of a guide, a test of
the default run, and a mutant: one change of one file, after which the package
still runs and gives a wrong number, hangs or loses something, and with which
that test fails. `python -m tests.programs.mutation_check` applies the mutants
one by one. When a file is rewritten, its rows are replaced, never dropped.

A row is a paragraph: the promise; its test, or `cluster:` and a test that
starts several processes; the file, below tf_xshard/; and the mutant as a diff.
The removed text, which may begin within a line, occurs once in the file.
"""

import pathlib
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
    cluster: bool


def _row(paragraph):
    text, test, file, *diff = paragraph.splitlines()
    kind, test = test.split(": ", 1)
    if kind not in ("test", "cluster") or not file.startswith("file: "):
        raise ValueError(f"Not a row of promises.txt: {paragraph}")
    if wrong := [line for line in diff if line[:2].strip() not in ("-", "+")]:
        raise ValueError(f"Not a line of a diff: {wrong[0]!r} of {text!r}")
    old, new = (
        "\n".join(line[2:] for line in diff if line.startswith(sign))
        for sign in "-+"
    )
    file = file.removeprefix("file: ")
    return Promise(text, test, file, old, new, kind == "cluster")


def _paragraphs(path):
    return path.read_text(encoding="utf-8").strip().split("\n\n")


PROMISES = [
    _row(paragraph)
    for paragraph in _paragraphs(pathlib.Path(__file__).with_suffix(".txt"))
    if not paragraph.startswith("# ")
]
