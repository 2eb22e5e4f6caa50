"""A folder imports only folders above it; each file keeps to its own task."""

import ast
import pathlib

import tf_xshard
from tests.support import paths

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
# The second one forks in a process that the first has started, and that is
# killed with its children.
_STARTERS = ("tests/support/processes.py", "tests/support/cluster.py")
_STARTS_PROCESSES = {
    "subprocess": ("Popen", "run", "call", "check_call", "check_output"),
    "os": ("fork", "forkpty", "posix_spawn"),
    "multiprocessing": ("Process", "Pool", "get_context"),
}


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


MODULES = dict(_modules())


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


def test_every_folder_has_its_place_and_says_what_it_is_for():
    folders = {p.parent.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")}
    first = {folder.parts[0] for folder in folders if folder.parts}
    assert first == set(FOLDERS) - {"values"}
    for folder in FOLDERS[1:]:
        doc = ast.get_docstring(MODULES[f"tf_xshard.{folder}"])
        assert doc and len(doc.splitlines()) >= 3, folder


def test_imports_point_up():
    assert [one for item in MODULES.items() for one in arrows(*item)] == []


def test_private_modules_are_imported_in_one_folder():
    """Also the simulated TPU's, which the optimizers do not need."""
    simulation = ("tf_xshard.testing", "tf_xshard.private.jax", "jax")
    found = []
    for name, tree in MODULES.items():
        refused = () if name.startswith("tf_xshard.private.") else PRIVATE
        if (
            _folder(name) not in ("testing", "examples")
            and name != "tf_xshard.private.jax.tpu_simulation"
        ):
            refused += simulation
        found += [(name, i) for i in _imports(tree) if i.startswith(refused)]
    assert found == []


def test_every_module_is_in_its_folder_s_map():
    missing = []
    for name in MODULES:
        path, _, module = name.rpartition(".")
        if path not in ("", "tf_xshard"):
            doc = ast.get_docstring(MODULES[path]) or ""
            missing += [name] * (f"`{module}`" not in doc)
    assert missing == []


def _functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from _functions(child)


def unannotated(tree):
    """What has no annotation, of every function that is not nested."""
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
        for name, tree in MODULES.items()
        # These look like users' scripts.
        if not name.startswith("tf_xshard.examples.")
    }
    assert not {name: missing for name, missing in found.items() if missing}


def started(tree):
    """The calls of a file that start a process."""
    return [
        f"{ast.unparse(node.func)}, line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.attr in _STARTS_PROCESSES.get(node.func.value.id, ())
    ]


def test_the_checks_can_fail():
    tree = ast.parse("from tf_xshard.optimizers import base")
    assert arrows("tf_xshard.reduction.reducer", tree) == [
        "reduction -> optimizers (tf_xshard.optimizers.base)"
    ]
    source = (
        "class A:\n    def f(self, x: int, *y, z=1):\n        def g(): pass"
    )
    assert unannotated(ast.parse(source)) == ["f: z, y, the result"]
    assert started(ast.parse("a = 1\nsubprocess.run([])")) == [
        "subprocess.run, line 2"
    ]


def test_one_file_starts_the_tests_processes():
    """It counts them, and kills what they leave behind."""
    found = {
        str(path.relative_to(paths.ROOT)): started(ast.parse(path.read_text()))
        for path in (paths.ROOT / "tests").rglob("*.py")
    }
    calls = {name: calls for name, calls in found.items() if calls}
    assert set(calls) <= set(_STARTERS), calls
