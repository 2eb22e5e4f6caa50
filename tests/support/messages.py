"""The messages that the code of a module shows to users, as it is written."""

import ast
import itertools
import re

# An inserted value.
ANY = "\0"
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
    # Later raised by `private.keras.moving_averages`.
    "refuse_swapped_averages": (1, ""),
    "_say": (0, "tf_xshard launch: "),
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
        """What an expression can be, with `ANY` for what is inserted."""
        if depth > _DEEPEST:
            return {ANY}
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
        return {ANY}

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
        return {ANY}

    def _of_call(self, call, depth):
        name = _last(call.func)
        if name == "format":
            texts = self.texts(call.func.value, depth)
            return {re.sub(r"\{[^{}]*\}", ANY, one) for one in texts}
        if name not in self.functions:
            return {ANY}
        function = self.functions[name]
        returned = [
            self.texts(node.value, depth)
            for node in _of_scope(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]
        return set().union(*returned) or {ANY}


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


def of_module(name, tree):
    """Every text in a module: (module, line, text with `ANY`)."""
    module = _Module(tree)
    for node in module.calls:
        expression, before = _shown(node)
        if expression is None:
            continue
        found = {before + text for text in module.texts(expression)}
        if ast.unparse(node.func).startswith("logging."):
            found = _formatted(found, node, module)
        # A name may be None, or what a caller passes, besides a text.
        whole = {text for text in found if text.strip(ANY)}
        for text in sorted(whole or {ANY}):
            yield name, node.lineno, re.sub(f"{ANY}+", ANY, text)
