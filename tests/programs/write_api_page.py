"""Writes tf_xshard/docs/api.md: every public name, from its docstring.

`python -m tests.programs.write_api_page`. A test compares the page with what
this would write.
"""

import enum
import inspect
import re

import tf_xshard
from tests.support import paths
from tf_xshard import testing

PAGE = paths.ROOT / "tf_xshard" / "docs" / "api.md"
_HEADER = """# API

Each name with its arguments and the first sentence of its docstring. The
docstrings have the type, meaning and default of every argument, every error, an
example and the source. `python -m mkdocs serve -f .ci/mkdocs.yml` shows them on
this page.
"""
_SECTIONS = (
    ("tf_xshard", tf_xshard),
    ("tf_xshard.testing", testing),
    ("tf_xshard.compat.v1", tf_xshard.compat.v1),
    ("tf_xshard.tf_keras", tf_xshard.tf_keras),
)


def _arguments(value) -> str:
    """The names of the arguments, with defaults that are short."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ""
    shown = []
    for one in inspect.signature(value).parameters.values():
        # With the stars, without the annotation.
        name = re.split("[:=]", str(one))[0].strip()
        default = repr(one.default)
        if one.default is not one.empty and len(default) < 20:
            name += f"={default}"
        shown.append(name)
    return f"({', '.join(shown)})"


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


def _entry(name: str, path: str, value) -> str:
    doc = inspect.getdoc(value)
    if not callable(value) or not doc:
        shown = f" = {value!r}" if isinstance(value, str) else ""
        return f"### {path}.{name}\n\n`{name}{shown}`\n"
    # The site shows what is at this place in the source.
    where = f"{value.__module__}.{value.__qualname__}"
    return (
        f"### {path}.{name}\n<!-- {where} -->\n\n"
        f"`{name}{_arguments(value)}`: {_first_sentence(doc)}\n"
    )


def page() -> str:
    """The page's text."""
    lines = [_HEADER]
    for title, module in _SECTIONS:
        lines.append(f"## {title}\n\n{_first_sentence(module.__doc__)}\n")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not inspect.ismodule(value) and name != "__version__":
                lines.append(_entry(name, title, value))
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page())
