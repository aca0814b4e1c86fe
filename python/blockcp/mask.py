"""Who may see whom inside a document."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

SPAN_RULES = ("left", "both", "none")


def as_int(value: Any, what: str) -> int:
    """An int from a Python int, a numpy integer or a 0-dim integer tensor; anything else is a ValueError."""
    if isinstance(value, torch.Tensor) and (value.dim() or value.is_floating_point() or value.dtype == torch.bool):
        raise ValueError(
            f"{what} must be an integer, but it is a tensor of {value.dtype} and shape {list(value.shape)}."
        )
    if not isinstance(value, bool):
        try:
            return operator.index(value.item() if isinstance(value, torch.Tensor) else value)
        except TypeError:
            pass
    raise ValueError(f"{what} must be an integer, but it is {value!r}.")


@dataclass(frozen=True, eq=False)
class Mask:
    """Row i of a document sees row j of the same document if causality, the window and the spans let it.

    Args:
        causal: j <= i.
        window: ``None`` or -1 is unbounded; an integer w counts keys, the row itself included; a pair ``(left, right)``
            counts as flash-attention does, without the row itself, and -1 or None is unbounded; ``right`` must be 0
            under ``causal``.
        spans: integer ids, ``[S]`` or ``[B, S]``, 0 is none. Rows of one span see each other both ways, inside their
            document. A span is one contiguous run.
        span_window: ``"left"``: (causal or same span) and not further back than the window; ``"both"``: and not further
            ahead either; ``"none"``: a span is not cut by the window.

    Numbers are normalised here, once; whether they make sense is checked by ``blockcp.plan``.
    """

    causal: bool = True
    window: Any = None
    spans: Any = None
    span_window: str = "left"

    def __post_init__(self) -> None:
        if self.span_window not in SPAN_RULES:
            raise ValueError(f"[plan] span_window must be one of {SPAN_RULES}, but it is {self.span_window!r}.")
        if not isinstance(self.causal, bool):
            raise ValueError(f"[plan] causal must be True or False, but it is {self.causal!r}.")
        object.__setattr__(self, "window", self._normalized(self.window))
        if self.spans is not None:
            object.__setattr__(self, "spans", torch.as_tensor(self.spans).detach().clone())

    @staticmethod
    def _normalized(window: Any) -> int | tuple[int | None, int | None] | None:
        if window is None:
            return None
        if isinstance(window, (tuple, list)):
            if len(window) != 2:
                raise ValueError(f"[plan] window must be a number or a pair (left, right), but it is {window!r}.")
            left, right = (None if side is None else as_int(side, "[plan] a side of window") for side in window)
            return left, right
        return as_int(window, "[plan] window")
