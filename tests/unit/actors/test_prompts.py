"""Prompts: stable ids, disjoint splits, resumable streams, and files whose mistakes are named."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data.arithmetic import arithmetic_prompt, arithmetic_split
from actors.data.build import build_dataset
from actors.data.files import DataFileError, load_files
from actors.data.prompt import TEMPLATES, make_prompt
from actors.data.stream import Dataset, PromptStream


def questions(prompts):
    return [prompt.question for prompt in prompts]


def test_arithmetic_prompt_is_a_function_of_its_arguments():
    a, b = (arithmetic_prompt(7, 3, "train") for _ in range(2))
    assert a == b
    assert arithmetic_prompt(8, 3, "train") != a and arithmetic_prompt(7, 4, "train") != a
    numbers = [int(x) for x in a.question.removesuffix("=?").split("+")]
    assert a.gold == str(sum(numbers)) and a.level == len(numbers)
    assert a.text == f"User: {a.question}\nAssistant: " and a.prefill == ""


def test_prompt_ids_are_the_same_in_another_process():
    code = (
        "from actors.data.arithmetic import arithmetic_prompt as p; "
        "print(p(7, 3, 'train').prompt_id)"
    )
    env = {"PYTHONHASHSEED": "12345", "PATH": ""}
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=Path(__file__).parents[3],
    )
    assert there.stdout.strip() == arithmetic_prompt(7, 3, "train").prompt_id


def test_levels_and_numbers_stay_in_range_and_all_occur():
    prompts = [arithmetic_prompt(i, 0, "train", terms=(2, 4), max_number=12) for i in range(400)]
    assert {p.level for p in prompts} == {2, 4}
    numbers = {int(x) for p in prompts for x in p.question.removesuffix("=?").split("+")}
    assert numbers == set(range(1, 13))


def test_the_order_of_the_terms_does_not_change_the_side():
    assert all(
        arithmetic_split((a, b)) == arithmetic_split((b, a))
        for a in range(1, 30)
        for b in range(1, 30)
    )
    share = (
        sum(arithmetic_split((a, b)) == "heldout" for a in range(1, 100) for b in range(a, 100))
        / 4950
    )
    assert 0.08 < share < 0.12


def test_train_and_heldout_share_no_operand_multiset():
    sides = {}
    for split in ("train", "heldout"):
        prompts = [arithmetic_prompt(i, 0, split, max_number=20) for i in range(2000)]
        sides[split] = {
            tuple(sorted(map(int, p.question.removesuffix("=?").split("+")))) for p in prompts
        }
    assert len(sides["heldout"]) > 200 and not sides["train"] & sides["heldout"]


def test_heldout_prompts_are_distinct_and_as_many_as_asked():
    heldout = build_dataset({"kind": "arithmetic", "heldout_size": 64}, "heldout")
    assert heldout.size == 64 and len({p.prompt_id for p in heldout.prompts()}) == 64


def test_too_large_a_heldout_set_is_refused_with_the_numbers():
    with pytest.raises(
        ValueError,
        match=r"data.heldout_size=500: arithmetic/heldout.* gave only \d+ usable distinct",
    ):
        build_dataset(
            {"kind": "arithmetic", "terms": [2], "max_number": 9, "heldout_size": 500}, "heldout"
        )


def finite(n=5):
    made = [make_prompt(f"q{i}", str(i), "none", data_source="test", task="math") for i in range(n)]
    return Dataset("test", n, made.__getitem__)


def test_each_epoch_of_finite_data_is_a_permutation_and_epochs_differ():
    stream = PromptStream(finite(50), seed=1)
    first, second = questions(stream.next(50)), questions(stream.next(50))
    assert sorted(first) == sorted(second) == sorted(f"q{i}" for i in range(50))
    assert first != second and first != [f"q{i}" for i in range(50)]


@pytest.mark.parametrize("endless", [False, True])
def test_a_restored_stream_continues_as_if_never_interrupted(endless):
    data = build_dataset({"kind": "arithmetic"}, "train") if endless else finite()
    whole = questions(PromptStream(data, seed=2).next(23))
    stream = PromptStream(data, seed=2)
    drawn = questions(stream.next(3)) + questions(stream.next(4))
    saved = json.loads(json.dumps(stream.state()))
    stream.next(6)  # drawn after the checkpoint, lost with the process
    resumed = PromptStream(data, seed=2)
    resumed.restore(saved)
    assert drawn + questions(resumed.next(16)) == whole


def test_streams_of_two_seeds_differ():
    data = build_dataset({"kind": "arithmetic"}, "train")
    assert not set(questions(PromptStream(data, 0).next(64))) & set(
        questions(PromptStream(data, 1).next(64))
    )


def test_a_stream_refuses_the_state_of_other_data_or_another_seed():
    state = PromptStream(finite(), seed=1).state()
    with pytest.raises(ValueError, match="has seed=1, this run has seed=2"):
        PromptStream(finite(), seed=2).restore(state)
    with pytest.raises(ValueError, match="has size=5, this run has size=6"):
        PromptStream(finite(6), seed=1).restore(state)


def test_templates_hold_the_question_once_and_r1_zero_ends_with_the_assistants_turn():
    for template in TEMPLATES.values():
        assert template.render("7+8=?").count("7+8=?") == 1
    text = TEMPLATES["r1_zero"].render("7+8=?")
    assert text.endswith("User: 7+8=?\nAssistant:")
    assert all(tag in text for tag in ("<think>", "</think>", "<answer>", "</answer>"))


def test_braces_in_a_question_are_left_alone():
    assert TEMPLATES["none"].render("{x} and {question}") == "{x} and {question}"


def test_build_dataset_reads_attributes_and_names_bad_settings():
    data = SimpleNamespace(
        kind="arithmetic", template="none", terms=[2], max_number=5, heldout_size=1, seed=0
    )
    assert build_dataset(data, "heldout").size == 1
    with pytest.raises(ValueError, match="data.kind=maths: expected one of arithmetic"):
        build_dataset({"kind": "maths"}, "train")
    with pytest.raises(ValueError, match="data.template=long: expected one of r1_zero"):
        build_dataset({"template": "long"}, "train")
    with pytest.raises(ValueError, match="data.max_prompt_tokens=20: the longest prompt"):
        build_dataset({"max_prompt_tokens": 20}, "train", count_tokens=len)


def test_reasoning_gym_train_never_asks_a_heldout_question():
    # Sums of two one-digit numbers: only some hundred questions, so seeds alone could not keep the
    # sides apart.
    cfg = {
        "kind": "reasoning_gym",
        "name": "chain_sum",
        "heldout_size": 16,
        "options": {"max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    held, train = build_dataset(cfg, "heldout"), build_dataset(cfg, "train")
    drawn = PromptStream(train, seed=0).next(300)
    assert held.size == 16 and not set(questions(held.prompts())) & set(questions(drawn))
    assert train.dropped["heldout"] > 0  # the check did work
    prompt = drawn[0]
    assert prompt.data_source == "reasoning_gym/chain_sum" and prompt.task == "reasoning_gym"
    assert json.loads(json.dumps(prompt.extra))["entry"]["answer"] == prompt.gold
    assert questions(drawn) == questions(
        PromptStream(build_dataset(cfg, "train"), seed=0).next(300)
    )


def test_an_unknown_reasoning_gym_name_suggests_near_ones():
    with pytest.raises(
        ValueError, match="data.name=countdwn: not a reasoning-gym data set; for example countdown"
    ):
        build_dataset({"kind": "reasoning_gym", "name": "countdwn"}, "train")


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 0},
}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verl_parquet_and_json_lines_give_the_same_prompts(tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL_ROW]), tmp_path / "a.parquet")
    (parquet,), (lines,) = (
        load_files(tmp_path / "a.parquet"),
        load_files(write_lines(tmp_path / "a.jsonl", [VERL_ROW])),
    )
    assert parquet == lines
    assert (parquet.question, parquet.gold, parquet.task) == ("Be brief.\n\n2+2?", "4", "math")
    assert parquet.data_source == "openai/gsm8k" and parquet.extra == {"index": 0}


def test_plain_columns_of_any_name_and_structured_answers(tmp_path):
    row = {"problem": "Make 10 of 3 and 7", "target": {"target": 10, "numbers": [3, 7]}}
    (prompt,) = load_files(
        write_lines(tmp_path / "a.jsonl", [row]), question_key="problem", answer_key="target"
    )
    assert json.loads(prompt.gold) == row["target"] and prompt.question == row["problem"]


def test_a_saved_hugging_face_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"question": "1+1", "answer": "2"}]).save_to_disk(
        str(tmp_path / "d")
    )
    (prompt,) = load_files(tmp_path / "d")
    assert (prompt.question, prompt.gold) == ("1+1", "2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a.jsonl: has no rows"),
        ('{"question": "q", "answer": "1"}\n\n{oops\n', r"a.jsonl, row 3: not JSON"),
        ("[1]\n", r"a.jsonl, row 1: a JSON list; expected one object a line"),
        (
            '{"query": "q", "answer": "1"}\n',
            r"row 1, column 'question': missing; the row has 'query', 'answer'",
        ),
        ('{"question": "q", "answer": null}\n', r"row 1, column 'answer': empty"),
        (
            '{"question": 5, "answer": "1"}\n',
            r"row 1, column 'question': 5; expected a question as text",
        ),
        ('{"prompt": [], "reward_model": {"ground_truth": "1"}}\n', r"row 1, column 'prompt'"),
        ('{"prompt": "q", "reward_model": {"style": "rule"}}\n', r"row 1, column 'reward_model'"),
        (
            '{"prompt": [{"role": "assistant", "content": "x"}], '
            '"reward_model": {"ground_truth": "1"}}\n',
            r"column 'prompt': a message of role 'assistant'",
        ),
    ],
)
def test_a_bad_file_is_named_with_row_and_column(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataFileError, match=message):
        load_files(tmp_path / "a.jsonl")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    for name, message in (
        ("a.parquet", "not a readable Parquet file"),
        ("b.jsonl", "no such file"),
    ):
        with pytest.raises(DataFileError, match=f"{name}: {message}"):
            load_files(tmp_path / name)


def test_long_repeated_and_heldout_rows_are_dropped_and_counted(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(6)]
    rows += [{"question": "q0", "answer": "0"}, {"question": "q" * 50, "answer": "1"}]
    cfg = {
        "kind": "files",
        "path": str(write_lines(tmp_path / "a.jsonl", rows)),
        "template": "none",
        "heldout_size": 2,
        "max_prompt_tokens": 10,
    }
    train, held = (build_dataset(cfg, split, count_tokens=len) for split in ("train", "heldout"))
    assert train.dropped == {"too_long": 1, "duplicate": 1, "heldout": 2}
    assert held.size == 2 and train.size == 4
    assert not set(questions(train.prompts())) & set(questions(held.prompts()))
    with pytest.raises(ValueError, match="data.heldout_size=6: .* has only 6 usable prompts"):
        build_dataset({**cfg, "heldout_size": 6}, "train", count_tokens=len)


def test_a_heldout_file_removes_its_questions_from_training(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(4)]
    cfg = {
        "kind": "files",
        "path": str(write_lines(tmp_path / "a.jsonl", rows)),
        "template": "none",
        "heldout_path": str(write_lines(tmp_path / "b.jsonl", rows[:1])),
    }
    train = build_dataset(cfg, "train")
    assert questions(train.prompts()) == ["q1", "q2", "q3"] and train.dropped["heldout"] == 1
