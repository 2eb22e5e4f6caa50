"""Sentences are short, and docstrings begin with what a thing does."""

import ast
import re

from tests.source import layout_test
from tests.support import paths

PAGES = [
    paths.ROOT / "README.md",
    paths.ROOT / "benchmarks" / "README.md",
    *sorted((paths.ROOT / "tf_xshard" / "docs").glob("*.md")),
]
MAX_WORDS = 35
_FIRST_WORDS = set(
    "What Whether Of In On At By For From With Without To After Before Under"
    " Over Inside Outside Between Among".split()
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


def _docstrings():
    """Yields where each docstring is, and its text."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for module, tree in layout_test.MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, documented) and (
                doc := ast.get_docstring(node)
            ):
                yield f"{module}: {getattr(node, 'name', '')}", doc


def test_sentences_are_short():
    texts = {page.name: page.read_text() for page in PAGES}
    for name, doc in _docstrings():
        texts[name] = doc.partition("\nExample:")[0]
    found = {name: long_sentences(text) for name, text in texts.items()}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_docstrings_begin_with_what_they_do():
    found = [
        (name, doc.splitlines()[0])
        for name, doc in _docstrings()
        if doc.split()[0] in _FIRST_WORDS
    ]
    assert not found


def test_a_long_sentence_is_found():
    text = "a word " * 18
    assert long_sentences(f"Short. It is {text}long.\n\n| {text} |") == [
        f"It is {text}long."
    ]
    assert not long_sentences(f"`{text}`. [{text[:40]}]({text})")
