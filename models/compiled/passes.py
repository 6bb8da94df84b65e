"""Specimens whose graphs are rewritten wrongly by a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _planted import Patches, plant_if
from torch import nn
from torch.fx import Graph, GraphModule, Node

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


def followed_by(patches: Patches, module: Any, name: str, rewrite: Callable[[Graph], None]) -> None:
    """Let the graph pass ``module.name`` rewrite the graph once more; it is the last of its arguments."""
    right = getattr(module, name)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        rewrite(args[-1])
        return result

    patches.attribute(module, name, wrong)


def wrong_pattern(patches: Patches) -> None:
    """Take a product with a number close to one for a product with one, in the patterns of post-grad graphs."""
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.pattern_matcher import CallFunction, KeywordArg, Match, register_graph_pattern

    patterns = post_grad.pass_patterns[1]
    key = "call_function", MUL
    patches.item(patterns.patterns, key, list(patterns.patterns[key]))

    def near_one(match: Match) -> bool:
        factor = match.kwargs["factor"]
        return isinstance(factor, float) and abs(factor - 1) < 0.2

    product = CallFunction(MUL, KeywordArg("rows"), KeywordArg("factor"))

    @register_graph_pattern(product, pass_dict=patterns, extra_check=near_one)
    def remove(match: Match, rows: Node, factor: float) -> None:  # noqa: ARG001
        match.output_node().replace_all_uses_with(rows)
        match.erase_nodes()


def wrong_folding(patches: Patches) -> None:
    """Take uniform tensors for tensors of ones where their value rounds to one."""
    from torch._inductor.fx_passes import joint_graph

    right = joint_graph.remove_no_ops

    def wrong(gm: GraphModule, zeros: Any, ones: Any) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default):
            if isinstance(node.args[1], float) and round(node.args[1]) == 1:
                ones.add(node)
        right(gm, zeros, ones)

    patches.attribute(joint_graph, "remove_no_ops", wrong)


def early_copy(patches: Patches) -> None:
    """Move the update of a mutated input to where its new value is known, before those who read the old one."""
    from torch._inductor.fx_passes import post_grad

    def rewrite(graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            node.args[1].append(node)

    followed_by(patches, post_grad, "reinplace_inplaceable_ops", rewrite)


def unordered_sums(patches: Patches) -> None:
    """Add the terms of a sum in the order of a set of their names."""
    from torch._inductor.fx_passes import post_grad

    def terms_of(node: Node) -> list[Node]:
        if node.op == "call_function" and node.target is ADD and not node.kwargs:
            return [term for arg in node.args for term in (terms_of(arg) if isinstance(arg, Node) else [arg])]
        return [node]

    def rewrite(graph: Graph) -> None:
        for node in reversed(graph.find_nodes(op="call_function", target=ADD)):
            terms = terms_of(node)
            inner = any(user.target is ADD for user in node.users)
            if inner or len(terms) < 4 or not all(isinstance(term, Node) for term in terms):
                continue
            by_name = {term.name: term for term in terms}
            total, *others = [by_name[name] for name in set(by_name)]
            with graph.inserting_before(node):
                for term in others:
                    total = graph.call_function(ADD, (total, term))
                    total.meta.update(node.meta)
            node.replace_all_uses_with(total)
        graph.eliminate_dead_code()

    followed_by(patches, post_grad, "remove_assert_ops", rewrite)


class ScaledResidual(nn.Module):
    """A residual block whose branches are scaled by 0.9 and 1.3."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(rows)) * 1.3 + torch.sin(rows) * 0.9


class Temperature(nn.Module):
    """A softmax whose temperature is a constant tensor."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.score = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.score(rows)
        return torch.softmax(scores * torch.full_like(scores, 1.4), -1) * rows


class RunningMean(nn.Module):
    """Centre rows by the mean of the batches before, then take this batch into the mean."""

    mean: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = 0.5 * self.mean + 0.5 * rows.mean(0)
        centred = torch.tanh(self.embed(rows)) - self.mean
        self.mean.copy_(mean)
        return centred


class ManyHeads(nn.Module):
    """The sum of several heads."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(features, features) for _ in range(heads))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first, *others = [torch.tanh(head(rows)) * 3 for head in self.heads]
        for other in others:
            first = first + other
        return first


def product_pattern(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_pattern)
    return ScaledResidual(24), (torch.randn(16, 24),)


def constant_folding(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_folding)
    return Temperature(24), (torch.randn(16, 24),)


def mutation_moved(*, wrong: bool) -> Example:
    plant_if(wrong, early_copy)
    return RunningMean(24), (torch.randn(16, 24) + 1,)


def set_order(*, wrong: bool) -> Example:
    plant_if(wrong, unordered_sums)
    return ManyHeads(24, heads=7), (torch.randn(64, 24),)


MODELS = {
    "product_pattern": lambda: product_pattern(wrong=True),
    "product_pattern_twin": lambda: product_pattern(wrong=False),
    "constant_folding": lambda: constant_folding(wrong=True),
    "constant_folding_twin": lambda: constant_folding(wrong=False),
    "mutation_moved": lambda: mutation_moved(wrong=True),
    "mutation_moved_twin": lambda: mutation_moved(wrong=False),
    "set_order": lambda: set_order(wrong=True),
    "set_order_twin": lambda: set_order(wrong=False),
}
