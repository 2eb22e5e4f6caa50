"""Sentences are short, and docstrings begin with what a thing does."""

import ast
import functools
import pathlib
import re

from tests.support import paths

_PACKAGE = paths.ROOT / "tf_xshard"
PAGES = [
    paths.ROOT / "README.md",
    paths.ROOT / "benchmarks" / "README.md",
    *sorted((_PACKAGE / "docs").glob("*.md")),
]
MODULES = sorted(_PACKAGE.rglob("*.py"))
MAX_WORDS = 35
_FIRST_WORDS = set(
    "What Whether Of In On At By For From With Without To After Before Under"
    " Over Inside Outside Between Among".split()
)
_DOCUMENTED = (
    ast.Module,
    ast.ClassDef,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
)


def _paragraphs(text):
    """Yields the paragraphs and list items of Markdown; no tables or code."""
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        drawn = re.search(r"\s\|(\s|$)|->|\S {3,}\S", block)
        if not drawn and not block.lstrip().startswith(("#", ">>>", "!")):
            yield " ".join(block.split())


def long_sentences(text):
    """Returns the sentences of Markdown that have too many words."""
    found = []
    for paragraph in _paragraphs(text):
        # A link counts as its text, and code as one word.
        plain = re.sub(r"\]\([^)]*\)", "]", paragraph)
        plain = re.sub(r"``?[^`]*``?", "code", plain)
        for sentence in re.split(r"(?<=[.:?!])\)?\s+(?=[\w\[*(\"])", plain):
            if len(sentence.split()) > MAX_WORDS:
                found.append(sentence)
    return found


def docstrings(path):
    """Yields the name and the text of each docstring of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _DOCUMENTED) and (doc := ast.get_docstring(node)):
            yield getattr(node, "name", path.stem), doc


@functools.cache
def _docstrings_of_all():
    return [
        (f"{path.relative_to(_PACKAGE)}: {name}", doc)
        for path in MODULES
        for name, doc in docstrings(path)
    ]


def test_sentences_are_short():
    texts = [(page.name, page.read_text()) for page in PAGES]
    texts += [
        (name, doc.partition("\nExample:")[0])
        for name, doc in _docstrings_of_all()
    ]
    found = [
        (name, sentence)
        for name, text in texts
        for sentence in long_sentences(text)
    ]
    assert not found


def test_docstrings_begin_with_what_they_do():
    found = [
        (name, doc.splitlines()[0])
        for name, doc in _docstrings_of_all()
        if doc.split()[0] in _FIRST_WORDS
    ]
    assert not found


def test_the_checks_can_fail(tmp_path):
    text = "a word " * 18
    assert long_sentences(f"Short. It is {text}long.\n\n| {text} |") == [
        f"It is {text}long."
    ]
    assert not long_sentences(f"`{text}`. [{text[:40]}]({text})")
    module = tmp_path / "module.py"
    module.write_text('def f():\n    """What a call returns."""\n')
    [(name, doc)] = docstrings(pathlib.Path(module))
    assert name == "f" and doc.split()[0] in _FIRST_WORDS
