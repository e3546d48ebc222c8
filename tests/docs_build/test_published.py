"""The page of published runs shows what its command prints."""

import pytest

from docs_build.published.__main__ import main
from docs_build.published.page import PAGE, TABLES, fill, read_tables


def test_the_page_has_every_table_once() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert list(read_tables(page)) == list(TABLES)
    assert all(page.count(f"python -m docs_build.published {name}") == 1 for name in TABLES)


@pytest.mark.parametrize("name", ["primus", "deepseek"])
def test_tables_of_the_page_are_computed(name: str) -> None:
    assert read_tables(PAGE.read_text(encoding="utf-8"))[name] == str(TABLES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "zero-bubble"])
def test_large_tables_of_the_page_are_computed(name: str) -> None:
    assert read_tables(PAGE.read_text(encoding="utf-8"))[name] == str(TABLES[name]())


def test_tables_are_filled_in_by_name() -> None:
    page = (
        "a\n<!-- published: one -->\n<!-- end -->\nb <!-- published: two -->\n\nold\n<!-- end -->"
    )
    assert read_tables(fill(page, {"one": "| 1 |"})) == {"one": "| 1 |", "two": "old"}


def test_a_table_is_printed_by_name_and_an_unknown_name_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["deepseek"])
    assert capsys.readouterr().out == f"deepseek\n\n{TABLES['deepseek']()}\n\n"
    with pytest.raises(SystemExit):
        main(["llama4"])
    message = "a NAME must be one of llama3, primus, zero-bubble, deepseek (got llama4)"
    assert message in capsys.readouterr().err
