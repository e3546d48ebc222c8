"""torchtitan's own pipeline_llm and Llama, on two ranks: gradients beside the unsplit model's.

python -m penstock.dropin -m torch.distributed.run ... titan.py schedule=NAME [csv=FILE]. Rank 0
prints how far gradients are off, relative to the largest of each, and the module of the schedule.
The step is called as its trainer does. Meshes and attention are those of a CPU.
"""

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

ROWS, WORDS = 8, 64


def make_model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    return model, config


def loss_of(output: torch.Tensor, target: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    share = len(target) / ROWS
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return share * loss, None


def main(*settings: str) -> None:
    chosen: dict[str, Any] = dict(setting.split("=") for setting in settings)
    dist.init_process_group("gloo")
    vars(parallel_dims)["device_type"] = "cpu"
    size = dist.get_world_size()
    model, config = make_model()
    expected = copy.deepcopy(model)
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=size,
        pipeline_parallel_schedule=chosen["schedule"],
        pipeline_parallel_schedule_csv=chosen.get("csv", ""),
        pipeline_parallel_microbatch_size=1,
    )
    schedule, parts, has_first, has_last = pipeline_llm(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, size),
        training=TrainingConfig(local_batch_size=ROWS, seq_len=8),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=lambda part, **_: part,
        loss_fn=loss_of,
    )
    wrong = 0.0
    for number in range(2):
        torch.manual_seed(1 + number)
        words = torch.randint(WORDS, (ROWS, 8))
        rows = list(torch.split(words, 1))
        schedule.step(
            arg_mbs=[(row,) for row in rows] if has_first else None,
            kwarg_mbs=[{} for _ in rows],
            target_mbs=rows if has_last else None,
            losses=[] if has_last else None,
            loss_kwargs={"global_valid_tokens": torch.tensor(words.numel())},
            return_outputs=False,
        )
        torch.autograd.backward(loss_of(expected(words), words)[0])
        wanted = {name: p.grad for name, p in expected.named_parameters()}
        for part in parts:
            for name, parameter in part.named_parameters():
                off = (parameter.grad - wanted[name]).abs().max() / wanted[name].abs().max()
                wrong = max(wrong, float(off))
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, wrong)
    if dist.get_rank() == 0:
        print(json.dumps({"wrong": everyone, "module": type(schedule).__module__}))  # noqa: T201  # what the test reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
