"""Where `make compat` finds what it runs on."""

from __future__ import annotations

import sys

from tools import compat


def test_every_supported_python_is_searched_and_the_current_one_is_found():
    assert compat.claimed() == ["3.11", "3.12", "3.13"]
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = compat.python(this)
    assert found is not None
    told = compat.run(found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    assert told.stdout.strip() == this
    assert compat.python("3.999") is None


def test_the_tests_to_run_on_every_redis_exist():
    assert [test for test in compat.REDIS_TESTS if (compat.ROOT / test).exists()]
    names = [one.name for one in compat.pairs()]
    assert "rq==2.8.0 redis==5.0.0" in names
    assert len(names) == len(set(names)) == len(compat.PAIRS)
