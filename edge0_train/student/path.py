"""The student path: prediction IS routing, in parallel over a sequence and token by token with a cache.

The path touches the base at one point only: a forward hook on every layer's router (`Family.hf_router`, which returns logits,
weights and indices). The hook sees the layer's MoE input h(N, t) and its own router logits, and its
return value is the routing that the block executes. Layer N+1's routing at input t needs layer N's features at input t-1 alone
(docs/method.md 1.5), so one pass over a whole sequence shifts the features by one position and evaluates each head where its
routing is used; a decode step is the same code with the last position's features carried over in a `PrerouterState`. Being
evaluated where it is used, a head that sees the token itself (`HeadInput.of`) finds it at its own position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from edge0_runtime.contract.tier import Tier
from edge0_runtime.contract.timeline import predicted_mask, previous_valid_mask
from edge0_train.base.families import cpu_options
from edge0_train.student.heads import PrerouterHeads, inputs_before, inputs_of_token
from edge0_train.student.packing import Documents, isolate_documents
from edge0_train.student.router import multi_hot, select, weigh
from edge0_train.student.sticky import Choices, choose, never


@dataclass
class PrerouterState:
    """What decoding carries from one input to the next, by owner.

    Attributes:
        features: [B, F]; what a head sees of this input when it routes the next one.
        routing: [B, E]; the routing alone, as a multi-hot.
        since: consumer -> [B, E]; of a sticky tier, how many inputs ago an expert last ran (sticky.py).
    """

    features: dict[int, torch.Tensor] = field(default_factory=dict)
    routing: dict[int, torch.Tensor] = field(default_factory=dict)
    since: dict[int, torch.Tensor] = field(default_factory=dict)


Pair = Callable[[int, torch.Tensor, torch.Tensor], None]
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
"""A router's logits [N, E], weights [N, K] and indices [N, K] that replace its own; None: they stay."""
Hook = Callable[[Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Routed]
"""A forward hook on a router: (module, arguments, output) -> what it is taken to have returned."""


@dataclass
class RoutingPass:
    """How one forward pass routes, and what it leaves behind.

    Attributes:
        k: experts per token.
        predicted_BT: bool; inputs routed by prediction. None: every layer keeps its own gate.
        previous_valid_BT: bool; inputs whose previous one-hot is input t-1's routing rather than zeros.
        start_BT: bool; first inputs of the documents packed into a row. None: one document a row.
        begin_BT: bool; the rows' first inputs where padding lies before them. None: there is none.
        capture: keep the owners' features and all routers' logits, to look at them afterwards.
        keep_logits: keep all routers' logits without the features, which are many times larger.
        pair: called in the forward with (owner, its features [B, T, F], layer owner + 1's router logits [B, T, E]) as soon as
            both are there; no more than one owner's features are held (head training, recall).
        state: carried over from the pass before, and to the next one, when decoding with a cache.
        features: {owner: [B, T, F]}; what its head sees to predict layer owner + 1 at input t. router_logits: {layer: [B, T,
            E]}; every router's own. Both at the same t, so that a head's target needs no shift.
        executed: {layer: int64 [B, T, K]}; the experts that ran.
        own: {owner: int64 [B, T, K]}; what its own gate chose, where that is a feature of its head (`feature_topk: teacher`).
        predictions: {owner: [B, T, E]}; its head's logits for layer owner + 1 at input t.
    """

    k: int
    predicted_BT: torch.Tensor | None = None
    previous_valid_BT: torch.Tensor | None = None
    start_BT: torch.Tensor | None = None
    begin_BT: torch.Tensor | None = None
    capture: bool = False
    keep_logits: bool = False
    pair: Pair | None = None
    state: PrerouterState | None = None
    features: dict[int, torch.Tensor] = field(default_factory=dict)
    router_logits: dict[int, torch.Tensor] = field(default_factory=dict)
    executed: dict[int, torch.Tensor] = field(default_factory=dict)
    own: dict[int, torch.Tensor] = field(default_factory=dict)
    predictions: dict[int, torch.Tensor] = field(default_factory=dict)


class StudentPath:
    """A base model whose routers obey a `RoutingPass`.

    Args:
        model: transformers causal LM of the tier's family, LoRA already injected if there is one.
        tier: routing rules, owners, consumers.
        heads: the prerouter heads; None allows native passes only.
    """

    def __init__(self, model: nn.Module, tier: Tier, heads: PrerouterHeads | None = None) -> None:
        self.model: Any = model
        self.tier, self.heads = tier, heads
        self._pass: RoutingPass | None = None
        self._batch_shape = (0, 0)
        self._token_BTF: torch.Tensor | None = None
        self._documents: Documents | None = None
        for layer in tier.layout.moe_layers(tier.architecture):
            gate = self.router(layer)
            gate.register_forward_hook(self._hook(layer))
        mixers = [model.get_submodule(path) for path in tier.layout.hf_recurrent_paths(tier.architecture)]
        isolate_documents(mixers, lambda: self._documents)

    def router(self, layer: int) -> Any:
        """Layer's router module: has `.weight` [E, H]."""
        return self.model.get_submodule(self.tier.layout.hf_router_path(layer))

    def expert_bias(self, layer: int) -> torch.Tensor | None:
        """[E], what a sigmoid router adds to its scores when it chooses itself; None for a softmax router."""
        return getattr(self.router(layer), self.tier.layout.hf_expert_bias, None)

    def timeline(
        self, decoded_BT: torch.Tensor, start_BT: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(predicted, previous one-hot valid), bool [B, T] each.

        Args:
            decoded_BT: inputs that serving processes in decode steps.
            start_BT: first inputs of the documents packed into the rows; None: one document a row.
        """
        rule, device = self.tier.first_token, decoded_BT.device
        decoded = decoded_BT.cpu().numpy()
        starts = [None] * len(decoded) if start_BT is None else list(start_BT.cpu().numpy())
        predicted = [predicted_mask(rule, row, start) for row, start in zip(decoded, starts, strict=True)]
        valid = [previous_valid_mask(rule, row, start) for row, start in zip(predicted, starts, strict=True)]
        return torch.from_numpy(np.stack(predicted)).to(device), torch.from_numpy(np.stack(valid)).to(device)

    def native(
        self,
        k: int,
        decoded_BT: torch.Tensor | None = None,
        start_BT: torch.Tensor | None = None,
        capture: bool = False,
    ) -> RoutingPass:
        """A pass in which every layer keeps its own gate with k experts.

        With `decoded_BT`, captured features have the previous one-hots that decoding would give them.
        """
        valid_BT = None if decoded_BT is None else self.timeline(decoded_BT, start_BT)[1]
        return RoutingPass(k=k, previous_valid_BT=valid_BT, start_BT=start_BT, capture=capture)

    def predicted(
        self, decoded_BT: torch.Tensor, start_BT: torch.Tensor | None = None, capture: bool = False
    ) -> RoutingPass:
        """A pass under the tier's timeline, given which inputs serving would process in decode steps."""
        predicted_BT, valid_BT = self.timeline(decoded_BT, start_BT)
        return RoutingPass(
            k=self.tier.k, predicted_BT=predicted_BT, previous_valid_BT=valid_BT, start_BT=start_BT, capture=capture
        )

    def hidden(self, input_ids_BT: torch.Tensor, routing: RoutingPass, **inputs: Any) -> Any:
        """Run the base's decoder (no language-model head) under `routing`; transformers' output object.

        Documents packed into a row (`routing.start_BT`) do not see each other. `routing` stays in force until the next call,
        because gradient checkpointing runs the hooks again in backward.
        """
        if routing.predicted_BT is not None and self.heads is None:
            raise ValueError("routing: a predicted pass needs prerouter heads; build StudentPath with heads")
        if routing.executed:
            raise ValueError("routing: this pass has run already; make a new RoutingPass for every forward")
        self._pass, self._batch_shape = routing, (input_ids_BT.shape[0], input_ids_BT.shape[1])
        self._token_BTF = inputs_of_token(self.tier, self.model.get_input_embeddings(), input_ids_BT)
        self._documents = None
        if routing.start_BT is not None and routing.start_BT[:, 1:].any():
            self._documents = Documents.of(routing.start_BT)
            # From positions that start again, transformers makes the block-diagonal mask of full attention.
            inputs["position_ids"] = self._documents.position_BT
        if input_ids_BT.device.type == "cpu":
            inputs |= cpu_options(self.tier.family)
        return self.model.model(input_ids=input_ids_BT, **inputs)

    # -- the hook ------------------------------------------------------------------------------------------------------

    def _hook(self, layer: int) -> Hook:
        is_owner, is_consumer = layer in self.tier.owners, layer in self.tier.consumers

        def route(gate: Any, args: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> Routed:
            routing = self._pass
            if routing is None:
                return None
            logits_NE = output[0]
            recomputing = layer in routing.executed
            own_NK = select(self.tier.router, logits_NE, routing.k, self.expert_bias(layer))
            indices_NK = routing.executed[layer].flatten(0, 1) if recomputing else own_NK
            routed_by_NE = logits_NE.float()
            if routing.predicted_BT is not None and is_consumer:
                by_head_N1 = routing.predicted_BT.flatten()[:, None]
                predicted_NE = routing.predictions[layer - 1].flatten(0, 1)
                routed_by_NE = torch.where(by_head_N1, predicted_NE, routed_by_NE)
                if not recomputing:
                    indices_NK = self._chosen(layer, own_NK, routing)
            served = routing.k == self.tier.k
            weights_NK = weigh(self.tier.router if served else self.tier.router.plain, routed_by_NE, indices_NK)

            if routing.pair and layer - 1 in routing.features:
                router_BTE = logits_NE.float().unflatten(0, self._batch_shape)
                routing.pair(layer - 1, routing.features.pop(layer - 1), router_BTE)  # nobody needs them afterwards
            if is_owner and (routing.predicted_BT is not None or routing.capture or routing.pair):
                # Recomputed as well: gradient checkpointing wants the very tensors saved that the first forward saved.
                one_hot_source = indices_NK if self.tier.feature_topk == "executed" else own_NK
                self._publish(layer, args[0], one_hot_source, routing, keep=not recomputing)
            if not recomputing:
                routing.executed[layer] = indices_NK.unflatten(0, self._batch_shape)
                if is_owner and self.tier.feature_topk == "teacher":
                    routing.own[layer] = own_NK.unflatten(0, self._batch_shape)
                if routing.capture or routing.keep_logits:
                    routing.router_logits[layer] = logits_NE.float().unflatten(0, self._batch_shape)
            return logits_NE, weights_NK.to(output[1].dtype), indices_NK

        return route

    def _chosen(self, layer: int, own_NK: torch.Tensor, routing: RoutingPass) -> torch.Tensor:
        """What a consumer runs: its head's choice where that routes, `own_NK` elsewhere; int64 [N, K]."""
        assert routing.predicted_BT is not None
        router, predicted_BTE = self.tier.router, routing.predictions[layer - 1]
        if not router.sticky:
            by_head_NK = select(router, predicted_BTE.flatten(0, 1), routing.k)
            return torch.where(routing.predicted_BT.flatten()[:, None], by_head_NK, own_NK)
        since_BE = routing.state.since.get(layer) if routing.state else None
        first_BT = routing.start_BT if routing.begin_BT is None else routing.begin_BT
        choices = Choices(
            predicted_BTE,
            own_NK.unflatten(0, self._batch_shape),
            routing.predicted_BT,
            torch.zeros_like(routing.predicted_BT) if first_BT is None else first_BT,
            never(router, predicted_BTE[:, 0]) if since_BE is None else since_BE,
        )
        ran_BTK, since_BE = choose(router, choices)
        if routing.state:
            routing.state.since[layer] = since_BE
        return ran_BTK.flatten(0, 1)

    def _publish(
        self, owner: int, hidden: torch.Tensor, indices_NK: torch.Tensor, routing: RoutingPass, keep: bool
    ) -> None:
        """Build what owner's head sees at every position; with a predicted pass, also its logits.

        Features are of the input before; the token is the position's own.
        """
        shape = self._batch_shape
        routed_BTE = multi_hot(indices_NK, self.tier.num_experts).unflatten(0, shape)
        before_BTE = _shift(routed_BTE, routing.state.routing.get(owner) if routing.state else None)
        if routing.previous_valid_BT is not None:
            before_BTE = before_BTE * routing.previous_valid_BT[..., None]
        known = {"hidden": hidden.reshape(*shape, -1), "routing": routed_BTE, "previous": before_BTE}
        features_BTF = inputs_before(self.tier, known)
        seen_BTF = _shift(features_BTF, routing.state.features.get(owner) if routing.state else None)
        if self._token_BTF is not None:
            seen_BTF = torch.cat([seen_BTF, self._token_BTF], dim=-1)
        if (routing.capture or routing.pair) and keep:
            routing.features[owner] = seen_BTF
        if routing.predicted_BT is None:
            return
        assert self.heads is not None
        logits_BTE = self.heads(owner, seen_BTF)
        if keep:
            routing.predictions[owner] = logits_BTE
        if keep and routing.state:
            routing.state.features[owner] = features_BTF[:, -1]
            routing.state.routing[owner] = routed_BTE[:, -1]


def _shift(x_BTF: torch.Tensor, carried_BF: torch.Tensor | None) -> torch.Tensor:
    """Position t takes the value of t-1; position 0 takes what the pass before left (zeros at the start)."""
    first_B1F = torch.zeros_like(x_BTF[:, :1]) if carried_BF is None else carried_BF[:, None]
    return torch.cat([first_B1F, x_BTF[:, :-1]], dim=1)
