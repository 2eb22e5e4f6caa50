"""The table of promises names default tests, and texts that exist."""

import collections

import pytest

from tests import conftest
from tests import promises
from tests.support import budget
from tests.support import paths


def test_each_test_exists_and_is_not_full(request):
    found = request.config.stash[conftest.COLLECTED]
    files = {one.split("::")[0] for one in found}
    for row in promises.PROMISES:
        file = row.test.split("::")[0]
        assert (paths.ROOT / file).exists(), row.test
        # A run of this file alone has collected no other.
        if file in files and not request.config.option.keyword:
            assert row.test in found, row.test
            assert not found[row.test], f"{row.test} is full"


@pytest.mark.parametrize(
    "file", sorted({row.file for row in promises.PROMISES})
)
def test_each_old_text_occurs_once(file):
    text = (paths.ROOT / "tf_xshard" / file).read_text()
    rows = [row for row in promises.PROMISES if row.file == file]
    for row in rows:
        assert text.count(row.old) == 1, row
        assert row.new != row.old, row
    changes = collections.Counter((row.old, row.new, row.test) for row in rows)
    assert max(changes.values()) == 1, changes


@pytest.mark.parametrize("folder", ["collectives", "reduction", "optimizers"])
def test_each_module_has_a_mutant(folder):
    files = {row.file for row in promises.PROMISES}
    modules = {
        str(path.relative_to(paths.ROOT / "tf_xshard"))
        for path in (paths.ROOT / "tf_xshard" / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert sorted(modules - files) == []


def test_what_is_dear_has_a_reason(request):
    assert len(budget.ABOVE_ONE_I) <= 40
    found = request.config.stash[conftest.COLLECTED]
    files = {one.split("::")[0] for one in found}
    for name in budget.ABOVE_ONE_I:
        file = name.split("::")[0]
        assert (paths.ROOT / file).exists(), name
        if file in files and not name.endswith("(fixture)"):
            assert found.get(name) is False, name
