"""How good a nano teacher is: exact match of its greedy answers.

Shapes: B rows, T tokens.
"""

from collections import Counter, defaultdict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edge0_train.data.tasks import TASKS, Problem, is_correct, messages

MAX_NEW_TOKENS = {name: 160 if name == "chain" else 48 for name in TASKS}


@torch.no_grad()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Problem]) -> list[str]:
    """Greedy completions with the KV cache. Prompts of one length run together, so nothing is padded."""
    alike = defaultdict(list)
    for i, problem in enumerate(batch):
        ids = tokenizer.apply_chat_template(messages(problem), add_generation_prompt=True)["input_ids"]
        alike[len(ids), MAX_NEW_TOKENS[problem.task]].append((i, ids))
    texts = [""] * len(batch)
    for (_, max_new_tokens), group in alike.items():
        ids_BT = torch.tensor([ids for _, ids in group])
        out_BT = model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=max_new_tokens
        )
        decoded = tokenizer.batch_decode(out_BT[:, ids_BT.shape[1] :], skip_special_tokens=True)
        for (i, _), text in zip(group, decoded, strict=True):
            texts[i] = text
    return texts


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: list[Problem]
) -> dict[str, tuple[int, int]]:
    """Task name -> (exact matches, problems); the entry `all` is their sum."""
    right: Counter[str] = Counter()
    count: Counter[str] = Counter()
    model.eval()
    for problem, text in zip(batch, complete(model, tokenizer, batch), strict=True):
        for name in (problem.task, "all"):
            right[name] += is_correct(problem.answer, text)
            count[name] += 1
    return {name: (right[name], count[name]) for name in (*TASKS, "all") if count[name]}
