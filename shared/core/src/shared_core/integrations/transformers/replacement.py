"""Other routing rules inside a loaded model, for the length of a ``with`` block.

Letters: R rows (tokens), H width, E experts, k slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_core.checks import check_indices
from shared_core.integrations.transformers.experts import run_experts
from shared_core.integrations.transformers.requirements import moe
from shared_core.integrations.transformers.sites import Site, find_sites, num_experts_of, with_forward
from shared_core.routing import Routing

__all__ = ["replace_routers"]

RoutingRule = Callable[..., Routing]


@contextlib.contextmanager
def replace_routers(
    model: nn.Module, factory: Callable[[str, nn.Module], RoutingRule | None]
) -> Iterator[dict[str, RoutingRule]]:
    """Let other rules decide in a model's mixture-of-experts layers, inside the ``with`` block.

    Parameters
    ----------
    model : nn.Module
        A mixture-of-experts model of transformers, or any part of one.
    factory : callable
        ``factory(name, router)`` is asked once for every router, with its qualified name and module. It returns the
        rule that takes its place: a :class:`shared_core.Router` or any callable from the router's input ``x``
        (``[R, H]`` or ``[B, S, H]``) to a :class:`shared_core.Routing` of its rows; or None, which leaves the router.
        :func:`as_router` builds the rule that changes nothing, on the same weights, as a start for others.

    Yields
    ------
    dict of str to callable
        The rules in place, by the names of the routers they replace. Rules with parameters of their own are not part
        of ``model.parameters()``: give them to the optimiser from here.

    Raises
    ------
    TypeError, ValueError
        If ``model`` is no module or has no experts that transformers knows; if ``factory`` is no function of two
        arguments; if a rule is not callable, is the router itself, is for another number of experts, or, when it runs,
        gives something else than a routing of all rows with indices in 0 .. E.

    Notes
    -----
    The model's modules, parameters and state-dict keys stay as they are; only ``forward`` of the routers is another
    one. Weights get the dtype that the family's router gives, and ``output_router_logits`` reports the rule's logits (a
    rule must then give some). A row may have another number of experts than the model was trained with, and slots
    without an expert; experts functions that cannot skip such slots run some expert with weight 0 in them. Where a
    block routes by itself, from its gate's logits, the gate gets the rule's logits and the experts its choice.

    A backward pass belongs inside the block if the model uses gradient checkpointing, which routes a second time.
    Compiled models notice the change and compile anew. Blocks on one model may nest and end in any order; copies of it
    made inside (``copy.deepcopy``, ``torch.save``) keep their own routers. A block belongs to the model, not to a
    thread: two threads must not run one model inside of it whose blocks route by themselves.

    Examples
    --------
    Experts that will be resident are preferred, while the mixture weights stay the model's own:

    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from shared_core.integrations.transformers import as_router, capture_routing
    >>> config = MixtralConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...     num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    ... )
    >>> model = MixtralForCausalLM(config)
    >>> resident = torch.tensor([1.0, 1.0, 0.0, 0.0])
    >>> def prefer_resident(name, router):
    ...     ours = as_router(router)
    ...     return lambda x: ours(x, selection_bias=resident)
    >>> with replace_routers(model, prefer_resident), capture_routing(model) as routings:
    ...     _ = model(torch.arange(10).view(2, 5))
    >>> routings["model.layers.0.mlp.gate"].counts()
    tensor([10, 10,  0,  0])
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(f"factory must be a function of a router's name and module, got {type(factory).__name__}")
    rules: dict[str, RoutingRule] = {}
    with contextlib.ExitStack() as stack:
        for site in find_sites(model):
            if site.router is None:
                continue
            rule = factory(site.name, site.router)
            if rule is None:
                continue
            _check_rule(rule, site)
            replacement = _Replacement(rule, site.router, site)
            stack.enter_context(with_forward(site.router, replacement.around_router))
            stack.enter_context(with_forward(site.experts, replacement.around_experts))
            rules[site.name] = rule
        yield rules


def _check_rule(rule: object, site: Site) -> None:
    if rule is site.router:
        raise TypeError(
            f"the rule for {site.name!r} is the very router that it would stand in for; "
            "return None to leave it, or as_router(router) for its rule"
        )
    if not callable(rule):
        raise TypeError(
            f"factory must return a callable x -> Routing or None for {site.name!r}, got {type(rule).__name__}"
        )
    _check_experts(getattr(rule, "num_experts", None), site)


