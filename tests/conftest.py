"""Marks each test by its folder, so that `-m "not flow"` works without decorating files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
KINDS = ("unit", "flow", "cluster")
# Torch's threads wait for each other by spinning: where anything else runs, two of them take ten
# times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {kind: rank for rank, kind in enumerate(KINDS)}
    for item in items:
        kind = item.path.resolve().relative_to(ROOT).parts[0]
        if kind in KINDS:
            item.add_marker(getattr(pytest.mark, kind))
    # Fast tests first: a broken pure function is reported before any engine starts. The sort is
    # stable.
    items.sort(
        key=lambda item: order.get(item.path.resolve().relative_to(ROOT).parts[0], len(KINDS))
    )


@pytest.fixture
def data_dir() -> Path:
    """The fixture data shipped with the tests."""
    return ROOT / "data"
