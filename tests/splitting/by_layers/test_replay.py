"""One run of a stage: outputs of earlier stages, messages for later ones, and the end."""

import pytest
import torch

from penstock.errors import ModelError
from penstock.splitting.by_layers.records.call_records import Value
from penstock.splitting.by_layers.replay import EndOfStage, Replay
from penstock.splitting.by_layers.routes import LayerRoutes
from penstock.splitting.by_layers.stand_ins import StandIn

CPU = torch.device("cpu")
PATHS = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}
PLAIN = LayerRoutes(2, PATHS, frozenset(["layers.0", "layers.1"]))


def make(index: int, routes: LayerRoutes = PLAIN) -> Replay:
    return Replay(index, routes, [f"layers.{index}"], ["x"])


def run_first(replay: Replay) -> dict[str, object]:
    with replay.running(CPU):
        replay.record_inputs((torch.ones(2),), {"flag": True})
        for path, size in [("embed", 3), ("layers.0", 4)]:
            replay.enter(path, ((), {}))
            replay.leave(path, torch.full((size,), float(size)))
        with pytest.raises(EndOfStage):
            replay.remote_output("layers.1")
        message: dict[str, object] = replay.messages().values[1]
    return message


def test_the_first_stage_sends_inputs_and_the_output_of_its_last_layer() -> None:
    message = run_first(make(0))
    assert [value.tolist() for value in message["values"]] == [[1.0] * 2, [4.0] * 4]  # type: ignore[attr-defined]  # a list of tensors


def test_the_next_stage_rebuilds_outputs_from_messages_and_records() -> None:
    message = run_first(make(0))
    replay = make(1)
    with replay.running(CPU):
        args, kwargs = replay.receive([message])
        assert (args[0].tolist(), kwargs) == ([1.0, 1.0], {"flag": True})
        assert repr(replay.remote_output("embed")) == "StandIn((3,), torch.float32, from embed)"
        assert replay.remote_output("layers.0").tolist() == [4.0] * 4
        with pytest.raises(ModelError, match="'embed' is called 2 times on stage 1"):
            replay.remote_output("embed")


def test_two_runs_send_the_same() -> None:
    replay = make(0)
    assert run_first(replay)["records"] == run_first(replay)["records"]
    assert not replay.is_running


def test_calls_inside_of_a_unit_are_not_recorded() -> None:
    replay = make(0)
    with replay.running(CPU):
        replay.record_inputs((), {})
        replay.enter("layers.0", ((), {}))
        replay.enter("head", ((), {}))
        replay.leave("head", torch.ones(1))
        replay.leave("layers.0", torch.ones(2))
        assert [len(value) for value in replay.messages().values[1]["values"]] == [2]


def test_a_call_that_belongs_to_a_later_stage_ends_the_run() -> None:
    calls = {("layers.0", 0): 0, ("layers.0", 1): 1}
    replay = make(0, LayerRoutes(2, PATHS, frozenset(), calls))
    with replay.running(CPU):
        replay.record_inputs((), {})
        assert replay.is_own_call("layers.0")
        replay.enter("layers.0", ((), {}))
        replay.leave("layers.0", torch.ones(1))
        assert not replay.is_own_call("layers.0")
        with pytest.raises(EndOfStage):
            replay.enter("layers.0", ((), {}))


def test_layers_that_were_not_called_are_refused() -> None:
    replay = make(0)
    with replay.running(CPU):
        replay.record_inputs((), {})
        with pytest.raises(ModelError, match=r"stage 0 holds 'layers\.0', but a later stage's"):
            replay.messages()


def test_a_model_that_returns_too_early_is_refused() -> None:
    replay = make(0)
    with (
        replay.running(CPU),
        pytest.raises(ModelError, match="returned on stage 0, before it called any module of"),
    ):
        replay.check_output(torch.ones(1))


def test_a_stand_in_is_never_returned() -> None:
    needed_by = {Value("layers.0", 0, ""): (1,), Value("embed", 0, ""): ()}
    message = run_first(make(0, LayerRoutes(2, PATHS, frozenset(), needed_by=needed_by)))
    replay = make(1)
    with replay.running(CPU):
        replay.receive([message])
        missing = replay.remote_output("embed")
        assert isinstance(missing, StandIn)
        with pytest.raises(
            ModelError, match="the model's output depends on what 'embed' returned"
        ):
            replay.check_output({"out": (missing * 2,)})
