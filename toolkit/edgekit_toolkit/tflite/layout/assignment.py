"""Chooses the form of each node (see `forms`), so that few bytes are transposed.

If a node can work in several forms, it starts with the form of its inputs. Then each node takes the form with
the lowest cost for the current forms of its neighbours. The graph is traversed backwards and forwards until
nothing changes. This greedy search does not always find the minimum.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from edgekit_toolkit.tflite.layout.forms import NEW, Form, conversion_cost, plain
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.layout.values import View
from edgekit_toolkit.tflite.view import Graph

MAX_SWEEPS: Final = 6


def plan_forms(graph: Graph, rules: Sequence[Rule | None], views: Mapping[str, View]) -> list[Form]:
    """Return the form of each node, in order. A node without a rule has an empty form.

    Args:
        graph: The graph, which is not modified.
        rules: The rule of each node. It is None if the node is not supported, or if its results are views.
        views: The views from `find_views`.
    """
    plan = _Plan(graph, rules, views)
    choices = [index for index, rule in enumerate(rules) if rule is not None and rule.allows is not None]
    for choice in choices:
        plan.improve(choice, planned=choice)
    for sweep in range(MAX_SWEEPS):
        order = choices if sweep % 2 else choices[::-1]
        if not sum(plan.improve(choice, planned=len(rules)) for choice in order):
            break
    return plan.forms


class _Plan:
    def __init__(self, graph: Graph, rules: Sequence[Rule | None], views: Mapping[str, View]) -> None:
        self._graph, self._rules, self._views = graph, rules, views
        self.forms = [() if rule is None else rule.start for rule in rules]
        self._producers: dict[str, tuple[int, int]] = {}
        self._readers: dict[str, list[tuple[int, int]]] = {}
        for index, node in enumerate(graph.nodes):
            if rules[index] is None:
                continue
            for slot, name in enumerate(node.outputs):
                self._producers[name] = (index, slot)
            for slot, name in enumerate(node.inputs):
                if name and not graph.is_constant(name):
                    self._readers.setdefault(self._root(name), []).append((index, slot))
        # The caller reads outputs in ONNX's order.
        self._root_forms: dict[str, list[Form]] = {}
        for name in graph.outputs:
            if name in graph.shapes:
                root_form = self._to_root(name, plain(len(graph.shapes[name])))
                self._root_forms.setdefault(self._root(name), []).append(root_form)

    def improve(self, index: int, *, planned: int) -> bool:
        """Give a node its best form; returns whether it changed. Nodes from `planned` on have no form yet."""
        before = self.forms[index]
        candidates = dict.fromkeys([before, *self._candidates(index)])
        if len(candidates) == 1:
            return False
        costs = {form: self._cost(index, form, planned) for form in candidates}
        best = min(costs, key=costs.__getitem__)
        if planned < len(self._rules) or costs[best] < costs[before]:
            self.forms[index] = best
        return self.forms[index] != before

    def _candidates(self, index: int) -> Iterator[Form]:
        """Yield the possible work forms that neighbours have; forms of the inputs come first."""
        rule, node = self._rules[index], self._graph.nodes[index]
        if rule is None or rule.allows is None:
            return
        for name in node.inputs:
            if (
                name
                and not self._graph.is_constant(name)
                and len(self._graph.shapes[name]) == len(rule.shape)
            ):
                yield from self._possible(rule, name, [self._produced(self._root(name))])
        for name in node.outputs:
            if rule.proposes is not None:
                proposals = (rule.proposes(form) for form in self._wanted(name, len(self._rules)))
                yield from (form for form in proposals if form is not None and rule.allows(form))
            elif len(self._graph.shapes.get(name, ())) == len(rule.shape):
                yield from self._possible(rule, name, self._wanted(name, len(self._rules)))
        yield plain(len(rule.shape))

    def _possible(self, rule: Rule, name: str, forms: Sequence[Form]) -> Iterator[Form]:
        for form in forms:
            viewed = self._views[name].from_root(form) if name in self._views else form
            complete = sum(1 for axis in viewed if axis != NEW) == len(rule.shape)
            if complete and rule.allows is not None and rule.allows(viewed):
                yield viewed

    def _cost(self, index: int, form: Form, planned: int) -> float:
        rule, node = self._rules[index], self._graph.nodes[index]
        assert rule is not None  # noqa: S101 - for the type checker; only nodes with a rule are improved
        if not rule.allows or not rule.allows(form):
            return float("inf")
        cost = 0.0
        for name, reader_form in zip(node.inputs, rule.reads(form), strict=False):
            if name and not self._graph.is_constant(name):
                root, target = self._root(name), self._to_root(name, reader_form)
                others = [f for p, f in self._reading(root, planned) if p != index]
                if target not in others:
                    cost += conversion_cost(self._produced(root), target, self._graph.shapes[root])
        for name, written in zip(node.outputs, rule.writes(form), strict=False):
            for reader_form in dict.fromkeys(self._wanted(name, planned)):
                cost += conversion_cost(written, reader_form, self._graph.shapes[name])
        return cost

    def _produced(self, root: str) -> Form:
        if root not in self._producers:
            return plain(len(self._graph.shapes[root]))
        producer, slot = self._producers[root]
        rule = self._rules[producer]
        return plain(0) if rule is None else rule.writes(self.forms[producer])[slot]

    def _wanted(self, root: str, planned: int) -> list[Form]:
        return [*(form for _, form in self._reading(root, planned)), *self._root_forms.get(root, ())]

    def _reading(self, root: str, planned: int) -> list[tuple[int, Form]]:
        """Return the forms in which nodes read a value, without nodes that have yet to choose their form."""
        affected = []
        for reader, slot in self._readers.get(root, ()):
            rule = self._rules[reader]
            if rule is None or (rule.allows is not None and reader > planned):
                continue
            forms = rule.reads(self.forms[reader])
            if slot < len(forms):
                name = self._graph.nodes[reader].inputs[slot]
                affected.append((reader, self._to_root(name, forms[slot])))
        return affected

    def _root(self, name: str) -> str:
        return self._views[name].root if name in self._views else name

    def _to_root(self, name: str, form: Form) -> Form:
        return self._views[name].to_root(form) if name in self._views else form
