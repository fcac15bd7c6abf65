"""Pictures that commands draw: whether one can be drawn is found out before the work that it shows."""

from __future__ import annotations

from pathlib import Path

from shardpass.core.ranks import prepare_target
from shardpass.errors import require


def prepare_picture(path: Path, purpose: str, otherwise: str) -> None:
    """Make the folder of a picture that can be drawn and written. `purpose` and `otherwise` are those of `require`."""
    require("matplotlib", "all", purpose, otherwise)
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{purpose} {path}: a picture ends in .{', .'.join(sorted(known))}")
    prepare_target(path)
