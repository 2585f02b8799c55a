"""The two adapter files of a tier, prerouter heads and recovery LoRA, with their contract and provenance.

Keys, shapes and dtype are those of the public project, so its runtime loads our files. What it cannot know,
the serving contract (the tier) and the provenance, travels as one JSON document in the metadata key `edge0`,
beside flat keys for people and other tools. Our runtime serves from that document; flat keys that contradict
it are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.files import raise_problems, sha256_file, shown, strict_json
from edge0_runtime.contract.provenance import Provenance
from edge0_runtime.contract.strict_safetensors import Header, read_array, read_header, write_atomic
from edge0_runtime.contract.tier import Tier, builtin_tier, builtin_tier_names

FORMAT_VERSION = 1
Kind = Literal["prerouter", "lora"]
KINDS: tuple[Kind, ...] = ("prerouter", "lora")
READABLE_DTYPES = ("F16", "BF16", "F32")  # written is F16 only


@dataclass(frozen=True)
class Adapter:
    """An adapter file that passed all checks.

    Attributes:
        kind: prerouter or lora.
        path: the file.
        tier: what to serve with: the file's own contract, or the fallback for a file without one.
        tensors: {key: array}, float16 or float32 (from F32 or BF16), shapes as the tier says.
        provenance: how it was made; None for a file without a contract.
        sha256: of the whole file.
        has_contract: whether the tier came from the file.
    """

    kind: Kind
    path: Path
    tier: Tier
    tensors: dict[str, np.ndarray]
    provenance: Provenance | None
    sha256: str
    has_contract: bool


# -- writing


def write_adapter(
    path: str | Path, kind: Kind, tier: Tier, tensors: Mapping[str, np.ndarray], provenance: Provenance
) -> str:
    """Check, round to F16, write atomically, read back and compare bit for bit; returns the file's sha256.

    Args:
        path: the file; the model directory's is `tier.file_name(kind)`.
        kind: prerouter or lora.
        tier: the contract it is to be served with; gives the key set and the shapes.
        tensors: float32 or float16 arrays, [out, in] for heads, A [r, in] and B [out, r] for a LoRA.
        provenance: how it was made; a LoRA's names the prerouter it was trained with.

    Equal input gives equal bytes. Raises one Edge0Error listing all offenders: keys, shapes, dtypes, values
    that are not finite or do not fit F16, tensors that are all zero after rounding. In a LoRA single `lora_B`
    may be zero (a delta of zero is a valid adapter; that every B gets a gradient is the training loop's
    check), but not all of them: that is an untrained one. If anything fails, the old file is untouched.
    """
    path = Path(path)
    _check_kind(kind)
    problems = _key_problems(kind, tier, {key: array.shape for key, array in tensors.items()})
    if kind == "prerouter" and provenance.prerouter_sha256 is not None:
        problems.append("provenance.prerouter_sha256: only a LoRA names a prerouter; set it to None")
    rounded: dict[str, np.ndarray] = {}
    for key, array in sorted(tensors.items()):
        if array.dtype not in (np.float16, np.float32):
            problems.append(f"{key}: dtype {array.dtype}, must be float32 or float16")
            continue
        finite = np.isfinite(array)
        if not finite.all():
            problems.append(f"{key}: {array.size - np.count_nonzero(finite)} of {array.size} values are not finite")
            continue
        with np.errstate(over="ignore"):  # overflow is what the next line looks for
            rounded[key] = array.astype(np.float16)
        if not np.isfinite(rounded[key]).all():
            problems.append(f"{key}: largest value {np.abs(array).max():g} is outside the F16 range of +-65504")
    problems += _zero_problems(kind, rounded)
    raise_problems(
        f"{path}: not written", problems, "fix the training run or the tier; nothing was changed on the disk"
    )

    contract = {"tier": tier.to_dict(), "provenance": provenance.to_dict()}
    metadata = _flat_metadata(kind, tier) | _flat_origin(provenance) | {"edge0": _canonical_json(contract)}

    def check(written: Path) -> None:
        try:
            adapter = read_adapter(written, kind)
        except Edge0Error as error:
            raise Edge0Error(str(error).replace(str(written), str(path))) from error
        same = adapter.tier == tier and adapter.provenance == provenance and adapter.tensors.keys() == rounded.keys()
        if not same or any(adapter.tensors[k].tobytes() != rounded[k].tobytes() for k in rounded):
            raise Edge0Error(f"{path}: what was read back differs from what was written; the old file is unchanged")

    write_atomic(path, rounded, metadata, check)
    return sha256_file(path)


def _zero_problems(kind: Kind, tensors: Mapping[str, np.ndarray]) -> list[str]:
    zero = [key for key, array in tensors.items() if not array.any()]
    if kind == "prerouter":
        return [f"{key}: all zero (in F16)" for key in zero]
    problems = [f"{key}: all zero (in F16)" for key in zero if key.endswith(".lora_A")]
    factors_b = [key for key in tensors if key.endswith(".lora_B")]
    if factors_b and all(key in zero for key in factors_b):
        problems.append("all lora_B are zero (in F16): this LoRA is untrained")
    return problems


def _flat_metadata(kind: Kind, tier: Tier) -> dict[str, str]:
    """The tier's flat keys, all strings; a function of the tier, so a reader can check them against it."""
    return {
        "kind": kind,
        "tier": tier.name,
        "model": tier.model,
        "K": str(tier.k),
        "r": str(tier.lora.r),
        "alpha": f"{tier.lora.alpha:.17g}",  # 32 and 32.0 are one number and must be one text
        "owners": json.dumps(list(tier.owners)),
        "start_layer": str(tier.start_layer),
        "feature_topk": tier.feature_topk,
        "router": tier.router.kind,
    }


