"""A tier is data: which model, which layers are predicted, how they route, what the adapters look like.

The YAML files in `configs/tier/` are the tiers that come with the project; an exported artifact carries its own tier in its
metadata, and that one is served. Everything derived (shapes, payload bytes, LoRA targets) is computed here, so that
training, export, loading and `edge0_runtime tiers` cannot disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge0_runtime.contract.errors import Edge0Error
from edge0_runtime.contract.families import Family, family
from edge0_runtime.contract.fields import check_fields, count, flag, layers, positive, text, texts
from edge0_runtime.contract.files import read_yaml
from edge0_runtime.contract.heads import HEAD_KINDS, columns, inputs_of
from edge0_runtime.contract.tier_rules import validate
from edge0_runtime.contract.timeline import FeatureTopk, FirstToken

SETTINGS = "settings"
"""Section of a tier's file that is not the tier's: how it is trained."""


@dataclass(frozen=True)
class Sticky:
    """Predicted routing that is kind to the disk: a bonus for experts that the layer ran a moment ago (docs/method.md 1.7).

    Attributes:
        bias: added to a prediction's logits of those experts, in nats; 0: off.
        window: how many inputs back the layer's runs count, own gates and the prompt included; 0: off.
    """

    bias: float = 0.0
    window: int = 0

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return self.window > 0


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
        sticky: of predicted inputs only. Not in the public project; absent in older files.
    """

    kind: str
    n_group: int = 1
    topk_group: int = 1
    scaling: float = 1.0
    renormalise: bool = True
    mass_k: int = 0
    sticky: Sticky = Sticky()

    @property
    def plain(self) -> Router:
        """The rule of the base itself."""
        return dataclasses.replace(self, mass_k=0, sticky=Sticky())


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
        family: a name of `families/`.
        architecture: the numbers of the base's (text) config.json that shapes follow from.
        k: served number of experts per token; the base's own is `architecture["num_experts_per_tok"]`.
        router: the routing rule.
        feature_topk: one-hots of a head's input: "executed" (what layer N really routed to) or "teacher" (its own gate).
        first_token: rule of the first decode step (timeline.py).
        owners: layers that own a head. consumers: layers routed by prediction; each consumer's owner is the layer before.
        head_width: width of a head's hidden layer.
        lora: the recovery LoRA.
        token_aware: heads see one more input, `token` of `heads.py`. Not in the public project; absent in older files.
        head: kind of the heads, a name of `HEAD_KINDS`; absent in older files.
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
    head: str = "mlp"

    # -- derived ---------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Family:
        """Names and shapes of the base's family."""
        return family(self.family)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, and so of a MoE layer's input."""
        return self._number("hidden_size")

    @property
    def num_layers(self) -> int:
        """Decoder layers, dense ones included."""
        return self._number("num_hidden_layers")

    @property
    def num_experts(self) -> int:
        """Routed experts of one MoE layer; shared ones are not counted."""
        return self._number(self.layout.num_experts)

    @property
    def expert_width(self) -> int:
        """Width of one routed expert's hidden layer."""
        return self._number(self.layout.expert_width)

    @property
    def base_k(self) -> int:
        """The K that the base and the teacher were trained with."""
        return self._number("num_experts_per_tok")

    @property
    def start_layer(self) -> int:
        """First layer routed by prediction."""
        return self.consumers[0]

    @property
    def head_inputs(self) -> tuple[str, ...]:
        """What a head sees, in the order of its input: names of `HEAD_INPUTS`."""
        return inputs_of(self.head, token_aware=self.token_aware)

    @property
    def head_columns(self) -> dict[str, slice]:
        """{input: its columns in a head's input}."""
        return columns(self.head_inputs, self.hidden_size, self.num_experts)

    @property
    def head_input(self) -> int:
        """Width of a head's input."""
        width: int = self.head_columns[self.head_inputs[-1]].stop
        return width

    @property
    def head_parts(self) -> dict[str, tuple[int, int]]:
        """{part: [out, in]} of one head."""
        return HEAD_KINDS[self.head].tensors(self.head_input, self.head_width, self.num_experts)

    def _number(self, field: str) -> int:
        """A field of the architecture that `validate` has found to be a whole number."""
        number: int = self.architecture[field]
        return number

    def config_fields(self) -> dict[str, Any]:
        """What the tier says of the base's config.json, under the names that transformers saves them under."""
        layout = self.layout
        rule = {field: getattr(self.router, name) for name, (field, _) in layout.router_fields.items()}
        return {layout.aliases.get(name, name): value for name, value in (dict(self.architecture) | rule).items()}

    def head_tensors(self) -> dict[str, tuple[int, int]]:
        """{key: [out, in]} of all tensors of the prerouter file."""
        return {head_key(n, part): shape for n in self.owners for part, shape in self.head_parts.items()}

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
        """Name of an adapter file in the model directory; `kind` is prerouter or lora.

        A sticky tier's ends in -sticky: the public runtime reads no metadata, and would serve it by another rule.
        """
        name = f"{self.name.removesuffix('-sticky')}-sticky" if self.router.sticky else self.name
        return f"{kind}_edge0_{name}.safetensors"

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
        sticky = router.get("sticky", {})
        check_fields("tier.router.sticky", Sticky, sticky)
        tier = cls(
            name=text("name", data["name"]),
            model=text("model", data["model"]),
            family=text("family", data["family"]),
            architecture=dict(data["architecture"]),
            k=count("k", data["k"]),
            router=Router(
                kind=text("router.kind", router["kind"]),
                n_group=count("router.n_group", router.get("n_group", 1)),
                topk_group=count("router.topk_group", router.get("topk_group", 1)),
                scaling=positive("router.scaling", router.get("scaling", 1.0)),
                renormalise=flag("router.renormalise", router.get("renormalise", True)),
                mass_k=count("router.mass_k", router.get("mass_k", 0), least=0),
                sticky=Sticky(
                    bias=positive("router.sticky.bias", sticky["bias"]) if sticky.get("bias", 0) != 0 else 0.0,
                    window=count("router.sticky.window", sticky.get("window", 0), least=0),
                ),
            ),
            feature_topk=data["feature_topk"],
            first_token=data["first_token"],
            owners=layers("owners", data["owners"]),
            consumers=layers("consumers", data["consumers"]),
            head_width=count("head_width", data["head_width"]),
            lora=Lora(
                r=count("lora.r", lora["r"]),
                alpha=positive("lora.alpha", lora["alpha"]),
                targets=texts("lora.targets", lora["targets"]),
            ),
            token_aware=flag("token_aware", data.get("token_aware", False)),
            head=text("head", data.get("head", "mlp")),
        )
        validate(tier)
        return tier


