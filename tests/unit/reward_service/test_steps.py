"""Step rewards by rule: hand-worked responses, and their places among tokens of any tokenizer."""

from __future__ import annotations

import pytest

from reward_service.step_labels.steps import running_sum, token_at, token_steps


@pytest.mark.parametrize(
    "response, wanted",
    [
        (
            "<think>12+30=42+4=46</think><answer>46</answer>",
            [("12+30=42", 1.0), ("12+30=42+4=46", 1.0)],
        ),
        ("<think>12+30=42+4=47</think>", [("12+30=42", 1.0), ("12+30=42+4=47", 0.0)]),
        (
            "<think>12+30=41+4=45 wait 41+4=45",
            [("12+30=41", 0.0), ("12+30=41+4=45", 1.0), ("12+30=41+4=45 wait 41+4=45", 1.0)],
        ),
        ("<think>easy</think><answer>1+1=2</answer>", []),  # the answer is no reasoning
        ("1+2=", []),
        ("", []),
    ],
)
def test_running_sum_by_hand(response: str, wanted: list[tuple[str, float]]) -> None:
    start = len("<think>") if response.startswith("<think>") else 0
    assert running_sum(response) == [(start + len(text), reward) for text, reward in wanted]


def test_token_that_holds_a_character() -> None:
    pieces = ["ab", "c", "", "defg", "h"]  # a token may add nothing to the text

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    assert [token_at(range(5), end, decode) for end in range(1, 9)] == [0, 0, 1, 3, 3, 3, 3, 4]


def test_the_answer_itself_is_the_last_step_and_the_prompt_has_none() -> None:
    text = "1+1=2+1=3."
    prefill = 5  # "1+1=2" stands in the prompt
    ids = [ord(c) for c in text[prefill:]]

    def decode(chosen: list[int]) -> str:
        return "".join(map(chr, chosen))

    assert token_steps([(5, 1.0), (9, 1.0)], prefill, ids, 0.25, decode) == ([1.0, 0.25], [3, 4])
