"""Modules that `torch.compile` has wrapped, or that were compiled in place, are recognised."""

import pytest
import torch
from torch import nn

from penstock.modules.compiled import (
    is_compiled,
    is_compiler_wrapper,
    leave_uncompiled,
    run_eagerly,
    unwrap_compiled,
)

# Torch's own, when its compiler is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_a_wrapped_module_is_compiled_and_can_be_unwrapped() -> None:
    module = nn.Linear(2, 2)
    wrapped = torch.compile(module, backend="eager")
    assert isinstance(wrapped, nn.Module)
    assert is_compiled(wrapped)
    assert is_compiler_wrapper(wrapped)
    assert unwrap_compiled(wrapped) is module


def test_a_module_compiled_in_place_is_compiled_but_not_wrapped() -> None:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    assert is_compiled(module)
    assert not is_compiler_wrapper(module)
    assert unwrap_compiled(module) is module


def test_a_plain_module_is_left_alone() -> None:
    module = nn.Linear(2, 2)
    assert not is_compiled(module)
    assert unwrap_compiled(module) is module
    assert leave_uncompiled(module, print) is print
    with run_eagerly(module) as nothing:
        assert nothing is None
