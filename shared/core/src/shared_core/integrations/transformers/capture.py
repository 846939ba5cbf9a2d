"""Which experts a model chose for every token, recorded while it runs.

Letters: R rows (tokens), k slots, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared_core.integrations.transformers.sites import find_sites, in_backward, num_experts_of, with_forward
from shared_core.routing import Routing

__all__ = ["CapturedRouting", "capture_routing"]

_SUM = 0.02  # of a softmax in bfloat16, over hundreds of experts


class CapturedRouting(Mapping[str, Routing]):
    """What :func:`capture_routing` gives: a mapping from the name of each router that ran to its :class:`Routing`.

    The calls of one router are joined when they are asked for, in the order in which they came: a prompt's tokens
    first, then one row for each generated token and sequence.
    """

    def __init__(self, calls: dict[str, list[_Call]]) -> None:
        self._calls = calls
        self._joined: dict[str, tuple[int, Routing]] = {}

    def __getitem__(self, name: str) -> Routing:
        """Everything that the router ``name`` has decided so far."""
        calls = self._calls.get(name, [])
        if not calls:
            known = ", ".join(self) or "none yet, because the model has not run inside the block"
            raise KeyError(f"no routing was captured for {name!r}; names are: {known}")
        count, joined = self._joined.get(name, (0, None))
        if joined is None or count != len(calls):
            joined = _join(calls)
            self._joined[name] = (len(calls), joined)
        return joined

    def __iter__(self) -> Iterator[str]:
        """Names of the routers that ran, in the order of the model's modules."""
        return (name for name, calls in self._calls.items() if calls)

    def __len__(self) -> int:
        """How many routers ran."""
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Forget everything, for example between two batches."""
        self._joined.clear()
        for calls in self._calls.values():
            calls.clear()

    def __repr__(self) -> str:
        """Names and sizes rather than values."""
        return f"CapturedRouting({{{', '.join(f'{name!r}: {self[name]!r}' for name in self)}}})"


class _Call(NamedTuple):
    """One call of one router, as it happened."""

    indices: Tensor  # [R, k], as the experts received them
    weights: Tensor  # [R, k]
    first: Tensor | None  # [R, E], what the router returned first
    chosen: Tensor | None  # [R, k], the indices that the router returned with it, if any
    num_experts: int

    def first_of_this_choice(self) -> Tensor | None:
        """The router's first output, unless somebody behind it chose differently."""
        if self.first is None or self.first.shape[0] != self.indices.shape[0]:
            return None
        same = self.chosen is None or torch.equal(self.chosen.reshape(self.indices.shape), self.indices)
        return self.first if same else None


def _join(calls: list[_Call]) -> Routing:
    indices = torch.cat([call.indices for call in calls]).long()
    weights = torch.cat([call.weights for call in calls])
    weights = weights if weights.dtype == torch.float64 else weights.float()
    rows = [first for call in calls if (first := call.first_of_this_choice()) is not None]
    first = torch.cat(rows).to(weights.dtype) if len(rows) == len(calls) else None
    # Most routers return logits first, some (Gemma 4) their softmax; values tell: no row of logits looks like this.
    softmax = (
        first is not None and len(first) > 0 and bool(((first >= 0).all(-1) & ((first.sum(-1) - 1).abs() < _SUM)).all())
    )
    logits, scores = (None, first) if softmax else (first, None)
    return Routing(indices, weights, logits, scores, calls[0].num_experts)


@contextlib.contextmanager
def capture_routing(model: nn.Module) -> Iterator[CapturedRouting]:
    """Record what every router of a model decides inside the ``with`` block.

    Parameters
    ----------
    model : nn.Module
        A mixture-of-experts model of transformers, or any part of one.

    Yields
    ------
    CapturedRouting
        From the qualified name of each router (of the block around the experts, where the router is no module of its
        own) to a detached :class:`Routing` of all rows it has routed: ``indices`` and ``weights`` as the experts
        received them, ``logits`` where the router returns them, ``scores`` where it returns their softmax instead. It
        can be read inside the block and after it.

    Raises
    ------
    TypeError, ValueError
        If ``model`` is no module or has no experts that transformers knows.

    Notes
    -----
    Rows are tokens in row-major order, padding included: with ``attention_mask`` of ``[B, S]``, row ``b * S + s``.
    The second forward pass of gradient checkpointing is not counted. A compiled model compiles anew when the block is
    entered, with the recording in its graph (a few recompilations are cheap, one block for each training step is not),
    and returns to the earlier graph after it. What is captured keeps its memory until it is dropped: ``R·(E + 2k)``
    numbers a layer. Blocks on one model may nest and end in any order; copies of it made inside (``copy.deepcopy``,
    ``torch.save``) are not recorded. A block records the model, not a thread: whoever runs it meanwhile is recorded
    too, and threads that run it at the same time may cost the logits. Names are relative to ``model``.

    Examples
    --------
    >>> import torch
    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> from shared_core import load_stats
    >>> config = MixtralConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    ...     num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    ... )
    >>> model = MixtralForCausalLM(config)
    >>> with capture_routing(model) as routings:
    ...     _ = model(torch.arange(10).view(2, 5))
    >>> list(routings)
    ['model.layers.0.mlp.gate', 'model.layers.1.mlp.gate']
    >>> routings["model.layers.0.mlp.gate"].indices.shape
    torch.Size([10, 2])
    >>> stats = load_stats(routings["model.layers.0.mlp.gate"].counts())
    """
    calls: dict[str, list[_Call]] = {}
    with contextlib.ExitStack() as stack:
        for site in find_sites(model):
            recorder = _Recorder(num_experts_of(site.experts), calls.setdefault(site.name, []))
            if site.router is not None:
                stack.enter_context(with_forward(site.router, recorder.around_router))
            stack.enter_context(with_forward(site.experts, recorder.around_experts))
        yield CapturedRouting(calls)


class _Recorder:
    """Keeps what passes one site: logits on their way out of the router, choices on their way into the experts."""

    def __init__(self, num_experts: int, calls: list[_Call]) -> None:
        self.num_experts, self.calls = num_experts, calls
        self.first: Tensor | None = None
        self.chosen: Tensor | None = None

    def around_router(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def router_forward(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            first = out[0] if isinstance(out, tuple) else out
            fits = isinstance(first, Tensor) and first.is_floating_point() and first.shape[-1] == self.num_experts
            self.first = first.detach().reshape(-1, self.num_experts) if fits else None
            self.chosen = out[2] if isinstance(out, tuple) and len(out) > 2 else None
            return out

        return router_forward

    def around_experts(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def experts_forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not in_backward():
                one, other = (choice.detach() for choice in (*args, *kwargs.values()))
                # Families name and order the two differently; integers are the indices.
                indices, weights = (other, one) if one.is_floating_point() else (one, other)
                slots = indices.shape[-1]
                flat = indices.reshape(-1, slots), weights.reshape(-1, slots)
                self.calls.append(_Call(*flat, self.first, self.chosen, self.num_experts))
            self.first = self.chosen = None
            return forward(hidden_states, *args, **kwargs)

        return experts_forward
