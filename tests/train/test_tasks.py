"""The generated tasks: deterministic, split by prompt, arithmetically right, and short enough as tokens."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from edge0_train.data.tasks import (
    LABELS,
    SHORT_TASKS,
    SPLITS,
    TASKS,
    extract_answer,
    is_correct,
    messages,
    problems,
    split_of,
)

TEACHER = Path(__file__).parents[2] / "edge0_train/assets/nano-teacher"
SHORT_ROW_TOKENS, CHAIN_ROW_TOKENS = 64, 256


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TEACHER)


def chat(problem):
    return [*messages(problem), {"role": "assistant", "content": problem.completion}]


def answer_from_prompt(prompt: str) -> str:
    """The answer, worked out again from the user's text alone."""
    if match := re.fullmatch(r"Add (\d+) and (\d+)\.", prompt):
        return str(int(match[1]) + int(match[2]))
    if match := re.fullmatch(r"Multiply (\d+) by (\d)\.", prompt):
        return str(int(match[1]) * int(match[2]))
    if match := re.fullmatch(r"Reverse (\d{4,8})\.", prompt):
        return match[1][::-1]
    if match := re.fullmatch(r"Run:((?:[a-zA-D][1-9]){30})\.", prompt):
        return f"{sum(map(int, re.findall('[1-9]', match[1]))) % 100:02d}"
    have, changes = r"\w+ has (?:(\d+) bags of )?(\d+) \w+", r"(?:, gets (\d+))?(?:, gives (\d+))?"
    match = re.fullmatch(have + changes + r"\. How many\?", prompt)
    assert match, prompt
    bags, each, gets, gives = (int(group) if group else None for group in match.groups())
    return str((bags or 1) * each + (gets or 0) - (gives or 0))


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_right(task):
    for problem in problems("train", 3, 500, [task]):
        assert problem.task == task
        assert problem.answer == answer_from_prompt(problem.prompt)
        assert problem.completion.endswith(f" #{problem.answer}")
        assert is_correct(problem.answer, problem.completion)


@pytest.mark.parametrize("task", ["add", "multiply", "word"])
def test_every_step_of_a_scratchpad_is_right(task):
    for problem in problems("train", 4, 500, [task]):
        *steps, _ = problem.completion.split(" ")
        assert steps
        for step in steps:
            numbers, result = step.split("=")
            first, operator, second, carry = re.fullmatch(r"(\d+)([-+*])(\d+)(?:\+(\d))?", numbers).groups()
            a, b = int(first), int(second)
            value = {"+": a + b, "-": a - b, "*": a * b}[operator] + int(carry or 0)
            assert value == int(result), problem


def test_every_step_of_a_chain_is_right_and_copies_its_digit():
    for problem in problems("train", 4, 500, ["chain"]):
        have = 0
        steps = re.findall(r"([a-zA-D])(\d)=(\d\d)", problem.completion)
        assert "".join(letter for letter, *_ in steps) == LABELS
        assert "".join(letter + digit for letter, digit, _ in steps) == problem.prompt[len("Run:") : -1]
        for _, digit, result in steps:
            assert int(result) == (have + int(digit)) % 100, problem
            have = int(result)
        assert problem.completion.endswith(f"={have:02d} #{have:02d}")


def test_the_same_seed_gives_the_same_problems():
    assert problems("train", 0, 100) == problems("train", 0, 100)
    assert problems("train", 0, 100) != problems("train", 1, 100)
    assert problems("train", 0, 100)[:40] == problems("train", 0, 40)


@pytest.mark.parametrize("chosen", [None, list(TASKS)])
def test_tasks_are_drawn_about_equally_and_chains_only_when_named(chosen):
    drawn = [problem.task for problem in problems("eval", 0, 2000, chosen)]
    expected = SHORT_TASKS if chosen is None else chosen
    assert set(drawn) == set(expected)
    assert min(drawn.count(task) for task in expected) > 2000 / len(expected) * 0.75


