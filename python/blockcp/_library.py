"""Loads the C++ module into torch's dispatcher, once, and checks that it was built for this torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

# Transfers have peers that wait for them.
EFFECTFUL = ("attention", "attention_backward", "move_rows", "move_rows_adjoint")


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def check_torch(built_for: str, running: str) -> None:
    """Raises ImportError unless both are of one minor release, which is what the C++ interface of torch needs."""
    if _release(built_for) != _release(running):
        raise ImportError(
            f"[import] blockcp must run with the torch it was built for, {_release(built_for)}, but this is torch "
            f"{running}. Install torch {_release(built_for)}, or build blockcp again: pip install "
            "--no-build-isolation --force-reinstall --no-deps blockcp."
        )


def load() -> None:
    module = Path(__file__).with_name("_C.so")
    if not module.exists():
        raise ImportError(
            f"[import] blockcp needs its C++ module, but {module} does not exist. Install the package with "
            "pip install --no-build-isolation ., or link the module of a build folder there."
        )
    from blockcp import _build_info

    check_torch(_build_info.TORCH_VERSION, torch.__version__)
    torch.ops.load_library(module)
    for name in EFFECTFUL:
        keep_in_order(name)


def keep_in_order(name: str) -> None:
    """Compilers must neither drop nor reorder calls of this op."""
    _register_effectful_op(getattr(torch.ops.blockcp, name).default, _EffectType.ORDERED)


def define_check(schema: str, body: Callable[..., None]) -> None:
    """Makes ``body``, which returns nothing, an op, so that it runs in compiled graphs too; not on meta tensors."""
    name = schema.partition("(")[0]
    _checks.define(schema)
    _checks.impl(name, body, "CompositeExplicitAutograd")
    _checks.impl(name, lambda *arguments: None, "Meta")
    keep_in_order(name)


load()
ops = torch.ops.blockcp
_checks = torch.library.Library("blockcp", "FRAGMENT")
