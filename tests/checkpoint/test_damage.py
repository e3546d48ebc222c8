"""Damaged, mixed and malicious checkpoints are refused and change nothing."""

import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.checkpoint.digests import digest_bytes
from penstock.checkpoint.loading.files import describe_file
from penstock.checkpoint.manifest import FORMAT
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.storage.local import LocalStorage
from tests.checkpoint.jobs import Training, train_alone, whole_state
from tests.models import differences
from tests.strategies import examples

FILES = (".metadata", "__0_0.distcp", "penstock.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """Return a folder with steps 1 and 2, and the training that saved them."""
    folder = tmp_path_factory.mktemp("saved")
    training = train_alone("1F1B", 2)
    with ps.Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            training.step(step)
            checkpoints.save(step, training.pipeline, training.optimizer)
    return folder, training


@pytest.fixture
def copied(saved: tuple[Path, Training], tmp_path: Path) -> Path:
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def refuse(folder: Path, training: Training, step: int | None = None) -> str:
    """Return the message of a refused load, which must not have changed anything."""
    before = whole_state(training.pipeline.state_dict())
    generator = torch.get_rng_state()
    with pytest.raises(ps.errors.CheckpointError) as caught:
        ps.Checkpoints(folder).load(training.pipeline, training.optimizer, step=step)
    assert differences(whole_state(training.pipeline.state_dict()), before, limit=0) == {}
    assert torch.equal(torch.get_rng_state(), generator)
    return str(caught.value)


def test_every_file_of_a_checkpoint_is_checked(copied: Path) -> None:
    folder = copied / "step-00000002"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert sorted(read_manifest(LocalStorage(copied), 2).files) == sorted(FILES[:2])


@pytest.mark.parametrize("name", FILES[:2])
def test_missing_short_changed_and_foreign_files_are_named(
    name: str, copied: Path, saved: tuple[Path, Training]
) -> None:
    training, file = saved[1], copied / "step-00000002" / name
    content, older = file.read_bytes(), copied / "step-00000001" / name
    start, end = "cannot load step 2: ", "; complete steps besides this one: [1]"
    file.unlink()
    assert refuse(copied, training) == f"{start}{file} is missing{end}"
    file.write_bytes(content[:-1])
    assert refuse(copied, training) == (
        f"{start}{file} must have {len(content)} bytes (got {len(content) - 1}){end}"
    )
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert refuse(copied, training) == (
        f"{start}{file} is not the file that was saved: its digest differs{end}"
    )
    shutil.copy(older, file)
    if content != older.read_bytes() and len(content) == older.stat().st_size:
        assert refuse(copied, training) == (
            f"{start}{file} is not the file that was saved: it belongs to {older}{end}"
        )
    file.write_bytes(content)
    assert ps.Checkpoints(copied).load(training.pipeline, training.optimizer) is not None


def test_missing_foreign_or_newer_manifest_is_named(
    copied: Path, saved: tuple[Path, Training]
) -> None:
    training, file = saved[1], copied / "step-00000002" / "penstock.json"
    whole = json.loads(file.read_text())
    start, end = f"cannot load step 2: {file}", "; complete steps besides this one: [1]"
    cases = {
        "": " is damaged: it is not JSON; load another step",
        "[" * 100_000: " is damaged: it is not JSON; load another step",
        '{"kind": "plan"}': " is not the manifest of a checkpoint of Penstock",
        "[1, 2]": " is not the manifest of a checkpoint of Penstock",
        json.dumps(whole | {"format": 1}): f" must have format {FORMAT} for this version of "
        "Penstock (got 1); load it with the version that wrote it",
        json.dumps(whole | {"content": whole["content"] | {"step": 3}}): " is damaged: its "
        "content does not match its SHA-256; load another step",
    }
    for text, message in cases.items():
        file.write_text(text)
        assert refuse(copied, training) == f"{start}{message}{end}"
    file.unlink()
    # Without its manifest a step is no longer complete.
    restored = ps.Checkpoints(copied).load(training.pipeline, training.optimizer)
    assert restored == ps.checkpoint.Restored(1, {}, has_generator_states=True)
    assert refuse(copied, training, step=2) == (
        f"{start} is missing, so this is not a checkpoint of Penstock{end}"
    )


def sign(content: dict[str, Any]) -> str:
    """Return a manifest with this content and a correct digest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    whole = {"kind": "penstock checkpoint", "format": FORMAT, "sha256": digest}
    return json.dumps(whole | {"content": content})


Change = Callable[[dict[str, Any]], object]
KEY = "model.layers.0.0.weight"
CHANGES: dict[str, Change] = {
    "not a file name: '../step-00000001/.metadata'": lambda c: c["files"].update(
        {"../step-00000001/.metadata": c["files"][".metadata"]}
    ),
    f"a part of '{KEY}' lies outside of the files": lambda c: c["tensors"][KEY]["chunks"][
        0
    ].update(position=10**9),
    f"a part of '{KEY}' lies outside of its shape [6, 6]": lambda c: c["tensors"][KEY]["chunks"][
        0
    ].update(offsets=[1, 0]),
    f"the parts of '{KEY}' do not make up its shape [6, 6]": lambda c: c["tensors"][KEY].update(
        chunks=[]
    ),
    "not a type of torch: 'load'": lambda c: c["tensors"][KEY].update(dtype="load"),
    "not a type of torch: '\\x1b[2J'": lambda c: c["tensors"][KEY].update(dtype="\x1b[2J"),
    f"not a count: '{'9' * 76}...": lambda c: c.update(processes="9" * 10**6),
    "not a file name: '\\x07.distcp'": lambda c: c["files"].update(
        {"\a.distcp": c["files"][".metadata"]}
    ),
    "not a count: -1": lambda c: c["tensors"][KEY].update(shape=[-1, 6]),
    "not a count: True": lambda c: c.update(step=True),
}


@pytest.mark.parametrize("message", CHANGES)
def test_manifest_with_impossible_content_is_refused(
    message: str, copied: Path, saved: tuple[Path, Training]
) -> None:
    file = copied / "step-00000002" / "penstock.json"
    content = json.loads(file.read_text())["content"]
    CHANGES[message](content)
    file.write_text(sign(content))
    assert refuse(copied, saved[1]) == (
        f"cannot load step 2: {file} is damaged: ValueError: {message}; load another step; "
        "complete steps besides this one: [1]"
    )


@settings(max_examples=examples(150))
@given(data=st.data())
def test_any_damage_to_any_file_is_refused(
    data: st.DataObject, saved: tuple[Path, Training], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(saved[0], folder)
    name = data.draw(st.sampled_from(FILES))
    file = folder / "step-00000002" / name
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(("cut", "flip", "swap", "extend", "junk"))):
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "flip":
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        case "swap":
            other = data.draw(st.sampled_from([n for n in FILES if n != name]))
            content[:] = (folder / "step-00000002" / other).read_bytes()
        case "extend":
            content += b"x"
        case _:
            content[:] = data.draw(st.binary(max_size=200))
    file.write_bytes(content)
    message = refuse(folder, saved[1], step=2)
    assert str(file) in message
    assert message.endswith("complete steps besides this one: [1]")


class Harm:
    """Does harm when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_nothing_in_a_checkpoint_is_ever_unpickled(
    copied: Path, saved: tuple[Path, Training], tmp_path: Path
) -> None:
    folder, mark = copied / "step-00000002", tmp_path / "harmed"
    harm = pickle.dumps(Harm(mark))
    manifest = json.loads((folder / "penstock.json").read_text())["content"]
    # Every byte of the file that is not a number of a tensor could be a pickle: so it goes.
    tensors = folder / "__0_0.distcp"
    numbers = bytearray(harm.ljust(tensors.stat().st_size, b"\0"))
    content = tensors.read_bytes()
    for tensor in manifest["tensors"].values():
        size = getattr(torch, tensor["dtype"]).itemsize
        for chunk in tensor["chunks"]:
            start = chunk["position"]
            end = start + size * torch.Size(chunk["sizes"]).numel()
            numbers[start:end] = content[start:end]
    for name, damaged in ((".metadata", harm), ("__0_0.distcp", bytes(numbers))):
        (folder / name).write_bytes(damaged)
        digest = describe_file(LocalStorage(folder), name)
        manifest["files"][name] = {"bytes": digest.bytes, "digest": digest.digest}
    (folder / "penstock.json").write_text(sign(manifest))
    training = train_alone("ZBV", 2, seed=4)
    restored = ps.Checkpoints(copied).load(training.pipeline, training.optimizer)
    assert restored == ps.checkpoint.Restored(2, {}, has_generator_states=True)
    ps.Checkpoints(saved[0]).load(saved[1].pipeline, saved[1].optimizer)
    expected = whole_state(saved[1].pipeline.state_dict())
    assert differences(whole_state(training.pipeline.state_dict()), expected, limit=0) == {}
    assert not mark.exists()
    pickle.loads(harm)
    assert mark.exists()


def test_digest_finds_damage_anywhere_in_a_long_file() -> None:
    mebibyte = 2**20
    data = bytearray(random.Random(0).randbytes(2 * mebibyte + 100))
    expected = digest_bytes(data)
    # It does not depend on the pieces that come.
    assert digest_bytes(data[:7], data[7 : mebibyte + 3], data[mebibyte + 3 :]) == expected
    for place in (0, mebibyte - 1, mebibyte, 2 * mebibyte, len(data) - 1):
        data[place] ^= 1
        assert digest_bytes(data) != expected
        data[place] ^= 1
    swapped = data[mebibyte : 2 * mebibyte] + data[:mebibyte] + data[2 * mebibyte :]
    for other in (swapped, data[:-1], data[:-100], data + b"\0"):
        assert digest_bytes(other) != expected
    assert digest_bytes(data) == expected
    # Numbers, sectors and pages that change places, or are lost.
    for size in (1, 8, 512, 4096, 8192, 65_536):
        for place in (size, 3 * size, mebibyte // 2):
            moved = bytearray(data)
            moved[:size], moved[place : place + size] = data[place : place + size], data[:size]
            assert digest_bytes(moved) != expected
        assert digest_bytes(bytes(size) + data[size:]) != expected