def test_no_eval_prompt_is_in_train():
    prompts = {split: {p.prompt for p in problems(split, 5, 4000, list(TASKS))} for split in SPLITS}
    assert not prompts["train"] & prompts["eval"]
    for split, found in prompts.items():
        assert {split_of(prompt) for prompt in found} == {split}


def test_the_split_of_a_prompt_is_fixed():
    # Changing the hash would move eval prompts into the training data of a teacher already published.
    assert [n for n in range(10, 40) if split_of(f"Add {n} and 10.") == "eval"] == [24, 33]


def test_unknown_names_are_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match="split is 'test'; use one of train, eval"):
        problems("test", 0, 1)
    with pytest.raises(ValueError, match="'divide'; use names from add, reverse, multiply, word, chain"):
        problems("train", 0, 1, ["add", "divide"])
    with pytest.raises(ValueError, match="tasks is empty"):
        problems("train", 0, 1, [])
    with pytest.raises(ValueError, match="count is -1"):
        problems("train", 0, -1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1+2+0=03 #3", "3"),
        ("3 #3<|im_end|>\n", "3"),
        ("#1 or rather #2", "2"),
        ("#12 34", "12 34"),
        ("no mark 12", None),
        ("ends early #", None),
        ("", None),
    ],
)
def test_the_answer_is_what_follows_the_last_mark(text, answer):
    assert extract_answer(text) == answer


def test_only_the_exact_answer_is_correct():
    assert is_correct("12", "x #12")
    assert not is_correct("12", "x #012")
    assert not is_correct("12", "x #123")
    assert not is_correct("12", "12")


def test_rows_fit_one_chunk_of_the_delta_rule(tokenizer):
    rows = tokenizer.apply_chat_template([chat(p) for p in problems("train", 6, 4000)])["input_ids"]
    assert max(map(len, rows)) <= SHORT_ROW_TOKENS


def test_a_chain_has_an_answer_of_154_tokens_in_a_row_of_four_chunks(tokenizer):
    chains = problems("train", 6, 500, ["chain"])
    assert {len(tokenizer(p.completion + "<|im_end|>")["input_ids"]) for p in chains} == {154}
    assert max(map(len, tokenizer.apply_chat_template([chat(p) for p in chains])["input_ids"])) <= CHAIN_ROW_TOKENS


def test_autotokenizer_tokenises_as_the_file_says(tokenizer):
    """AutoTokenizer swaps in Qwen's pre-tokenizer; tokenizer.json must have been made with the same one."""
    plain = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    for problem in problems("eval", 7, 500):
        text = tokenizer.apply_chat_template(chat(problem), tokenize=False)
        ids = plain.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == plain.get_vocab_size() == 384


def test_digits_are_single_tokens_and_special_ids_are_fixed(tokenizer):
    assert len(tokenizer("0123456789 12")["input_ids"]) == 13
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    config = json.loads((TEACHER / "config.json").read_text())
    assert config["text_config"]["eos_token_id"] == 2


def test_the_assistant_mask_covers_the_completion_and_the_end_of_turn(tokenizer):
    problem = problems("train", 8, 1)[0]
    conversation = [{"role": "system", "content": "Be brief."}, *chat(problem)]
    row = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
    own = [i for i, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(own) == problem.completion + "<|im_end|>"


def test_the_generation_prompt_is_a_prefix_of_the_row(tokenizer):
    problem = problems("train", 9, 1)[0]
    prompt = tokenizer.apply_chat_template(messages(problem), add_generation_prompt=True)["input_ids"]
    row = tokenizer.apply_chat_template(chat(problem))["input_ids"]
    assert row[: len(prompt)] == prompt


def test_a_role_the_template_does_not_know_is_refused(tokenizer):
    with pytest.raises(Exception, match="role is tool; use system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "7"}])
