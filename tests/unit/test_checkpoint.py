"""A checkpoint is there whole or not at all, and a damaged one is refused by name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from learner import checkpoint
from learner.config import Config


def tensors(content: bytes = b"weights"):
    return lambda folder: (folder / "policy.safetensors").write_bytes(content)


def test_commit_verifies_and_keeps_the_newest(tmp_path: Path):
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step, {"done": step}, tensors(), keep=2)
    assert [p.name for p in checkpoint.committed(tmp_path)] == ["step_00002", "step_00003"]
    assert checkpoint.newest(tmp_path, pytest.fail).name == "step_00003"
    assert not list(tmp_path.glob("checkpoints/*.partial"))


def test_keep_zero_keeps_all(tmp_path: Path):
    for step in range(5):
        checkpoint.write(tmp_path, step, {}, tensors(), keep=0)
    assert len(checkpoint.committed(tmp_path)) == 5


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "said"), [
    (_flip, "policy.safetensors does not match its checksum"),
    (lambda p: p.write_bytes(p.read_bytes()[:-1]), "policy.safetensors has 6 bytes, expected 7"),
    (lambda p: p.unlink(), "policy.safetensors is missing"),
])
def test_damage_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, damage, said: str):
    for step in (1, 2):
        checkpoint.write(tmp_path, step, {}, tensors(), keep=2)
    damage(tmp_path / "checkpoints" / "step_00002" / "policy.safetensors")
    told: list[str] = []
    assert checkpoint.newest(tmp_path, told.append).name == "step_00001"
    assert len(told) == 1 and "step_00002" in told[0] and said in told[0]


def test_without_a_manifest_it_does_not_count(tmp_path: Path):
    checkpoint.write(tmp_path, 1, {}, tensors(), keep=2)
    (tmp_path / "checkpoints" / "step_00001" / "manifest.json").unlink()
    assert checkpoint.newest(tmp_path, pytest.fail) is None


def test_a_full_disk_leaves_the_older_one_and_nothing_half_written(tmp_path: Path):
    checkpoint.write(tmp_path, 1, {}, tensors(), keep=1)

    def full(folder: Path) -> None:
        (folder / "policy.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, 2, {}, full, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00001"]
    checkpoint.verify(tmp_path / "checkpoints" / "step_00001")


def test_changed_settings_are_listed_and_harmless_ones_are_not():
    cfg = Config()
    saved = checkpoint.as_dict(cfg)
    cfg.steps, cfg.learner.ranks, cfg.generator.count = 7, 2, 3
    assert checkpoint.changes(cfg, saved) == []
    cfg.optimizer.lr = 0.5
    assert checkpoint.changes(cfg, saved) == ["optimizer.lr: 1e-06 -> 0.5"]
    with pytest.raises(checkpoint.CheckpointError, match="optimizer.lr: 1e-06 -> 0.5.*allow_changes=true"):
        checkpoint.check_config(cfg, saved, Path("somewhere"))
    cfg.allow_changes = True
    checkpoint.check_config(cfg, saved, Path("somewhere"))
