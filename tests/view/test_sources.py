"""What a file holds is found out by its ending and its first field."""

from pathlib import Path

import pytest

from penstock.errors import ParseError
from penstock.view.sources import read_source


@pytest.mark.parametrize(
    ("text", "got"),
    [("{}", "an object without fields"), ('{"b": 1, "a": []}', "an object with 'a', 'b'")],
)
def test_object_that_is_nothing_known_is_not_called_a_trace(
    text: str, got: str, tmp_path: Path
) -> None:
    # Such an object was read as a trace without events, and the message asked for a profile.
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ParseError) as caught:
        read_source(file)
    assert str(caught.value) == (
        f"{file}: an object must have 'traceEvents' to be a trace, or begin with a field of a "
        f"plan or of a recorded timeline (got {got})"
    )
