"""Writes the shipped examples into the guides that show them.

`python -m tests.programs.write_examples_in_pages`. A test compares the guides
with what this would write.
"""

import re

from tests.support import paths

DOCS = paths.ROOT / "tf_xshard" / "docs"
MARKED = re.compile(
    r"(<!-- (tf_xshard/examples/\w+\.py) -->\n```python\n)(.*?)(```)", re.S
)


def _shown(path: str) -> str:
    """The program, without the docstring that the guide's text repeats."""
    source = (paths.ROOT / path).read_text()
    return source.split('"""\n', 1)[1].lstrip()


def filled(page: str) -> str:
    """The page, with each marked block as its example is now."""
    return MARKED.sub(
        lambda match: match[1] + _shown(match[2]) + match[4], page
    )


if __name__ == "__main__":
    for path in DOCS.glob("*.md"):
        path.write_text(filled(path.read_text()))
