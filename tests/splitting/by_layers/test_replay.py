"""One stage's run: answers for earlier stages, notes for later ones, and a stop between."""

import pytest
import torch

from penstock.errors import ModelError
from penstock.splitting.by_layers.notes import Value
from penstock.splitting.by_layers.replay import Departure, Replay
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stand_ins import StandIn

CPU = torch.device("cpu")
PATHS = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
PLAIN = LayerRoutes(2, PATHS, frozenset(["layers.0", "layers.1"]))


def make(index: int, itinerary: LayerRoutes = PLAIN) -> Replay:
    return Replay(index, itinerary, [f"layers.{index}"], ["x"])


def run_first(replay: Replay) -> dict[str, object]:
    with replay.running(CPU):
        replay.start((torch.ones(2),), {"flag": True})
        for path, size in [("embed", 3), ("layers.0", 4)]:
            replay.enter(path, ())
            replay.leave(path, torch.full((size,), float(size)))
        with pytest.raises(Departure):
            replay.answer("layers.1")
        parcel: dict[str, object] = replay.pack().values[1]
    return parcel


def test_the_first_stage_sends_inputs_and_its_last_layer_and_notes_the_rest() -> None:
    parcel = run_first(make(0))
    assert [value.tolist() for value in parcel["values"]] == [[1.0] * 2, [4.0] * 4]  # type: ignore[attr-defined]  # a list of tensors


def test_the_next_stage_answers_from_what_was_sent_and_noted() -> None:
    parcel = run_first(make(0))
    replay = make(1)
    with replay.running(CPU):
        args, kwargs = replay.unpack([parcel])
        assert (args[0].tolist(), kwargs) == ([1.0, 1.0], {"flag": True})
        assert repr(replay.answer("embed")) == "StandIn((3,), torch.float32, from embed)"
        assert replay.answer("layers.0").tolist() == [4.0] * 4
        with pytest.raises(ModelError, match="'embed' is called 2 times on stage 1"):
            replay.answer("embed")


def test_a_run_leaves_nothing_behind() -> None:
    replay = make(0)
    assert run_first(replay)["notes"] == run_first(replay)["notes"]
    assert not replay.is_running


def test_what_a_unit_calls_inside_is_its_own_business() -> None:
    replay = make(0)
    with replay.running(CPU):
        replay.start((), {})
        replay.enter("layers.0", ())
        replay.enter("head", ())
        replay.leave("head", torch.ones(1))
        replay.leave("layers.0", torch.ones(2))
        assert [len(value) for value in replay.pack().values[1]["values"]] == [2]


def test_an_own_unit_whose_turn_is_on_a_later_stage_ends_the_run() -> None:
    calls = {("layers.0", 0): 0, ("layers.0", 1): 1}
    replay = make(0, LayerRoutes(2, PATHS, frozenset(), calls))
    with replay.running(CPU):
        replay.start((), {})
        assert replay.is_own_call("layers.0")
        replay.enter("layers.0", ())
        replay.leave("layers.0", torch.ones(1))
        assert not replay.is_own_call("layers.0")
        with pytest.raises(Departure):
            replay.enter("layers.0", ())


def test_layers_that_were_passed_over_are_missed() -> None:
    replay = make(0)
    with replay.running(CPU):
        replay.start((), {})
        with pytest.raises(ModelError, match=r"stage 0 holds 'layers\.0', but a later stage's"):
            replay.pack()


def test_a_model_that_returns_too_early_is_noticed() -> None:
    replay = make(0)
    with (
        replay.running(CPU),
        pytest.raises(ModelError, match="returned on stage 0, before it called any module of"),
    ):
        replay.check_output(torch.ones(1))


def test_a_stand_in_goes_nowhere() -> None:
    needs = {Value("layers.0", 0, ""): (1,), Value("embed", 0, ""): ()}
    parcel = run_first(make(0, LayerRoutes(2, PATHS, frozenset(), needs=needs)))
    replay = make(1)
    with replay.running(CPU):
        replay.unpack([parcel])
        missing = replay.answer("embed")
        assert isinstance(missing, StandIn)
        with pytest.raises(
            ModelError, match="the model's output depends on what 'embed' returned"
        ):
            replay.check_output({"out": (missing * 2,)})