def _flat_origin(provenance: Provenance) -> dict[str, str]:
    return {
        "format_version": str(FORMAT_VERSION),
        "source": f"edge0_train {provenance.tool_version} ({provenance.commit})",
    }


def _canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# -- reading


def find_adapter(directory: Path, kind: Kind, tier_name: str | None = None) -> Adapter | None:
    """The `kind` file of a directory, the base's or one of adapters alone, read and checked; None when there is none.

    A file without a contract is served by the built-in tier that its name ends with. Raises Edge0Error when it is no directory,
    when several tiers' files lie there and `tier_name` does not choose one, and whatever `read_adapter` refuses.
    """
    if not directory.is_dir():
        raise Edge0Error(f"{directory}: not a directory; give the one that holds the adapter files")
    paths = sorted(directory.glob(f"{kind}_edge0_{tier_name or '*'}.safetensors"))
    if len(paths) > 1:
        raise Edge0Error(f"{directory}: {', '.join(path.name for path in paths)}: choose one with --tier")
    if not paths:
        return None
    name = paths[0].stem.removeprefix(f"{kind}_edge0_")
    return read_adapter(paths[0], kind, builtin_tier(name) if name in builtin_tier_names() else None)


def read_adapter(path: str | Path, kind: Kind, fallback_tier: Tier | None = None) -> Adapter:
    """Read and check an adapter file.

    Args:
        path: the file.
        kind: what it must be, prerouter or lora.
        fallback_tier: serves a file without a contract (the public project's); never used for one with a
            contract.

    Raises one Edge0Error listing all offenders: what `read_header` refuses; a format version newer than ours;
    a damaged contract, or flat keys that contradict it; keys missing, unknown, or half of an A/B pair; wrong
    shapes or rank; dtypes other than F16, BF16 and F32; values that are not finite.
    """
    path = Path(path)
    _check_kind(kind)
    header = read_header(path)
    version = header.metadata.get("format_version", "")
    if re.fullmatch("[0-9]{1,9}", version) and int(version) > FORMAT_VERSION:
        raise Edge0Error(
            f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the newest"
            " that this Edge0 knows: update it"
        )

    problems: list[str] = []
    provenance: Provenance | None = None
    if "edge0" in header.metadata:
        tier, provenance = _contract(path, header.metadata["edge0"])
        expected = _flat_metadata(kind, tier) | _flat_origin(provenance)
        what = "the contract in `edge0`"
    elif fallback_tier is not None:
        tier = fallback_tier
        # Other producers' flat keys are theirs to choose; these four have one meaning, and serving against
        # them gives wrong results.
        present = header.metadata.keys() & {"kind", "K", "r", "alpha"}
        expected = {key: value for key, value in _flat_metadata(kind, tier).items() if key in present}
        what = f"tier {tier.name}"
    else:
        raise Edge0Error(f"{path}: carries no contract (metadata key `edge0`); name the tier to serve it with")
    for key, value in expected.items():
        if not _same_value(header.metadata.get(key), value):
            actual = shown(header.metadata.get(key))
            problems.append(f"metadata {key}: {actual} in the file, {shown(value)} by {what}")

    problems += _key_problems(kind, tier, {key: entry.shape for key, entry in header.entries.items()})
    sha256 = sha256_file(path)  # before the tensors: reading those fails if the file is replaced meanwhile
    tensors = _read_tensors(header, _expected_shapes(kind, tier), problems)
    raise_problems(
        f"{path}: not a {kind} file of tier {tier.name}",
        problems,
        "export it again, or choose the tier it was made for",
    )
    return Adapter(kind, path, tier, tensors, provenance, sha256, "edge0" in header.metadata)


