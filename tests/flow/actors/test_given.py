"""Given answers are built in Ray tasks: the driver receives scalars and references of tables."""

from __future__ import annotations

import pytest
import ray

from actors.data.answers import GivenRequest, answer_records
from actors.data.arithmetic import arithmetic_prompt
from actors.data.prompt import Prompt
from actors.given import given_groups
from actors.modeling.tokenizer import build_tokenizer
from conf.schema import ConfigError

TOKENIZER = build_tokenizer()
EMPTY = Prompt("p", "1+1", "2", "1+1", "", "file", "math")

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("cluster")]


def test_groups_are_those_of_the_pure_function_in_the_order_of_the_requests() -> None:
    prompts = [arithmetic_prompt(i, 0, "train") for i in range(3)]
    requests = [GivenRequest(10 + i, p, [5, i]) for i, p in enumerate(prompts)]
    built = given_groups(requests, TOKENIZER, "pairs", 7, 12)
    assert [group.meta.group_id for group, _ in built] == [10, 11, 12]
    for request, (group, scored) in zip(requests, built, strict=True):
        meta, its_scored, table = answer_records(
            request.group_id, request.prompt, request.prompt_ids, TOKENIZER, "pairs", 7, 12
        )
        assert isinstance(group.table, ray.ObjectRef)
        assert ray.get(group.table, timeout=30).equals(table) and scored.equals(its_scored)
        assert group.prompt == request.prompt and str(group.meta) == str(meta)
    [(group, scored)] = given_groups(requests[:1], ray.put(TOKENIZER), "pairs", 7, 12)
    assert scored.equals(built[0][1]) and str(group.meta) == str(built[0][0].meta)


def test_a_missing_column_is_a_config_error_without_rays_text() -> None:
    with pytest.raises(ConfigError) as caught:
        given_groups([GivenRequest(0, EMPTY, [5])], TOKENIZER, "dataset", 0, 12)
    assert str(caught.value).startswith("data.path=file: prompt p has no column 'completion'")


def test_an_error_inside_the_task_arrives_as_it_was_raised() -> None:
    broken = Prompt("p", "1+one=?", "2", "1+1", "", "arithmetic", "math")
    with pytest.raises(ValueError, match="^invalid literal for int") as caught:
        given_groups([GivenRequest(0, broken, [5])], TOKENIZER, "dataset", 0, 12)
    assert type(caught.value) is ValueError
    assert given_groups([], TOKENIZER, "dataset", 0, 12) == []
