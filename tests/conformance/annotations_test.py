"""Every function that is not nested has annotated arguments and a result."""

import ast

from tests.conformance import layout_test


def _functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from _functions(child)


def unannotated(tree):
    found = []
    for function in _functions(tree):
        a = function.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        missing = [
            argument.arg
            for argument in arguments
            if argument is not None
            and argument.annotation is None
            and argument.arg not in ("self", "cls")
        ]
        if function.returns is None:
            missing.append("the result")
        if missing:
            found.append(f"{function.name}: {', '.join(missing)}")
    return found


def test_annotations():
    found = {
        name: unannotated(tree)
        for name, tree in layout_test.MODULES.items()
        # These look like users' scripts.
        if not name.startswith("tf_xshard.examples.")
    }
    assert not {name: missing for name, missing in found.items() if missing}


def test_the_test_can_fail():
    source = (
        "class A:\n    def f(self, x: int, *y, z=1):\n        def g(): pass"
    )
    assert unannotated(ast.parse(source)) == ["f: z, y, the result"]
