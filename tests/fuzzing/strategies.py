"""What property tests draw from: changed files, and bytes of any kind."""

from typing import get_args

from hypothesis import strategies as st

from tests.fuzzing.edits import ODDITIES, VALUES, Edit, How, apply_edits
from tests.fuzzing.readers import Reader

__all__ = ["any_bytes", "changed_files"]

_EDITS = st.lists(
    st.builds(
        Edit,
        how=st.sampled_from(get_args(How)),
        place=st.integers(0, 5000),
        length=st.integers(1, 40),
        text=st.sampled_from(ODDITIES),
        value=st.integers(0, len(VALUES) - 1),
    ),
    min_size=1,
    max_size=6,
)


def changed_files(reader: Reader) -> st.SearchStrategy[bytes]:
    """A valid file after a few edits."""
    return st.builds(apply_edits, st.sampled_from(reader.valid), _EDITS)


def any_bytes() -> st.SearchStrategy[bytes]:
    """Bytes, some of which are text."""
    return st.one_of(st.binary(), st.text().map(str.encode), st.lists(_PIECES).map(b"".join))


_PIECES = st.sampled_from(ODDITIES)
