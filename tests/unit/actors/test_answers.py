"""Given answers as records: what is tokenised, cut, rewarded, and refused."""

from __future__ import annotations

import pytest

from actors.data.answers import GivenRequest, answer_records, check_answers, records_of_groups
from actors.data.arithmetic import arithmetic_prompt
from actors.data.prompt import Prompt
from actors.modeling.tokenizer import build_tokenizer
from actors.records import check_rollout, check_scored
from conf.schema import ConfigError

TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


def prompt(**extra: str) -> Prompt:
    return Prompt("p", "1+1", "2", "1+1", "", "file", "math", extra)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_a_pair_is_chosen_first_with_rewards_one_and_zero() -> None:
    asked = prompt(chosen="2", rejected="1+2")
    meta, scored, table = answer_records(7, asked, [5, 6], TOKENIZER, "pairs", 0, 10)
    check_scored(scored), check_rollout(table)
    assert table.column("completion_ids").to_pylist() == [[*ids("2"), EOS], [*ids("1+2"), EOS]]
    assert table.column("prompt_ids").to_pylist() == [[5, 6], [5, 6]]
    assert table.column("versions").to_pylist() == [[-1, -1], [-1] * 4]
    assert scored.column("reward").to_pylist() == [1.0, 0.0]
    assert (meta.prompt_tokens, meta.lengths.tolist()) == (2, [2, 4])
    assert (meta.version_min, meta.version_max, meta.generator) == (-1, -1, "data")


def test_an_answer_over_the_limit_is_cut_and_says_so() -> None:
    asked = prompt(completion="1+2")
    meta, _, table = answer_records(0, asked, [5], TOKENIZER, "dataset", 0, 3)
    assert table.column("completion_ids").to_pylist() == [ids("1+2")]  # the <eos> was the fourth
    assert meta.finish_reasons == ("length",)
    assert table.column("finish_reason").to_pylist() == ["length"]


def test_sums_have_a_worked_solution_and_a_near_miss() -> None:
    asked = arithmetic_prompt(0, 0, "train")
    _, _, table = answer_records(0, asked, [5], TOKENIZER, "pairs", 3, 100)
    right, wrong = (
        TOKENIZER.decode(i, skip_special_tokens=True)
        for i in table.column("completion_ids").to_pylist()
    )
    assert right.endswith(f"={asked.gold}</think><answer>{asked.gold}</answer>")
    assert wrong.endswith("</answer>") and f"<answer>{asked.gold}</answer>" not in wrong


def test_a_missing_column_is_named() -> None:
    check_answers(prompt(completion="2"), "dataset")
    with pytest.raises(ConfigError, match="prompt p has no column 'rejected'.*columns chosen, rej"):
        check_answers(prompt(chosen="2"), "pairs")


def test_a_task_returns_the_scalars_of_all_groups_and_a_table_each() -> None:
    requests = [GivenRequest(i, prompt(completion=str(i)), [5]) for i in (3, 4)]
    records, *tables = records_of_groups(requests, TOKENIZER, "dataset", 0, 10)
    assert [meta.group_id for meta, _ in records] == [3, 4]
    assert [t.column("completion_ids")[0].as_py() for t in tables] == [
        [*ids("3"), EOS],
        [*ids("4"), EOS],
    ]
