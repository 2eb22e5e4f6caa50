"""Adds README, the benchmarks and whole docstrings to the site."""

import pathlib
import re

from mkdocs.structure import files as files_lib

_ROOT = pathlib.Path(__file__).parents[1]
_DOCS = "tf_xshard/docs/"
# On a phone, a table scrolls instead of breaking the names in it.
_CSS = ".md-typeset td code { word-break: normal; }"
_INTRODUCTION = "Each public name, with its arguments, errors and an example."


def _relinked(page):
    """Returns a page of the repository with links to the site's pages."""

    def replace(match):
        text, target = match.groups()
        if target.startswith(("http", "#")):
            return match[0]
        if target.endswith("benchmarks/README.md"):
            return f"[{text}](benchmarks.md)"
        if target.startswith(_DOCS):
            return f"[{text}]({target.removeprefix(_DOCS)})"
        return match[0]

    return re.sub(r"\[([^\]]*)\]\(([^)]+)\)", replace, page)


def on_files(files, config):
    """Makes the home page of README, and a page of the benchmarks'."""
    for name, source in (
        ("index.md", "README.md"),
        ("benchmarks.md", "benchmarks/README.md"),
    ):
        text = _relinked((_ROOT / source).read_text())
        files.append(files_lib.File.generated(config, name, content=text))
    files.append(files_lib.File.generated(config, "site.css", content=_CSS))
    for picture in (_ROOT / "benchmarks").glob("*.png"):
        files.append(
            files_lib.File.generated(
                config, picture.name, abs_src_path=str(picture)
            )
        )
    return files


def on_page_markdown(markdown, page, config, files):
    """Shows a name's whole docstring where the page has its first sentence."""
    del config, files
    if page.file.src_uri != "api.md":
        return None
    title, _, names = markdown.partition("\n\n")
    markdown = "\n\n".join([title, _INTRODUCTION, names[names.index("## ") :]])
    return re.sub(
        r"^### .*?\n<!-- (\S+) -->\n.*?(?=^##|\Z)",
        r"::: \1\n\n",
        markdown,
        flags=re.S | re.M,
    )
