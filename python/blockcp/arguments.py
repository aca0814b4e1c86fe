"""What users pass: taken for what it means, or an error on one line. Where one rank finds it, all ranks raise it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

INTEGERS = (
    torch.bool,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def seen(value: Any) -> str:
    """A value of any type in an error message: one line, not long."""
    try:
        text = _described(value)
    except Exception:  # whatever a foreign type raises; integers of thousands of digits do
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else f"of shape {list(value.shape)}"
        return f"a {value.dtype} tensor {shape}{' on the device meta' if value.is_meta else ''}"
    return one_line(ascii(value))


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


def as_int(value: Any, what: str) -> int:
    """An int from a Python int, a numpy integer or a 0-dim integer tensor; anything else is a ValueError."""
    if isinstance(value, torch.Tensor):
        if value.dim() or value.dtype not in INTEGERS[1:] or value.is_meta:
            raise ValueError(f"{what} must be an integer, but it is {seen(value)}.")
        value = value.item()
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{what} must be an integer, but it is {seen(value)}.")
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit into 64 bits, but it is {seen(number)}.")
    return number


def as_integers(value: Any, what: str) -> torch.Tensor:
    """A copy of integers or bools of any shape, as int64 or bool on the CPU.

    Args:
        value: a tensor of any integer type and device, an array, or lists of integers, of tensors or of lists, as deep
            as they are and of one length at each depth.
        what: begins the message, "[plan] doc_ids" say.

    Raises:
        ValueError: anything else, naming the first value that cannot be meant.
    """
    if isinstance(value, torch.Tensor):
        return _from_tensor(value, what)
    if hasattr(value, "__array__"):
        return _from_array(value, what)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return _from_sequence(value, what)
    if is_number(value):
        return torch.tensor(value if isinstance(value, bool) else as_int(value, what))
    raise ValueError(f"{what} must be integers, but it is {seen(value)}.")


def no_bools(numbers: torch.Tensor, what: str) -> torch.Tensor:
    if numbers.dtype == torch.bool:
        raise ValueError(f"{what} must be integers, but they are bool, True or False.")
    return numbers


def _from_tensor(value: torch.Tensor, what: str) -> torch.Tensor:
    if value.is_nested or value.layout != torch.strided:
        raise ValueError(f"{what} must be dense, but it is {'nested' if value.is_nested else value.layout}.")
    if value.is_meta:
        raise ValueError(f"{what} must have values, but it is on the device meta, which keeps none.")
    if value.dtype not in INTEGERS:
        if value.numel() == 0:  # an empty list is a tensor of floats to torch
            return torch.zeros(value.shape, dtype=torch.int64)
        first = "" if value.is_quantized else f" (first value {value.flatten()[0].item()})"
        raise ValueError(f"{what} must be integers, but they are {value.dtype}{first}. Convert them first.")
    kind = torch.bool if value.dtype == torch.bool else torch.int64
    copy = value.detach().to("cpu", kind, copy=True)
    if value.dtype == torch.uint64 and bool((copy < 0).any()):
        at = tuple((copy < 0).nonzero()[0].tolist())
        raise ValueError(f"{what}{list(at) if at else ''} must be less than 2^63, but it is {value[at].item()}.")
    return copy


def _from_array(value: Any, what: str) -> torch.Tensor:
    import numpy

    try:
        array = numpy.array(value, order="C")
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{what} must be integers, but it is {seen(value)}.") from None
    return _from_tensor(tensor, what)


def _from_sequence(values: Sequence[Any], what: str) -> torch.Tensor:
    kinds = set(map(type, values))
    if kinds == {bool}:
        return torch.tensor(values)
    if kinds != {int} and not all(map(is_number, values)):
        return _stacked([as_integers(part, f"{what}[{i}]") for i, part in enumerate(values)], what)
    try:
        return torch.tensor(values if kinds == {int} else _ints(values, what), dtype=torch.int64)
    except (OverflowError, RuntimeError, ValueError):
        return torch.tensor(_ints(values, what))  # names the one that is too large


def is_number(value: Any) -> bool:
    """Whether it can be one integer: nothing with elements."""
    return getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__")


def _ints(values: Sequence[Any], what: str) -> list[int]:
    return [as_int(value, f"{what}[{i}]") for i, value in enumerate(values)]


def _stacked(parts: list[torch.Tensor], what: str) -> torch.Tensor:
    for i, part in enumerate(parts):
        if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype):
            raise ValueError(f"{what} must be of parts alike, but [0] is {seen(parts[0])} and [{i}] {seen(part)}.")
    return torch.stack(parts)
