"""A checkpoint of a tier's exact names and shapes with random values: for measuring at scale without the real weights.

    tier = shrink(builtin_tier("35b"), {"num_hidden_layers": 12})
    write_base(directory, tier, seed=0)
    write_adapters(directory, tier, calibrate(tier, 0.25, seed=0), seed=0)

Codes are uniform, so a weight is uniform too, of a variance that keeps activations at the size of their inputs. Quality is
nil; names, shapes, bytes, and how many experts a step shares with those before are what it is for.
"""

from __future__ import annotations

import datetime
import math
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from edge0_runtime.contract.artifacts import write_adapter
from edge0_runtime.contract.checkpoint import Checkpoint
from edge0_runtime.contract.code_version import code_commit, tool_version
from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Names
from edge0_runtime.contract.heads import HEAD_KINDS
from edge0_runtime.contract.provenance import Provenance
from edge0_runtime.contract.tier import Router, Tier, head_key
from edge0_train.base.layout import Target, checkpoint_layout, quantization_block
from edge0_train.base.names import mlx_config, own_fields, tier_config
from edge0_train.base.quantize_model import COPIED
from edge0_train.base.shards import SHARD_BYTES, Group, new_directory, write_json, write_shards
from edge0_train.locality import misses
from edge0_train.student.router import multi_hot, select
from edge0_train.student.sticky import Choices, choose, never

ROUTER_GAIN = 3.0  # a router's logits of a deviation of 3: the chosen experts' weights differ
HEAD_NOISE = 0.25  # deviation of what hidden state and token add to an overlapping head's logits
LORA_SHARE = 0.1  # deviation of a LoRA's delta, of the module's own output
SIMULATED = 512  # tokens
NANO_IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}  # of the tokenizer that is written along


def shrink(tier: Tier, architecture: Mapping[str, int], k: int | None = None) -> Tier:
    """The tier with other numbers: fewer layers, experts or words, another K; named as what it is.

    Layers go from the end, and heads with them: what was kept free of prediction at the end stays so.

    Raises:
        Edge0Error: what is left is no tier, e.g. since no layer would be routed by prediction.
    """
    unknown = sorted(architecture.keys() - tier.architecture.keys())
    if unknown:
        raise Edge0Error(f"architecture: {', '.join(unknown)} are no fields of tier {tier.name}")
    data = tier.to_dict()
    gone = tier.num_layers - architecture.get("num_hidden_layers", tier.num_layers)
    owners = [n for n in tier.owners if n <= tier.owners[-1] - gone]
    consumers = [n for n in tier.consumers if n <= tier.consumers[-1] - gone]
    if not consumers:
        raise Edge0Error(
            f"num_hidden_layers: {tier.num_layers - gone} leaves no layer of tier {tier.name} to predict;"
            f" it takes at least {tier.num_layers - tier.consumers[-1] + tier.start_layer}"
        )
    data |= {"name": f"{tier.name}-synthetic", "k": tier.k if k is None else k}
    data |= {"architecture": dict(tier.architecture) | dict(architecture), "owners": owners, "consumers": consumers}
    return Tier.from_dict(data)


def with_sticky(tier: Tier, bias: float, window: int) -> Tier:
    """The tier with that rule (docs/method.md 1.7) and nothing else changed, under a name of its own: `<name>-sticky`."""
    data = tier.to_dict()
    data |= {"name": f"{tier.name}-sticky", "router": data["router"] | {"sticky": {"bias": bias, "window": window}}}
    return Tier.from_dict(data)


# -- the base ----------------------------------------------------------------------------------------------------------


def model_config(tier: Tier, **fields: Any) -> PreTrainedConfig:
    """transformers' config of the tier's architecture and router, with `fields` and the library's defaults elsewhere."""
    return tier_config(tier, **(NANO_IDS | fields))


