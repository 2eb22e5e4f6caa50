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

Generated from the docstrings by `python -m tests.programs.write_api_page`. They
say more: the type, meaning, default and unit of every argument, what is
returned, every error, an example and its source. Read one with
`help(tf_xshard.CrossShardOptimizer)`.
"""
_SECTIONS = (
    ("tf_xshard", tf_xshard),
    ("tf_xshard.testing", testing),
    ("tf_xshard.compat.v1", tf_xshard.compat.v1),
)


def _arguments(value) -> str:
    """The names of the arguments, with defaults that are short."""
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return ""
    shown = []
    for one in inspect.signature(value).parameters.values():
        name = {
            inspect.Parameter.VAR_POSITIONAL: f"*{one.name}",
            inspect.Parameter.VAR_KEYWORD: f"**{one.name}",
        }.get(one.kind, one.name)
        default = repr(one.default)
        if one.default is not inspect.Parameter.empty and len(default) < 20:
            name += f"={default}"
        shown.append(name)
    return f"({', '.join(shown)})"


def _first_sentence(doc: str) -> str:
    paragraph = " ".join(doc.split("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


def _methods(value) -> str:
    """The public methods and properties that this package defines."""
    if not isinstance(value, type):
        return ""
    own = [
        f"`{name}`"
        for base in value.__mro__
        if base.__module__.startswith("tf_xshard.")
        for name, member in vars(base).items()
        if not name.startswith(("_", "on_"))  # on_*: Keras calls them.
        and (inspect.isroutine(member) or isinstance(member, property))
    ]
    return f" Has {', '.join(dict.fromkeys(own))}." if own else ""


def _entry(name: str, value) -> str:
    doc = inspect.getdoc(value)
    if callable(value) and doc:
        return (
            f"- `{name}{_arguments(value)}`: {_first_sentence(doc)}"
            f"{_methods(value)}"
        )
    return f"- `{name}`" + (f": {value!r}" if isinstance(value, str) else "")


def page() -> str:
    """The page's text."""
    lines = [_HEADER]
    for title, module in _SECTIONS:
        lines.append(f"## {title}\n\n{_first_sentence(module.__doc__)}\n")
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not inspect.ismodule(value) and name != "__version__":
                lines.append(_entry(name, value))
        lines.append("")
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    PAGE.write_text(page())
