"""Write a checkpoint of a tier's exact names and shapes with random int4 weights, and matching random adapters.

    python scripts/make_synthetic_checkpoint.py 35b models/35b-synthetic                   # 19.5 GB
    python scripts/make_synthetic_checkpoint.py 35b /tmp/small --layers 12 --experts 64 --vocab 4096
    python scripts/make_synthetic_checkpoint.py 35b /tmp/headers --headers-only            # holes: the full size, no room
    python scripts/make_synthetic_checkpoint.py 35b models/35b-synthetic --sticky 2,2      # two tiers: 35b-synthetic[-sticky]

The directory loads in `edge0_runtime`, of two tiers the one that `--tier` names; memory stays at a few copies of the largest
tensor.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from edge0_runtime.contract.edge import parser_of
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import read_tier
from edge0_train.synthetic import calibrate, calibrate_loudness, shrink, with_sticky, write_adapters, write_base

NANO_MISSES = (
    0.38  # nano at bias 2, window 2, heads refined for it: .92 of 2.42 misses a token and layer, and .95 of 2.42
)


def rule(text: str) -> tuple[float, int]:
    """`2,2` -> (bias, window)."""
    bias, window = text.split(",")
    return float(bias), int(window)


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    parser = parser_of(__doc__)
    parser.add_argument("tier", help="built-in tier (35b, nano, ...), or a file ending in .yaml")
    parser.add_argument("directory", type=Path, help="must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, metavar="N", help="default: the tier's")
    parser.add_argument("--experts", type=int, metavar="N", help="per layer; default: the tier's")
    parser.add_argument("--vocab", type=int, metavar="N", help="default: the tier's")
    parser.add_argument("--k", type=int, metavar="K", help="served experts a token; default: the tier's")
    parser.add_argument(
        "--overlap", type=float, default=0.25, metavar="SHARE",
        help="of a predicted layer's experts that the next token needs again (default 0.25); native layers have their own",
    )  # fmt: skip
    parser.add_argument(
        "--sticky", type=rule, metavar="BIAS,WINDOW",
        help="write the same heads and LoRA a second time, as a tier with this rule whose name ends in -sticky",
    )  # fmt: skip
    parser.add_argument(
        "--misses", type=float, default=NANO_MISSES, metavar="SHARE",
        help="with --sticky: of the plain tier's misses in an LRU of 2 K experts a layer, what the rule leaves: sets how loud"
        f" the heads' logits are beside the bias (default {NANO_MISSES}, measured on nano at 2,2)",
    )  # fmt: skip
    parser.add_argument("--headers-only", action="store_true", help="all tensors zero and not on disk; no adapters")
    args = parser.parse_args()
    numbers = {"num_hidden_layers": args.layers, "num_experts": args.experts, "vocab_size": args.vocab}
    began = time.time()
    try:
        tier = shrink(read_tier(args.tier), {k: v for k, v in numbers.items() if v is not None}, args.k)
        tiers, loudness = [tier], 1.0
        strength = 0.0 if args.headers_only else calibrate(tier, args.overlap, args.seed)
        if args.sticky and not args.headers_only:
            tiers.append(with_sticky(tier, *args.sticky))
            loudness = calibrate_loudness(tier, tiers[1], strength, args.misses, args.seed)
        size = write_base(args.directory, tier, seed=args.seed, headers_only=args.headers_only)
        print(f"{args.directory}: {size} B of tensors in {time.time() - began:.0f} s", flush=True)
        if not args.headers_only:
            for each in tiers:
                write_adapters(args.directory, each, strength, seed=args.seed, loudness=loudness)
            print(f"heads of strength {strength:.3f}: simulated overlap {args.overlap}; tier {tier.name}, K={tier.k}")
        if len(tiers) > 1:
            print(
                f"tier {tiers[1].name}: loudness {loudness:.3f}, simulated {args.misses} of the misses at an LRU of {2 * tier.k}"
            )
    except Edge0Error as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
