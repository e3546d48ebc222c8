"""Measures families, one line of JSON each, or writes the page about all lines.

python -m tests.splitting.families --part 0/5 >> families.jsonl
python -m tests.splitting.families --only llama timm/MlpMixer >> families.jsonl
python -m tests.splitting.families --table families.jsonl > docs/families.md
python -m tests.splitting.families --again some.jsonl    changes these rows of the page
"""

import argparse
import json
import logging
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from tests.splitting.families.building import families
from tests.splitting.families.measuring import COLUMNS, measure
from tests.splitting.families.optional import prepare_torchvision
from tests.splitting.families.table import read_page, write_table

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def _read(lines: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.read_text().splitlines()]


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--columns", nargs="*", default=COLUMNS, choices=COLUMNS)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--again", type=Path)
    chosen = parser.parse_args()
    if chosen.table is not None:
        sys.stdout.write(write_table(_read(chosen.table)))
        return
    if chosen.again is not None:
        PAGE.write_text(write_table(read_page(PAGE.read_text()) + _read(chosen.again)))
        return
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    prepare_torchvision()
    start, step = map(int, chosen.part.split("/"))
    end = time.monotonic() + chosen.seconds
    for kind in chosen.only or families()[start::step]:
        if time.monotonic() > end:
            sys.stderr.write(f"left out from {kind}\n")
            break
        began = time.monotonic()
        with redirect_stdout(sys.stderr):  # some families print
            row = measure(kind, chosen.columns)
        row["seconds"] = round(time.monotonic() - began, 1)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


main()
