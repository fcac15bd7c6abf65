"""Pictures that commands draw: whether one can be drawn is found out before the work that it shows."""

from __future__ import annotations

from pathlib import Path

from shardpass.core.ranks import prepare_target
from shardpass.errors import require


def prepare_picture(path: Path, purpose: str, otherwise: str) -> None:
    """Make the folder of a picture, and return when the picture can be drawn and written.

    Args:
        path: its file.
        purpose, otherwise: what needs it, and what to do instead; see `require`.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ValueError: matplotlib has no format of that name.
        OSError: the file cannot be written.
    """
    require("matplotlib", "all", purpose, otherwise)
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{purpose} {path}: a picture ends in .{', .'.join(sorted(known))}")
    prepare_target(path)
