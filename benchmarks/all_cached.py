"""Decoding with every expert in memory, against plain mlx-lm on the same checkpoint: what the engine itself costs.

    python benchmarks/all_cached.py models/nano --tokens 256 --rounds 6

The peer is mlx-lm's own `load_model` and `generate_step` at the tier's K and in the engine's compute dtype, everything in
memory. Two engines: `same model` without prerouter and LoRA, whose greedy ids must equal the peer's, and `as served`
with both, which compute more. All three in one process, there and back in each round; decode tokens/s from the first
token to the last, as ratios to the peer's run in the same half round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from edge0_runtime.contract.edge import parser_of
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.engine import Engine

PLENTY = 1024.0  # GiB; the plan takes what all experts need
PEER = "mlx-lm"
Decode = Callable[[], Iterable[int]]


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("model_dir", type=Path, help="int4 base, tokenizer, prerouter and LoRA")
    parser.add_argument("--tokens", type=int, default=128, help="to generate in each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="there and back (%(default)s)")
    parser.add_argument("--prompt", default="Add 348 and 275.")
    args = parser.parse_args()
    with (
        Engine.load(args.model_dir, prerouter=False, lora=False, memory_budget=PLENTY) as same,
        Engine.load(args.model_dir, memory_budget=PLENTY) as served,
    ):
        prompt_ids = same.tokenizer.encode(args.prompt)
        peer = _peer(args.model_dir, same)

        def engine(which: Engine) -> Decode:
            return lambda: (step.token for step in which.generate(prompt_ids, max_tokens=args.tokens, ignore_eos=True))

        def mlx_lm() -> Iterable[int]:
            return (int(token) for token, _ in generate_step(mx.array(prompt_ids), peer, max_tokens=args.tokens))

        runs: dict[str, Decode] = {PEER: mlx_lm, "same model": engine(same), "as served": engine(served)}
        ids = {name: list(decode()) for name, decode in runs.items()}  # and warm
        if ids["same model"] != ids[PEER]:
            raise Edge0Error("the engine without prerouter and LoRA chose other tokens than mlx-lm; this is a bug")
        rates = _alternate(runs, args.rounds)
    device, tier = mx.default_device(), same.model.tier
    print(f"tier {tier.name}, K {tier.k}, {args.tokens} tokens, {device}; same ids as {PEER}: yes")
    for name, values in rates.items():
        ratios = sorted(value / peer_value for value, peer_value in zip(values, rates[PEER], strict=True))
        print(
            f"{name:<11} {statistics.median(values):8.2f} tok/s  {statistics.median(ratios):.3f} of {PEER}"
            f"  ({ratios[0]:.3f}..{ratios[-1]:.3f}, {len(ratios)} pairs)"
        )


def _peer(directory: Path, engine: Engine) -> Callable[..., mx.array]:
    """mlx-lm's model: the engine's K, its compute dtype, all weights in memory."""
    model, _ = load_model(directory)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)  # casts scales and biases too, once
    for module in model.modules():
        if hasattr(module, "top_k"):  # of softmax families the block, of sigmoid families its gate
            module.top_k = engine.model.tier.k
    mx.eval(model.parameters())
    peer: Callable[..., mx.array] = model
    return peer


def _alternate(runs: dict[str, Decode], rounds: int) -> dict[str, list[float]]:
    """Decode tokens/s of each, a value for each half round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(rounds):
        for half in (order, order[::-1]):
            for name in half:
                at = [time.perf_counter() for _ in runs[name]()]
                rates[name].append((len(at) - 1) / (at[-1] - at[0]))
    return rates


if __name__ == "__main__":
    main()
