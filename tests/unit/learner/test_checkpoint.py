"""A checkpoint is complete or absent, on a disk and in an object store.

A damaged one is refused by name.
"""

from __future__ import annotations

import errno
import json
import uuid
from pathlib import Path

import pytest

from conf.schema import CheckpointConfig, Config, ConfigError
from learner.checkpoints import checkpoint, resume, saved_settings
from learner.checkpoints.checkpoint import CheckpointError, Store
from learner.checkpoints.retention import check_best, doomed


@pytest.fixture(params=["folder", "file", "dir", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A local folder twice, and two file systems that are treated as object stores (no rename)."""
    there = tmp_path / "there" / "checkpoints"
    address = {
        "folder": str(there),
        "file": f"file://{there}",
        "dir": f"dir::file://{there}",
        "memory": f"memory://{uuid.uuid4().hex}/run",
    }[request.param]
    (tmp_path / "run").mkdir()
    return Store(address, tmp_path / "run")


def tensors(content: bytes = b"weights"):
    return lambda folder: (folder / "policy.safetensors").write_bytes(content)


def write(store: Store, *steps: int, keep: int = 2, **settings) -> None:
    for step in steps:
        store.write(
            step, {"done": step, "config": {}}, tensors(), CheckpointConfig(keep=keep, **settings)
        )


def steps(store: Store) -> list[int]:
    assert all(store.steps().values())
    return [*store.steps()]


def files(store: Store) -> list[str]:
    """Everything there is, committed or not."""
    return sorted(p.rpartition("step_")[2] for p in store.fs.find(store.root))


# ---- commit and retention -----------------------------------------------------------------------


def test_commit_verifies_and_keeps_the_newest(store: Store, tmp_path: Path):
    write(store, 1, 2, 3)
    assert steps(store) == [2, 3]
    folder = store.newest(pytest.fail)
    assert (
        folder.name == "step_00003"
        and json.loads((folder / "trainer.json").read_text())["done"] == 3
    )
    assert (folder / "policy.safetensors").read_bytes() == b"weights"
    assert files(store) == [
        f"0000{s}/{n}"
        for s in (2, 3)
        for n in ("manifest.json", "policy.safetensors", "trainer.json")
    ]
    left = [p.name for p in tmp_path.glob("run/*")]
    assert left == ([] if store.local else [checkpoint.FETCHED]), "staged files stay behind"


def test_keep_zero_keeps_all(store: Store):
    write(store, *range(5), keep=0)
    assert steps(store) == [0, 1, 2, 3, 4]


def test_steps_sort_by_number(tmp_path: Path):
    store = Store(str(tmp_path), tmp_path)
    write(store, 99_999, 100_000)
    assert store.newest(pytest.fail).name == "step_100000"


@pytest.mark.parametrize(
    ("found", "keep", "keep_best", "mode", "gone"),
    [
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 0, "max", [1, 2, 3]),
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 1, "max", [1, 3]),
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 2, "max", [1]),
        ({1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}, 1, 1, "min", [2, 3]),
        ({1: 0.5, 2: 0.5, 4: None}, 1, 1, "max", [1]),  # of equal ones the later
        ({1: None, 2: None, 4: None}, 1, 2, "max", [1, 2]),  # nobody is best without a value
        ({1: None, 2: 0.0, 4: None}, 1, 2, "max", [1]),  # 0 is a value
        ({1: 0.1, 2: 0.9, 4: 0.2}, 0, 0, "max", []),
        (
            {1: 0.1, 4: 0.2, 7: 0.9, 8: None},
            2,
            1,
            "max",
            [7, 8],
        ),  # later ones belong to a continuation given up
    ],
)
def test_retention(found: dict, keep: int, keep_best: int, mode: str, gone: list[int]):
    assert doomed(found, 4, keep, keep_best, mode) == gone


def test_the_best_stay_and_the_store_decides_which(store: Store, tmp_path: Path):
    settings = CheckpointConfig(keep=1, keep_best=1, metric="eval/pass@1")
    for step, value in ((1, 0.3), (2, 0.8), (3, 0.5), (4, None)):
        metrics = {} if value is None else {"eval/pass@1": value}
        store.write(step, {"metrics": metrics}, tensors(), settings)
    assert steps(store) == [2, 4]
    again = Store(store.address, tmp_path / "run")  # another process, which remembers nothing
    again.write(5, {"metrics": {"eval/pass@1": 0.7}}, tensors(), settings)
    assert steps(again) == [2, 5]


def test_an_older_one_goes_only_when_the_new_one_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    write(store, 1, keep=1)
    removed = []

    def remove(self: Store, step: int) -> None:
        removed.append(step)
        checkpoint.verify(self.fetch("step_00002"))

    monkeypatch.setattr(Store, "remove", remove)
    write(store, 2, keep=1)
    assert removed == [1]


def test_a_removal_cut_short_leaves_no_checkpoint(store: Store, monkeypatch: pytest.MonkeyPatch):
    write(store, 1, 2)
    monkeypatch.setattr(type(store.fs), "rm", lambda *a, **k: (_ for _ in ()).throw(OSError("cut")))
    with pytest.raises(OSError, match="cut"):
        store.remove(1)
    assert store.steps() == {1: False, 2: True}


def test_one_that_cannot_be_removed_is_named_and_the_new_one_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    write(store, 1, keep=1)
    monkeypatch.setattr(
        Store, "remove", lambda *a: (_ for _ in ()).throw(PermissionError("not yours"))
    )
    with pytest.raises(
        OSError, match="step 2 is there, but an older one cannot be removed: not yours"
    ):
        write(store, 2, keep=1)
    assert store.newest(pytest.fail).name == "step_00002"


def test_a_step_made_again_replaces_the_first(store: Store):
    write(store, 1, 2)
    store.write(2, {"again": True}, tensors(b"other weights"), CheckpointConfig())
    assert (store.newest(pytest.fail) / "policy.safetensors").read_bytes() == b"other weights"
    assert steps(store) == [1, 2]


# ---- damage -------------------------------------------------------------------------------------


def _flip(store: Store, path: str) -> None:
    data = bytearray(store.fs.cat_file(path))
    data[3] ^= 1
    store.fs.pipe_file(path, bytes(data))


def _cut(store: Store, path: str) -> None:
    store.fs.pipe_file(path, store.fs.cat_file(path)[:-1])


def _remove(store: Store, path: str) -> None:
    store.fs.rm_file(path)


@pytest.mark.parametrize(
    ("damage", "file", "said"),
    [
        (_flip, "policy.safetensors", "policy.safetensors does not match its checksum"),
        (_cut, "policy.safetensors", "policy.safetensors has 6 bytes, expected 7"),
        (_remove, "policy.safetensors", "policy.safetensors is missing"),
        (_flip, "trainer.json", "trainer.json does not match its checksum"),
        (_remove, "manifest.json", "no readable manifest.json"),
        (_cut, "manifest.json", "no readable manifest.json"),
    ],
)
def test_damage_is_refused_by_name_and_the_one_before_is_used(
    store: Store, damage, file: str, said: str
):
    write(store, 1, 2)
    damage(store, f"{store.root}/step_00002/{file}")
    told: list[str] = []
    assert store.newest(told.append).name == "step_00001"
    assert len(told) == 1 and f"{store.address}/step_00002" in told[0] and said in told[0]


@pytest.mark.parametrize(
    "manifest", ["{}", "[1]", '{"trainer.json": 3}', '{"trainer.json": {"bytes": 1}}']
)
def test_a_manifest_that_says_nothing_is_refused(tmp_path: Path, manifest: str):
    store = Store(str(tmp_path), tmp_path)
    write(store, 1)
    (tmp_path / "step_00001" / "manifest.json").write_text(manifest)
    told: list[str] = []
    assert (
        store.newest(told.append) is None
        and "step_00001: " in told[0]
        and "manifest.json" in told[0]
    )


def test_the_next_commit_removes_what_never_was_one(store: Store):
    write(store, 1, 2)
    _remove(store, f"{store.root}/step_00002/manifest.json")
    assert store.steps() == {1: True, 2: False}
    write(store, 3)
    assert steps(store) == [1, 3]


def test_a_full_disk_leaves_the_older_one_and_nothing_half_written(store: Store, tmp_path: Path):
    write(store, 1, keep=1)

    def full(folder: Path) -> None:
        (folder / "policy.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.write(2, {}, full, CheckpointConfig(keep=1))
    assert steps(store) == [1] and not list(tmp_path.rglob("*.partial"))
    assert store.newest(pytest.fail).name == "step_00001"


def test_an_upload_cut_short_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(f"memory://{uuid.uuid4().hex}", tmp_path)
    write(store, 1)
    real = type(store.fs).put_file

    def put_file(fs, local: str, remote: str, **more) -> None:
        if remote.endswith("trainer.json"):
            raise ValueError("some client's own error")
        real(fs, local, remote, **more)

    monkeypatch.setattr(type(store.fs), "put_file", put_file)
    with pytest.raises(
        OSError, match=r"memory://.*step_00002: ValueError: some client's own error"
    ):
        write(store, 2)
    assert "00002/policy.safetensors" in files(store) and store.steps() == {1: True, 2: False}
    monkeypatch.undo()
    write(store, 2)
    assert steps(store) == [1, 2] and store.newest(pytest.fail).name == "step_00002"


def test_what_a_killed_driver_left_is_swept(store: Store):
    stale = store.staging / "step_00007.partial"
    stale.mkdir(parents=True)
    (stale / "policy.safetensors").write_bytes(b"half")
    write(store, 8)
    assert not stale.exists() and steps(store) == [8]


def test_the_manifest_is_uploaded_last_and_made_durable_before_the_rename(
    store: Store, monkeypatch
):
    order: list[str] = []
    real = checkpoint.fsync
    monkeypatch.setattr(
        checkpoint, "fsync", lambda path: (order.append(f"fsync {path.name}"), real(path))
    )
    if store.local:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, to: (order.append("commit"), rename(p, to)))
    else:
        put = type(store.fs).put_file
        monkeypatch.setattr(
            type(store.fs),
            "put_file",
            lambda fs, local, remote, **k: (
                order.append("commit" if remote.endswith("manifest.json") else "put"),
                put(fs, local, remote, **k),
            ),
        )
    write(store, 1)
    synced = [
        "fsync policy.safetensors",
        "fsync trainer.json",
        "fsync manifest.json",
        "fsync step_00001.partial",
    ]
    assert order == [
        *synced,
        *(
            ["commit", f"fsync {Path(store.root).name}"]
            if store.local
            else ["put"] * 2 + ["commit"]
        ),
    ]


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nope://bucket/run", "dropbox://bucket"])
def test_an_address_that_cannot_be_opened_is_named(tmp_path: Path, address: str):
    with pytest.raises(CheckpointError, match=f"checkpoint.folder={address}: .*fsspec"):
        Store(address, tmp_path)


def test_the_setting_decides_where(tmp_path: Path):
    cfg = Config()
    assert checkpoint.open_store(cfg, tmp_path).root == str(tmp_path / "checkpoints")
    cfg.checkpoint.folder = "memory://elsewhere/"
    store = checkpoint.open_store(cfg, tmp_path)
    assert (
        not store.local
        and store.staging == tmp_path
        and store.shown("step_00001") == "memory://elsewhere/step_00001"
    )


def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store = Store(f"dir::file://{tmp_path}/file/below", tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint.folder=dir::file://.*cannot be written"):
        store.probe()
    good = Store(f"memory://{uuid.uuid4().hex}/run", tmp_path)
    good.probe()
    assert files(good) == []


# ---- which one a run goes on from ---------------------------------------------------------------


def run_with(folder: Path, *at: int) -> Store:
    store = Store(str(folder / "checkpoints"), folder)
    for step in at:
        store.write(
            step, {"config": saved_settings.as_dict(Config())}, tensors(), CheckpointConfig(keep=0)
        )
    return store


def find(tmp_path: Path, how: str, store: Store, **settings) -> Path | None:
    cfg = Config(resume=how, **settings)
    return resume.find(cfg, tmp_path, store)


def test_resume_auto_takes_the_newest_or_starts_anew(tmp_path: Path):
    store = run_with(tmp_path / "a")
    assert find(tmp_path, "auto", store) is None
    assert find(tmp_path, "auto", run_with(tmp_path / "a", 1, 2)).name == "step_00002"


def test_resume_from_a_run_a_folder_or_a_checkpoint(tmp_path: Path):
    store = run_with(tmp_path / "a", 1, 2)
    for how, step in (
        ("a", 2),
        ("a/", 2),
        ("a/checkpoints", 2),
        ("a/checkpoints/step_00001", 1),
        ("a/checkpoints/step_00001/", 1),
    ):
        assert find(tmp_path, f"{tmp_path}/{how}", store).name == f"step_0000{step}", how


def test_resume_from_an_object_store(tmp_path: Path):
    away = Store(f"memory://{uuid.uuid4().hex}/run", tmp_path)
    for step in (1, 2):
        away.write(
            step, {"config": saved_settings.as_dict(Config())}, tensors(), CheckpointConfig()
        )
    own = run_with(tmp_path / "b")
    assert find(tmp_path, away.address, own) == tmp_path / checkpoint.FETCHED / "step_00002"
    found = find(tmp_path, f"{away.address}/step_00001", own)
    assert (found / "policy.safetensors").read_bytes() == b"weights"


def test_a_named_checkpoint_that_is_damaged_is_not_replaced_by_another(tmp_path: Path):
    store = run_with(tmp_path / "a", 1, 2)
    _flip(store, f"{store.root}/step_00002/policy.safetensors")
    with pytest.raises(CheckpointError, match="step_00002: policy.safetensors does not match"):
        find(tmp_path, f"{store.root}/step_00002", store)


def test_other_settings_are_refused_where_the_run_goes_on(tmp_path: Path):
    cfg = Config(resume="auto")
    cfg.optimizer.lr = 0.5
    with pytest.raises(
        CheckpointError,
        match="a/checkpoints/step_00001 was written with other settings: optimizer.lr",
    ):
        resume.find(cfg, tmp_path, run_with(tmp_path / "a", 1))


def test_all_damaged_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture):
    store = run_with(tmp_path / "a", 1, 2)
    for step in (1, 2):
        _cut(store, f"{store.root}/step_0000{step}/policy.safetensors")
    with pytest.raises(
        CheckpointError, match="resume=auto: no usable checkpoint in .*a/checkpoints. Give"
    ):
        find(tmp_path, "auto", store)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "step_00002" in told[0] and "step_00001" in told[1]


def test_checkpoints_of_two_runs_do_not_mix(tmp_path: Path):
    """Pruning after a commit would take the other run's for abandoned ones."""
    one, two = run_with(tmp_path / "a", 1), run_with(tmp_path / "b", 9)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run already"):
        find(tmp_path, "never", two)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run already"):
        find(tmp_path, str(tmp_path / "a"), two)
    assert find(tmp_path, str(tmp_path / "a"), one).name == "step_00001"


# ---- settings -----------------------------------------------------------------------------------


def test_changed_settings_are_listed_and_harmless_ones_are_not():
    cfg = Config()
    saved = json.loads(json.dumps(saved_settings.as_dict(cfg)))
    cfg.steps, cfg.learner.ranks, cfg.generator.count, cfg.checkpoint.keep_best = 7, 2, 3, 4
    assert saved_settings.changes(cfg, saved) == []
    cfg.optimizer.lr = 0.5
    assert saved_settings.changes(cfg, saved) == ["optimizer.lr: 1e-06 -> 0.5"]
    with pytest.raises(
        CheckpointError, match="checkpoint there .*optimizer.lr: 1e-06 -> 0.5.*allow_changes=true"
    ):
        saved_settings.check_config(cfg, saved, "there")
    cfg.allow_changes = True
    saved_settings.check_config(cfg, saved, "there")


def test_a_model_of_the_checkout_is_the_same_in_another_copy_of_it(monkeypatch, tmp_path):
    cfg = Config()
    cfg.model.path = str(saved_settings.ROOT / "actors" / "modeling" / "assets" / "tiny")
    saved = saved_settings.as_dict(cfg)
    monkeypatch.setattr(saved_settings, "ROOT", tmp_path)
    cfg.model.path = str(tmp_path / "actors" / "modeling" / "assets" / "tiny")
    assert saved_settings.changes(cfg, saved) == []
    cfg.model.path = str(tmp_path / "actors" / "modeling" / "assets" / "other")
    assert saved_settings.changes(cfg, saved) == [
        "model.path: actors/modeling/assets/tiny -> actors/modeling/assets/other"
    ]


def test_more_steps_are_a_change_where_the_learning_rate_depends_on_them():
    cfg = Config()
    cfg.optimizer.decay = "cosine"
    saved = saved_settings.as_dict(cfg)
    cfg.steps += 1
    assert saved_settings.changes(cfg, saved) == ["steps: 64 -> 65"]


def test_the_words_that_describe_an_algorithm_are_no_change():
    """A checkpoint that was written before they were settings does not have them at all."""
    cfg = Config()
    saved = saved_settings.as_dict(cfg)
    for key in ("source", "rewards", "coefficient"):
        del saved["algorithm"][key]
        setattr(cfg.algorithm, key, f"other {key}")
    assert saved_settings.changes(cfg, saved) == []


def test_secrets_are_not_saved():
    cfg = Config()
    cfg.reward.options = {"api_key": "very-secret"}
    assert "very-secret" not in json.dumps(saved_settings.as_dict(cfg))
    assert saved_settings.changes(cfg, saved_settings.as_dict(cfg)) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep": 0}, "checkpoint.keep_best=1: checkpoint.keep=0 keeps every"),
        ({"metric": "eval/pas@1"}, "checkpoint.metric=eval/pas@1: "),
        ({"metric": "reward"}, "checkpoint.metric=reward: expected reward/mean"),
        (
            {"metric": "eval/pass@64"},
            "checkpoint.metric=eval/pass@64: .*samples_during=8 expected one of eval/pass@1",
        ),
        (
            {"every": 7},
            "checkpoint.keep_best=1: no checkpoint would be written at a step that is evaluated",
        ),
        (
            {"every": 0},
            "checkpoint.keep_best=1: no checkpoint would be written at a step that is evaluated",
        ),
    ],
)
def test_a_choice_that_could_never_be_made_is_refused(settings: dict, said: str):
    cfg = Config(checkpoint=CheckpointConfig(keep_best=1, **{"every": 20, **settings}))
    cfg.evaluation.every = 10
    with pytest.raises(ConfigError, match=said):
        check_best(cfg)


def test_choices_that_can_be_made_are_let_through():
    for metric in ("eval/pass@8", "eval/maj@8", "eval/length", "reward/mean", "actor/entropy"):
        cfg = Config(checkpoint=CheckpointConfig(every=20, keep_best=1, metric=metric))
        cfg.evaluation.every = 10
        check_best(cfg)