def _contract(path: Path, text: str) -> tuple[Tier, Provenance]:
    try:
        document = strict_json(text)
        if not isinstance(document, dict) or set(document) != {"tier", "provenance"}:
            raise Edge0Error("must be an object with exactly the fields tier and provenance")
        return Tier.from_dict(document["tier"]), Provenance.from_dict(document["provenance"])
    except (Edge0Error, ValueError, TypeError, KeyError, ArithmeticError, AttributeError, RecursionError) as error:
        # The document is foreign data: whatever it breaks is the file's fault and is told as such.
        raise Edge0Error(f"{path}: metadata `edge0` is not a valid contract: {error}; export the file again") from error


def _read_tensors(header: Header, shapes: Mapping[str, tuple[int, int]], problems: list[str]) -> dict[str, np.ndarray]:
    """The expected tensors; wrong dtypes and values go to `problems`, unknown tensors are not read."""
    tensors: dict[str, np.ndarray] = {}
    for key, shape in shapes.items():
        entry = header.entries.get(key)
        if entry is None or entry.shape != shape:
            continue  # reported already
        if entry.dtype not in READABLE_DTYPES:
            problems.append(f"{key}: dtype {entry.dtype}, must be one of {', '.join(READABLE_DTYPES)}")
            continue
        tensors[key] = read_array(header, key)
        finite = np.isfinite(tensors[key])
        if not finite.all():
            problems.append(f"{key}: {finite.size - np.count_nonzero(finite)} of {finite.size} values are not finite")
    return tensors


def _same_value(actual: str | None, expected: str) -> bool:
    if actual == expected:
        return True
    try:  # 32.0 and 32; [6,7] and [6, 7]
        return actual is not None and bool(strict_json(actual) == strict_json(expected))
    except ValueError:
        return False


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise Edge0Error(f"kind: {kind!r} is unknown; choose one of {', '.join(KINDS)}")


def _expected_shapes(kind: Kind, tier: Tier) -> dict[str, tuple[int, int]]:
    return tier.head_tensors() if kind == "prerouter" else tier.lora_tensors()


def _key_problems(kind: Kind, tier: Tier, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Missing, unknown and misshapen tensors; `shapes` is {key: shape} of what is there."""
    expected = _expected_shapes(kind, tier)
    problems = []
    for key in sorted(expected.keys() - shapes.keys()):
        other = key[:-1] + ("B" if key.endswith("A") else "A")
        half = f"; its pair {other.rsplit('.', 1)[1]} is there" if kind == "lora" and other in shapes else ""
        problems.append(f"{key}: missing{half}")
    problems += [
        f"{shown(key)}: unknown, no {kind} tensor of tier {tier.name}"
        for key in sorted(shapes.keys() - expected.keys())
    ]
    for key in sorted(expected.keys() & shapes.keys()):
        actual, wanted = tuple(shapes[key]), expected[key]
        if actual == wanted:
            continue
        rank_axis = 0 if key.endswith(".lora_A") else 1
        hint = ""
        if kind == "lora" and len(actual) == 2 and actual[1 - rank_axis] == wanted[1 - rank_axis]:
            hint = f": rank {actual[rank_axis]} instead of {tier.lora.r}"
        elif actual == wanted[::-1]:
            hint = ": transposed"
        problems.append(f"{key}: shape {list(actual)}, must be {list(wanted)}{hint}")
    return problems
