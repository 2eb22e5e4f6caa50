"""Finds what code names that the libraries do not have, without running it.

Modules are imported. A variable that is assigned a class's instance has the
class's methods. Whatever else is not known is not checked.
"""

import ast
import builtins
import importlib
import inspect
from typing import Any, NamedTuple

# Libraries of other environments, whose names are not checked.
ABSENT = ("horovod", "official", "ray", "tensorflow_recommenders", "torch")
# Layers take it among other keywords.
_OF_LAYERS = {"input_shape"}


class _Value(NamedTuple):
    value: Any


class _Instance(NamedTuple):
    cls: type


class _Method(NamedTuple):
    """A function whose first argument is an instance."""

    value: Any


def problems(source, given=()):
    """What is wrong with a program, as lines of text.

    Args:
      source: The program.
      given: The values that it begins with, by name.
    """
    tree = ast.parse(source)
    checker = _Checker({*_bound(tree), *vars(builtins), *given}, dict(given))
    checker.visit(tree)
    return list(dict.fromkeys(checker.problems))


def _bound(tree):
    """Every name that a program binds anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]


def _parameters(function):
    """The signature of a call, and for a class all of its bases' keywords."""
    if not inspect.isclass(function) or function.__init__ is object.__init__:
        return inspect.signature(function), None
    # `__new__`, which `signature` would prefer, takes anything in Keras.
    init = inspect.signature(function.__init__)
    signature = init.replace(parameters=[*init.parameters.values()][1:])
    library = function.__module__.split(".")[0]
    if library not in ("keras", "tf_keras", "tf_xshard"):
        return signature, None
    known = set(_OF_LAYERS)
    for one in function.__mro__:
        if "__init__" in vars(one) and one is not object:
            known |= set(inspect.signature(one.__init__).parameters)
    return signature, known


def _imported(path, name):
    module = importlib.import_module(path)
    if hasattr(module, name):
        return getattr(module, name)
    return importlib.import_module(f"{path}.{name}")


class _Checker(ast.NodeVisitor):
    """Visits expressions in order; each visit returns what is known of one."""

    def __init__(self, names, given):
        self.problems = []
        self._names = names
        self._scope = {name: _Value(value) for name, value in given.items()}

    def _wrong(self, node, what):
        self.problems.append(f"line {node.lineno}: {what}")

    def visit_Import(self, node):
        for alias in node.names:
            first = alias.name.split(".")[0]
            if first in ABSENT:
                continue
            try:
                module = importlib.import_module(alias.name)
            except ImportError:
                self._wrong(node, f"no module {alias.name}")
                continue
            if alias.asname is None:
                module = importlib.import_module(first)
            self._scope[alias.asname or first] = _Value(module)

    def visit_ImportFrom(self, node):
        if node.module.split(".")[0] in ABSENT:
            return
        for alias in node.names:
            try:
                value = _imported(node.module, alias.name)
            except ImportError:
                self._wrong(node, f"{node.module} has no {alias.name}")
            else:
                self._scope[alias.asname or alias.name] = _Value(value)

    def visit_Name(self, node):
        if not isinstance(node.ctx, ast.Load):
            self._scope.pop(node.id, None)
        elif node.id not in self._names:
            self._wrong(node, f"{node.id} is not defined")
        return self._scope.get(node.id)

    def visit_Attribute(self, node):
        owner = self.visit(node.value)
        if isinstance(owner, _Value):
            if hasattr(owner.value, node.attr):
                return _Value(getattr(owner.value, node.attr))
            self._wrong(node, f"{ast.unparse(node)} does not exist")
        return None

    def visit_Assign(self, node):
        value = self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            if isinstance(target, ast.Name) and value is not None:
                self._scope[target.id] = value

    def _nested(self, node):
        outer = dict(self._scope)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                self._scope.pop(argument.arg, None)
        self.generic_visit(node)
        self._scope = outer

    def visit_FunctionDef(self, node):
        self._scope.pop(node.name, None)
        self._nested(node)

    visit_Lambda = _nested

    def _comprehension(self, node):
        for generator in node.generators:
            self.visit(generator)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = _comprehension
    visit_GeneratorExp = _comprehension

    def visit_Call(self, node):
        function, arguments = self._called(node.func), len(node.args)
        for child in [*node.args, *node.keywords]:
            self.visit(child)
        if not isinstance(function, (_Value, _Method)):
            return None
        arguments += isinstance(function, _Method)
        function = function.value
        try:
            signature, known = _parameters(function)
        except (TypeError, ValueError):  # Of functions in C.
            return None
        keywords = {one.arg: None for one in node.keywords if one.arg}
        is_open = len(keywords) < len(node.keywords) or any(
            isinstance(one, ast.Starred) for one in node.args
        )
        bind = signature.bind_partial if is_open else signature.bind
        try:
            bind(*[None] * (0 if is_open else arguments), **keywords)
        except TypeError as error:
            self._wrong(node, f"{ast.unparse(node.func)}: {error}")
        if known is not None and not known >= set(keywords):
            unknown = sorted(set(keywords) - known)
            self._wrong(node, f"{ast.unparse(node.func)} has no {unknown}")
        return _Instance(function) if inspect.isclass(function) else None

    def _called(self, node):
        if not isinstance(node, ast.Attribute):
            return self.visit(node)
        owner = self.visit(node.value)
        if not isinstance(owner, _Instance):
            return self.visit(node)
        method = inspect.getattr_static(owner.cls, node.attr, None)
        if method is None:
            self._wrong(node, f"{ast.unparse(node)} does not exist")
        return _Method(method) if inspect.isfunction(method) else None
