"""Every public name is documented, and every example runs."""

import dataclasses
import doctest
import importlib
import inspect
import logging
import pkgutil
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.support import paths
from tf_xshard import testing

MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(tf_xshard.__path__, "tf_xshard.")
    if info.name != "tf_xshard.__main__"
] + [tf_xshard]
v1 = tf_xshard.compat.v1
# Named tuples and constants, which raise nothing.
_SIMPLE = (v1.InputPipelineConfig, tuple, v1.ModeKeys)
GLOBALS = {"keras": keras, "np": np, "tf": tf, "tf_xshard": tf_xshard}


def _examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in MODULES:
        for test in finder.find(module, extraglobs=GLOBALS):
            if test.examples:
                yield pytest.param(test, id=test.name)


def _needs_libtpu(text):
    if "compile_for_tpu(" in text:
        pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")


@pytest.mark.parametrize("example", list(_examples()))
def test_docstring_example(example):
    _needs_libtpu(example.docstring)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    output = []
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)


def _public():
    for module in (tf_xshard, tf_xshard.compat.v1):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and not issubclass(value, _SIMPLE):
                yield pytest.param(value, id=name)


@pytest.mark.parametrize(
    "function",
    [
        testing.simulated_tpu_strategy,
        testing.compile_for_tpu,
        tf_xshard.barrier,
        tf_xshard.group_reduce,
        tf_xshard.is_chief,
        tf_xshard.multi_worker_fit,
        tf_xshard.rank,
        v1.shard,
        v1.shard_initializer,
        v1.replicate_model_fn,
        v1.load_into_keras,
    ],
    ids=lambda function: function.__name__,
)
def test_functions_are_documented(function):
    doc = inspect.getdoc(function)
    signature = inspect.signature(function)
    sections = ["Example:"]
    if signature.parameters:
        sections += ["Args:", "Raises:", "Source:"]
    if signature.return_annotation not in (None, "None"):
        sections.append("Returns:")
    for section in sections:
        assert section in doc, f"{function.__name__} has no {section}"
    for name in signature.parameters:
        assert re.search(rf"^ +\*?{name}: ", doc, re.M), name


@pytest.mark.parametrize(
    "value",
    [testing.Collective, testing.CompiledForTPU, testing.MemoryStatistics],
    ids=lambda value: value.__name__,
)
def test_results_are_documented(value):
    doc = inspect.getdoc(value)
    for field in dataclasses.fields(value):
        assert re.search(rf"^ +{field.name}: ", doc, re.M), field.name


@pytest.mark.parametrize("value", list(_public()))
def test_documented(value):
    doc = inspect.getdoc(value)
    for section in ("Args:", "Raises:", "Example:", "Source:"):
        assert section in doc, f"{value.__name__} has no {section}"
    for name in inspect.signature(value).parameters:
        if name != "kwargs":
            assert re.search(rf"^ +{name}: ", doc, re.M), name
    for name, member in vars(value).items():
        if name.startswith("_") or inspect.ismemberdescriptor(member):
            continue
        described = inspect.getdoc(getattr(value, name)) or ""
        assert described, f"{value.__name__}.{name}"
        if inspect.isfunction(member):
            for argument in list(inspect.signature(member).parameters)[1:]:
                assert f"{argument}: " in described, (
                    f"{value.__name__}.{name}({argument})"
                )


def test_all_is_what_there_is():
    assert len(set(tf_xshard.__all__)) == len(tf_xshard.__all__)
    for name in tf_xshard.__all__:
        assert hasattr(tf_xshard, name)


def _readme_blocks():
    text = (paths.ROOT / "README.md").read_text()
    for index, block in enumerate(
        re.findall(r"```python\n(.*?)```", text, re.S)
    ):
        yield pytest.param(block, id=f"block{index}")


# TensorFlow's, of a collective strategy that is made after something has run.
_TENSORFLOWS_OWN = ("Collective ops is not configured at program startup.",)


