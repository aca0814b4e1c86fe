"""What is wrong with an argument, on one line: one rank finds it, and all ranks raise it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def seen(value: Any) -> str:
    """A value of any type as a message shows it."""
    kind = type(value).__name__
    try:
        shape = getattr(value, "shape", None)
        text = f"a {kind} of {list(shape)}" if isinstance(shape, tuple) else one_line(ascii(value))
    except Exception:  # whatever a foreign type raises; integers of thousands of digits do
        text = f"{kind} that cannot be printed"
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    return " ".join(text.split())


def trouble_of(error: Exception, place: str) -> str:
    """An error of this rank as the others are told. One that a foreign type raised does not say where."""
    text = one_line(str(error))
    return text if text.startswith("[") else f"[{place}] {type(error).__name__}: {text}"


def check_tensors(place: str, world: int, **tensors: Any) -> None:
    """Tensors on meta, which have shapes alone, are for one rank: in a group they would leave the others waiting.

    Raises:
        ValueError: one is not a dense tensor, or they are not together on a device that can compute.
    """
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"[{place}] {name} must be a dense tensor, but it is {type(x).__name__}.")
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
            raise ValueError(f"[{place}] {name} must be a dense tensor, but it is a {kind} one.")
    devices = [x.device for x in tensors.values()]
    if any(device != devices[0] for device in devices):
        raise ValueError(f"[{place}] {_listed(tensors)} must be on one device, but they are on {_listed(devices)}.")
    if devices[0].type != "cpu" and (devices[0].type != "meta" or world > 1):
        raise ValueError(f"[{place}] {_listed(tensors)} must be on the CPU in this build, but on {devices[0]}.")


def _listed(things: Iterable[Any]) -> str:
    """Several things in a sentence: "a, b and c"."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def as_scale(scale: Any, place: str) -> float | None:
    """A float from a number of any kind or a tensor or array without dimensions; anything else is a ValueError."""
    if scale is None:
        return None
    try:
        if not isinstance(scale, (str, bytes, bool)) and getattr(scale, "ndim", 0) == 0:
            return float(scale)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"[{place}] scale must be a finite number, but it is {seen(scale)}.")
