"""Shares fixtures among the tests of several real processes."""

import pytest

from tests.support import cluster


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Creates the folder that all workers write into."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def of(request, directory):
    """A function: what a case of the file's `program` returned on each worker.

    All cases run once.
    """
    program = request.module.program
    return cluster.cases_of(
        program.__name__, program.NUM_WORKERS, [str(directory)]
    )
