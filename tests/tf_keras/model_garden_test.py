"""Model Garden's Trainer and TF-Recommenders' models, with an aggregator."""

import functools
import os
import re
import subprocess
import sys

import pytest

from tests.support import keras_2
from tests.support import paths

OPTIMIZERS = ("lamb", "lamb sum", "legacy_adamw")
TRAINED = (
    "bert, adamw",
    "bert, lamb",
    "bert, new adam",
    "bert, ema",
    "resnet, sgd",
)
NAMES = {
    "mirrored": (*OPTIMIZERS, "lamb scaled", *TRAINED, "two towers"),
    # tf_keras refuses a LossScaleOptimizer under TPUStrategy.
    "tpu": (*OPTIMIZERS, *TRAINED),
    "workers": (*OPTIMIZERS, "lamb scaled", "bert, lamb"),
}
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    # An environment of its own, since Model Garden brings much.
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run(
        [
            *(python, "-m", "pip", "install", "-q"),
            f"{paths.ROOT}[testing]",
            "tf-models-official==2.20.0",
            "tensorflow-recommenders==0.7.7",
            "pytest",
        ],
        check=True,
    )
    return python


@pytest.fixture(scope="module")
def differences(python):
    """From one device, by case, as a function of the kind of replicas."""

    @functools.cache
    def of_kind(kind):
        return keras_2.differences(
            keras_2.printed("model_garden_program", kind, python)
        )

    return of_kind


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, name) for k, names in NAMES.items() for name in names],
)
def test_is_one_device(kind, name, differences):
    assert differences(kind)[name] < 1e-6


@pytest.mark.parametrize("kind", NAMES)
def test_every_case_is_tested(kind, differences):
    assert differences(kind).keys() == set(NAMES[kind])


@pytest.mark.parametrize("library", ["from official.", "import tensorflow_rec"])
def test_the_guide(library, python, tmp_path):
    page = (paths.ROOT / "tf_xshard" / "docs" / "from_tf_keras.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    [block] = [one for one in blocks if library in one]
    subprocess.run(
        [python, "-c", block],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "TF_USE_LEGACY_KERAS": "1"},
        timeout=1500,
    )
