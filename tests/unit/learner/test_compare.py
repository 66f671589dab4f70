"""The numbers of the comparison, worked out by hand, and sweeps that resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from cluster.monitoring.sinks import MetricLog
from cluster.monitoring.stat import MetricError
from conf.compose import read
from conf.schema import Config
from learner import main, run
from learner.reports import compare

HELD_OUT = {"pass@1": 0.25, "pass@8": 0.9, "maj@8": 0.5, "format": 0.8, "length": 20.0}


def finish(
    folder: Path,
    steps: int,
    after: float,
    *,
    tokens: tuple[float, ...] = (),
    evals: dict[int, float] | None = None,
    wall_s: float = 120.0,
    maj: float | None = 0.5,
) -> None:
    """A finished run of 4 groups of 8 a step, one of them filtered each step."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text(
            yaml.safe_dump({"rollout": {"group_size": 8}, "steps": steps})
        )
    log = MetricLog(folder)
    log.log(0, {"eval/pass@1": 0.25})
    for step in range(1, steps + 1):
        log.log(
            step,
            {
                "groups/trained": 3.0 * step,
                "groups/filtered": 1.0 * step,
                "groups/admitted": 4.0 * step,
            }
            | ({"perf/trained_tokens": tokens[step - 1]} if tokens else {}),
        )
        if step in (evals or {}):
            log.log(step, {"eval/pass@1": evals[step]})
    log.log(steps, {"eval/pass@1": after})
    log.close()
    after_all = HELD_OUT | {"pass@1": after, "maj@8": maj}
    (folder / "summary.json").write_text(
        json.dumps({"steps": steps, "wall_s": wall_s, "before": HELD_OUT, "after": after_all})
    )


def cells(table: list[tuple[str, ...]], label: str) -> dict[str, str]:
    return dict(zip(table[0], next(row for row in table if row[0] == label), strict=True))


def test_table_of_three_seeds_and_of_one(tmp_path: Path) -> None:
    for seed, (after, maj, wall) in enumerate(
        [(0.8, 0.9, 60.0), (0.9, 0.9, 120.0), (1.0, None, 180.0)]
    ):
        finish(
            tmp_path / f"grpo-seed{seed}",
            2,
            after,
            maj=maj,
            wall_s=wall,
            tokens=(100.0, 200.0 + 30 * seed),
        )
    finish(tmp_path / "ppo-seed0", 3, 0.7)
    (tmp_path / "rloo-seed0").mkdir()  # began and did not end
    table = compare.write(tmp_path)
    assert [row[0] for row in table] == ["", "grpo", "ppo"]
    assert cells(table, "grpo") == {
        "": "grpo",
        "runs": "3",
        "pass@1 before": "0.250 ± 0.000",
        "pass@1 after": "0.900 ± 0.100",
        "maj@8 after": "0.900 ± 0.000",
        "format after": "0.800 ± 0.000",
        "length after": "20.0 ± 0.0",
        "samples": "64",  # 2 steps x 4 groups x 8
        "learner tokens": "330 ± 30",  # 300, 330, 360
        "minutes": "2.0 ± 1.0",
        "samples to 0.70": "64 ± 0",
    }
    alone = cells(table, "ppo")
    assert (alone["pass@1 after"], alone["samples"], alone["learner tokens"], alone["minutes"]) == (
        "0.700",
        "96",
        "-",
        "2.0",
    )
    text = (tmp_path / "comparison.md").read_text().splitlines()
    assert len(text) == 4 and text[2].startswith("| grpo | 3 | 0.250 ± 0.000 | 0.900 ± 0.100 |")
    assert len({line.count("|") for line in text}) == 1
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_samples_to_the_highest_accuracy_that_every_run_reached(tmp_path: Path) -> None:
    finish(tmp_path / "a-seed0", 4, 0.6, evals={1: 0.5, 2: 0.72})  # fell again; 32 samples a step
    finish(tmp_path / "a-seed1", 4, 0.70, evals={1: 0.69})
    finish(tmp_path / "b-seed0", 4, 0.9, evals={1: 0.74})
    table = compare.write(tmp_path)
    assert cells(table, "a")["samples to 0.70"] == "96 ± 45"  # 64 and 128
    assert cells(table, "b")["samples to 0.70"] == "32"


