"""The imports follow the data flow, and private names stay behind two doors."""

import ast
import pathlib

import pytest

import tf_xshard

PACKAGE = pathlib.Path(tf_xshard.__file__).parent

# From the first stage of the data to the last adapter. A module imports only
# modules of lines above its own.
LAYERS = (
    ("version", "versions", "group_assignment", "communication"),
    ("replica_context", "indexed_slices", "replica_variables"),
    ("seen_variables",),
    ("transports.transport", "transports.watchdog"),
    (
        "transports.collective",
        "transports.merge_call",
        "transports.one_hot",
        "transports.tpu",
    ),
    ("transports",),
    ("gradient_pattern", "gradient_clipping", "replica_values"),
    ("reduction", "loss_scaling"),
    ("inner_update", "delegation", "notice_of_saving"),
    ("wrapper",),
    ("cross_shard_optimizer",),
    ("tower_optimizer", "agn_arguments"),
    ("agn_optimizer",),
    ("center_weights", "tower_train_step"),
    # Besides the flow: what groups hold.
    ("group_values", "saved_state", "table"),
    ("state_variables", "chief_callbacks", "keras_trainer"),
    ("group_variables", "group_models", "keras_multi_worker"),
    ("group_divergence", "group_saving"),
    ("group_state",),
    ("group_callbacks",),
    ("group_checkpoint",),
    (
        "compat.v1.internals",
        "compat.v1.estimator_spec",
        "compat.v1.shard_copies",
        "compat.v1.agn_custom_getter",
    ),
    ("compat.v1.inner_optimizers",),
    ("compat.v1.shards", "compat.v1.wrapper"),
    (
        "compat.v1.cross_shard_optimizer",
        "compat.v1.tower_optimizer",
        "compat.v1.agn_optimizer",
    ),
    (
        "compat.v1.sharding",
        "compat.v1.model_fn_replication",
        "compat.v1.old_checkpoints",
    ),
    ("compat.v1",),
    ("compat",),
    ("",),
    ("testing.requirements", "testing.internals", "testing.compiled_hlo"),
    (
        "testing.fabricated_tpu",
        "testing.tpu_operations",
        "testing.compiled_for_tpu",
    ),
    ("testing.replicated_program",),
    ("testing.stablehlo", "testing.xla_cpu"),
    ("testing.execution",),
    ("testing.simulated_strategy",),
    ("testing.tpu_compiler",),
    ("testing",),
    ("local_cluster", "logical_devices"),
    ("demo.digits",),
    ("demo.training",),
    ("demo.promises",),
    ("demo.cross_shard", "demo.tower", "demo.agn"),
    ("demo", "doctor", "launcher"),
    ("__main__",),
)
# The optimizers' door to each, and those of the TF1 surface and the tool.
DOORS = {
    "tensorflow.python": (
        "replica_context",
        "compat.v1.internals",
        "testing.internals",
    ),
    "tensorflow.compiler": ("testing.internals",),
    "keras.src": ("inner_update", "keras_multi_worker"),
    "jax._src": ("testing.internals",),
    "jaxlib": ("testing.internals",),
}


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        name = name.removesuffix("__init__").removesuffix(".")
        yield name, ast.parse(path.read_text())


def _imports(tree):
    """Dotted names of all that is imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _layer_of(name):
    for index, layer in enumerate(LAYERS):
        if name in layer:
            return index
    return None


def test_every_module_has_a_layer():
    names = {name for name, _ in _modules()}
    listed = [name for layer in LAYERS for name in layer]
    assert names == set(listed) and len(listed) == len(set(listed))


@pytest.mark.parametrize(
    "name, tree",
    list(_modules()),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_imports_point_up(name, tree):
    for imported in _imports(tree):
        if not imported.startswith("tf_xshard"):
            continue
        target = imported.removeprefix("tf_xshard").removeprefix(".")
        # `import tf_xshard` is the package; a public name is, too.
        if _layer_of(target) is None:
            target = target.rpartition(".")[0]
        assert _layer_of(target) is not None, imported
        if name == "":
            continue
        assert _layer_of(target) < _layer_of(name), (
            f"tf_xshard/{name} imports {imported}, which comes later in the"
            " data flow"
        )


@pytest.mark.parametrize(
    "name, tree",
    list(_modules()),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_private_names_have_one_door(name, tree):
    for imported in _imports(tree):
        for private, doors in DOORS.items():
            if imported.startswith(private):
                assert name in doors, f"{name} imports {imported}"


def test_the_optimizers_do_not_need_the_testing_tool():
    for name, tree in _modules():
        if not name.startswith("testing"):
            for imported in _imports(tree):
                assert not imported.startswith(("tf_xshard.testing", "jax"))


def test_the_direction_test_can_fail():
    tree = ast.parse("from tf_xshard import wrapper")
    with pytest.raises(AssertionError, match="comes later"):
        test_imports_point_up("reduction", tree)
