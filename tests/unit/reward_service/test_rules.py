"""Each rule against values worked out by hand, and how rules add up."""

from __future__ import annotations

import math

import pytest

from reward_service.rules import format, shaping
from reward_service.rules.item import RewardItem, RewardResult
from reward_service.rules.scorer import Scorer, score_safely

GOOD = "<think>3+4</think><answer>7</answer>"


@pytest.mark.parametrize(
    "text, value",
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        ("<think>a\n\nb</think>\n\n<answer>\n7\n</answer>", 1.0),
        (GOOD + "!", 0.0),
        ("x" + GOOD, 0.0),
        (GOOD + GOOD, 0.0),
        ("<think>3</think> so <answer>7</answer>", 0.0),
        ("<answer>7</answer><think>3</think>", 0.0),
        ("<think>3</think><answer>7", 0.0),
        ("<THINK>3</THINK><answer>7</answer>", 0.0),
        ("3</think><answer>7</answer>", 0.0),
        ("<think>" + GOOD, 0.0),
        ("", 0.0),
        (GOOD + "\u200b", 0.0),
        (GOOD + "\x00", 0.0),
        ("<think>a <answer> b</think><answer>7</answer>", 0.0),
        ("<think>a < b > c </thinks></think><answer>7</answer>", 1.0),
    ],
)
def test_format_is_exact(text: str, value: float) -> None:
    assert format.format_reward(text) == value


@pytest.mark.parametrize(
    "text, block",
    [
        (GOOD, "7"),
        ("<answer>7</answer>", "7"),
        ("<think>a <answer>5</answer> b</think><answer>7</answer>", "7"),
        ("<think>a <answer>5</answer>", None),
        ("a <answer>5</answer></think>", None),
        ("<think>a</think><answer>7", None),
        ("<think>a</think><answer>5</answer><answer>7</answer>", "7"),
        ("<think><think>a</think><answer>7</answer>", "7"),
        ("<think>a <think>b</think> <answer>5</answer> c</think> d", None),
        ("<think>a</think><answer>7</answer> so", "7"),
        ("<think>a</think><answer><answer>7</answer>", "7"),
        ("7</answer>", None),
        ("", None),
        ("<think>a</think><answer>7</answer><think>b <answer>8</answer>", "7"),
        ("a</think><answer>7</answer>", "7"),
        ("<answer>5</answer><think>b</think><answer>7</answer>", "7"),
        ("<answer>", None),
    ],
)
def test_answer_block_is_the_last_one_outside_the_reasoning(text: str, block: str | None) -> None:
    assert format.answer_block(text) == block


def test_tag_count_is_a_quarter_for_each_tag_that_stands_once() -> None:
    assert format.tag_count_reward(GOOD) == 1.0
    assert format.tag_count_reward("<think>a</think><think>") == 0.25  # </think> alone stands once
    assert format.tag_count_reward("") == 0.0


@pytest.mark.parametrize(
    "reasoning, target, value",
    [
        ("we add three numbers", "en", 1.0),
        ("세 수를 더한다", "ko", 1.0),
        ("세 수를 add 한다", "ko", 0.75),  # 3 of 4 words
        ("我们 add 数", "zh", 0.75),  # three Han characters and one Latin word
        ("we 加 x and y", "en", 2 / 3),  # we, and; one Han character; single letters are variables
        (r"\frac{1}{2} + 3 = x", "ko", 1.0),  # no word at all
        ("   ", "en", 0.0),
    ],
)
def test_language_is_the_share_of_words_in_the_target_script(
    reasoning: str, target: str, value: float
) -> None:
    text = f"<think>{reasoning}</think><answer>안녕 hello</answer>"
    assert shaping.language_reward(text, target) == pytest.approx(value)


def test_language_needs_a_known_target() -> None:
    with pytest.raises(ValueError, match="language.target"):
        shaping.language_reward(GOOD, "klingon")


def test_cosine_length_by_hand() -> None:
    assert shaping.cosine_length_reward(0, 100, True) == 1.0
    assert shaping.cosine_length_reward(50, 100, True) == pytest.approx(
        0.75
    )  # halfway from 1.0 to 0.5
    assert shaping.cosine_length_reward(25, 100, True) == pytest.approx(
        0.5 + 0.25 * (1 + math.sqrt(0.5))
    )
    assert shaping.cosine_length_reward(0, 100, False) == -1.0
    assert shaping.cosine_length_reward(50, 100, False) == pytest.approx(-0.75)
    assert (
        shaping.cosine_length_reward(100, 100, True)
        == shaping.cosine_length_reward(10**6, 100, True)
        == -1.0
    )


