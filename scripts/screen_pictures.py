"""Draw the pictures of docs/ from the recorded runs in tests/.

    python scripts/screen_pictures.py [FOLDER]

Writes one SVG a screen into docs/pictures, or into FOLDER.
"""

from __future__ import annotations

import asyncio
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZE = (120, 36)
sys.path.insert(0, str(ROOT / "tests" / "support"))

from picture_scenes import BOARD_SCENES, DOCUMENTED, RECORDED, Scene, board_standing, picture, standing  # noqa: E402

from grpo_tui.ui.themes import DARK  # noqa: E402


async def drawn(scene: Scene, run: Path) -> str:
    """The picture of a scene."""
    async with standing(scene, run, SIZE, DARK) as (app, pilot):
        return await picture(app, pilot)


async def drawn_board(name: str, logs: Path) -> str:
    """The picture of the board, or of its curves."""
    async with board_standing(name, logs, SIZE, DARK) as (app, pilot):
        return await picture(app, pilot)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in BOARD_SCENES:
        with tempfile.TemporaryDirectory() as logs:
            with tarfile.open(RECORDED / "tiny-cpu.tar.gz") as tar:
                tar.extractall(Path(logs) / "recorded", filter="data")
            (folder / f"{name}.svg").write_text(asyncio.run(drawn_board(name, Path(logs))))
    for name, scene in DOCUMENTED.items():
        with tempfile.TemporaryDirectory() as logs:
            with tarfile.open(scene.archive) as tar:
                tar.extractall(logs, filter="data")
            (run,) = Path(logs).iterdir()
            svg = asyncio.run(drawn(scene, run))
        (folder / f"{name}.svg").write_text(svg)
        print(f"{folder / name}.svg  {len(svg.encode()):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
