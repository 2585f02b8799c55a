"""What the nano teachers read: a tokenizer of 384 entries, and task rows in its chat template.

Shapes: B rows, T tokens.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from edge0_train.data.tasks import TASKS, Problem, messages, problems

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCAB = 384
ROW_TOKENS = {name: 256 if name == "chain" else 64 for name in TASKS}  # the torch delta rules have chunks of 64
# `generation` marks what the assistant says itself: its text and the token that ends the turn.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message['role'] in ('system', 'user') %}
        {{- message['content'] + '<|im_end|>' }}
    {%- else %}
        {{- raise_exception('role is ' + message['role'] + '; use system, user or assistant.') }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def build_tokenizer(seed: int) -> Qwen3_5Tokenizer:
    """Byte-level BPE of `VOCAB` entries, trained on task rows; every digit is one token.

    AutoTokenizer answers model type qwen3_5_moe with `Qwen3_5Tokenizer`, and bailing_hybrid, which has no tokenizer of its
    own, with the class that tokenizer_config.json names: this one. It puts in Qwen's own normalizer and pre-tokenizer
    whatever tokenizer.json says, so the merges are learnt under exactly those.
    """
    pipeline = Qwen3_5Tokenizer().backend_tokenizer
    core = Tokenizer(models.BPE())
    core.normalizer, core.pre_tokenizer = pipeline.normalizer, pipeline.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = problems("train", seed, 4000)
    texts = [text for p in drawn for text in ("user\n", p.prompt, "assistant\n", p.completion)]
    # No task has a system turn; this keeps a plain one short.
    texts += ["system\n", "You are a helpful assistant. Think step by step."] * 100
    core.train_from_iterator(texts, trainer)
    bpe = json.loads(core.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        unk_token=None,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
    )
    ids = tokenizer.convert_tokens_to_ids([PAD, IM_START, IM_END])
    if ids != [0, 1, 2] or len(tokenizer) != VOCAB:
        raise ValueError(f"tokenizer has {len(tokenizer)} entries, specials {ids}; want {VOCAB}, [0, 1, 2].")
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, out: Path, batch: list[Problem]) -> None:
    """AutoTokenizer on the saved directory must give the ids that training saw."""
    loaded = AutoTokenizer.from_pretrained(out)
    ours, theirs = (t.apply_chat_template(_chats(batch))["input_ids"] for t in (tokenizer, loaded))
    if ours != theirs or len(loaded) != VOCAB:
        raise AssertionError(f"AutoTokenizer on {out} gives other ids than in training; see build_tokenizer.")


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, batch: list[Problem]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(ids_BT, mask_BT, labels_BT)`, right-padded; labels are -100 outside the assistant's turn.

    Raises ValueError when a row is longer than `ROW_TOKENS` of its task.
    """
    rows = tokenizer.apply_chat_template(_chats(batch), return_dict=True, return_assistant_tokens_mask=True)
    for problem, ids in zip(batch, rows["input_ids"], strict=True):
        if len(ids) > ROW_TOKENS[problem.task]:
            raise ValueError(
                f"a row has {len(ids)} tokens; shorten task {problem.task} to at most {ROW_TOKENS[problem.task]}."
            )
    longest = max(map(len, rows["input_ids"]))
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    mask_BT, labels_BT = torch.zeros_like(ids_BT), torch.full_like(ids_BT, -100)
    for i, (ids, own) in enumerate(zip(rows["input_ids"], rows["assistant_masks"], strict=True)):
        ids_T, own_T = torch.tensor(ids), torch.tensor(own, dtype=torch.bool)
        ids_BT[i, : len(ids)] = ids_T
        mask_BT[i, : len(ids)] = 1
        labels_BT[i, : len(ids)] = ids_T.masked_fill(~own_T, -100)
    return ids_BT, mask_BT, labels_BT


def _chats(batch: list[Problem]) -> list[list[dict[str, str]]]:
    return [[*messages(p), {"role": "assistant", "content": p.completion}] for p in batch]