def test_soft_overlong_by_hand() -> None:
    values = [shaping.soft_overlong_reward(tokens, 100, 20) for tokens in (0, 80, 90, 100, 500)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="cache"):
        shaping.soft_overlong_reward(5, 100, 0)


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert shaping.repetition_reward("a b c d e", n=2) == 0.0
    assert shaping.repetition_reward("a b a b a", n=2) == pytest.approx(
        -0.5
    )  # ab ba ab ba: 2 of 4 distinct
    assert shaping.repetition_reward("a", n=2) == 0.0
    assert shaping.repetition_reward("so " * 1000, n=4) == pytest.approx(-1 + 1 / 997)


def test_reasoning_steps_are_counted_up_to_the_wanted_number() -> None:
    text = "<think>Step 1: add\n2. carry\n- check\nFinally, done</think>"
    text += "<answer>First, second,</answer>"
    assert shaping.reasoning_steps_reward(text, 8) == 0.5
    assert shaping.reasoning_steps_reward(text, 3) == 1.0
    assert shaping.reasoning_steps_reward("<think>hm</think>", 3) == 0.0


def score(cfg: dict, **fields: object) -> RewardResult:
    return score_safely(
        Scorer(cfg), RewardItem(**{"id": "1", "response": GOOD, "gold": "7", **fields})
    )


def test_sum_product_and_weights_per_source() -> None:
    weights = {"accuracy": 1.0, "format": 0.2}
    assert score({"rules": weights}).total == pytest.approx(1.2)
    assert score({"rules": weights}, gold="8").total == pytest.approx(0.2)
    assert score({"rules": weights, "combine": "product"}).total == pytest.approx(0.2)
    assert score({"rules": weights, "combine": "product"}, gold="8").total == 0.0
    by_source = {"rules": weights, "options": {"by_source": {"gsm8k": {"format": 3.0}}}}
    assert score(by_source, data_source="gsm8k").total == 3.0
    assert score(by_source, data_source="math").total == pytest.approx(1.2)


def test_a_rule_of_weight_zero_is_measured_and_changes_nothing() -> None:
    for gold, parts in (
        ("8", {"accuracy": 0.0, "format": 1.0}),
        ("", {"format": 1.0}),
    ):  # no verdict: no part, no zero
        result = score({"rules": {"accuracy": 0.0, "format": 1.0}, "combine": "product"}, gold=gold)
        assert (result.status, result.total, result.parts) == ("ok", 1.0, parts)


def test_length_rules_see_tokens_and_the_budget() -> None:
    cfg = {
        "rules": {"cosine_length": 1.0, "soft_overlong": 1.0, "accuracy": 0.0},
        "options": {"max_tokens": 100, "soft_overlong": {"cache": 20}},
    }
    result = score(cfg, completion_tokens=90)
    assert result.parts["soft_overlong"] == -0.5
    assert result.parts["cosine_length"] == pytest.approx(
        shaping.cosine_length_reward(90, 100, True)
    )
    ungradable = score(
        cfg, completion_tokens=90, gold=""
    )  # a length reward that needs the verdict is none without it
    assert ungradable.status == "ungradable" and ungradable.parts == {"soft_overlong": -0.5}
    missing = score({"rules": {"soft_overlong": 1.0}})
    assert (
        missing.status == "error" and "max_tokens" in missing.reason and math.isnan(missing.total)
    )


@pytest.mark.parametrize(
    "cfg, names",
    [
        ({"rules": {}}, "reward.rules"),
        ({"rules": {"acuracy": 1.0}}, "acuracy"),
        ({"rules": {"format": math.nan}}, "format"),
        ({"rules": {"cosine_length": 1.0}}, "cosine_length"),
        ({"rules": {"format": 1.0}, "combine": "mean"}, "reward.combine"),
        ({"rules": {"format": 1.0}, "options": {"langauge": {}}}, "langauge"),
        ({"rules": {"format": 1.0}, "options": {"by_source": {"x": {"nope": 1.0}}}}, "by_source.x"),
    ],
)
def test_a_bad_setting_is_refused_by_name(cfg: dict, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Scorer(cfg)
