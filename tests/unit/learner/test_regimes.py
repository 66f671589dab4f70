"""Regimes of groups with a known answer, and the decisions taken from them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from actors.data import history
from learner.algorithms import regimes as r


@pytest.mark.parametrize(
    ("correct", "extracted", "want"),
    [
        ([1, 1, 1], ["5", "5", "5"], "saturated"),
        ([1, 0, 0], ["5", "6", "6"], "learnable"),
        ([0, 0, 0, 0], ["6", "6", "6", "7"], "collapsed"),
        ([0, 0, 0, 0], ["6", "6", "7", "8"], "collapsed"),  # half alike
        ([0, 0, 0, 0, 0], ["6", "6", "7", "8", "9"], "scattered"),
        ([0, 0, 0], ["", "", ""], "collapsed"),  # none found an answer: they miss in the same way
        ([0.5, 0.5], ["1", "1"], "collapsed"),  # partly right is not right
        ([1], ["5"], "undetermined"),
        ([], [], "undetermined"),
    ],
)
def test_regime_of_a_group(correct, extracted, want):
    assert r.classify(correct, extracted) == want


def test_threshold_of_alike_can_be_set():
    assert r.classify([0, 0, 0, 0], ["6", "6", "7", "8"], alike=0.6) == "scattered"
    with pytest.raises(ValueError, match="2 grades but 1 extracted"):
        r.classify([0, 0], ["1"])


def test_shares_of_synthetic_groups_with_known_answer():
    # Ids 0..9: 4 saturated, 3 learnable, 2 collapsed, 1 scattered; each with one ungraded sample
    # that must not count.
    kinds = ["saturated"] * 4 + ["learnable"] * 3 + ["collapsed"] * 2 + ["scattered"]
    answers = {
        "saturated": [1, 1, 1, 1],
        "learnable": [1, 0, 0, 1],
        "collapsed": [0] * 4,
        "scattered": [0] * 4,
    }
    texts = {"saturated": "aaaa", "learnable": "abca", "collapsed": "bbbb", "scattered": "bcde"}
    rows = [
        (g, c, t, True)
        for g, k in enumerate(kinds)
        for c, t in zip(answers[k], texts[k], strict=True)
    ]
    rows += [(g, np.nan, "", False) for g in range(10)]
    order = np.random.default_rng(0).permutation(len(rows))
    groups, correct, extracted, valid = zip(*(rows[i] for i in order), strict=True)
    got = r.classify_all(np.array(groups), np.array(correct), extracted, np.array(valid))
    assert list(got) == list(range(10)) and list(got.values()) == kinds
    share = r.shares(got)
    assert share == {
        "saturated": 0.4,
        "learnable": 0.3,
        "collapsed": 0.2,
        "scattered": 0.1,
        "undetermined": 0.0,
    }
    assert sum(share.values()) == pytest.approx(1.0)
    assert r.shares({}) == {}


def test_a_group_without_a_graded_answer_is_kept_as_undetermined():
    got = r.classify_all(
        np.array([4, 4]), np.array([np.nan, np.nan]), ["", ""], np.array([False, False])
    )
    assert got == {4: "undetermined"}


def test_dead_groups_are_kept_skipped_or_weighed_down():
    alive = np.array([True, False, True])
    assert r.group_factors("none", alive).tolist() == [1, 1, 1]
    assert r.group_factors("skip_dead", alive).tolist() == [1, 0, 1]
    assert r.group_factors("resample", alive).tolist() == [1, 0, 1]
    assert r.group_factors("down_weight", alive, 0.25).tolist() == [1, 0.25, 1]
    with pytest.raises(ValueError, match="algorithm.filter='drop' is not known"):
        r.group_factors("drop", alive)


def test_dynamic_sampling_by_hand():
    # Nothing known: rate 1/2, so 8 wanted needs 16.
    assert r.groups_to_draw(target=8, alive=0, finished=0, in_flight=0, limit=100) == 16
    assert (
        r.groups_to_draw(target=8, alive=0, finished=0, in_flight=16, limit=100) == 0
    )  # already on the way
    assert (
        r.groups_to_draw(target=8, alive=3, finished=14, in_flight=0, limit=100) == 20
    )  # rate 4/16, 5 missing
    assert r.groups_to_draw(target=8, alive=3, finished=14, in_flight=0, limit=24) == 10  # bounded
    assert (
        r.groups_to_draw(target=8, alive=3, finished=14, in_flight=4, limit=24) == 6
    )  # those in flight count
    assert (
        r.groups_to_draw(target=8, alive=3, finished=24, in_flight=0, limit=24) == 0
    )  # spent: train on three
    assert r.groups_to_draw(target=8, alive=9, finished=12, in_flight=0, limit=24) == 0


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 1.0])
def test_dynamic_sampling_ends_within_its_limit(rate):
    rng, wanted, limit = np.random.default_rng(3), 16, 80
    alive, finished = [], 0
    for _ in range(limit + 1):
        more = r.groups_to_draw(wanted, len(alive), finished, 0, limit)
        if more == 0:
            break
        alive += [finished + i for i in range(more) if rng.random() < rate]
        finished += more
    else:
        pytest.fail("did not end")
    assert finished <= limit and (len(alive) >= wanted or finished == limit)


def test_sampling_prefers_a_pass_rate_near_one_half():
    got = history.sampling_weights(np.array([0.0, 0.25, 0.5, 0.75, 1.0]), floor=0.2)
    np.testing.assert_allclose(got, [0.2, 0.8, 1.0, 0.8, 0.2], atol=1e-12)
    with pytest.raises(ValueError, match="must lie in"):
        history.sampling_weights(np.array([1.5]))


def test_prompt_history_by_hand_and_through_a_checkpoint():
    known = history.PromptHistory(decay=0.5)
    assert known.pass_rate("new") == 0.5
    known.update("a", right=0, graded=8, regime="collapsed", step=1)
    known.update("a", right=0, graded=8, regime="scattered", step=2)
    known.update("b", right=8, graded=8, regime="saturated", step=2)
    assert known.pass_rate("a") == pytest.approx(1 / 14)  # 8/2 + 8 = 12 graded, none right
    assert known.pass_rate("b") == pytest.approx(9 / 10)
    assert known.entries["a"]["dead"] == 2 and known.entries["a"]["visits"] == 2
    known.update("a", right=4, graded=8, regime="learnable", step=3)
    assert known.entries["a"]["dead"] == 0
    assert known.pass_rate("a") == pytest.approx((4 + 1) / (6 + 8 + 2))
    known.update("a", right=8, graded=8, regime="saturated", step=4)
    assert known.pass_rate("a") == pytest.approx((2 + 8 + 1) / (7 + 8 + 2))
    assert known.acceptance("new", floor=0.0) == 1.0
    assert known.acceptance("b") == pytest.approx(0.1 + 0.9 * 4 * 0.9 * 0.1)
    assert known.acceptance("b", floor=0.0) < known.acceptance("a", floor=0.0) < 1.0
    copy = history.PromptHistory.from_state(json.loads(json.dumps(known.state_dict())))
    assert copy == known
    copy.update("a", right=0, graded=1, regime="scattered", step=4)
    assert copy != known
    with pytest.raises(ValueError, match="prompt c: 3 right of 2"):
        known.update("c", 3, 2, "learnable", 1)


def test_curriculum_moves_up_only_on_a_full_window_of_its_own_level():
    curriculum = history.Curriculum([1, 2, 3], up=0.75, window=4, replay=0.2)
    assert not curriculum.update([1, 1, 1, 2], [1.0, 1.0, 1.0, 0.0])  # three of four
    assert curriculum.update([1], [0.0])  # mean 0.75
    assert curriculum.levels[curriculum.position] == 2 and curriculum.recent == []
    assert [curriculum.acceptance(level) for level in (1, 2, 3, 7)] == [0.2, 1.0, 0.0, 0.0]
    copy = history.Curriculum([1, 2, 3], up=0.75, window=4, replay=0.2)
    copy.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert copy == curriculum
    assert curriculum.update([2] * 4, [1.0] * 4)
    assert not curriculum.update([3] * 4, [1.0] * 4)  # the last level stays


def test_curriculum_starts_on_its_first_level_alone():
    assert [history.Curriculum([1, 2]).acceptance(level) for level in (2, 1)] == [0.0, 1.0]