def test_curve_is_accuracy_against_samples_over_seeds(tmp_path: Path) -> None:
    finish(tmp_path / "a-seed0", 4, 0.9, evals={2: 0.5})
    finish(tmp_path / "a-seed1", 4, 0.7, evals={2: 0.3})
    finish(tmp_path / "b-seed0", 4, 0.6)
    runs = [compare.load(tmp_path / name) for name in ("a-seed0", "a-seed1", "b-seed0")]
    assert runs[0].curve == ((0, 0.25), (64, 0.5), (128, 0.9))  # 32 answers a step
    root = math.sqrt(
        0.02
    )  # of 0.5, 0.3 and of 0.9, 0.7: 0.1 each side of the mean, one less in the divisor
    found = compare.bands([r.curve for r in runs[:2]])
    assert [x for x, _, _ in found] == [0, 64, 128]
    assert [m for _, m, _ in found] == pytest.approx([0.25, 0.4, 0.8])
    assert [w for _, _, w in found] == pytest.approx([0.0, root, root])
    axis = compare.figure(runs, "t").axes[0]
    assert [line.get_label() for line in axis.lines] == ["a", "b"]
    assert axis.lines[0].get_xydata().tolist() == [
        pytest.approx(p) for p in ([0, 0.25], [64, 0.4], [128, 0.8])
    ]
    assert axis.lines[1].get_xydata().tolist() == [
        pytest.approx(p) for p in ([0, 0.25], [128, 0.6])
    ]


def test_a_reward_model_and_gold_are_drawn_beside_each_other(tmp_path: Path) -> None:
    for seed, shift in ((0, 0.0), (1, 0.1)):
        folder = tmp_path / f"fixed-seed{seed}"
        folder.mkdir()
        log = MetricLog(folder)
        for step, (score, right) in enumerate([(0.3, 0.25), (0.9, 0.05)], 1):
            log.log(
                step,
                {
                    "groups/trained": 2.0 * step,
                    "groups/filtered": 0.0,
                    "reward/accuracy": right + shift,
                    "reward_gap/orm": score - right,
                },
            )
        log.close()
        finish_rest(folder)
    runs = [compare.load(tmp_path / f"fixed-seed{seed}") for seed in (0, 1)]
    assert runs[0].judged == (pytest.approx((16, 0.3, 0.25)), pytest.approx((32, 0.9, 0.05)))
    axis = compare.figure(runs, "t").axes[1]
    assert [line.get_label() for line in axis.lines] == ["fixed: model", "fixed: gold"]
    assert axis.lines[0].get_ydata() == pytest.approx([0.35, 0.95]) and axis.lines[
        1
    ].get_ydata() == pytest.approx([0.3, 0.1])


def finish_rest(folder: Path) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"rollout": {"group_size": 8}}))
    (folder / "summary.json").write_text(
        json.dumps({"wall_s": 1.0, "before": HELD_OUT, "after": HELD_OUT})
    )


def test_a_folder_without_finished_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match="holds no finished run"):
        compare.write(tmp_path)


# ---- sweeps -------------------------------------------------------------------------------------


def test_the_shipped_experiments_are_sweeps_of_comparable_runs() -> None:
    composed = read(["experiment=compare_algorithms"])
    cfg = composed.cfg
    assert composed.sweep == [
        "+experiment=compare_algorithms",
        "algorithm=grpo,rloo,reinforce_pp,dr_grpo,ppo",
        "seed=0,1,2",
    ]
    for name in ("grpo", "rloo", "reinforce_pp", "dr_grpo", "ppo"):  # what Hydra composes for each
        one = main.load(["experiment=compare_algorithms", f"algorithm={name}", "seed=1"])
        assert one.run_dir == f"outputs/compare_algorithms/{name}-seed1"
        assert (one.steps, one.samples_per_step, one.optimizer, one.data, one.reward) == (
            cfg.steps,
            256,
            cfg.optimizer,
            cfg.data,
            cfg.reward,
        )
        assert one.algorithm.beta == 0 and one.algorithm.name == name
    assert one.algorithm.options["critic_lr"] > one.optimizer.lr
    composed = read(["experiment=skip_dead", "seed=3", "algorithm.filter=none,resample"])
    assert composed.sweep == ["+experiment=skip_dead", "seed=3", "algorithm.filter=none,resample"]
    assert read(["experiment=r1_zero", "seed=1"]).sweep == []


