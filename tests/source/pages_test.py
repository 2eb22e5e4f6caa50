"""What README.md, the guides and docstrings name exists; all is documented."""

import doctest
import importlib
import inspect
import json
import pkgutil
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_xshard
from tests.programs import version_matrix
from tests.programs import write_api_page
from tests.programs import write_examples_in_pages
from tests.source import prose_test
from tests.support import names_in_code
from tests.support import paths
from tf_xshard import testing
from tf_xshard.compat import v1

README = paths.ROOT / "README.md"
DOCS = paths.ROOT / "tf_xshard" / "docs"
NOTEBOOK = DOCS / "digits.ipynb"
PAGES = prose_test.PAGES


def blocks(page):
    """The page's own blocks; `examples_test` runs the shipped programs."""
    own = write_examples_in_pages.MARKED.sub("", page.read_text())
    return re.findall(r"```python\n(.*?)```", own, re.S)


def cells():
    """The notebook's cells of code, with their programs as `source`."""
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return [
        {**cell, "source": "".join(cell["source"])}
        for cell in found
        if cell["cell_type"] == "code"
    ]


def docstring_examples():
    """The examples of every docstring, with what they may name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = {"keras": keras, "np": np, "tf": tf, "tf_xshard": tf_xshard}
    modules = pkgutil.walk_packages(tf_xshard.__path__, "tf_xshard.")
    for name in ("tf_xshard", *(module.name for module in modules)):
        if name != "tf_xshard.__main__":
            module = importlib.import_module(name)
            found = finder.find(module, extraglobs=names)
            yield from (one for one in found if one.examples)


def test_code_names_what_exists():
    """Of TensorFlow, Keras and tf_xshard; keywords of calls as well."""
    programs = {page.name: ("\n".join(blocks(page)), {}) for page in PAGES}
    code = "\n".join(cell["source"] for cell in cells())
    programs[NOTEBOOK.name] = (code, {})
    for one in docstring_examples():
        code = "\n".join(example.source for example in one.examples)
        programs[one.name] = (code, one.globs)
    found = {
        name: names_in_code.problems(*one) for name, one in programs.items()
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("keras.optimizer.Adam()", "keras.optimizer does not exist"),
        ("keras.optimizers.Adam(clip=1)", r"Adam has no \['clip'\]"),
        ("keras.layers.Dense(1, unit=2)", r"Dense has no \['unit'\]"),
        ("m = keras.Model()\nm.fitt()", "m.fitt does not exist"),
        ("m = keras.Model()\nm.fit(epoch=1)", "unexpected keyword.*'epoch'"),
        ("def f(x):\n    return y", "y is not defined"),
        (
            "import tf_xshard\ntf_xshard.GroupAssignment.contiguous(4)",
            "missing a required argument: 'group_size'",
        ),
        ("from keras import optimizer", "keras.*has no attribute 'optimizer'"),
    ],
)
def test_names_that_do_not_exist_are_found(code, problem):
    [found] = names_in_code.problems(f"import keras\n{code}")
    assert re.search(problem, found), found


def test_what_pages_name_exists():
    """Files and modules; .ci/check looks at links."""
    for page in PAGES:
        text = page.read_text()
        named = re.findall(
            r"`((?:tf_xshard|tests|benchmarks|\.ci)/[^`* ]+)`", text
        )
        for module in re.findall(r"-m ((?:tests|benchmarks)\.[\w.]+)", text):
            named.append(module.replace(".", "/") + ".py")
        for path in named:
            assert (paths.ROOT / path).exists(), (page.name, path)


def test_every_guide_is_linked_from_the_readme():
    """Directly, or from a page that is."""
    seen, pages = set(), [README]
    while pages:
        page = pages.pop()
        for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text()):
            target = (page.parent / link).resolve()
            if target not in seen:
                seen.add(target)
                pages.append(target)
    assert {page.resolve() for page in DOCS.glob("*.md")} <= seen


def test_the_commands_of_the_readme():
    command = (
        "python3 -m venv --clear .venv && .venv/bin/python -m pip install"
        " '.[{}]' && .venv/bin/python -m {}"
    )
    demo = command.format("cpu,demo", "tf_xshard demo")
    tests = command.format("tensorflow,test", "pytest")
    assert demo in README.read_text() and tests in README.read_text()
    assert tests in (paths.ROOT / ".ci" / "run").read_text()


def test_contributing_names_every_nightly_command():
    workflow = (paths.ROOT / ".github/workflows/nightly.yml").read_text()
    named = " ".join((DOCS / "CONTRIBUTING.md").read_text().split())
    commands = re.findall(r"python -m (?:tests|pytest)[^\n]*", workflow)
    for command in commands:
        assert command.replace(" ${{ matrix.row }}", "") in named, command
    newest = version_matrix.NEWEST
    others = [
        row
        for row in version_matrix.ROWS
        # A runner has one Python.
        if row != newest and not row.startswith("python-")
    ]
    assert f"row: [{', '.join(others)}]" in workflow
    assert f"version_matrix {newest} --full" in workflow


def test_written_pages_are_what_would_be_written():
    assert write_api_page.PAGE.read_text() == write_api_page.page(), (
        "Run python -m tests.programs.write_api_page."
    )
    # README shows the result of one_device_numbers.
    shown = {"one_device_numbers"}
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert write_examples_in_pages.filled(text) == text, (
            "Run python -m tests.programs.write_examples_in_pages."
        )
        shown |= {
            path.split("/")[-1].removesuffix(".py")
            for _, path, *_ in write_examples_in_pages.MARKED.findall(text)
        }
    examples = (paths.ROOT / "tf_xshard" / "examples").glob("[a-z]*.py")
    assert {path.stem for path in examples} == shown
    citation = (DOCS / "CITATION.cff").read_text()
    assert f"\nversion: {tf_xshard.__version__}\n" in citation


def _undocumented(value):
    """What the docstring of a public function or class does not say."""
    doc, signature = inspect.getdoc(value), inspect.signature(value)
    arguments = [f"{one}: " for one in signature.parameters if one != "kwargs"]
    needed = ["Example:", *arguments]
    if arguments or inspect.isclass(value):
        needed += ["Args:", "Raises:", "Source:"]
    if inspect.isfunction(value) and signature.return_annotation != "None":
        needed.append("Returns:")
    methods = [
        name
        for name, member in vars(value).items()
        if not name.startswith("_") and not inspect.ismemberdescriptor(member)
    ]
    return [one for one in needed if one not in doc] + [
        name
        for name in methods
        if inspect.isclass(value) and not inspect.getdoc(getattr(value, name))
    ]


def test_public_names_are_documented():
    public = [
        getattr(module, name)
        for module in (tf_xshard, v1)
        for name in module.__all__
    ]
    public += [testing.simulated_tpu_strategy, testing.compile_for_tpu]
    # Named tuples and constants, which raise nothing.
    simple = (v1.InputPipelineConfig, tuple, v1.ModeKeys)
    found = {
        value.__name__: _undocumented(value)
        for value in public
        if inspect.isfunction(value)
        or (inspect.isclass(value) and not issubclass(value, simple))
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_all_is_what_there_is():
    """Two are imported on request, the others with the package."""
    source = (paths.ROOT / "tf_xshard" / "public.py").read_text()
    imported = [*re.findall(r"(\w+) as \1", source), "__version__"]
    imported += ["compat", "tf_keras"]
    assert sorted(tf_xshard.__all__) == sorted(imported)
    assert all(hasattr(tf_xshard, name) for name in imported)
