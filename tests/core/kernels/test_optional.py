"""Modules that need a package which is absent, asked for by many threads at once."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardpass.core.kernels import optional_module

HALF_MADE = "import a_package_that_is_not_installed\nTHE_END = True\n"


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    def write(text):
        (tmp_path / "needs_a_package.py").write_text(text)
        return "needs_a_package"

    monkeypatch.syspath_prepend(str(tmp_path))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield write
    sys.setswitchinterval(interval)
    sys.modules.pop("needs_a_package", None)


def test_no_thread_gets_a_module_whose_import_fails(module_of):
    name = module_of(HALF_MADE)
    with ThreadPoolExecutor(8) as pool:  # not from its cache: as if all threads came first
        found = list(pool.map(optional_module.__wrapped__, [name] * 1000))
    assert found == [None] * 1000


def test_a_module_that_can_be_imported_is_returned(module_of):
    name = module_of("THE_END = True\n")
    assert optional_module.__wrapped__(name).THE_END
