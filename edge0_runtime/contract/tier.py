"""A tier is data: which model, which layers are predicted, how they route, what the adapters look like.

The YAML files in `configs/tier/` are the tiers that come with the project; an exported artifact carries its own tier in its
metadata, and that one is served. Everything derived (shapes, payload bytes, LoRA targets) is computed here, so that
training, export, loading and `edge0_runtime tiers` cannot disagree.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, family
from edge0_runtime.contract.timeline import FEATURE_TOPK_KINDS, FIRST_TOKEN_RULES, FeatureTopk, FirstToken

MAX_COUNT = 2**20
MAX_LAYERS = 1024
"""Bounds on what a stranger's file may ask us to build."""
ROUTER_KINDS = ("softmax_topk", "sigmoid_group")
TOKEN_NORM_EPS = 1e-6
"""In the token feature of token-aware heads, see `Tier.token_aware`."""


@dataclass(frozen=True)
class Router:
    """How logits become experts and weights (docs/method.md 1.2).

    Attributes:
        kind: softmax_topk (softmax, top-k, renormalise) or sigmoid_group (sigmoid, best groups, top-k, renormalise, scale).
        n_group, topk_group: sigmoid_group only: number of expert groups, and how many of them are kept.
        scaling: factor on the renormalised weights (8b: 2.5).
        renormalise: false leaves the chosen experts' softmax as it is, for a base whose config.json says so
            (`Family.renormalises`). Absent in older files.
        mass_k: softmax_topk only: weights are divided by the mass of the `mass_k` likeliest experts instead of by that of the K
            chosen, so that what was not chosen still counts; 0: by the K chosen. Not in the public project; absent in
            older files. A rule of the served K: the teacher, and a base at another K, know nothing of it.
    """

    kind: str
    n_group: int = 1
    topk_group: int = 1
    scaling: float = 1.0
    renormalise: bool = True
    mass_k: int = 0

    @property
    def plain(self) -> Router:
        """The rule of the base itself."""
        return dataclasses.replace(self, mass_k=0)