def _check_experts(given: object, site: Site) -> None:
    wanted = num_experts_of(site.experts)
    if isinstance(given, int) and given != wanted:
        raise ValueError(f"the rule for {site.name!r} chooses among num_experts={given}, but the layer has {wanted}")


class _Form(NamedTuple):
    """What a family's router returns: bare logits (its block routes), or logits, weights, indices and perhaps more."""

    bare: bool
    logits: torch.dtype
    weights: torch.dtype
    indices: torch.dtype
    flat: bool
    more: bool

    @classmethod
    def of(cls, returned: Any, router: nn.Module) -> _Form:
        if isinstance(returned, Tensor):
            return cls(True, returned.dtype, returned.dtype, torch.int64, returned.ndim == 2, False)
        known = isinstance(returned, tuple) and len(returned) >= 3 and all(isinstance(t, Tensor) for t in returned[:3])
        if not known or not returned[0].is_floating_point() or returned[2].is_floating_point():
            raise TypeError(
                f"{type(router).__name__} returns neither logits nor (logits, weights, indices), so that no other "
                "router can stand in for it"
            )
        logits, weights, indices, *rest = returned
        return cls(False, logits.dtype, weights.dtype, indices.dtype, indices.ndim == 2, bool(rest))


class _Replacement:
    """What stands in for one router: the rule's decision in the form in which the family's block expects it."""

    def __init__(self, rule: RoutingRule, router: nn.Module, site: Site) -> None:
        self.rule, self.router, self.site = rule, router, site
        self.num_experts = num_experts_of(site.experts)
        self.form: _Form | None = None
        self.pending: tuple[Tensor, Tensor] | None = None

    def around_router(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def router_forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.form is None:  # the first call looks once at what the router itself returns
                with torch.no_grad():
                    self.form = _Form.of(forward(x, *args, **kwargs), self.router)
            form = self.form
            routing = self.decide(x)
            indices, weights = self.choice(routing)
            leading = indices.shape[:1] if form.flat else x.shape[:-1]
            logits = routing.logits
            if logits is not None:
                logits = logits.to(form.logits).reshape(*leading, logits.shape[-1])
            if form.bare:
                self.pending = indices, weights
                return forward(x, *args, **kwargs) if logits is None else logits
            slots = indices.shape[-1]  # with no rows at all, -1 would say nothing
            indices = indices.to(form.indices).reshape(*leading, slots)
            weights = weights.to(form.weights).reshape(*leading, slots)
            more = forward(x, *args, **kwargs)[3:] if form.more else ()
            return logits, weights, indices, *more

        return router_forward

    def around_experts(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def experts_forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.pending is None:
                return forward(hidden_states, *args, **kwargs)
            (indices, weights), self.pending = self.pending, None
            one, other = (*args, *kwargs.values())
            # Families name and order the two differently; integers are the indices.
            if one.is_floating_point():
                choice = (weights.to(one.dtype), indices.to(other.dtype))
            else:
                choice = (indices.to(one.dtype), weights.to(other.dtype))
            return forward(hidden_states, *choice[: len(args)], **dict(zip(kwargs, choice[len(args) :], strict=True)))

        return experts_forward

    def decide(self, x: Tensor) -> Routing:
        routing = self.rule(x)
        name = self.site.name
        if not isinstance(routing, Routing):
            raise TypeError(f"the rule for {name!r} must return a Routing, got {type(routing).__name__}")
        _check_experts(routing.num_experts, self.site)
        rows = x.shape[:-1].numel()
        if routing.num_rows != rows:
            raise ValueError(
                f"the rule for {name!r} must route all {rows} rows of x {list(x.shape)}, got {routing.num_rows}"
            )
        check_indices(routing.indices, self.num_experts)  # behind it, some experts functions would run another expert
        return routing

    def choice(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Indices and weights ``[R, k]`` that the layer's experts function can take."""
        experts: Any = self.site.experts
        implementation = getattr(experts.config, "_experts_implementation", None)
        skips = moe.ALL_EXPERTS_FUNCTIONS.get(implementation) if implementation not in {None, "eager"} else None
        if skips is run_experts and not getattr(experts, "_is_expert_parallel", False):
            return routing.indices, routing.weights
        nobody = routing.indices == self.num_experts
        return routing.indices.clamp(max=self.num_experts - 1), routing.weights.masked_fill(nobody, 0.0)