def synthetic_config(tier: Tier, **fields: Any) -> dict[str, Any]:
    """The config.json of `model_config`, which transformers and mlx-lm both read; not quantised yet."""
    return mlx_config(tier.layout, own_fields(model_config(tier, **fields)))


def write_base(
    directory: Path | str,
    tier: Tier,
    *,
    seed: int = 0,
    names: Names = "published",
    headers_only: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write config.json, shards and nano's small tokenizer, tensor by tensor; returns the bytes of all tensors.

    Args:
        directory: must not exist; appears whole or not at all.
        seed: equal seeds give equal tensors, whatever else is written.
        names: whose names its tensors have.
        headers_only: leave all tensors zero, as holes: a file of the full size that takes no room.
    """
    directory = Path(directory)
    config = synthetic_config(tier)
    targets = checkpoint_layout(config, tier.layout, names)
    config["quantization"] = config["quantization_config"] = quantization_block(targets)
    groups = [Group(target.stored(), _maker(target, tier, seed) if not headers_only else tuple) for target in targets]
    total = sum(group.nbytes() for group in groups)
    with new_directory(directory, 0 if headers_only else total) as partial:
        write_shards(partial, groups, shard_bytes)
        write_json(partial / "config.json", dict(sorted(config.items())))
        source = files("edge0_train") / "assets" / "nano-teacher"
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(str(source / name), partial / name)
    return total


def _maker(target: Target, tier: Tier, seed: int) -> Any:
    def make() -> Iterator[tuple[str, torch.Tensor]]:
        kinds = target.stored()
        random = np.random.Generator(np.random.SFC64([seed, zlib.crc32(target.name.encode())]))
        if not target.bits:
            yield target.name, torch.from_numpy(_float_values(target, tier, random)).to(target.dtype)
            return
        (weight, (shape, _)), (scales, (groups, dtype)), (biases, _) = kinds.items()
        words = random.bit_generator.random_raw((int(np.prod(shape)) + 1) // 2).view(np.uint32)
        yield weight, torch.from_numpy(words[: np.prod(shape)].reshape(shape))
        levels = (1 << target.bits) - 1
        step = _deviation(target, tier) / math.sqrt(levels * (levels + 2) / 12)  # the root: a uniform code's deviation
        scale = torch.from_numpy(random.uniform(0.8, 1.2, groups).astype(np.float32) * np.float32(step)).to(dtype)
        yield scales, scale
        yield biases, (scale.float() * (-levels / 2)).to(dtype)

    return make


def _deviation(target: Target, tier: Tier) -> float:
    """Of a weight's values: outputs are as large as inputs, embeddings are 1, routers are louder."""
    if target.module == tier.layout.embedding:
        return 1.0
    gain = ROUTER_GAIN if f".{tier.layout.router}." in target.name else 1.0
    inputs = math.prod(target.shape[1:]) if target.link.change in ("conv_axes", "channels") else target.shape[-1]
    return gain / math.sqrt(inputs)


def _float_values(target: Target, tier: Tier, random: np.random.Generator) -> np.ndarray:
    values = random.standard_normal(target.shape, np.float32)
    if len(target.shape) > 1:
        return values * np.float32(_deviation(target, tier))
    centre = 1.0 if target.name.endswith(("norm.weight", "dt_bias")) else 0.0
    return np.float32(centre) + np.float32(0.1) * values


# -- the adapters ------------------------------------------------------------------------------------------------------


def write_adapters(directory: Path | str, tier: Tier, strength: float, *, seed: int = 0, loudness: float = 1.0) -> None:
    """Random heads (`overlapping_heads`) and LoRA, bound to the base in `directory` and to each other."""
    directory = Path(directory)
    checkpoint = Checkpoint.open(directory)
    base = checkpoint.identity()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def provenance(prerouter_sha256: str | None) -> Provenance:
        return Provenance(
            tool_version=tool_version(),
            commit=code_commit(),
            phases=(),
            base_fingerprint=base.fingerprint,
            tokenizer_hash=checkpoint.tokenizer_hash(),
            template_hash=checkpoint.template_hash(),
            teacher=None,
            data=None,
            prerouter_sha256=prerouter_sha256,
            created=now,
            base_config=base.config,
        )

    heads = overlapping_heads(tier, strength, seed, loudness)
    sha256 = write_adapter(directory / tier.file_name("prerouter"), "prerouter", tier, heads, provenance(None))
    lora = random_lora(tier, seed)
    write_adapter(directory / tier.file_name("lora"), "lora", tier, lora, provenance(sha256))


def random_lora(tier: Tier, seed: int) -> dict[str, np.ndarray]:
    """Normal factors; the scaled delta is `LORA_SHARE` of a module's output that is as large as its input."""
    random = np.random.default_rng([seed, 2])
    b = LORA_SHARE * tier.lora.r / tier.lora.alpha / np.sqrt(tier.lora.r)
    return {
        key: (random.standard_normal(shape) * (b if key.endswith("lora_B") else shape[1] ** -0.5)).astype(np.float32)
        for key, shape in tier.lora_tensors().items()
    }


def overlapping_heads(tier: Tier, strength: float, seed: int, loudness: float = 1.0) -> dict[str, np.ndarray]:
    """Heads whose layers need some of their experts for two tokens in a row.

    The only inputs that a head shares from one token to the next are the owner's routings: this token's set is the next
    one's previous set. So both one-hot blocks of the direct part draw the consumer towards one and the same image of a set (a
    permutation P of the experts, `strength` high), and the current block also holds a random matrix R, a hash of the set,
    that decides which of them win:

        logits(t+1) = loudness ((strength P + R) set(t) + strength P set(t-1) + a little of h(t))

    Strength 0 leaves what R's images of half-equal sets share, a little over chance; without bound, everything is kept.
    Loudness has no part in who is chosen, but in how much a sticky rule's bias counts against the logits.
    """
    kind, columns, experts = HEAD_KINDS[tier.head], tier.head_columns, tier.num_experts
    tensors: dict[str, np.ndarray] = {}
    for owner in tier.owners:
        random = np.random.default_rng([seed, 1, owner])
        image, hash_EE = _locality(tier, owner, seed)
        linear = HEAD_NOISE * random.standard_normal((experts, tier.head_input)) / np.sqrt(tier.hidden_size)
        linear[:, columns["routing"]] = strength * image + hash_EE
        linear[:, columns["previous"]] = strength * image
        tensors[head_key(owner, kind.direct)] = (loudness * linear).astype(np.float32)
        for part, shape in kind.tensors(tier.head_input, tier.head_width, experts).items():
            if part != kind.direct:
                gain = loudness * HEAD_NOISE if part in kind.adding else 1.0
                values = gain * random.standard_normal(shape) / np.sqrt(shape[1])
                tensors[head_key(owner, part)] = values.astype(np.float32)
    return tensors


def _locality(tier: Tier, owner: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The permutation matrix P and the random matrix R of an owner: both [E, E], R of row deviation 1 for a set of K."""
    random = np.random.default_rng([seed, 0, owner])
    image = np.eye(tier.num_experts)[random.permutation(tier.num_experts)]
    return image, random.standard_normal((tier.num_experts, tier.num_experts)) / np.sqrt(tier.k)


def calibrate(tier: Tier, overlap: float, seed: int) -> float:
    """The strength at which simulated neighbouring tokens share `overlap` of a predicted layer's experts, on average.

    Raises Edge0Error naming the range that can be had.
    """

    def had(strength: float) -> float:
        return simulated_overlap(tier, strength, seed)

    return _where(
        had,
        overlap,
        (0.0, 32.0),
        lambda low, high: (low + high) / 2,
        16,
        f"overlap: {overlap} cannot be had with K={tier.k}",
    )


def calibrate_loudness(tier: Tier, sticky: Tier, strength: float, share: float, seed: int) -> float:
    """The loudness at which `sticky` misses `share` of what `tier`, the same without the rule, does (`simulated_misses`).

    Raises Edge0Error naming the range that can be had.
    """
    plain = simulated_misses(tier, strength, seed, 1.0)

    def left(loudness: float) -> float:
        return simulated_misses(sticky, strength, seed, loudness) / plain

    refusal = f"misses: {share} of the plain tier's cannot be had with this rule"
    return _where(left, share, (2.0**-4, 2.0**6), lambda low, high: math.sqrt(low * high), 10, refusal)


def _where(
    had: Callable[[float], float],
    wanted: float,
    between: tuple[float, float],
    middle: Callable[[float, float], float],
    steps: int,
    refusal: str,
) -> float:
    """Where a rising function has the `wanted` value, by halving the range. Raises Edge0Error if it lies outside."""
    low, high = between
    least, most = had(low), had(high)
    if not least <= wanted <= most:
        raise Edge0Error(f"{refusal}; choose from {least:.3f} to {most:.3f}")
    for _ in range(steps):
        centre = middle(low, high)
        low, high = (centre, high) if had(centre) < wanted else (low, centre)
    return middle(low, high)


def simulated_overlap(tier: Tier, strength: float, seed: int) -> float:
    """Mean over the predicted layers of |set(t+1) & set(t)| / K."""
    shares = []
    for ran_TK in simulated(tier, strength, seed):
        set_TE = multi_hot(ran_TK, tier.num_experts)
        shares.append(float((set_TE[1:] * set_TE[:-1]).sum(-1).mean()) / tier.k)
    return sum(shares) / len(shares)


def simulated_misses(tier: Tier, strength: float, seed: int, loudness: float) -> float:
    """Experts that a predicted layer reads a token on average, where each holds the 2 K that it used last."""
    every = [misses(ran_TK.tolist(), 2 * tier.k) for ran_TK in simulated(tier, strength, seed, loudness)]
    return sum(every) / len(every)


def simulated(tier: Tier, strength: float, seed: int, loudness: float = 1.0) -> list[torch.Tensor]:
    """Experts [T, K] of each predicted layer, if each first owner's sets were drawn at random.

    Under `executed` one-hots a head sees what the head before it chose, under `teacher` the layer's own, random here.
    """
    random = torch.Generator().manual_seed(seed)
    chosen: dict[int, torch.Tensor] = {}
    for owner in tier.owners:
        chained = tier.feature_topk == "executed" and owner in chosen
        if not chained:
            own_TK = torch.rand(SIMULATED, tier.num_experts, generator=random).topk(tier.k).indices
        set_TE = multi_hot(chosen[owner] if chained else own_TK, tier.num_experts)
        image, hash_EE = (torch.from_numpy(part).float() for part in _locality(tier, owner, seed))
        near_TE = set_TE @ (strength * image + hash_EE).T
        far_TE = set_TE @ (strength * image).T
        logits_TE = HEAD_NOISE * torch.randn(SIMULATED, tier.num_experts, generator=random)
        logits_TE[1:] += near_TE[:-1]
        logits_TE[2:] += far_TE[:-2]
        chosen[owner + 1] = _chosen(tier.router, loudness * logits_TE, tier.k)
    return [chosen[layer] for layer in tier.consumers]


def _chosen(router: Router, logits_TE: torch.Tensor, k: int) -> torch.Tensor:
    """[T, K], of one sequence whose every input is predicted."""
    plain_TK = select(router, logits_TE, k)
    if not router.sticky:
        return plain_TK
    by_head_1T = torch.ones(1, len(logits_TE), dtype=torch.bool)
    since_1E = never(router, logits_TE[:1])
    return choose(router, Choices(logits_TE[None], plain_TK[None], by_head_1T, ~by_head_1T, since_1E))[0][0]
