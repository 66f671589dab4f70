"""A file or folder that is written is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.files import SUFFIX, atomic, remove, write_bytes, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_target_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "table.parquet"
    with atomic(target) as partial:
        partial.write_text("whole")
        assert partial.parent == tmp_path and not target.exists()
        assert partial.name.startswith(".") and partial.name.endswith(SUFFIX)
    assert target.read_text() == "whole" and names(tmp_path) == ["table.parquet"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    write_json(target, {"steps": 1})
    with pytest.raises(KeyboardInterrupt), atomic(target) as partial:
        partial.write_text("ha")
        raise KeyboardInterrupt
    assert json.loads(target.read_text()) == {"steps": 1} and names(tmp_path) == ["summary.json"]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "nothing"):
        pass


def test_a_folder_replaces_an_older_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("old")
    with atomic(target) as partial:
        partial.mkdir()
        (partial / "new").write_text("new")
        assert names(target) == ["old"]
    assert names(target) == ["new"] and names(tmp_path) == ["model"]


def test_a_folder_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic(target) as partial:
        partial.mkdir()
        (partial / "new").write_text("n")
        raise OSError("disk full")
    assert names(target) == ["old"] and names(tmp_path) == ["model"]


def test_what_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    left = tmp_path / f".model{SUFFIX}"
    left.mkdir()
    (left / "half").write_text("half")
    with atomic(tmp_path / "model") as partial:
        assert partial == left and not partial.exists()
        partial.mkdir()
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == []


def test_helpers(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "\u00fc\n")
    write_bytes(tmp_path / "b", b"\x00")
    write_json(tmp_path / "c", {"x": [1]})
    assert (tmp_path / "a").read_bytes() == "\u00fc\n".encode()
    assert (tmp_path / "b").read_bytes() == b"\x00"
    assert (tmp_path / "c").read_text() == '{\n "x": [\n  1\n ]\n}\n'
    remove(tmp_path / "a")
    remove(tmp_path / "a")
    assert names(tmp_path) == ["b", "c"]
