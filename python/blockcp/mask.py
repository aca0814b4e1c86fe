"""Who may see whom inside a document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockcp.arguments import as_int, as_integers, seen

SPAN_RULES = ("left", "both", "none")


@dataclass(frozen=True, eq=False)
class Mask:
    """Row i of a document sees row j of the same document if causality, the window and the spans let it.

    Args:
        causal: j <= i.
        window: ``None`` or -1 is unbounded; an integer w counts keys, the row itself included (without ``causal``
            that many on either side); a pair ``(left, right)`` counts as flash-attention does, without the row itself,
            and -1 or None is unbounded; ``right`` must be 0 under ``causal``.
        spans: ids, ``[S]`` or ``[B, S]``, given as ``doc_ids`` of :func:`blockcp.plan` may be; 0 is none. Rows of one
            span see each other both ways, inside their document. A span is one contiguous run.
        span_window: ``"left"``: (causal or same span) and not further back than the window; ``"both"``: and not further
            ahead either; ``"none"``: a span is not cut by the window.

    Numbers are normalised here, once; whether they make sense is checked by ``blockcp.plan``.
    """

    causal: bool = True
    window: Any = None
    spans: Any = None
    span_window: str = "left"

    def __post_init__(self) -> None:
        if not isinstance(self.span_window, str) or self.span_window not in SPAN_RULES:
            raise ValueError(f"[mask] span_window must be one of {SPAN_RULES}, but it is {seen(self.span_window)}.")
        if not isinstance(self.causal, bool):
            raise ValueError(f"[mask] causal must be True or False, but it is {seen(self.causal)}.")
        object.__setattr__(self, "window", self._normalized(self.window))
        if self.spans is not None:
            object.__setattr__(self, "spans", as_integers(self.spans, "[mask] spans"))

    @staticmethod
    def _normalized(window: Any) -> int | tuple[int | None, int | None] | None:
        if window is None:
            return None
        if isinstance(window, (tuple, list)):
            if len(window) != 2:
                raise ValueError(f"[mask] window must be a number or a pair (left, right), but it is {seen(window)}.")
            left, right = (None if side is None else as_int(side, "[mask] a side of window") for side in window)
            return left, right
        return as_int(window, "[mask] window")