@pytest.fixture
def logged_warnings():
    """What TensorFlow and absl log; AutoGraph's complaints for example."""
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if not message.startswith(_TENSORFLOWS_OWN):
                messages.append(message)

    handler = Handler(logging.WARNING)
    loggers = tf.get_logger(), logging.getLogger("absl")
    for logger in loggers:
        logger.addHandler(handler)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.mark.parametrize("block", list(_readme_blocks()))
def test_readme_example(block, tmp_path, monkeypatch, logged_warnings):
    monkeypatch.chdir(tmp_path)
    if "TPUClusterResolver" in block:
        # Needs a TPU: that it compiles and that every name in it exists is what
        # can be held here.
        compile(block, "README.md", "exec")
        for dotted in set(re.findall(r"tf(?:\.[A-Za-z_]\w*)+", block)):
            value = tf
            for part in dotted.split(".")[1:]:
                value = getattr(value, part)
        pytest.skip("the rest needs an accelerator")
    _needs_libtpu(block)
    # The tests' devices are made; these would be fewer.
    monkeypatch.setattr(
        tf.config,
        "set_logical_device_configuration",
        lambda device, logical: tf.config.list_logical_devices()[len(logical)],
    )
    scope = dict(GLOBALS)
    # AutoGraph reads the source of what it converts.
    program = tmp_path / "readme_example.py"
    program.write_text(block)
    exec(compile(block, program, "exec"), scope)
    if "GroupState" in block:
        _check_population(scope)
    assert not logged_warnings


def _check_population(scope):
    """What the README says of the table, and the table that it shows."""
    table, held_out = scope["table"], scope["held_out"]
    text = (paths.ROOT / "README.md").read_text()
    [shown] = re.findall(r"```\n(group .*?)\n```", text, re.S)
    for line, row in zip(shown.splitlines()[1:], table, strict=True):
        group, accuracy, loss = line.split()
        assert group == str(row["group"])
        assert abs(float(accuracy) - row["accuracy"]) < 0.1, (line, row)
    slow, good, fast, failed, ensemble = table
    assert failed["accuracy"] < 0.5 < slow["accuracy"]
    assert slow["accuracy"] + 0.03 < max(good["accuracy"], fast["accuracy"])
    assert ensemble["accuracy"] > good["accuracy"] - 0.05
    assert ensemble["loss"] < slow["loss"]
    best = table[scope["best"]]
    loss, accuracy = scope["alone"].evaluate(*held_out, verbose=0)
    np.testing.assert_allclose(
        [loss, accuracy], [best["loss"], best["accuracy"]], rtol=1e-5
    )


def test_the_page_on_tf1():
    """Its blocks are one program."""
    page = paths.ROOT / "tf_xshard" / "compat" / "v1" / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert len(blocks) == 3
    scope = dict(GLOBALS)
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


def test_readme_has_the_two_commands():
    text = (paths.ROOT / "README.md").read_text()
    command = (
        "python3 -m venv .venv && .venv/bin/python -m pip install"
        " '.[cpu,{}]' && .venv/bin/python -m {}"
    )
    for extra, module in (("demo", "tf_xshard demo"), ("test", "pytest")):
        assert command.format(extra, module) in text
    ci = (paths.ROOT / ".ci" / "run").read_text()
    assert command.format("test", "pytest") in ci


@pytest.mark.parametrize(
    "page", sorted((paths.ROOT / "tf_xshard" / "docs").glob("*.md")), ids=str
)
def test_pages_are_true(page, tmp_path, monkeypatch):
    """Files that they name exist, and their blocks run."""
    text = page.read_text()
    assert len(text.splitlines()) < 200
    for path in re.findall(
        r"`((?:tf_xshard|tests|benchmarks|\.ci)/[^`* ]+)`", text
    ):
        assert (paths.ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:tests|benchmarks)[\w.]+)", text):
        path = paths.ROOT / f"{module.replace('.', '/')}.py"
        assert path.exists(), module
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, str(page), "exec"), dict(GLOBALS))


def test_the_public_names_stand_once():
    """For type checkers, and for the import."""
    source = (paths.ROOT / "tf_xshard" / "__init__.py").read_text()
    checked = re.findall(r"(\w+) as \1", source)
    assert sorted(checked) == sorted(tf_xshard._PUBLIC)
