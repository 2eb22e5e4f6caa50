"""README.md and the guides: what they name exists, and every block runs."""

import ast
import json
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

import tf_xshard
from tests.programs import version_matrix
from tests.programs import write_api_page
from tests.programs import write_examples_in_pages
from tests.support import paths
from tests.support import seeds

README = paths.ROOT / "README.md"
DOCS = paths.ROOT / "tf_xshard" / "docs"
NOTEBOOK = DOCS / "digits.ipynb"
PAGES = [README, paths.ROOT / "benchmarks" / "README.md", *DOCS.glob("*.md")]
# Blocks that import these are read only: they need a TPU, or another
# environment.
NOT_RUN = (
    "TPUClusterResolver",
    "import horovod",
    "import torch",
    # tests/tf_keras/model_garden_test.py runs these.
    "from official.",
    "import tensorflow_recommenders",
)
# TensorFlow's, of a collective strategy that is made after something has run.
_TENSORFLOWS_OWN = ("Collective ops is not configured at program startup.",)


def _blocks(page):
    """The page's own blocks; `examples_test` runs the shipped programs."""
    own = write_examples_in_pages.MARKED.sub("", page.read_text())
    return re.findall(r"```python\n(.*?)```", own, re.S)


@pytest.fixture
def logged_warnings(monkeypatch):
    """What TensorFlow and absl log; AutoGraph's complaints for example."""
    # TensorFlow warns of the fifth `fit` of a process that traces, and this
    # process has run other tests. A page is a program of its own.
    monkeypatch.setattr(
        polymorphic_function,
        "_frequent_tracing_detector_manager",
        polymorphic_function._FrequentTracingDetectorManager(),
    )
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


def _run(blocks, tmp_path, monkeypatch):
    """Runs the blocks of a page, in order, as one program.

    The tests' devices are made already, so a page's strategy is compared with
    the devices that the page has configured.
    """
    configured = []

    def configure(device, logical):
        assert len(logical) <= len(tf.config.list_logical_devices("CPU"))
        configured[:] = logical

    make_strategy = tf.distribute.MirroredStrategy

    def mirrored(devices=None):
        assert len(devices or ()) <= len(configured), (devices, configured)
        return make_strategy(devices)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        tf.config, "set_logical_device_configuration", configure
    )
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", mirrored)
    # Blocks set TensorFlow's seed, some more than once; see `seeds`.
    monkeypatch.setattr(keras.utils, "set_random_seed", seeds.seed)
    scope = {}
    for index, block in enumerate(blocks):
        if any(name in block for name in NOT_RUN):
            _check_names(block)
            continue
        if "compile_for_tpu(" in block:
            pytest.importorskip("libtpu", reason="for Linux on x86-64 only")
        # AutoGraph reads the source of what it converts.
        program = tmp_path / f"block{index}.py"
        program.write_text(block)
        exec(compile(block, program, "exec"), scope)
    return scope


def _check_names(block):
    """That it compiles, and that TensorFlow has every name in it."""
    ast.parse(block)
    if "import horovod" in block:  # For another TensorFlow.
        return
    for dotted in set(re.findall(r"\btf(?:\.[A-Za-z_]\w*)+", block)):
        value = tf
        for part in dotted.split(".")[1:]:
            value = getattr(value, part)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if _blocks(page)],
    ids=lambda page: page.name,
)
def test_blocks_run(page, tmp_path, monkeypatch, logged_warnings):
    scope = _run(_blocks(page), tmp_path, monkeypatch)
    assert not logged_warnings
    if page.name == "groups.md":
        _check_population(page, scope)


def _check_population(page, scope):
    """Compares the page's table, and what it says of it, with the program."""
    table, x, y = scope["table"], scope["x"], scope["y"]
    [shown] = re.findall(r"```\n(group .*?)\n```", page.read_text(), re.S)
    for line, row in zip(shown.splitlines()[1:], table, strict=True):
        group, loss = line.split()
        assert group == str(row["group"])
        assert float(loss) == pytest.approx(row["loss"], rel=0.1, abs=1e-3)
    *groups, ensemble = table.column("loss")
    assert sorted(groups, reverse=True) == groups
    assert groups[3] < 1e-2 < ensemble < groups[0]
    assert scope["best"] == 3
    alone = scope["alone"].predict(x[512:], verbose=0)[:, 0]
    np.testing.assert_allclose(alone, y[512:], atol=0.2)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """All cells, on fewer replicas; `execute_notebook` wrote what they show."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code[1:])
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in one.get("data", {}) for one in outputs) >= 3
    # Fewer epochs and replicas take less time.
    sources = [
        "".join(cell["source"])
        .replace("epochs=8", "epochs=2")
        .replace("range(2, 9, 2)", "range(2, 3, 2)")
        .replace("] * 8", "] * 4")
        .replace("range(8)])", "range(4)])")
        .replace("contiguous(8, 4)", "contiguous(4, 2)")
        for cell in code
    ]
    _run(sources, tmp_path, monkeypatch)


def test_the_commands_of_the_readme():
    command = (
        "python3 -m venv --clear .venv && .venv/bin/python -m pip install"
        " '.[{}]' && .venv/bin/python -m {}"
    )
    demo = command.format("cpu,demo", "tf_xshard demo")
    tests = command.format("tensorflow,test", "pytest")
    assert demo in README.read_text() and tests in README.read_text()
    assert tests in (paths.ROOT / ".ci" / "run").read_text()


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


def test_the_api_page_is_what_the_docstrings_say():
    assert write_api_page.PAGE.read_text() == write_api_page.page(), (
        "Run python -m tests.programs.write_api_page."
    )


def test_guides_show_the_examples_as_they_are():
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


def test_the_citation_has_the_version():
    citation = (DOCS / "CITATION.cff").read_text()
    assert f"\nversion: {tf_xshard.__version__}\n" in citation


def test_the_nightly_workflow_has_every_keras_and_nightly_tensorflow():
    workflow = paths.ROOT / ".github" / "workflows" / "nightly.yml"
    rows = ", ".join([*version_matrix.SMOKE, "tensorflow-nightly"])
    assert f"row: [{rows}]" in workflow.read_text()
