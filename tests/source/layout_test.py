"""A folder imports only folders above it; each file keeps to its own task."""

import ast

from tests.support import paths

# The order of the data. A folder imports itself and what is above it; "values"
# are the modules beside the folders.
FOLDERS = (
    "values",
    "private",
    "distribute",
    "collectives",
    "reduction",
    "optimizers",
    "planning",
    "multi_worker",
    "group_state",
    "callbacks",
    "compat",
    "tf_keras",
    "testing",
    "cli",
    "examples",
)
# These connect the folders for users, and may import all of them.
FRONT_DOORS = ("tf_xshard", "tf_xshard.__main__", "tf_xshard.public")
PRIVATE = ("tensorflow.python", "tensorflow.compiler", "keras.src", "jax._src")
SIMULATED_TPU = ("tf_xshard.testing", "tf_xshard.private.jax", "jax")
FILES = sorted((paths.ROOT / "tf_xshard").rglob("*.py"))
# The syntax tree of each module, by its dotted name.
MODULES = {
    ".".join(path.relative_to(paths.ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): ast.parse(path.read_text())
    for path in FILES
}


def _imports():
    """Each module with the dotted name of what it imports."""
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                of = f"{node.module}." if hasattr(node, "module") else ""
                yield from ((module, of + alias.name) for alias in node.names)


def _folder(name):
    """The folder of a module, or None for a public name of the package."""
    first = name.split(".")[1] if "." in name else ""
    if first in FOLDERS:
        return first
    return "values" if f"tf_xshard.{first}" in MODULES else None


def test_imports_point_up():
    found = []
    for module, imported in _imports():
        if module in FRONT_DOORS or imported.split(".")[0] != "tf_xshard":
            continue
        own, target = _folder(module), _folder(imported)
        if target is None:
            # For those who use the package as users do.
            is_down = own not in ("testing", "cli", "examples")
        else:
            is_down = FOLDERS.index(target) > FOLDERS.index(own)
        if is_down:
            found.append((module, imported))
    assert not found


def test_private_modules_are_imported_in_one_folder():
    """Also the simulated TPU's, which the optimizers do not need."""
    found = []
    for module, imported in _imports():
        refused = () if module.startswith("tf_xshard.private.") else PRIVATE
        if (
            _folder(module) not in ("testing", "examples")
            and module != "tf_xshard.private.jax.tpu_simulation"
        ):
            refused += SIMULATED_TPU
        if imported.startswith(refused):
            found.append((module, imported))
    assert not found


def test_every_folder_says_what_it_is_for_and_lists_its_modules():
    first = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    assert first == set(FOLDERS) - {"values"}
    for folder in first:
        doc = ast.get_docstring(MODULES[f"tf_xshard.{folder}"])
        assert len(doc.splitlines()) >= 3, folder
    for name in MODULES:
        folder, _, module = name.rpartition(".")
        if folder not in ("", "tf_xshard"):
            assert f"`{module}`" in ast.get_docstring(MODULES[folder]), name


def test_functions_are_annotated():
    """Except nested ones, and those of the examples, which are as users'."""
    found = [
        (module, function.name)
        for module, tree in MODULES.items()
        if not module.startswith("tf_xshard.examples.")
        for parent in (tree, *tree.body)
        if isinstance(parent, (ast.Module, ast.ClassDef))
        for function in parent.body
        if isinstance(function, ast.FunctionDef)
        and (
            function.returns is None
            or any(
                one.annotation is None and one.arg not in ("self", "cls")
                for one in ast.walk(function.args)
                if isinstance(one, ast.arg)
            )
        )
    ]
    assert not found
