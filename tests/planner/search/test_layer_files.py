"""Files of layers are read strictly; errors name the file and the layer."""

from pathlib import Path

import pytest

from penstock.errors import CostsError
from penstock.planner.partition.pieces import Piece
from penstock.planner.search.layer_files import LayerCosts, read_layers, write_layers

ONE_SIZE = """
transfer = 0.5

[[layers]]
name = "embedding"
forward = 1
parameter_bytes = 1e3

[[layers]]
name = "block"
repeat = 2
forward = 2.5
backward_input = 2
message_bytes = 7
"""

SIZES = """
transfer = 0.5

[[sizes]]
microbatch_size = 1
layers = [{ name = "block", forward = 1, repeat = 2 }]

[[sizes]]
microbatch_size = 4
transfer = [[0, 1], [2, 0]]
layers = [{ name = "block", forward = 3, repeat = 2 }]
"""


def write(folder: Path, text: str, name: str = "layers.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_layers_are_read_and_repeated(tmp_path: Path) -> None:
    block = {"forward": 2.5, "backward_input": 2, "message_bytes": 7}
    assert read_layers(write(tmp_path, ONE_SIZE)) == LayerCosts(
        layers={
            1: (
                Piece("embedding", forward=1, parameter_bytes=1e3),
                Piece("block.0", **block),
                Piece("block.1", **block),
            )
        },
        transfer={1: 0.5},
    )


def test_every_size_has_its_layers_and_may_have_its_transfer(tmp_path: Path) -> None:
    assert read_layers(write(tmp_path, SIZES)) == LayerCosts(
        layers={
            1: (Piece("block.0", forward=1), Piece("block.1", forward=1)),
            4: (Piece("block.0", forward=3), Piece("block.1", forward=3)),
        },
        transfer={1: 0.5, 4: ((0, 1), (2, 0))},
    )


def test_the_host_is_written_and_read(tmp_path: Path) -> None:
    piece = Piece("block", forward=1.0, host_action=0.25)
    given = LayerCosts({1: (piece,), 2: (piece,)}, {1: 0.5, 2: 1.0}, host_message=0.125)
    write_layers(tmp_path / "layers.json", given)
    assert read_layers(tmp_path / "layers.json") == given


def test_json_says_the_same(tmp_path: Path) -> None:
    file = write(tmp_path, '{"layers": [{"name": "a", "forward": 1}]}', "layers.json")
    assert read_layers(file) == LayerCosts({1: (Piece("a", forward=1),)}, {1: 0.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file must have either layers or sizes"),
        ("layers = 3", "layers must be a list of at least one table (got 3)"),
        ("layers = []", "layers must be a list of at least one table (got [])"),
        ("layers = [1]", "layer 0 must be a table of names and values (got 1)"),
        ("layers = [{forward = 1}]", "layer 0 must have a name (got None)"),
        ("layers = [{name = 'a', forward = -1}]", "forward of piece 'a' is -1; give a number"),
        ("layers = [{name = 'a', forward = 'x'}]", "forward of piece 'a' is 'x'; give a number"),
        (
            "layers = [{name = 'a', speed = 1}]",
            "layer 0 has an unknown field 'speed'; known are activation",
        ),
        ("layers = [{name = 'a', repeat = 0}]", "repeat of layer 'a' must be at least 1 (got 0)"),
        (
            "transfer = -1\nlayers = [{name = 'a'}]",
            "transfer must be from 0 to 1e+100 (got -1",
        ),
        (
            "sizes = [{layers = [{name = 'a'}]}]",
            "every size must have its own microbatch_size, from 1",
        ),
        ("sizes = [{microbatch_size = 2}]", "layers must be a list of at least one table"),
        (
            "color = 1",
            "the file has an unknown field 'color'; known are host_message, layers, sizes, "
            "transfer",
        ),
        ("=", "not readable as TOML: Invalid statement"),
    ],
)
def test_bad_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(CostsError) as caught:
        read_layers(file)
    assert str(caught.value).startswith(f"{file}: {message}")