@dataclass(frozen=True)
class Lora:
    """The recovery LoRA (docs/method.md 1.6): rank, alpha, and the module paths below a layer that it sits on."""

    r: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Tier:
    """One deployable model: base architecture, served K, prerouter layout, LoRA layout.

    Attributes:
        name: the tier's name; part of the adapters' file names.
        model: the base model's public name.
        family: a name of `families.py`.
        architecture: the numbers of the base's (text) config.json that shapes follow from.
        k: served number of experts per token; the base's own is `architecture["num_experts_per_tok"]`.
        router: the routing rule.
        feature_topk: one-hots of a head's input: "executed" (what layer N really routed to) or "teacher" (its own gate).
        first_token: rule of the first decode step (timeline.py).
        owners: layers that own a head. consumers: layers routed by prediction; each consumer's owner is the layer before.
        head_width: width of a head's hidden layer.
        lora: the recovery LoRA.
        token_aware: heads see one more input, the token that the consumer's step processes: it has been sampled before the
            heads must run. For token id v and the base's embedding row e = embed(v) [hidden_size] (the values that the base
            itself embeds with, dequantised), the feature is e / sqrt(mean(e^2) + TOKEN_NORM_EPS) in float32, without a
            learned weight; it comes last in the head's input. Not in the public project; absent in older files.
    """

    name: str
    model: str
    family: str
    architecture: Mapping[str, Any]
    k: int
    router: Router
    feature_topk: FeatureTopk
    first_token: FirstToken
    owners: tuple[int, ...]
    consumers: tuple[int, ...]
    head_width: int
    lora: Lora
    token_aware: bool = False

    # -- derived ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Family:
        """Names and shapes of the base's family."""
        return family(self.family)

    @property
    def hidden_size(self) -> int:
        return self.architecture["hidden_size"]

    @property
    def num_layers(self) -> int:
        return self.architecture["num_hidden_layers"]

    @property
    def num_experts(self) -> int:
        return self.architecture[self.layout.num_experts]

    @property
    def expert_width(self) -> int:
        """Width of one routed expert's hidden layer."""
        return self.architecture[self.layout.expert_width]

    @property
    def base_k(self) -> int:
        """The K that the base and the teacher were trained with."""
        return self.architecture["num_experts_per_tok"]

    @property
    def start_layer(self) -> int:
        """First layer routed by prediction."""
        return self.consumers[0]

    @property
    def head_input(self) -> int:
        """Width of a head's input: hidden state, two multi-hot routings (docs/method.md 1.3), and the token if it is seen."""
        return self.hidden_size + 2 * self.num_experts + self.hidden_size * self.token_aware

    def head_tensors(self) -> dict[str, tuple[int, int]]:
        """{key: [out, in]} of all tensors of the prerouter file."""
        shapes = {
            "fc1": (self.head_width, self.head_input),
            "fc2": (self.num_experts, self.head_width),
            "linear_init": (self.num_experts, self.head_input),
        }
        return {f"layers.{n}.{part}.weight": shape for n in self.owners for part, shape in shapes.items()}

    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """{module path in the MLX checkpoint: (in_features, out_features)} of the LoRA's targets."""
        modules = self.layout.linear_modules(self.architecture)
        prefixes = [self.layout.layer_path(n) + "." for n in range(self.num_layers)]
        wanted = {prefix + target for prefix in prefixes for target in self.lora.targets}
        return {path: shape for path, shape in modules.items() if path in wanted}

    def lora_tensors(self) -> dict[str, tuple[int, int]]:
        """{key: shape} of all tensors of the LoRA file: A is [r, in], B is [out, r]."""
        tensors: dict[str, tuple[int, int]] = {}
        for path, (in_features, out_features) in self.lora_modules().items():
            tensors[f"{path}.lora_A"] = (self.lora.r, in_features)
            tensors[f"{path}.lora_B"] = (out_features, self.lora.r)
        return tensors

    def file_name(self, kind: str) -> str:
        """Name of an adapter file in the model directory; `kind` is prerouter or lora."""
        return f"{kind}_edge0_{self.name}.safetensors"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON/YAML data; `Tier.from_dict` reads it back."""
        return dataclasses.asdict(self) | {
            "architecture": dict(self.architecture),
            "owners": list(self.owners),
            "consumers": list(self.consumers),
            "lora": dataclasses.asdict(self.lora) | {"targets": list(self.lora.targets)},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tier:
        """Read and validate a tier. Raises Edge0Error that names the field, the value and the fix."""
        check_fields("tier", cls, data)
        check_fields("tier.router", Router, data["router"])
        check_fields("tier.lora", Lora, data["lora"])
        if not isinstance(data["architecture"], Mapping):
            raise Edge0Error(f"tier.architecture: {data['architecture']!r} is not a mapping of fields to values")
        router, lora = data["router"], data["lora"]
        tier = cls(
            name=_text("name", data["name"]),
            model=_text("model", data["model"]),
            family=_text("family", data["family"]),
            architecture=dict(data["architecture"]),
            k=_count("k", data["k"]),
            router=Router(
                kind=_text("router.kind", router["kind"]),
                n_group=_count("router.n_group", router.get("n_group", 1)),
                topk_group=_count("router.topk_group", router.get("topk_group", 1)),
                scaling=_positive("router.scaling", router.get("scaling", 1.0)),
                renormalise=_flag("router.renormalise", router.get("renormalise", True)),
                mass_k=_count("router.mass_k", router.get("mass_k", 0), least=0),
            ),
            feature_topk=data["feature_topk"],
            first_token=data["first_token"],
            owners=_layers("owners", data["owners"]),
            consumers=_layers("consumers", data["consumers"]),
            head_width=_count("head_width", data["head_width"]),
            lora=Lora(
                r=_count("lora.r", lora["r"]),
                alpha=_positive("lora.alpha", lora["alpha"]),
                targets=tuple(_text("lora.targets", target) for target in _list("lora.targets", lora["targets"])),
            ),
            token_aware=_flag("token_aware", data.get("token_aware", False)),
        )
        _validate(tier)
        return tier


def check_fields(where: str, cls: type, data: Mapping[str, Any]) -> None:
    """Raise Edge0Error unless `data` has exactly the fields of the dataclass `cls` (those with a default may be absent)."""
    if not isinstance(data, Mapping):
        raise Edge0Error(f"{where}: {data!r} is not a mapping of fields to values")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data)
    if unknown or missing:
        parts = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
        raise Edge0Error(f"{where}: fields {'; '.join(parts)}; the fields are {', '.join(fields)}")


def _layers(field: str, value: Any) -> tuple[int, ...]:
    """A list of layer indices, or {first, last} for a run of them."""
    if isinstance(value, Mapping) and set(value) == {"first", "last"}:
        first, last = value["first"], value["last"]
        if type(first) is int and type(last) is int and 0 <= first <= last < MAX_COUNT:
            return tuple(range(first, last + 1))
    elif isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
        return tuple(value)
    raise Edge0Error(f"tier.{field}: {value!r} is neither a list of layer indices nor {{first: N, last: M}}")


def _text(field: str, value: Any) -> str:
    """A plain name: it becomes part of file names and messages, and tiers are read from strangers' files."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise Edge0Error(
            f"tier.{field}: {value!r} is not a plain name of letters, digits, dots, dashes and underscores"
        )
    return value


