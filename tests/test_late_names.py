"""Names that a package loads when they are first used."""

import sys
from types import ModuleType

import pytest

from penstock.late_names import late_names


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a package with one module that exists, and a name of another that does not."""
    found = ModuleType("lately")
    inner = ModuleType("lately.numbers")
    vars(inner)["one"] = 1
    monkeypatch.setitem(sys.modules, "lately", found)
    monkeypatch.setitem(sys.modules, "lately.numbers", inner)
    getter, lister = late_names("lately", {"one": "numbers", "gone": "nowhere"})
    vars(found).update(__getattr__=getter, __dir__=lister)
    return found


def test_a_name_is_that_of_its_module(package: ModuleType) -> None:
    assert package.one == 1


def test_another_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'lately' has no attribute 'two'"):
        _ = package.two


def test_an_error_of_a_module_is_not_hidden(package: ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        _ = package.gone


def test_names_are_listed_before_they_are_loaded(package: ModuleType) -> None:
    assert {"one", "gone"} <= set(dir(package))
