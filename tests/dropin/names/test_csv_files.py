import csv
from pathlib import Path

import pytest

from penstock.dropin.names.actions import ActionTextError
from penstock.dropin.names.lists import list_actions, read_order, write_order
from penstock.dropin.names.passes import lower_order
from penstock.dropin.orders.tables import build_order
from penstock.ir.schedule import Schedule
from tests.dropin.incumbent import FAMILIES, rank_of_stage, to_torch
from tests.dropin.incumbent import read_order as read_lines


@pytest.mark.parametrize(("name", "stages_per_rank"), FAMILIES)
def test_file_is_the_one_that_torch_writes_and_is_read_back(
    name: str, stages_per_rank: int, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    order = build_order(name, 3, 7, stages_per_rank)
    compute = {
        rank: [slot for slot in slots if slot is None or slot.is_compute_op]
        for rank, slots in order.items()
    }
    holder = rank_of_stage(order)
    lowered = list_actions(lower_order(compute, holder, 7))
    for written in (order, compute, {rank: [*actions] for rank, actions in lowered.items()}):
        write_order(written, ours)
        with theirs.open("w", newline="") as file:
            csv.writer(file).writerows(to_torch(written).values())
        assert ours.read_bytes() == theirs.read_bytes()
        assert read_order(str(ours)) == written


def test_empty_cells_are_idle_slots_and_empty_lines_at_the_end_are_nothing(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,  ,0B0,\n,1F0 , 1B0\n\n\n")
    assert read_order(file) == read_lines("0F0 . 0B0 .", ". 1F0 1B0")
    write_order(read_lines(". .", "0F0", "."), file)
    assert read_order(file) == read_lines(". .", "0F0", ".")


def test_wrong_cell_is_named(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0B0\n1F0,1B0garbage\n")
    with pytest.raises(ActionTextError, match="rank 1, cell 1: not a valid action: '1B0garbage'"):
        read_order(file)


def test_files_of_schedules_are_read_too(tmp_path: Path) -> None:
    file = tmp_path / "order.csv"
    order = read_lines("0F0 0F1 (0F2;0B0) 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    Schedule.from_orders([map(str, slots) for slots in order.values()]).to_csv(file)
    assert read_order(file) == order
