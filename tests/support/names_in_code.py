"""Finds what code names that the libraries do not have, without running it.

Modules are imported. A variable that is only assigned instances of one class
has the class's methods. Whatever else is not known is not checked.
"""

import ast
import builtins
import collections
import inspect
import pkgutil
import sys

# Libraries of other environments, whose names are not checked.
ABSENT = ("horovod", "official", "ray", "tensorflow_recommenders", "torch")
# Their classes pass keywords to their bases, which must have them.
_CHECKED = ("keras.", "tf_keras.", "tf_xshard.")


def problems(source, given=()):
    """What is wrong with a program, as lines of text.

    Args:
      source: The program.
      given: The values that it begins with, by name.
    """
    nodes = [*ast.walk(ast.parse(source))]
    values = {**vars(builtins), **dict(given)}
    # What assignments and arguments give each name: a class for an instance
    # of it, and None for what is not known.
    classes = collections.defaultdict(set)
    found = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                try:
                    name, value = _imported(node, alias)
                except (ImportError, AttributeError) as error:
                    found.append(str(error))
                else:
                    values[name] = value
    made = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            value = _value(node.value.func, values)
            made[node.targets[0]] = value if inspect.isclass(value) else None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            classes[node.id].add(made.get(node))
        elif isinstance(node, ast.arg):
            classes[node.arg].add(None)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            classes[node.name].add(None)
    values |= dict.fromkeys(classes)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id not in values:
            found.append(f"{node.id} is not defined")
        elif isinstance(node, ast.Attribute):
            owner = _value(node.value, values)
            if owner is not None and not hasattr(owner, node.attr):
                found.append(f"{ast.unparse(node)} does not exist")
        elif isinstance(node, ast.Call):
            found += _problems_of_call(node, values, classes)
    return list(dict.fromkeys(found))


def _imported(node, alias):
    """The name that an import binds, and its value; None if it is absent."""
    module = getattr(node, "module", None)
    path = f"{module}.{alias.name}" if module else alias.name
    first = path.split(".")[0]
    name = alias.asname or alias.name.split(".")[0]
    if first in ABSENT:
        return name, None
    value = pkgutil.resolve_name(path)
    return name, value if module or alias.asname else sys.modules[first]


def _value(node, values):
    """What a dotted name is, or None if that is not known."""
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, values)
        return None if owner is None else getattr(owner, node.attr, None)
    return values.get(node.id) if isinstance(node, ast.Name) else None


def _problems_of_call(call, values, classes):
    """What is wrong with the function of a call, or with its arguments."""
    text, function = ast.unparse(call.func), _value(call.func, values)
    owner, _, method = text.rpartition(".")
    [cls] = classes[owner] if len(classes[owner]) == 1 else [None]
    if cls:
        if not hasattr(cls, method):
            return [f"{text} does not exist"]
        function = getattr(cls, method)
    is_class = inspect.isclass(function)
    is_class = is_class and function.__init__ is not object.__init__
    has_self = is_class or (cls and inspect.isfunction(function))
    try:
        # `__new__`, which `signature` would prefer, takes anything in Keras.
        called = function.__init__ if is_class else function
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # It is not known, or in C.
        return []
    keywords = {one.arg: None for one in call.keywords if one.arg}
    try:
        if len(keywords) < len(call.keywords) or any(
            isinstance(one, ast.Starred) for one in call.args
        ):
            signature.bind_partial(**keywords)
        else:
            signature.bind(*[None] * bool(has_self), *call.args, **keywords)
    except TypeError as error:
        return [f"{text}: {error}"]
    if is_class and function.__module__.startswith(_CHECKED):
        known = {"input_shape"}  # Layers take it among other keywords.
        for one in function.__mro__:
            known |= set(inspect.signature(one.__init__).parameters)
        if unknown := sorted(set(keywords) - known):
            return [f"{text} has no {unknown}"]
    return []
