"""What a grammar costs a token: computing the mask and laying it over the logits, for a vocabulary of a model's size.

    python benchmarks/grammar_mask.py [--vocab 151936] [--tokens 200]

The vocabulary is made up: bytes, and words of a fixed seed that read like JSON and prose. Each line is one schema, the median and
the 95th percentile in milliseconds, and what making the grammar took.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from edge0_runtime.server.grammar import Grammar, json_grammar
from edge0_runtime.server.vocabulary import Vocabulary

SCHEMAS = {
    "json_object": {"type": "object"},
    "json_schema": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "number"}}},
        "required": ["name", "sizes"],
        "additionalProperties": False,
    },
}


def made_up(size: int) -> Vocabulary:
    """A byte-level vocabulary of that many tokens; the last one ends an answer."""
    draw = random.Random(0)
    names = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(names) < size - 1:
        names[
            draw.choice(["", "Ġ"])
            + "".join(draw.choices(string.ascii_letters + '":,{}[]0123456789', k=draw.randint(2, 9)))
        ] = None
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return Vocabulary(fast, size, [fast.eos_token_id])


def measure(vocabulary: Vocabulary, schema: object, size: int, tokens: int) -> dict[str, float]:
    """Milliseconds of one answer's masks, its tokens drawn from what is allowed."""
    started = time.perf_counter()
    grammar = Grammar(vocabulary, json_grammar(schema, "schema"), "schema")
    mask, made_ms = grammar.processor(1), 1e3 * (time.perf_counter() - started)
    draw, ids, times = np.random.default_rng(0), [0], []
    logits = mx.zeros((1, size))
    for _ in range(tokens):
        started = time.perf_counter()
        masked = mask(mx.array(ids), logits)
        mx.eval(masked)
        times.append(1e3 * (time.perf_counter() - started))
        allowed = np.flatnonzero(np.isfinite(np.array(masked)[0]))
        ids.append(int(draw.choice(allowed)))
        if ids[-1] == size - 1:
            mask, ids = grammar.processor(1), [0]
    return {"median_ms": float(np.median(times)), "p95_ms": float(np.quantile(times, 0.95)), "grammar_ms": made_ms}


def main() -> None:
    """Print a JSON line for each schema."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    started = time.perf_counter()
    vocabulary = made_up(args.vocab)
    print(json.dumps({"vocab": args.vocab, "vocabulary_s": round(time.perf_counter() - started, 3)}))
    for name, schema in SCHEMAS.items():
        found = measure(vocabulary, schema, args.vocab, args.tokens)
        print(
            json.dumps({"schema": name, "tokens": args.tokens} | {key: round(value, 3) for key, value in found.items()})
        )


if __name__ == "__main__":
    main()
