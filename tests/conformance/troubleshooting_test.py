"""Every message that a user can meet is on a troubleshooting page.

Messages are read from the code, so that an error without an entry, and an entry
whose error is gone, both fail.
"""

import ast
import functools
import re

import pytest

from tests.conformance import layout_test
from tests.support import messages
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


# Nobody meets these, or not as a text of their own. Besides, by rule: what is
# raised again, NotImplementedError without a text (an abstract method), and
# AssertionError (the impossible).
_EXEMPT = {
    ("tf_xshard.collectives.transport", "..."): (
        "callers ask for `gathers` before they gather"
    ),
    ("tf_xshard.compat.v1.optimizers.cross_shard", "..."): (
        "GroupAssignment's own text, in an error of the original's type"
    ),
    ("tf_xshard.compat.v1.tensorflow", "..."): (
        "for Python's import, which asks for names such as __path__"
    ),
    ("tf_xshard.private.names", "..."): (
        "for Python, which asks for names such as __wrapped__"
    ),
    ("tf_xshard.private.keras.moving_averages", "..."): (
        "what `refuse_swapped_averages` got"
    ),
    (
        "tf_xshard.private.keras.moving_averages",
        "_model_variables_moving_average",
    ): "for hasattr",
    ("tf_xshard.testing.compiled_hlo", "... has no ...: ..."): (
        "the one libtpu that is allowed prints it"
    ),
}


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


def missing(shown, entries):
    """The messages, exempt ones apart, that no entry is about."""
    patterns = [_pattern(one) for _, one, is_ours in entries if is_ours]
    return [
        f"{name}:{line} {_readable(text)}"
        for name, line, text in shown
        if (name, _readable(text)) not in _EXEMPT
        and not any(pattern.search(text) for pattern in patterns)
    ]


def stale(shown, entries):
    """The fragments of no message, and those that could be of any."""
    texts = {text for *_, text in shown}
    return [
        f"{where} {fragment}"
        for where, fragment, is_ours in entries
        if len(fragment.replace("...", "").strip()) < _LEAST_CONSTANT
        or (is_ours and not any(map(_pattern(fragment).search, texts)))
    ]


def _readable(text):
    return text.replace(messages.ANY, "...")


@functools.cache
def _messages():
    modules = layout_test.MODULES.items()
    return [
        one for name, tree in modules for one in messages.of_module(name, tree)
    ]


@functools.cache
def _entries():
    return [
        one for page in PAGES for one in fragments(page.name, page.read_text())
    ]


def test_every_message_has_an_entry():
    found = missing(_messages(), _entries())
    assert not found, "\n".join(
        ["on no troubleshooting page in tf_xshard/docs:", *found]
    )


def test_every_entry_is_of_a_message():
    found = stale(_messages(), _entries())
    assert not found, "\n".join(
        [f"no such message, or less than {_LEAST_CONSTANT} characters:", *found]
    )


def test_what_is_exempt_exists():
    found = {(name, _readable(text)) for name, _, text in _messages()}
    assert found >= _EXEMPT.keys(), _EXEMPT.keys() - found


# The ways to write a message.
_WAYS = {
    "constant": 'raise ValueError("A moon of" " cheese.")',
    "f-string": 'raise ValueError(f"A moon of {x}" " cheese")',
    "concatenated": 'raise ValueError("A moon of " + x + " cheese")',
    "formatted": 'raise ValueError("A moon of {} cheese".format(x))',
    "conditional": 'raise ValueError("A moon" + (" of cheese" if x else ""))',
    "module's name": (
        '_MOON = "A moon of"\ndef f():\n    raise ValueError(f"{_MOON} {x}")'
    ),
    "local name": (
        'def f():\n    x = "A moon"\n    x += " of cheese"\n    log.error(x)'
    ),
    "helper": (
        'def why(self):\n    return "A moon of cheese"\n'
        "raise ValueError(self.why())"
    ),
    "error of a helper": (
        'def error():\n    return ValueError("A moon of cheese")\nraise error()'
    ),
    "log": 'logging.warning("%s of %d cheeses", "A moon", n)',
    "argument parser": 'parser.error(f"{moon}: A moon of cheese")',
    "assertion": 'tf.debugging.assert_equal(x, 0, "A moon of cheese")',
}


@pytest.mark.parametrize("source", _WAYS.values(), ids=_WAYS)
def test_a_message_without_an_entry_is_found(source):
    shown = list(messages.of_module("m", ast.parse(source)))
    assert missing(shown, _entries())
    entry = next(fragments("page", "| `A moon of` | m | d |"))
    # Some of these can be "A moon", too.
    assert len(missing(shown, [entry])) < len(shown)


@pytest.mark.parametrize(
    "page, number",
    [
        ("| `A moon of ... cheese` | m | d |", 0),
        ("| `A sun of cheese`<br>`A moon of` | m | d |", 2),
        (f"## {_FOREIGN}\n| `A sun of cheese` | m | d |", 0),
        (f"## {_FOREIGN}\n## Ours\n| `A sun of cheese` | m | d |", 1),
        ("| what it means | `not a message` | d |", 0),
    ],
)
def test_a_stale_entry_is_found(page, number):
    shown = messages.of_module(
        "m", ast.parse('raise ValueError(f"A moon of {x} cheese")')
    )
    assert len(stale(list(shown), fragments("page", page))) == number


def test_what_is_no_message():
    source = (
        "raise\nraise error\nraise NotImplementedError\nraise _Cancelled()\n"
        'raise AssertionError("A moon of cheese")\nlogging.info("A moon")'
    )
    assert not list(messages.of_module("m", ast.parse(source)))
