"""A folder imports only folders above it, and private names stay in one."""

import ast
import pathlib

import pytest

import tf_xshard

PACKAGE = pathlib.Path(tf_xshard.__file__).parent

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


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


MODULES = dict(_modules())
every_module = pytest.mark.parametrize("name", MODULES)


def _imports(tree):
    """Dotted names of all that is imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _folder(name):
    """The folder of a module, or of a name that is imported from one."""
    if name == "tf_xshard":
        return None
    first = name.split(".")[1]
    if first in FOLDERS:
        return first
    assert f"tf_xshard.{first}" in MODULES or hasattr(tf_xshard, first), name
    return "values" if f"tf_xshard.{first}" in MODULES else None


def arrows(name, tree):
    """Imports that point down, such as "reduction -> optimizers"."""
    if name in FRONT_DOORS:
        return []
    own = _folder(name)
    found = []
    for imported in _imports(tree):
        if imported.split(".")[0] != "tf_xshard":
            continue
        target = _folder(imported)
        if target is None:
            # The public names: for those who use the package as users do.
            if own not in ("testing", "cli", "examples"):
                found.append(f"{own} -> tf_xshard ({imported})")
        elif FOLDERS.index(target) > FOLDERS.index(own):
            found.append(f"{own} -> {target} ({imported})")
    return found


def test_every_folder_has_its_place():
    folders = {p.parent.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")}
    first = {folder.parts[0] for folder in folders if folder.parts}
    assert first == set(FOLDERS) - {"values"}


@every_module
def test_imports_point_up(name):
    found = arrows(name, MODULES[name])
    assert not found, f"{name} imports against the order of the data: {found}"


@every_module
def test_private_modules_are_imported_in_one_folder(name):
    if name.startswith("tf_xshard.private."):
        return
    found = [i for i in _imports(MODULES[name]) if i.startswith(PRIVATE)]
    assert not found, f"{name} imports {found}: move that to tf_xshard/private"


@every_module
def test_the_optimizers_do_not_need_the_testing_tool(name):
    if (
        _folder(name) in ("testing", "examples")
        or name == "tf_xshard.private.jax.tpu_simulation"
    ):
        return
    for imported in _imports(MODULES[name]):
        assert not imported.startswith(
            ("tf_xshard.testing", "tf_xshard.private.jax", "jax")
        ), f"{name} imports {imported}"


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_a_folder_says_what_it_is_for(folder):
    doc = ast.get_docstring(MODULES[f"tf_xshard.{folder}"])
    assert doc and len(doc.splitlines()) >= 3, folder


@every_module
def test_every_module_is_in_its_folder_s_map(name):
    path, _, module = name.rpartition(".")
    if path == "tf_xshard" or module == "tf_xshard":
        return
    doc = ast.get_docstring(MODULES[path]) or ""
    assert f"`{module}`" in doc, f"{path}'s docstring has no line for {module}"


def test_the_direction_test_can_fail():
    tree = ast.parse("from tf_xshard.optimizers import base")
    assert arrows("tf_xshard.reduction.reducer", tree) == [
        "reduction -> optimizers (tf_xshard.optimizers.base)"
    ]
