"""README's first program runs; with --full the blocks of all pages do."""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from tests.source import pages_test as pages
from tests.support import names_in_code
from tests.support import replicas
from tests.support import seeds

# Blocks with one of these need a TPU, or another environment.
NOT_RUN = (
    "TPUClusterResolver|(import|from) (" + "|".join(names_in_code.ABSENT) + ")"
)
# TensorFlow's, of a collective strategy that is made after something has run.
_TENSORFLOWS_OWN = ("Collective ops is not configured at program startup.",)


@pytest.fixture
def logged_warnings(monkeypatch, caplog):
    """A function: what TensorFlow and absl have logged; AutoGraph's complaints.

    A page is a program of its own, and this process has run other tests:
    TensorFlow warns of the fifth `fit` of a process that traces.
    """
    monkeypatch.setattr(
        polymorphic_function,
        "_frequent_tracing_detector_manager",
        polymorphic_function._FrequentTracingDetectorManager(),
    )
    return lambda: [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and not record.message.startswith(_TENSORFLOWS_OWN)
    ]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs blocks, in order, as one program."""
    # The tests' devices are made already, so a page's strategy is compared with
    # the devices that the page has configured. Two are all GPUs.
    configured = [None] * 2

    def configure(device, logical):
        assert len(logical) <= len(tf.config.list_logical_devices("CPU"))
        configured[:] = logical

    make_strategy = tf.distribute.MirroredStrategy

    def mirrored(devices=("CPU:0", "CPU:1")):
        assert len(devices) <= len(configured), (devices, configured)
        return make_strategy(devices)

    def run_(blocks):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(
            tf.config, "set_logical_device_configuration", configure
        )
        monkeypatch.setattr(tf.distribute, "MirroredStrategy", mirrored)
        # Blocks set TensorFlow's seed, some more than once; see `seeds`.
        monkeypatch.setattr(keras.utils, "set_random_seed", seeds.seed)
        scope = {}
        for index, block in enumerate(blocks):
            if re.search(NOT_RUN, block):
                continue
            if "compile_for_tpu(" in block:
                pytest.importorskip("libtpu", reason="for Linux on x86-64 only")
            # AutoGraph reads the source of what it converts.
            program = tmp_path / f"block{index}.py"
            program.write_text(block)
            exec(compile(block, program, "exec"), scope)
        return scope

    return run_


def test_the_first_program_of_the_readme(run, logged_warnings):
    [first, _] = pages.blocks(pages.README)
    scope = run([first])
    assert not logged_warnings()
    assert scope["optimizer"].iterations.numpy() == 4
    for weight in scope["model"].trainable_variables:
        one, other = replicas.values(scope["strategy"], weight)
        np.testing.assert_array_equal(one, other)


@replicas.in_full
@pytest.mark.parametrize(
    "page",
    [page for page in pages.PAGES if pages.blocks(page)],
    ids=lambda page: page.name,
)
def test_blocks_run(page, run, logged_warnings):
    scope = run(pages.blocks(page))
    assert not logged_warnings()
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


@replicas.in_full
def test_the_notebook_runs(run, monkeypatch):
    """All cells, on fewer replicas."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    cells = pages.cells()
    assert all(cell["outputs"] for cell in cells[1:])
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in one.get("data", {}) for one in outputs) >= 3
    # Fewer epochs and replicas take less time.
    run(
        cell["source"]
        .replace("epochs=8", "epochs=2")
        .replace("range(2, 9, 2)", "range(2, 3, 2)")
        .replace("] * 8", "] * 4")
        .replace("range(8)])", "range(4)])")
        .replace("contiguous(8, 4)", "contiguous(4, 2)")
        for cell in cells
    )
