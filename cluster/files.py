"""The one way to write a file or a folder so that readers find it whole or not at all.

Standard library only. Checkpoints are written by learner/checkpoints/checkpoint.py instead, because
they are also checksummed, synced to disk and, for some file systems, uploaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUFFIX = ".partial"  # cluster/stopping.py removes what a killed process left under such a name


@contextmanager
def atomic(target: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `target`, where the caller writes a file or folder.

    When the block ends, the temporary path is renamed to `target` and replaces what was there. When
    the block raises, the temporary path is removed and `target` is left as it was. The temporary
    name begins with a dot, so that readers of whole folders (Parquet data sets) pass over it.
    """
    partial = target.with_name(f".{target.name}{SUFFIX}")
    remove(partial)  # from a process that was killed
    try:
        yield partial
        if target.is_dir():
            shutil.rmtree(target)  # a folder that is not empty cannot be replaced by a rename
        partial.replace(target)
    finally:
        remove(partial)


def write_text(target: Path, text: str) -> None:
    """Write a text file (UTF-8) that readers find whole or not at all."""
    with atomic(target) as partial:
        partial.write_text(text, encoding="utf-8")


def write_bytes(target: Path, content: bytes) -> None:
    """Write a file that readers find whole or not at all."""
    with atomic(target) as partial:
        partial.write_bytes(content)


def write_json(target: Path, value: Any) -> None:
    """Write a JSON file, indented by one space, that readers find whole or not at all."""
    write_text(target, json.dumps(value, indent=1) + "\n")


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds; do nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
