"""Every message that a user can meet is on a troubleshooting page.

Messages are read from the code, so that an error without an entry, and an entry
whose error is gone, both fail.
"""

import ast
import re

from tests.source import layout_test
from tests.support import paths

_DOCS = paths.ROOT / "tf_xshard" / "docs"
# Entries of this section are about messages that are not in the code.
_FOREIGN = "Errors of Keras and TensorFlow"
# Fewer constant characters match messages that are not meant.
_LEAST_CONSTANT = 12
# These functions show their text to users, as raised errors do.
_REPORTERS = (
    *("error", "warning", "warn", "log_first_n", "_say"),
    *("assert_equal", "Assert"),
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
    if isinstance(node, ast.FormattedValue):
        return "..."
    parts = map(_text, ast.iter_child_nodes(node))
    return ("" if isinstance(node, ast.JoinedStr) else "...").join(parts)


def _name(call):
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def shown(tree):
    """The texts of the errors, warnings and log lines of a module."""
    raised = [
        node.exc
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    for call in ast.walk(tree):
        if call in raised or (
            isinstance(call, ast.Call) and _name(call) in _REPORTERS
        ):
            text = "...".join(map(_text, call.args))
            if _name(call) == "_say":
                text = f"tf_xshard launch: {text}"
            if _name(call) not in _NOT_SHOWN and text.strip(". "):
                yield text


def entries(text):
    """(fragment, whether it is ours) of the messages in a page's tables."""
    is_ours = True
    for line in text.splitlines():
        if line.startswith("#"):
            is_ours = line.strip("# ") != _FOREIGN
        if line.startswith("|"):
            cell = re.split(r"(?<!\\)\|", line)[1].replace(r"\|", "|")
            for fragment in re.findall(r"`([^`]+)`", cell):
                yield fragment, is_ours


def is_in(fragment, text):
    """Whether a message has a fragment, in which `...` is anything."""
    position = 0
    for part in fragment.split("..."):
        position = text.find(part, position) + len(part)
        if position < len(part):
            return False
    return True


ENTRIES = [
    entry
    for page in sorted(_DOCS.glob("troubleshooting*.md"))
    for entry in entries(page.read_text())
]


def test_every_message_has_an_entry():
    found = [
        (module, text)
        for module, tree in layout_test.MODULES.items()
        for text in shown(tree)
        if (module.removeprefix("tf_xshard."), text) not in _EXEMPT
        and not any(is_ours and is_in(one, text) for one, is_ours in ENTRIES)
    ]
    # On no troubleshooting page:
    assert not found


def test_every_entry_is_of_a_message():
    texts = set()
    for tree in layout_test.MODULES.values():
        texts.update(shown(tree))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                texts.add(_text(node))
    found = [
        fragment
        for fragment, is_ours in ENTRIES
        if len(fragment.replace("...", "").strip()) < _LEAST_CONSTANT
        or (is_ours and not any(is_in(fragment, text) for text in texts))
    ]
    # No such message, or too few characters:
    assert not found


def test_messages_are_found():
    for source in (
        'raise ValueError("A moon of" " cheese.")',
        'raise ValueError(f"A moon of {x}" " cheese")',
        'raise ValueError("A moon of " + x + " cheese")',
        'logging.warning("A moon of %d cheeses", n)',
        'parser.error(f"{moon}: A moon of cheese")',
        'tf.debugging.assert_equal(x, 0, "A moon of cheese")',
    ):
        [text] = shown(ast.parse(source))
        [(fragment, is_ours)] = entries("| `moon...cheese` | `meaning` | do |")
        assert is_ours and is_in(fragment, text), source
        assert not is_in("cheese...moon", text), source
    assert not [*shown(ast.parse('raise AssertionError("A moon")\nraise x'))]
    assert [*entries(f"## {_FOREIGN}\n| `A moon` | m | d |")] == [
        ("A moon", False)
    ]
