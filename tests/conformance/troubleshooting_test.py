"""Every message that a user can meet is on a troubleshooting page.

Messages are read from the code, so that an error without an entry, and an entry
whose error is gone, both fail.
"""

import ast
import functools
import itertools
import re

import pytest

from tests.conformance import layout_test
from tests.support import paths

_DOCS = paths.ROOT / "tf_xshard" / "docs"
PAGES = tuple(
    _DOCS / f"troubleshooting{suffix}.md" for suffix in ("", "_tf1", "_tpus")
)
# Entries of this section are about messages that are not in the code.
_FOREIGN = "Errors of Keras and TensorFlow"
# An inserted value.
_ANY = "\0"
# Fewer constant characters match messages that are not meant.
_LEAST_CONSTANT = 12
_DEEPEST = 5

_EXCEPTION = re.compile(r"\w*(Error|Exception|Exit)")
# Calls that show a text to users: the position of the text among the arguments
# (None: the keyword `message`), and what is printed before it.
_REPORTERS = {
    "error": (0, ""),  # logging's and argparse's.
    "warning": (0, ""),
    "warn": (0, ""),
    "log_first_n": (1, ""),
    "Assert": (1, ""),
    "assert_equal": (2, ""),
    "PreventGradient": (None, ""),
    # Later raised by `private.keras_moving_averages`.
    "refuse_swapped_averages": (1, ""),
    "_say": (0, "tf_xshard launch: "),
}
# Nobody meets these, or not as a text of their own. Besides, by rule: what is
# raised again, NotImplementedError without a text (an abstract method), and
# AssertionError (the impossible).
_EXEMPT = {
    ("tf_xshard.collectives.transport", "..."): (
        "callers ask for `gathers` before they gather"
    ),
    ("tf_xshard.compat.v1.cross_shard_optimizer", "..."): (
        "GroupAssignment's own text, in an error of the original's type"
    ),
    ("tf_xshard.compat.v1.tensorflow", "..."): (
        "for Python's import, which asks for names such as __path__"
    ),
    ("tf_xshard.private.keras_moving_averages", "..."): (
        "what `refuse_swapped_averages` got"
    ),
    (
        "tf_xshard.private.keras_moving_averages",
        "_model_variables_moving_average",
    ): "for hasattr",
    ("tf_xshard.testing.compiled_hlo", "... has no ...: ..."): (
        "the one libtpu that is allowed prints it"
    ),
}


class _Module:
    """A module, for evaluating the texts in it."""

    def __init__(self, tree):
        nodes = list(ast.walk(tree))
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.functions = {
            node.name: node
            for node in nodes
            if isinstance(node, ast.FunctionDef)
        }
        self._parents = {
            child: node
            for node in nodes
            for child in ast.iter_child_nodes(node)
        }

    def _scopes(self, node):
        """The functions around a node, innermost first, then the module."""
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, (ast.FunctionDef, ast.Module)):
                yield node

    def texts(self, node, depth=0):
        """What an expression can be, with `_ANY` for what is inserted."""
        if depth > _DEEPEST:
            return {_ANY}
        if isinstance(node, ast.Constant) and node.value is None:
            return set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value, depth + 1)
        if isinstance(node, (ast.JoinedStr, ast.List)):
            parts = getattr(node, "values", None) or node.elts
            return _joined(self.texts(part, depth) for part in parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            both = node.left, node.right
            return _joined(self.texts(part, depth) for part in both)
        if isinstance(node, ast.IfExp):
            both = node.body, node.orelse
            return set().union(*(self.texts(one, depth) for one in both))
        if isinstance(node, ast.Name):
            return self._of_name(node, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth + 1)
        return {_ANY}

    def _of_name(self, name, depth):
        for scope in self._scopes(name):
            found, added = set(), set()
            for node in _of_scope(scope):
                targets = getattr(node, "targets", [])
                targets = [*targets, getattr(node, "target", None)]
                if name.id in [getattr(one, "id", None) for one in targets]:
                    into = added if isinstance(node, ast.AugAssign) else found
                    if getattr(node, "value", None) is not None:
                        into |= self.texts(node.value, depth)
            if found:
                return found | _joined([found, added])
        return {_ANY}

    def _of_call(self, call, depth):
        name = _last(call.func)
        if name == "format":
            texts = self.texts(call.func.value, depth)
            return {re.sub(r"\{[^{}]*\}", _ANY, one) for one in texts}
        if name not in self.functions:
            return {_ANY}
        function = self.functions[name]
        returned = [
            self.texts(node.value, depth)
            for node in _of_scope(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]
        return set().union(*returned) or {_ANY}


def _of_scope(scope):
    """The nodes of a function or module, without those of functions in it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def _joined(parts):
    return {"".join(one) for one in itertools.product(*parts)}


def _last(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def _shown(call):
    """The expression that a call shows to a user, and what comes before it."""
    name = _last(call.func)
    if name == "AssertionError":  # For what is impossible.
        return None, ""
    if _EXCEPTION.fullmatch(name):
        return (call.args[0], "") if call.args else (None, "")
    if name not in _REPORTERS:
        return None, ""
    position, before = _REPORTERS[name]
    if position is None:
        [text] = [k.value for k in call.keywords if k.arg == "message"]
        return text, before
    if position >= len(call.args):
        return None, ""
    return call.args[position], before


def _formatted(found, call, module):
    """The texts of a log call, with its arguments in the place of %s."""
    result = set()
    for text in found:
        parts = re.split(r"(%[.\d]*[sdfg])", text)
        inserted = iter(call.args[-len(parts[1::2]) :])
        result |= _joined(
            module.texts(next(inserted)) if index % 2 else {part}
            for index, part in enumerate(parts)
        )
    return result


def messages(name, tree):
    """Every text in a module: (module, line, text with `_ANY`)."""
    module = _Module(tree)
    for node in module.calls:
        expression, before = _shown(node)
        if expression is None:
            continue
        found = {before + text for text in module.texts(expression)}
        if ast.unparse(node.func).startswith("logging."):
            found = _formatted(found, node, module)
        # A name may be None, or what a caller passes, besides a text.
        whole = {text for text in found if text.strip(_ANY)}
        for text in sorted(whole or {_ANY}):
            yield name, node.lineno, re.sub(f"{_ANY}+", _ANY, text)


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
    return text.replace(_ANY, "...")


@functools.cache
def _messages():
    modules = layout_test.MODULES.items()
    return [one for name, tree in modules for one in messages(name, tree)]


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
    shown = list(messages("m", ast.parse(source)))
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
    shown = messages(
        "m", ast.parse('raise ValueError(f"A moon of {x} cheese")')
    )
    assert len(stale(list(shown), fragments("page", page))) == number


def test_what_is_no_message():
    source = (
        "raise\nraise error\nraise NotImplementedError\nraise _Cancelled()\n"
        'raise AssertionError("A moon of cheese")\nlogging.info("A moon")'
    )
    assert not list(messages("m", ast.parse(source)))