def _count(field: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= MAX_COUNT:
        raise Edge0Error(f"tier.{field}: {value!r} is not a whole number of at least {least} (and at most {MAX_COUNT})")
    return value


def _positive(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise Edge0Error(f"tier.{field}: {value!r} is not a number larger than 0")
    return float(value)


def _flag(field: str, value: Any) -> bool:
    if type(value) is not bool:
        raise Edge0Error(f"tier.{field}: {value!r} is neither true nor false")
    return value


def _list(field: str, value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise Edge0Error(f"tier.{field}: {value!r} is not a list")
    return value


def _validate(tier: Tier) -> None:
    layout = tier.layout
    missing = [name for name in (*layout.required, *layout.from_zero) if name not in tier.architecture]
    if missing:
        raise Edge0Error(
            f"tier.architecture: {', '.join(missing)} missing for family {tier.family}; copy from the base's config.json"
        )
    router = tier.router
    for name, value, allowed in (
        ("router.kind", router.kind, ROUTER_KINDS),
        ("feature_topk", tier.feature_topk, FEATURE_TOPK_KINDS),
        ("first_token", tier.first_token, FIRST_TOKEN_RULES),
    ):
        if value not in allowed:
            raise Edge0Error(f"tier.{name}: {value!r} is unknown; choose one of {', '.join(allowed)}")
    for name in layout.required:
        _count(f"architecture.{name}", tier.architecture[name])
    for name in layout.from_zero:
        _count(f"architecture.{name}", tier.architecture[name], least=0)
    for name in layout.optional:
        if tier.architecture.get(name) is not None:
            _count(f"architecture.{name}", tier.architecture[name])
    if tier.num_layers > MAX_LAYERS:
        raise Edge0Error(f"tier.architecture.num_hidden_layers: {tier.num_layers} is more than {MAX_LAYERS}")
    if tier.k > tier.num_experts:
        raise Edge0Error(
            f"tier.k: {tier.k} is larger than the {tier.num_experts} experts of {tier.model}; lower tier.k"
        )
    if not router.renormalise and layout.renormalises is None:
        raise Edge0Error(f"tier.router.renormalise: {tier.family} always renormalises; it must be true")
    if router.mass_k and (router.kind != "softmax_topk" or not tier.k <= router.mass_k <= tier.num_experts):
        raise Edge0Error(
            f"tier.router.mass_k: {router.mass_k} must be 0, or with softmax_topk from k = {tier.k} to the"
            f" {tier.num_experts} experts"
        )
    if router.kind == "sigmoid_group" and tier.num_experts % router.n_group:
        raise Edge0Error(f"tier.router.n_group: {router.n_group} does not divide {tier.num_experts} experts")
    if not 1 <= router.topk_group <= router.n_group:
        raise Edge0Error(f"tier.router.topk_group: {router.topk_group} must lie in 1..n_group = {router.n_group}")
    group_room = router.topk_group * (tier.num_experts // router.n_group)
    if tier.k > group_room:
        raise Edge0Error(
            f"tier.k: {tier.k} does not fit the {group_room} experts of topk_group = {router.topk_group} groups"
        )

    moe = set(layout.moe_layers(tier.architecture))
    if not moe:
        raise Edge0Error(
            f"tier.architecture: none of its {tier.num_layers} layers has routed experts; choose a MoE base"
        )
    if not tier.owners or list(tier.owners) != sorted(set(tier.owners)):
        raise Edge0Error(f"tier.owners: {list(tier.owners)} must be layer indices, rising and each once")
    outside = [n for n in tier.owners if n not in moe or n + 1 not in moe]
    if outside:
        raise Edge0Error(
            f"tier.owners: {outside} of a model with {tier.num_layers} layers; an owner and the layer after it must both"
            f" have routed experts: choose owners from {min(moe)}..{max(moe) - 1}"
        )
    if not tier.consumers or list(tier.consumers) != sorted(set(tier.consumers)):
        raise Edge0Error(f"tier.consumers: {list(tier.consumers)} must be layer indices, rising and each once")
    orphans = [n for n in tier.consumers if n - 1 not in tier.owners]
    if orphans:
        raise Edge0Error(f"tier.consumers: {orphans} have no head; the layer before a consumer must be in tier.owners")

    known = {path.split(".layers.", 1)[1].split(".", 1)[1] for path in layout.linear_modules(tier.architecture)}
    strangers = [target for target in tier.lora.targets if target not in known]
    if strangers or not tier.lora.targets:
        raise Edge0Error(
            f"tier.lora.targets: {strangers} match no module of {tier.family}; choose from {', '.join(sorted(known))}"
        )


def tier_directory() -> Path:
    """Where the tiers that come with the project lie: beside this file in a wheel, `configs/tier` in a checkout."""
    packaged = Path(__file__).parent / "tiers"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs" / "tier"


def builtin_tier_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in tier_directory().glob("*.yaml")))


def read_tier(name: str) -> Tier:
    """The built-in tier `name`, or that of a file ending in .yaml. Raises Edge0Error: unknown, unreadable or no tier."""
    if not name.endswith(".yaml"):
        return builtin_tier(name)
    try:
        data = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Edge0Error(f"tier: {name} cannot be read as YAML: {' '.join(str(error).split())}") from error
    return _without_settings(data)


def builtin_tier(name: str) -> Tier:
    """The tier `name` that comes with the project. Raises Edge0Error naming the known ones."""
    if name not in builtin_tier_names():
        raise Edge0Error(f"tier: {name!r} is unknown; choose one of {', '.join(builtin_tier_names())}")
    return _without_settings(yaml.safe_load((tier_directory() / f"{name}.yaml").read_text(encoding="utf-8")))


def _without_settings(data: Any) -> Tier:
    """The tier of a file's data, whose section `settings` is training's (edge0_train/config/tiers.py)."""
    return Tier.from_dict({k: v for k, v in data.items() if k != "settings"} if isinstance(data, Mapping) else data)