def head_key(owner: int, part: str) -> str:
    """Key of one tensor of a head in the prerouter file."""
    return f"layers.{owner}.{part}.weight"


def tier_directory() -> Path:
    """Where the tiers that come with the project lie: beside this file in a wheel, `configs/tier` in a checkout."""
    packaged = Path(__file__).parent / "tiers"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "configs" / "tier"


def builtin_tier_names() -> tuple[str, ...]:
    """Names of the tiers that come with the project, sorted."""
    return tuple(sorted(path.stem for path in tier_directory().glob("*.yaml")))


def read_tier(name: str) -> Tier:
    """The built-in tier `name`, or that of a file ending in .yaml. Raises Edge0Error: unknown, unreadable or no tier."""
    if not name.endswith(".yaml"):
        return builtin_tier(name)
    return _tier_of_file(Path(name))


def builtin_tier(name: str) -> Tier:
    """The tier `name` that comes with the project. Raises Edge0Error naming the known ones."""
    if name not in builtin_tier_names():
        raise Edge0Error(f"tier: {name!r} is unknown; choose one of {', '.join(builtin_tier_names())}")
    return _tier_of_file(tier_directory() / f"{name}.yaml")


def _tier_of_file(path: Path) -> Tier:
    """The tier of a YAML file, whose section `settings` is training's (edge0_train/config/tiers.py)."""
    data = read_yaml(path, "`edge0_runtime tiers 35b` shows a tier's fields")
    data.pop(SETTINGS, None)
    return Tier.from_dict(data)
