"""What README.md, the guides and docstrings name exists; all is documented."""

import dataclasses
import doctest
import importlib
import inspect
import json
import pkgutil
import re

import pytest

import tf_xshard
from tests.programs import version_matrix
from tests.programs import write_api_page
from tests.programs import write_examples_in_pages
from tests.support import names_in_code
from tests.support import paths
from tf_xshard import testing
from tf_xshard.compat import v1

README = paths.ROOT / "README.md"
DOCS = paths.ROOT / "tf_xshard" / "docs"
CONTRIBUTING = DOCS / "CONTRIBUTING.md"
NOTEBOOK = DOCS / "digits.ipynb"
NIGHTLY = paths.ROOT / ".github" / "workflows" / "nightly.yml"
PAGES = [README, paths.ROOT / "benchmarks" / "README.md", *DOCS.glob("*.md")]
MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(tf_xshard.__path__, "tf_xshard.")
    if info.name != "tf_xshard.__main__"
] + [tf_xshard]
GLOBALS = {
    name.split(" as ")[-1]: importlib.import_module(name.split(" as ")[0])
    for name in ("keras", "numpy as np", "tensorflow as tf", "tf_xshard")
}
# Named tuples and constants, which raise nothing.
_SIMPLE = (v1.InputPipelineConfig, tuple, v1.ModeKeys)


def blocks(page):
    """The page's own blocks; `examples_test` runs the shipped programs."""
    own = write_examples_in_pages.MARKED.sub("", page.read_text())
    return re.findall(r"```python\n(.*?)```", own, re.S)


def docstring_examples():
    """The examples of every docstring, with what they may name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in MODULES:
        for found in finder.find(module, extraglobs=GLOBALS):
            if found.examples:
                yield found


def test_code_names_what_exists():
    """Of TensorFlow, Keras and tf_xshard; keywords of calls as well."""
    programs = [
        (
            page.name,
            re.findall(r"```python\n(.*?)```", page.read_text(), re.S),
            {},
        )
        for page in PAGES
    ]
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [one["source"] for one in cells if one["cell_type"] == "code"]
    programs.append((NOTEBOOK.name, ["".join(lines) for lines in code], {}))
    programs += [
        (example.name, [one.source for one in example.examples], example.globs)
        for example in docstring_examples()
    ]
    found = {
        name: names_in_code.problems("\n".join(parts), given)
        for name, parts, given in programs
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
        ("model", "model is not defined"),
        ("def f(x):\n    return y", "y is not defined"),
        (
            "import tf_xshard\ntf_xshard.GroupAssignment.contiguous(4)",
            "missing a required argument: 'group_size'",
        ),
        ("from keras import optimizer", "keras has no optimizer"),
    ],
)
def test_names_that_do_not_exist_are_found(code, problem):
    [found] = names_in_code.problems(f"import keras\n{code}")
    assert re.search(problem, found), found
    assert not names_in_code.problems(
        "import keras\n[m(training=one) for one in range(3)]\n"
        "m = keras.Model()\nm.anything = lambda x: x\n"
    )


def test_what_pages_name_exists():
    """Links, files and modules."""
    for page in PAGES:
        text = page.read_text()
        named = re.findall(
            r"`((?:tf_xshard|tests|benchmarks|\.ci)/[^`* ]+)`", text
        )
        modules = re.findall(r"python -m ((?:tests|benchmarks)[\w.]+)", text)
        named += [f"{one.replace('.', '/')}.py" for one in modules]
        for path in named:
            assert (paths.ROOT / path).exists(), (page.name, path)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), (page.name, link)


def test_every_guide_is_linked_from_the_readme():
    """Directly, or from a page that is."""
    seen, pages = set(), [README]
    while pages:
        page = pages.pop()
        for link in re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text()):
            target = (page.parent / link).resolve()
            if not link.startswith("http") and target not in seen:
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
    workflow = NIGHTLY.read_text()
    commands = re.findall(r"python -m (?:tests|pytest)[^\n]*", workflow)
    assert len(commands) >= 9
    named = " ".join(CONTRIBUTING.read_text().split())
    for command in commands:
        assert command.replace(" ${{ matrix.row }}", "") in named, command
    rows = set(version_matrix.ROWS) - {version_matrix.NEWEST}
    others = [row for row in version_matrix.ROWS if row in rows]
    # A runner has one Python.
    others = [row for row in others if not row.startswith("python-")]
    assert f"row: [{', '.join(others)}]" in workflow
    assert f"--only {version_matrix.NEWEST} --pytest=--full" in workflow


def test_written_pages_are_what_would_be_written():
    assert write_api_page.PAGE.read_text() == write_api_page.page(), (
        "Run python -m tests.programs.write_api_page."
    )
    shown = set()
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert write_examples_in_pages.filled(text) == text, (
            "Run python -m tests.programs.write_examples_in_pages."
        )
        shown |= {
            match[2] for match in write_examples_in_pages.MARKED.finditer(text)
        }
    examples = (paths.ROOT / "tf_xshard" / "examples").glob("[a-z]*.py")
    # README shows the result of one_device_numbers.
    assert {path.stem for path in examples} - {"one_device_numbers"} == {
        path.split("/")[-1].removesuffix(".py") for path in shown
    }
    citation = (DOCS / "CITATION.cff").read_text()
    assert f"\nversion: {tf_xshard.__version__}\n" in citation


def _has_lines(doc, names):
    return [
        name for name in names if not re.search(rf"^ +\*?{name}: ", doc, re.M)
    ]


def _undocumented(value):
    """What a public function or class does not say."""
    doc = inspect.getdoc(value)
    signature = inspect.signature(value)
    is_class = isinstance(value, type)
    if dataclasses.is_dataclass(value) and value.__module__.startswith(
        testing.__name__
    ):
        fields = [field.name for field in dataclasses.fields(value)]
        return _has_lines(doc, fields)
    sections = ["Example:"]
    if signature.parameters or is_class:
        sections += ["Args:", "Raises:", "Source:"]
    if not is_class and signature.return_annotation not in (None, "None"):
        sections.append("Returns:")
    found = [section for section in sections if section not in doc]
    found += _has_lines(doc, set(signature.parameters) - {"kwargs"})
    for name, member in vars(value).items() if is_class else ():
        if name.startswith("_") or inspect.ismemberdescriptor(member):
            continue
        described = inspect.getdoc(getattr(value, name)) or ""
        arguments = []
        if inspect.isfunction(member):
            arguments = list(inspect.signature(member).parameters)[1:]
        found += [name] * (not described)
        found += [
            f"{name}({argument})"
            for argument in arguments
            if f"{argument}: " not in described
        ]
    return found


def test_public_names_are_documented():
    functions = [
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
    ]
    results = [
        testing.Collective,
        testing.CompiledForTPU,
        testing.MemoryStatistics,
    ]
    public = [
        getattr(module, name)
        for module in (tf_xshard, v1)
        for name in module.__all__
    ]
    classes = [
        value
        for value in public
        if isinstance(value, type) and not issubclass(value, _SIMPLE)
    ]
    found = {
        value.__name__: _undocumented(value)
        for value in (*functions, *results, *classes)
    }
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_all_is_what_there_is():
    """Two are imported on request, the others with the package."""
    source = (paths.ROOT / "tf_xshard" / "public.py").read_text()
    imported = [*re.findall(r"(\w+) as \1", source), "__version__"]
    imported += ["compat", "tf_keras"]
    assert sorted(tf_xshard.__all__) == sorted(imported)
    assert len(set(imported)) == len(imported)
    for name in tf_xshard.__all__:
        assert hasattr(tf_xshard, name)
