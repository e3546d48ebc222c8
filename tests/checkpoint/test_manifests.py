"""Manifests with right digests and wrong content: refused in full, or restored in full."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.checkpoint.manifest import FORMAT
from penstock.checkpoint.manifest_reading import read_manifest
from penstock.checkpoint.parts import Box, tile_wholly
from penstock.checkpoint.storage.local import LocalStorage
from tests.checkpoint.jobs import Training, train_alone, whole_state
from tests.strategies import examples


def sign(content: dict[str, Any]) -> str:
    """Return a manifest with this content and a correct digest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    whole = {"kind": "penstock checkpoint", "format": FORMAT, "sha256": digest}
    return json.dumps(whole | {"content": content})


def state_of(training: Training) -> dict[str, Any]:
    """Return everything that a restore may change, as plain values."""
    state = training.optimizer.state_dict()
    return {
        "model": {
            name: t.tolist() for name, t in whole_state(training.pipeline.state_dict()).items()
        },
        "state": {
            f"{number}.{key}": v.tolist() if isinstance(v, torch.Tensor) else v
            for number, values in state["state"].items()
            for key, v in values.items()
        },
        "groups": repr(state["param_groups"]),
        "random": torch.get_rng_state().tolist(),
        "random_step": training.pipeline.random_step,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    training = train_alone("1F1B", 2)
    with ps.Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            training.step(step)
            checkpoints.save(step, training.pipeline, training.optimizer)
    return folder


def read_content(folder: Path) -> dict[str, Any]:
    text = (folder / "step-00000002" / "penstock.json").read_text()
    content: dict[str, Any] = json.loads(text)["content"]
    return content


class Loader:
    """Loads changed manifests into one training, and looks at what has changed."""

    def __init__(self, saved: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(saved, folder)
        self.training = train_alone("ZBV", 2, seed=3)
        self.training.step(0)
        self.before = state_of(self.training)

    def load(self, content: dict[str, Any]) -> str:
        """Return why a manifest is refused, which has changed nothing, or an empty text."""
        (self.folder / "step-00000002" / "penstock.json").write_text(sign(content))
        training = self.training
        try:
            ps.Checkpoints(self.folder).load(training.pipeline, training.optimizer, step=2)
        except ps.errors.CheckpointError as error:
            assert state_of(training) == self.before
            return str(error)
        # A step must work with what was restored.
        after = state_of(training)
        training.step(5)
        assert after["model"] != self.before["model"]
        ps.Checkpoints(self.folder).load(training.pipeline, training.optimizer, step=1)
        self.before = state_of(training)
        return ""


@pytest.fixture(scope="module")
def loader(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    return Loader(saved, tmp_path_factory.mktemp("changed") / "run")


NAME = "layers.0.0.weight"
KEY = f"model.{NAME}"
STATE = f"optim.state.{NAME}.exp_avg"
Change = Callable[[dict[str, Any]], object]


def overlap(content: dict[str, Any]) -> None:
    """Let two parts cover one half of a tensor, and none the other."""
    (chunk,) = content["tensors"][KEY]["chunks"]
    half = chunk | {"sizes": [3, 6]}
    content["tensors"][KEY]["chunks"] = [half, half | {"position": half["position"] + 144}]


def share(content: dict[str, Any]) -> None:
    """Let two tensors have the same bytes."""
    other = content["tensors"][f"optim.state.{NAME}.exp_avg_sq"]["chunks"][0]
    content["tensors"][STATE]["chunks"][0]["position"] = other["position"] + 8


def forget(content: dict[str, Any]) -> None:
    """Remove state, with a count that fits."""
    del content["tensors"][STATE]
    content["counts"]["optim.state."] -= 1


def reshape(content: dict[str, Any]) -> None:
    """Give state another shape of the same size."""
    state = content["tensors"][STATE]
    state["shape"], state["chunks"][0]["sizes"] = [4, 9], [4, 9]
    state["chunks"][0]["offsets"] = [0, 0]


def rename(content: dict[str, Any]) -> None:
    """Move state to what is not a parameter."""
    content["tensors"][STATE.replace(NAME, "nobody")] = content["tensors"].pop(STATE)


def spoil_generator(content: dict[str, Any]) -> None:
    """Read the state of the generator from where the state of Adam is."""
    weights = content["tensors"]
    size = weights["random.0.cpu"]["shape"][0]
    file = content["files"]["__0_0.distcp"]["bytes"]
    del weights["random.0.cpu"]
    used = {
        (c["position"], c["position"] + 8 * torch.Size(c["sizes"]).numel())
        for t in weights.values()
        for c in t["chunks"]
    }
    start = next(
        s for s in range(0, file - size, 64) if all(s + size <= a or s >= b for a, b in used)
    )
    chunk = {"offsets": [0], "sizes": [size], "file": "__0_0.distcp", "position": start}
    weights["random.0.cpu"] = {"shape": [size], "dtype": "uint8", "chunks": [chunk]}


CHANGES: dict[str, Change] = {
    f"the parts of '{KEY}' do not make up its shape [6, 6]": overlap,
    "two parts share bytes of '__0_0.distcp'": share,
    "must have the same keys ('exp_avg' is missing for one of them)": forget,
    f"the optimizer's 'exp_avg' of '{NAME}' must fit the shape [6, 6]": reshape,
    "is not of a parameter of the model": rename,
    "it must hold {": lambda c: c["tensors"].pop(STATE),
    "the optimizer's setting 'lr' must be a number": lambda c: c["values"].update(
        {key: "fast" for key in c["values"] if key.endswith(".lr")}
    ),
    "the optimizer's setting 'betas' must be a list of 2": lambda c: c["values"].update(
        {key: [0.9] for key in c["values"] if key.endswith(".betas")}
    ),
    "the optimizer must be the one that was saved, 'torch.optim.SGD' (got 'torch.optim.Adam')": (
        lambda c: c.update(optimizer="torch.optim.SGD")
    ),
    "random.0.cpu must be the state of a generator": spoil_generator,
    "not a generator of 1 processes": lambda c: c["tensors"].update(
        {"random.7.cpu": c["tensors"].pop("random.0.cpu")}
    ),
    "it must have the generators of 2 processes (got 1)": lambda c: c.update(processes=2),
    "cannot be another name of": lambda c: c["aliases"].update({"other": "nobody"}),
    "it is the manifest of step 1": lambda c: c.update(step=1),
    "not a digest": lambda c: c["files"][".metadata"].update(digest=7),
    "is not a plain value": lambda c: c["values"].update({"pipeline.random_step": {"a": 1}}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_wrong_content_with_a_right_digest_changes_nothing(
    message: str, saved: Path, loader: Loader
) -> None:
    content = read_content(saved)
    CHANGES[message](content)
    assert message in loader.load(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 10) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def mutate(content: dict[str, Any], data: st.DataObject) -> None:
    """Replace, remove, copy or swap a part of a manifest."""
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        is_leaf = not isinstance(place[key], dict | list) or not place[key]
        if is_leaf or data.draw(st.booleans()):
            break
        place = place[key]
    other = data.draw(st.sampled_from(keys))
    match data.draw(st.sampled_from(("replace", "remove", "copy", "swap"))):
        case "replace":
            place[key] = data.draw(JSON)
        case "remove":
            del place[key]
        case "copy":
            place[key] = place[other]
        case _:
            place[key], place[other] = place[other], place[key]


def check_mutation(data: st.DataObject, saved: Path, loader: Loader) -> None:
    content = read_content(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(content, data)
    loader.load(content)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_mutated_manifest_is_restored_in_full_or_not_at_all(
    data: st.DataObject, saved: Path, loader: Loader
) -> None:
    check_mutation(data, saved, loader)


@pytest.mark.slow
@settings(max_examples=500)
@given(data=st.data())
def test_five_hundred_mutated_manifests(data: st.DataObject, saved: Path, loader: Loader) -> None:
    check_mutation(data, saved, loader)


@pytest.mark.parametrize("count", [10_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_many_empty_parts_take_time_in_proportion(count: int, saved: Path, tmp_path: Path) -> None:
    # 300,000 of them took 67 s, because every pair was compared.
    shutil.copytree(saved, tmp_path / "run")
    content = read_content(tmp_path / "run")
    chunks = content["tensors"][KEY]["chunks"]
    chunks += [chunks[0] | {"sizes": [0, 6]}] * count
    (tmp_path / "run" / "step-00000002" / "penstock.json").write_text(sign(content))
    begin = time.process_time()
    assert len(read_manifest(LocalStorage(tmp_path / "run"), 2).tensors[KEY].chunks) == count + 1
    seconds = time.process_time() - begin
    assert seconds < 5 + count * 1e-4


@given(data=st.data())
def test_boxes_tile_if_they_cover_each_number_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    boxes = [Box((0,) * len(shape), tuple(shape))]
    for _ in range(data.draw(st.integers(0, 4))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dimension = data.draw(st.integers(0, len(shape) - 1))
        place = data.draw(st.integers(0, box.sizes[dimension]))
        first, second = list(box.sizes), list(box.sizes)
        first[dimension], second[dimension] = place, box.sizes[dimension] - place
        offsets = list(box.offsets)
        offsets[dimension] += place
        boxes += [Box(box.offsets, tuple(first)), Box(tuple(offsets), tuple(second))]
    assert tile_wholly(shape, boxes)
    moved = data.draw(st.integers(0, len(boxes) - 1))
    other = data.draw(st.sampled_from(boxes))
    changed = [*boxes[:moved], other, *boxes[moved + 1 :]]
    covered = torch.zeros(shape)
    for box in changed:
        ranges = (slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        covered[tuple(ranges)] += 1
    assert tile_wholly(shape, changed) == bool((covered == 1).all())
