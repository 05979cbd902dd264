"""Describes the windows of convolutions and pooling layers, as model.toml writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from service.importers.draft import ImportRefused

WINDOW_KEYS = ("width", "stride", "dilation", "padding", "pads")
Same = Literal["same_upper", "same_lower"]


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `width` steps. pads: zero steps before and after each sequence; same: the paddings that model.toml calls so."""

    width: int
    stride: int = 1
    dilation: int = 1
    pads: tuple[int, int] = (0, 0)
    same: Same | None = None

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Window:
        """Return the window of a conv or pool layer."""
        width, dilation, name = table["width"], table.get("dilation", 1), table.get("padding")
        around = (width - 1) * dilation
        pads = {"same": (around // 2, around - around // 2), "causal": (around, 0)}.get(str(name), (0, 0))
        same = name if name in ("same_upper", "same_lower") else None
        return cls(width, table.get("stride", 1), dilation, tuple(table.get("pads", pads)), same)

    @property
    def reach(self) -> int:
        """Steps from the first to the last step of the window."""
        return (self.width - 1) * self.dilation + 1

    @property
    def by_length(self) -> bool:
        """Whether the number of padding steps depends on the length of the sequence."""
        return self.same is not None

    def padded_by(self, pads: tuple[int, int]) -> Window:
        """Return the window with more padding steps."""
        if self.by_length:
            raise ImportRefused("its input was padded, and it pads by the length of the sequence: use explicit pads")
        return replace(self, pads=(self.pads[0] + pads[0], self.pads[1] + pads[1]))

    def outputs(self, steps: int) -> int:
        """Return the number of windows of a sequence; raises ImportRefused if there is none."""
        if self.by_length:
            return -(-steps // self.stride)
        count = (steps + sum(self.pads) - self.reach) // self.stride + 1
        if count < 1:
            raise ImportRefused(f"its window covers {self.reach} steps, and the padded sequence has {steps + sum(self.pads)}")
        return count

    def table(self) -> dict[str, Any]:
        """Return the window as model.toml writes it."""
        around = self.reach - 1
        names = {(around // 2, around - around // 2): "same", (around, 0): "causal", (0, 0): "none"}
        sizes = {"stride": self.stride, "dilation": self.dilation if self.width > 1 else 1}
        given = {name: size for name, size in sizes.items() if size > 1}
        if self.same is not None:
            return {"width": self.width, **given, "padding": self.same}
        pads = {"padding": names[self.pads]} if self.pads in names else {"pads": list(self.pads)}
        return {"width": self.width, **given, **pads}


def same_window(width: int, stride: int, dilation: int, same: Same) -> Window:
    """Return a window that pads so that there are ceil(steps / stride) windows."""
    around = (width - 1) * dilation
    less, more = around // 2, around - around // 2
    if stride == 1:
        return Window(width, 1, dilation, (less, more) if same == "same_upper" else (more, less))
    return Window(width, stride, dilation, same=same)
