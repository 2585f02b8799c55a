"""The nano recipes' own arithmetic: where a chain goes wrong, and tables over seeds and recipes."""

import json

import pytest

from edge0_runtime.contract.errors import Edge0Error
from edge0_train.config import configure
from edge0_train.data.chat import Chat
from edge0_train.data.prompts import load_prompts
from edge0_train.data.tasks import problems
from recipes.long_chain import run as long_chain
from recipes.long_chain.run import first_error
from recipes.nano.table import mean_rows, read_results, show


@pytest.fixture(scope="module")
def chain():
    """(prompt, right completion) as a chat template shows them."""
    problem = problems("eval", 0, 1, ["chain"])[0]
    return f"<|im_start|>user\n{problem.prompt}<|im_end|>\n", problem.completion


def test_a_right_chain_has_no_first_error(chain):
    prompt, completion = chain
    assert first_error(prompt, completion) is None
    assert first_error(prompt, completion + "<|im_end|>") is None


@pytest.mark.parametrize("step", [1, 2, 17, 30])
@pytest.mark.parametrize("offset", [0, 1, 3, 4])
def test_the_first_wrong_character_decides_the_step(chain, step, offset):
    """Letter, digit or result wrong, whatever follows; a step is five characters."""
    prompt, completion = chain
    at = 5 * (step - 1) + offset
    wrong = completion[:at] + "?" + completion[at + 1 :]
    assert first_error(prompt, wrong) == step
    assert first_error(prompt, wrong[: at + 1]) == step


def test_a_wrong_or_missing_answer_after_right_steps_is_one_step_more(chain):
    prompt, completion = chain
    assert first_error(prompt, completion[:-1]) == 31
    assert first_error(prompt, completion.split(" ")[0]) == 31


def test_a_prompt_without_a_chain_is_refused():
    with pytest.raises(ValueError, match="is not a chain"):
        first_error("Add 3 and 4.", "")


def test_settings_of_the_command_are_every_runs(tmp_path, monkeypatch):
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(long_chain, "run_once", lambda phase, directory, *settings: given.append(settings))
    monkeypatch.setattr(long_chain, "finished", lambda directory: {"seconds": 1.0})
    monkeypatch.setattr(long_chain, "configure_run", lambda phase, directory, *settings: given.append(settings))
    monkeypatch.setattr(long_chain, "measure_seed", lambda config, root, seed: None)
    arguments = long_chain._arguments(["--set", "tier.consumers.last=7"])
    long_chain.run_seed(tmp_path, 0, arguments.set)
    assert len(given) == 11 and all("tier.consumers.last=7" in settings for settings in given)


def rows(kl: float) -> list[dict[str, object]]:
    teacher = {"stage": "teacher", "loss": 0.1, "kl": 0.0, "exact_match": 1.0, "add": 1.0}
    return [teacher, {"stage": "+ SFT", "loss": 0.2, "kl": kl, "recall": 0.5, "exact_match": 0.8, "add": 0.8}]


def write(directory, run, kl):
    path = directory / run / "evaluate/done.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"table": rows(kl)}))


def test_recipes_stand_side_by_side_with_their_means(tmp_path):
    for run, kl in (
        ("nano-seed0", 0.25),
        ("nano-seed1", 0.75),
        ("nano-paper-seed0", 1.5),
        ("nano-paper-seed1", 2.5),
        ("nano-seed2", 9.0),  # its other recipe is not there yet
    ):
        write(tmp_path, run, kl)
    results = read_results(tmp_path)
    assert {recipe: list(seeds) for recipe, seeds in results.items()} == {"ours": [0, 1], "paper": [0, 1]}
    means = mean_rows(list(results["paper"].values()))
    assert means[1]["kl"] == 2.0 and means[1]["recall"] == 0.5 and "recall" not in means[0]
    *_, ours, paper = show(results).splitlines()
    assert ours.split()[:5] == ["+", "SFT,", "ours", "0.2", "0.5"]
    assert paper.split()[:5] == ["+", "SFT,", "paper", "0.2", "2"]


def test_a_directory_without_a_complete_seed_says_so(tmp_path):
    write(tmp_path, "nano-seed0", 1.0)
    with pytest.raises(Edge0Error, match="no seed has both recipes"):
        read_results(tmp_path)


@pytest.mark.parametrize("phase", ["teacher_text", "student_sft", "on_policy", "evaluate"])
def test_the_long_chain_experiment_has_room_for_whole_answers(phase):
    config = configure(f"phase={phase}", "tier=nano", "experiment=long_chain")
    chat = Chat(config.teacher.directory)
    prompts = load_prompts(config.text.prompts, train=20, held_out=20, seed=0).train
    assert {prompt.task for prompt in prompts} == {"chain"}
    answer = len(chat.tokenizer(problems("train", 0, 1, ["chain"])[0].completion)["input_ids"]) + 1  # the end token
    assert answer >= 150 and answer <= config.sample.max_new_tokens
    assert max(len(chat.prompt_ids(prompt)) for prompt in prompts) + answer <= config.text.max_length
