"""Every public name is documented, and every docstring's example runs."""

import dataclasses
import doctest
import importlib
import inspect
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


@pytest.mark.parametrize("example", list(_examples()))
def test_docstring_example(example):
    if "compile_for_tpu(" in example.docstring:
        pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")
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
    """Two are imported on request, the others with the package."""
    source = (paths.ROOT / "tf_xshard" / "public.py").read_text()
    imported = [*re.findall(r"(\w+) as \1", source), "__version__"]
    imported += ["compat", "tf_keras"]
    assert sorted(tf_xshard.__all__) == sorted(imported)
    assert len(set(imported)) == len(imported)
    for name in tf_xshard.__all__:
        assert hasattr(tf_xshard, name)