class Fake:
    """Stands for learner.main.execute_in_process; ends with the status of the folder's name."""

    def __init__(self, statuses: dict[str, int]) -> None:
        self.statuses, self.done = statuses, []

    def __call__(self, cfg: Config) -> int:
        folder = run.prepare(cfg)
        self.done.append(folder.name)
        status = self.statuses.get(folder.name, 0)
        if status == 0 and not cfg.preflight:
            finish(folder, cfg.steps, 0.5)
        return status


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["main"])
    return [
        "experiment=compare_algorithms",
        "algorithm=grpo,rloo",
        "seed=0,1",
        "steps=2",
        "run_dir=sweep/${algorithm.name}-seed${seed}",
    ]


def test_a_failed_run_is_named_loses_no_other_and_is_done_again(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Fake({"grpo-seed1": 1})
    monkeypatch.setattr(main, "execute_in_process", first)
    assert main.main(arguments) == 1
    assert first.done == ["grpo-seed0", "grpo-seed1", "rloo-seed0", "rloo-seed1"]
    told = capsys.readouterr()
    assert "1 of 4 runs failed: sweep/grpo-seed1." in told.err
    assert "rloo" in told.out and "Traceback" not in told.out + told.err
    table = Path("sweep/comparison.md").read_text()
    assert "| grpo | 1 |" in table and "| rloo | 2 |" in table
    again = Fake({})
    monkeypatch.setattr(main, "execute_in_process", again)
    assert main.main(arguments) == 0
    assert again.done == ["grpo-seed1"]  # nothing that is finished is repeated
    assert "| grpo | 2 |" in Path("sweep/comparison.md").read_text()


def test_a_sweep_that_only_checks_has_nothing_to_compare(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake({})
    monkeypatch.setattr(main, "execute_in_process", fake)
    assert main.main([*arguments, "preflight=true"]) == 0
    assert len(fake.done) == 4 and not Path("sweep/comparison.md").exists()


def test_other_settings_are_not_taken_for_the_finished_run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "execute_in_process", Fake({}))
    once = [a for a in arguments if not a.startswith(("seed=", "steps="))] + ["seed=0"]
    assert main.main([*once, "steps=2"]) == 0
    for changed, count in (
        (["steps=2", "logging.report=false"], 0),
        (["steps=2", "optimizer.lr=0.5"], 2),
        (["steps=3", "optimizer.lr=0.5"], 2),
    ):
        other = Fake({})
        monkeypatch.setattr(main, "execute_in_process", other)
        assert main.main([*once, *changed]) == 0
        assert len(other.done) == count, changed


@pytest.mark.parametrize("status", [130, 143])
def test_an_interrupted_sweep_stops(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    stopped = Fake({"grpo-seed1": status})
    monkeypatch.setattr(main, "execute_in_process", stopped)
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    assert caught.value.code == status and stopped.done == ["grpo-seed0", "grpo-seed1"]


def test_a_run_whose_settings_cannot_work_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake({})
    monkeypatch.setattr(main, "execute_in_process", fake)
    assert (
        main.main([*arguments[2:], *arguments[:1], "algorithm=grpo,dr_grpo", "algorithm.beta=0.1"])
        == 1
    )
    assert fake.done == ["grpo-seed0", "grpo-seed1"]
    assert (
        "2 of 4 runs failed: algorithm.beta=0.1: a KL coefficient above 0 has no effect"
        in capsys.readouterr().err
    )
