"""Every docstring's example runs, and gives what it shows."""

import doctest

import pytest

from tests.source import pages_test as pages


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=one.name) for one in pages.docstring_examples()],
)
def test_docstring_example(example):
    if "compile_for_tpu(" in example.docstring:
        pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    output = []
    runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)
