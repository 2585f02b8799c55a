"""Write a checkpoint of a tier's exact names and shapes with random int4 weights, and matching random adapters.

    python scripts/make_synthetic_checkpoint.py 35b models/35b-synthetic                   # 19.5 GB
    python scripts/make_synthetic_checkpoint.py 35b /tmp/small --layers 12 --experts 64 --vocab 4096
    python scripts/make_synthetic_checkpoint.py 35b /tmp/headers --headers-only            # holes: the full size, no room

The directory loads in `edge0_runtime`; memory stays at a few copies of the largest tensor.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.tier import read_tier
from edge0_train.synthetic import calibrate, shrink, write_adapters, write_base


def main() -> None:
    """Entry point; the arguments are those of the module's docstring."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        None, None, description, epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--headers-only", action="store_true", help="all tensors zero and not on disk; no adapters")
    args = parser.parse_args()
    numbers = {"num_hidden_layers": args.layers, "num_experts": args.experts, "vocab_size": args.vocab}
    began = time.time()
    try:
        tier = shrink(read_tier(args.tier), {k: v for k, v in numbers.items() if v is not None}, args.k)
        strength = 0.0 if args.headers_only else calibrate(tier, args.overlap, args.seed)
        size = write_base(args.directory, tier, seed=args.seed, headers_only=args.headers_only)
        print(f"{args.directory}: {size} B of tensors in {time.time() - began:.0f} s", flush=True)
        if not args.headers_only:
            write_adapters(args.directory, tier, strength, seed=args.seed)
            print(f"heads of strength {strength:.3f}: simulated overlap {args.overlap}; tier {tier.name}, K={tier.k}")
    except Edge0Error as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
