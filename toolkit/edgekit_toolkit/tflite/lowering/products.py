"""Replaces Einsum by matrix products. Operands are multiplied in pairs."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError

_ELLIPSIS_LABELS = "0123456789"


@dataclass(frozen=True, slots=True)
class _Term:
    """A tensor with a label and a size for each axis."""

    value: Value
    labels: str
    sizes: tuple[int, ...]

    def summed_to(self, needed: Collection[str]) -> "_Term":
        """Return the sums over axes whose labels are not needed."""
        gone = [axis for axis, label in enumerate(self.labels) if label not in needed]
        value = self.value
        for axis in gone:
            value = value.sum(axis)
        remaining_axes = [axis for axis in range(len(self.labels)) if axis not in gone]
        sizes = tuple(self.sizes[axis] for axis in remaining_axes)
        labels = "".join(self.labels[axis] for axis in remaining_axes)
        return _Term(value.reshape(*sizes), labels, sizes) if gone else self

    def size(self, labels: str) -> int:
        return math.prod(self.sizes[self.labels.index(label)] for label in labels)

    def grouped(self, *groups: str) -> Value:
        """Return the tensor with one axis for each group of labels."""
        order = [self.labels.index(label) for group in groups for label in group]
        return self.value.transpose(order).reshape(*(self.size(group) for group in groups))


@lowers("Einsum")
def _einsum(body: Body) -> Value:
    operands, result = _labels(body)
    terms = [_Term(body.input(number), labels, body.shape(number)) for number, labels in enumerate(operands)]
    product = terms[0]
    for number, term in enumerate(terms[1:], start=1):
        needed = set(result).union(*(later.labels for later in terms[number + 1 :]))
        product = _joined(product.summed_to(needed | {*term.labels}), term, needed)
    product = product.summed_to(result)
    return product.value.transpose([product.labels.index(label) for label in result])


def _labels(body: Body) -> tuple[list[str], str]:
    """Return the labels of each operand and of the result, those of an ellipsis written out."""
    inputs, arrow, result = body.attribute("equation").replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow:
        letters = sorted(set(inputs) - {",", "."})
        result = "..." * ("..." in inputs) + "".join(c for c in letters if inputs.count(c) == 1)
    ranks = [len(body.shape(n)) - len(term.replace(".", "")) for n, term in enumerate(operands)]
    widest = _ELLIPSIS_LABELS[
        : max((r for r, term in zip(ranks, operands, strict=True) if "." in term), default=0)
    ]
    written = [
        term.replace("...", widest[len(widest) - rank :]) for term, rank in zip(operands, ranks, strict=True)
    ]
    if any(len(set(term)) < len(term) for term in written):
        raise RefusedError(f"'{body.attribute('equation')}' takes a diagonal, which is not covered")
    return written, result.replace("...", widest)


def _joined(first: _Term, second: _Term, needed: Collection[str]) -> _Term:
    """Return the product of two terms, summed over the labels of both that are not needed."""
    second = second.summed_to({*needed, *first.labels})
    common = [label for label in first.labels if label in second.labels]
    batch = "".join(label for label in common if label in needed)
    inner = "".join(label for label in common if label not in needed)
    rows = "".join(label for label in first.labels if label not in common)
    columns = "".join(label for label in second.labels if label not in common)
    sizes = {label: max(first.size(label), second.size(label)) for label in common}
    if any(first.size(label) != second.size(label) for label in common):
        raise RefusedError("operands with sizes 1 beside others under one label are not covered")
    a, b = first.grouped(batch, rows, inner), second.grouped(batch, inner, columns)
    value = a.op("MatMul", b) if inner else a * b
    shape = (
        *(sizes[label] for label in batch),
        *(first.size(label) for label in rows),
        *(second.size(label) for label in columns),
    )
    return _Term(value.reshape(*shape), batch + rows + columns, shape)
