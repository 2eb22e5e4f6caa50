"""The table of promises names default tests, and texts that exist."""

import pytest

from tests import conftest
from tests import promises
from tests.support import budget
from tests.support import paths


def test_each_test_exists_and_is_not_full(request):
    """The test of each promise, and each that may be dear."""
    tests = (paths.ROOT / "tests").rglob("*_test.py")
    files = [str(path.relative_to(paths.ROOT)) for path in tests]
    found = request.config.stash[conftest.COLLECTED]
    collected = {one.split("::")[0] for one in found}
    for name in (*(row.test for row in promises.PROMISES), *budget.ABOVE_ONE_I):
        end = name.split("::")[0]
        [file] = [one for one in files if f"/{one}".endswith(f"/{end}")]
        # A run of some files has collected no other.
        if file in collected and not request.config.option.keyword:
            test = file + name.removeprefix(end)
            assert found.get(test) is False, test


@pytest.mark.parametrize(
    "file", sorted({row.file for row in promises.PROMISES})
)
def test_each_old_text_occurs_once(file):
    text = (paths.ROOT / "tf_xshard" / file).read_text()
    rows = [row for row in promises.PROMISES if row.file == file]
    for row in rows:
        assert text.count(row.old) == 1, row
        assert row.new != row.old, row
    changes = {(row.old, row.new, row.test) for row in rows}
    assert len(changes) == len(rows)


def test_each_module_has_a_mutant():
    files = {row.file for row in promises.PROMISES}
    modules = {
        str(path.relative_to(paths.ROOT / "tf_xshard"))
        for folder in ("collectives", "reduction", "optimizers")
        for path in (paths.ROOT / "tf_xshard" / folder).rglob("[a-z]*.py")
    }
    assert sorted(modules - files) == []
