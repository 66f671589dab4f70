"""The benchmark's table says what was run, where, and never invents a number."""

from __future__ import annotations

from benchmarks.run import commit, machine, markdown


def test_table_has_a_row_a_seed_and_a_dash_for_what_was_not_measured() -> None:
    before = {"pass@1": 0.312, "pass@8": None, "maj@8": 0.5, "format": 0.8, "length": 14.94}
    run = {
        "seed": 2,
        "before": before,
        "after": before | {"pass@1": 0.9},
        "wall_s": 300.4,
        "tokens_per_s": 2345.6,
    }
    record = {
        "command": "make run",
        "commit": "abc1234+",
        "machine": {"cores": 2, "cpu": "X"},
        "runs": [run],
    }
    lines = markdown(record).splitlines()
    assert lines[0] == "`make run` at abc1234+, 2 x X"
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|") == 10
    assert lines[4] == (
        "| 2 | 0.312 → 0.900 | - → - | - → - | 0.500 → 0.500 | 0.800 → 0.800 "
        "| 14.9 → 14.9 | 300 s | 2,346 |"
    )


def test_commit_and_machine_are_known() -> None:
    assert len(commit().rstrip("+")) >= 7
    assert machine()["cores"] >= 1 and machine()["cpu"]
