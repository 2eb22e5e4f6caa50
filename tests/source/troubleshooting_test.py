"""Every message that a user can meet is on a troubleshooting page.

Messages are read from the code, so that an error without an entry, and an entry
whose error is gone, both fail.
"""

import ast
import re

import pytest

from tests.source import layout_test
from tests.support import paths

_DOCS = paths.ROOT / "tf_xshard" / "docs"
PAGES = tuple(
    _DOCS / f"troubleshooting{suffix}.md"
    for suffix in ("", "_commands", "_tf1", "_tpus")
)
# Entries of this section are about messages that are not in the code.
_FOREIGN = "Errors of Keras and TensorFlow"
# Fewer constant characters match messages that are not meant.
_LEAST_CONSTANT = 12


# These functions show their text to users, as raised errors do.
_REPORTERS = (
    "error",
    "warning",
    "warn",
    "log_first_n",
    "assert_equal",
    "Assert",
    "_say",
)
# Nobody meets these: NotImplementedError of an abstract method, and what is
# impossible.
_NOT_SHOWN = ("NotImplementedError", "AssertionError")
# Raised for Python, which asks for names such as __path__, and for hasattr;
# repeated with a text that is made before.
_EXEMPT = {
    ("callbacks.divergence_sentinel", "%s..."),
    ("cli.plan", "...: ..."),
    ("multi_worker.exchange", "...error..."),
    ("multi_worker.launch", "tf_xshard launch: ..."),
    ("multi_worker.launch", "tf_xshard launch: worker ... ...."),
    ("compat.v1.tensorflow", "... ..."),
    ("private.keras.moving_averages", "_model_variables_moving_average"),
    ("testing.compiled", "... has no ...: ..."),
}


def _text(node):
    """The constants of an expression, with `...` for what is inserted."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "..."
    parts = [_text(child) for child in ast.iter_child_nodes(node)]
    if isinstance(node, ast.JoinedStr):
        return "".join(parts)
    if isinstance(node, ast.FormattedValue):
        return "..."
    return "...".join(parts)


def _name(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def shown(tree):
    """(line, text) of the errors, warnings and log lines of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
        elif isinstance(node, ast.Call) and _name(node) in _REPORTERS:
            call = node
        else:
            continue
        text = "...".join(map(_text, call.args))
        if _name(call) == "_say":
            text = f"tf_xshard launch: {text}"
        if _name(call) not in _NOT_SHOWN and text.strip(". "):
            yield node.lineno, text


def strings(tree):
    """Every text that a module could show."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            yield _text(node)


def fragments(page, text):
    """("page:line", fragment, whether it is ours) of every entry's messages."""
    is_ours = True
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            is_ours = line.strip("# ") != _FOREIGN
        if line.startswith("|"):
            cell = re.split(r"(?<!\\)\|", line)[1].replace(r"\|", "|")
            for fragment in re.findall(r"`([^`]+)`", cell):
                yield f"{page}:{number}", fragment, is_ours


def _pattern(fragment):
    """What matches a message with that fragment; `...` is anything."""
    return re.compile(".*?".join(map(re.escape, fragment.split("..."))), re.S)


def missing(found, entries):
    """The messages, exempt ones apart, that no entry is about."""
    patterns = [_pattern(one) for _, one, is_ours in entries if is_ours]
    return [
        f"{name}:{line} {text}"
        for name, line, text in found
        if (name.removeprefix("tf_xshard."), text) not in _EXEMPT
        and not any(pattern.search(text) for pattern in patterns)
    ]


def stale(texts, entries):
    """The fragments of no message, and those that could be of any."""

    def is_shown(fragment):
        parts, pattern = fragment.split("..."), _pattern(fragment)
        return any(
            all(part in text for part in parts) and pattern.search(text)
            for text in texts
        )

    return [
        f"{where} {fragment}"
        for where, fragment, is_ours in entries
        if len(fragment.replace("...", "").strip()) < _LEAST_CONSTANT
        or (is_ours and not is_shown(fragment))
    ]


@pytest.fixture(scope="module")
def entries():
    return [
        one for page in PAGES for one in fragments(page.name, page.read_text())
    ]


def test_every_message_has_an_entry(entries):
    modules = layout_test.MODULES.items()
    messages = [(n, *one) for n, tree in modules for one in shown(tree)]
    # On no troubleshooting page:
    assert missing(messages, entries) == []


def test_every_entry_is_of_a_message(entries):
    trees = layout_test.MODULES.values()
    texts = {one for tree in trees for one in strings(tree)}
    texts |= {text for tree in trees for _, text in shown(tree)}
    # No such message, or too few characters:
    assert stale(texts, entries) == []


def test_a_message_without_an_entry_is_found(entries):
    for source in (
        'raise ValueError("A moon of" " cheese.")',
        'raise ValueError(f"A moon of {x}" " cheese")',
        'raise ValueError("A moon of " + x + " cheese")',
        'raise ValueError("A moon of" + (" cheese" if x else ""))',
        'logging.warning("A moon of %d cheeses", n)',
        'parser.error(f"{moon}: A moon of cheese")',
        'tf.debugging.assert_equal(x, 0, "A moon of cheese")',
    ):
        found = [("m", *one) for one in shown(ast.parse(source))]
        assert missing(found, entries), source
        entry = next(fragments("page", "| `A moon of` | m | d |"))
        assert not missing(found, [entry]), source


def test_a_stale_entry_is_found():
    texts = strings(ast.parse('raise ValueError(f"A moon of {x} cheese")'))
    texts = set(texts)
    for page, number in (
        ("| `A moon of ... cheese` | m | d |", 0),
        ("| `A sun of cheese`<br>`A moon of` | m | d |", 2),
        (f"## {_FOREIGN}\n| `A sun of cheese` | m | d |", 0),
        (f"## {_FOREIGN}\n## Ours\n| `A sun of cheese` | m | d |", 1),
        ("| what it means | `not a message` | d |", 0),
    ):
        assert len(stale(texts, fragments("page", page))) == number, page


def test_what_is_no_message():
    source = (
        "raise\nraise error\nraise NotImplementedError\nraise _Cancelled()\n"
        'raise AssertionError("A moon of cheese")\nlogging.info("A moon")'
    )
    assert not list(shown(ast.parse(source)))
