"""Docstrings' examples give what they show; those that train, with --full.

`tests/source/pages_test.py` checks the names and keywords of all of them.
"""

import doctest

import pytest

from tests.source import pages_test as pages
from tests.support import replicas

_TRAINS = (".fit(", "compile_for_tpu(", "train_step(")


def _examples():
    for example in pages.docstring_examples():
        trains = any(call in example.docstring for call in _TRAINS)
        marks = [replicas.in_full] if trains else []
        yield pytest.param(example, id=example.name, marks=marks)


@pytest.mark.parametrize("example", list(_examples()))
def test_docstring_example(example):
    if "compile_for_tpu(" in example.docstring:
        pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    output = []
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)
