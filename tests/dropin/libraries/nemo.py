"""NeMo AutoModel's own AutoPipeline, on two ranks: gradients beside those of the unsplit model.

python -m penstock.dropin -m torch.distributed.run ... nemo.py [name=value ...]. Rank 0 prints how
far gradients are off, relative to the largest of each, and the module of the schedule.
"""

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

ROWS, WORDS, LAYERS = 8, 32, 8


def make_model() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": LAYERS,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))  # type: ignore[no-untyped-call]  # untyped upstream


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    # A microbatch counts for its share of the batch.
    share = len(target) / ROWS
    return share * torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(*settings: str) -> None:
    chosen: dict[str, Any] = dict(setting.split("=") for setting in settings)
    flags = {name: value == "yes" for name, value in chosen.items() if value in ("yes", "no")}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    model = make_model()
    expected = copy.deepcopy(model)
    pipeline = AutoPipeline(
        world_mesh=mesh,
        pp_microbatch_size=1,
        pp_batch_size=ROWS,
        device=torch.device("cpu"),
        layers_per_stage=int(chosen.pop("layers_per_stage")),
        **{**chosen, **flags},
    ).build(model, loss_fn=loss_of)
    wrong = 0.0
    for number in range(2):
        torch.manual_seed(1 + number)
        words = torch.randint(WORDS, (ROWS, 6))
        target = words if pipeline.info.has_last_stage else None
        losses: Any = [] if pipeline.info.has_last_stage else None
        pipeline.step(words, target=target, losses=losses)
        torch.autograd.backward(loss_of(expected(words), words))
        wrong = max(wrong, difference(pipeline, dict(expected.named_parameters())))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    if dist.get_rank() == 0:
        kind = type(pipeline.info.schedule)
        print(json.dumps({"wrong": everyone, "module": kind.__module__}))  # noqa: T201  # what the test reads
    dist.destroy_process_group()


def difference(pipeline: Any, expected: dict[str, Any]) -> float:
    """Return the largest difference of this rank's gradients, accumulated over steps."""
    found = 0.0
    for part in pipeline.parts:
        for name, parameter in part.named_parameters():
            wanted = expected[name].grad
            found = max(found, float((parameter.grad - wanted).abs().max() / wanted.abs().max()))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
