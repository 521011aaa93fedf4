"""One step of two records: the ratios of their gradients and updates, and values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minipar.compare.causes import CLIPPED, MEANS, OTHER, Difference, Sizes, causes, describe, name_strips
from minipar.compare.record import strips

NEARLY_PARALLEL = 0.8  # the cosine of two gradients that are sums of the same parts, with other weights
CERTAIN = 0.01  # the rounding, as a part of a gradient, beyond which a ratio says little
NOT_FINITE = (
    "an overflow (inf) or inf - inf, 0 / 0 (nan) on some rank: the record has what rank 0 gets from all"
)
UPDATE = "weight decay, betas, eps, clipping or optimizer state"

Arrays = Mapping[str, np.ndarray]  # a step's loss, grad_norm, gradient/NAME and update/NAME


@dataclass(frozen=True)
class StepComparison:
    """One step of two records A and B, and the relative difference that rounding explains."""

    a: Arrays
    b: Arrays
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Sizes
    eps: float
    limit: float
    update_limit: float | None = None  # for updates without a common factor; None: same

    # ---- values that are not finite ----------------------------------------------------------------------------------

    @cached_property
    def skipped(self) -> bool:
        """True if both runs left out the update, because gradients of the same parameters were not finite.

        That is fp16's normal work. The gradients that are not finite in both are then not compared;
        nor are the norms.
        """
        runs = self.a, self.b
        for run in runs:
            if np.isfinite(run["grad_norm"]):
                return False
            for name in self.shapes:
                if run[f"update/{name}"].any():
                    return False
        return True

    def where_not_finite(self, key: str) -> str:
        """Return in which runs an array has a value that is not finite: "", "A", "B" or "A and B"."""
        found = []
        for run, arrays in (("A", self.a), ("B", self.b)):
            if not np.isfinite(arrays[key]).all():
                found.append(run)
        return " and ".join(found)

    def wrongly_not_finite(self, key: str) -> str:
        """Return the same, but "" for what is not finite in both runs in a step that both skipped."""
        runs = self.where_not_finite(key)
        if self.skipped and runs == "A and B":
            return ""
        return runs

    def not_finite(self) -> list[Difference]:
        """Return every quantity that is not finite in either run, the parameters grouped by run."""
        found = self._parameters_not_finite("gradient")
        for name in ("loss", "grad_norm"):
            runs = self.wrongly_not_finite(name)
            if runs:
                group = f"{float(self.a[name]):.6g} in A, {float(self.b[name]):.6g} in B"
                found.append(Difference(name, None, group, (), (NOT_FINITE,), runs))
        return found + self._parameters_not_finite("update")

    def _parameters_not_finite(self, kind: str) -> list[Difference]:
        groups: dict[str, list[str]] = {}
        for name in self.shapes:
            runs = self.wrongly_not_finite(f"{kind}/{name}")
            if runs:
                groups.setdefault(runs, []).append(name)
        found = []
        for runs, names in groups.items():
            group = describe(names, self.shapes)
            found.append(Difference(kind, None, group, tuple(names), (NOT_FINITE,), runs))
        return _in_order(found)

    # ---- differences -------------------------------------------------------------------------------------------------

    @cached_property
    def noise(self) -> float:
        """The norm below which a strip's gradient is rounding.

        That of the keys' bias is zero, and is never exactly.
        """
        largest = 0.0
        for name in self.shapes:
            for run in (self.a, self.b):
                gradient = np.abs(run[f"gradient/{name}"])
                finite = np.isfinite(gradient)
                largest = max(largest, float(gradient.max(initial=0.0, where=finite)))
        return min(64 * self.eps, 1e-3) * largest

    def differences(self, before: StepComparison | None = None) -> list[Difference]:
        """Return what differs: what is not finite, gradients and the loss, or else the norm, or else the updates.

        `before` is the comparison of the step before this one, which found no difference.
        """
        with np.errstate(all="ignore"):  # what overflows differs, and is named
            found = self.not_finite() + self.of_gradients(before) + self.of_value("loss")
            if not found:
                found = self.of_value("grad_norm")
            if not found:
                found = self.of_updates()
            return found

    def of_value(self, name: str) -> list[Difference]:
        """Return the difference of the loss or of the gradient norm, if there is one and both are finite, in a list."""
        a = float(self.a[name])
        b = float(self.b[name])
        if self.where_not_finite(name) or self._values_equal(a, b):
            return []
        ratio = b / a if a else math.inf
        group = f"{a:.6g} in A, {b:.6g} in B"
        return [Difference(name, ratio, group, (), causes(name, ratio, self.sizes, b - a))]

    def _values_equal(self, a: float, b: float) -> bool:
        return a == b or abs(b - a) <= self.limit * max(abs(a), abs(b))

    def of_gradients(self, before: StepComparison | None) -> list[Difference]:
        """Group the parameters whose gradients differ; one group if the gradients of the step before are still in them.

        All gradients without a constant ratio to A's are one group, with causes that fit their
        length and direction.
        """
        left = None
        if before is not None and not before.skipped:
            left = self._left_from(before)
        if left is not None:
            return [left]
        found = []
        for ratio, part, names in self._groups("gradient"):
            if ratio is None:
                reasons = self._causes_without_ratio(names)
            else:
                reasons = causes("gradient", ratio, self.sizes)
            group = part + describe(names, self.shapes)
            found.append(Difference("gradient", ratio, group, tuple(names), reasons))
        return _in_order(found)

    def of_updates(self) -> list[Difference]:
        """Group the parameters whose updates differ."""
        found = []
        for ratio, part, names in self._groups("update"):
            reasons: tuple[str, ...] = (UPDATE,)
            if ratio is not None:
                reasons = causes("update", ratio, self.sizes)
            group = part + describe(names, self.shapes)
            found.append(Difference("update", ratio, group, tuple(names), reasons))
        return _in_order(found)

    def _groups(self, kind: str) -> list[tuple[float | None, str, list[str]]]:
        """Return (ratio, part, names) of the parameters that differ by one ratio in one part.

        Where a gradient is little more than rounding, any ratio near it fits. Such a parameter
        joins the largest group that explains it, rather than being one of its own.
        """
        groups: dict[tuple[str, str], tuple[float | None, str, list[str]]] = {}
        uncertain = []
        for name in self.shapes:
            if self.where_not_finite(f"{kind}/{name}"):
                continue
            ratio, part = self.ratio(kind, name)
            if ratio == 1:
                continue
            if self._is_uncertain(kind, name) and part == "" and ratio != math.inf:
                uncertain.append((name, ratio))
                continue
            key = ("" if ratio is None else f"{ratio:.3g}", part)
            groups.setdefault(key, (ratio, part, []))[2].append(name)
        for name, ratio in uncertain:
            largest = sorted(groups.values(), key=lambda group: -len(group[2]))
            for other, part, names in largest:
                if part == "" and self._explains(kind, name, other):
                    names.append(name)
                    break
            else:
                groups[name, ""] = (ratio, "", [name])
        order = list(self.shapes)
        for _, _, names in groups.values():
            names.sort(key=order.index)
        return list(groups.values())

    def _is_uncertain(self, kind: str, name: str) -> bool:
        a = self.a[f"{kind}/{name}"]
        b = self.b[f"{kind}/{name}"]
        return self.noise > CERTAIN * max(np.abs(a).max(), np.abs(b).max())

    def _explains(self, kind: str, name: str, ratio: float | None) -> bool:
        if ratio is None:
            return True
        a = self.a[f"{kind}/{name}"]
        b = self.b[f"{kind}/{name}"]
        return self.same(_times(ratio, a), b)

    def ratio(self, kind: str, name: str) -> tuple[float | None, str]:
        """Return the ratio of one parameter's gradient or update, and the part of it that differs.

        The part "" is all of it.
        """
        a = self.a[f"{kind}/{name}"]
        b = self.b[f"{kind}/{name}"]
        if kind == "update":
            # AdamW divides a gradient by its own size, and would make an update of rounding alone.
            # A gradient is exactly zero in an expert without tokens, which decays.
            gradient = np.maximum(self.a[f"gradient/{name}"][0], self.b[f"gradient/{name}"][0])
            certain = (gradient > self.noise) | (gradient == 0)
            a, b = a * certain, b * certain
        whole = self.factor(a, b)
        if whole is None and kind == "update" and self._is_amplified(a, b):
            whole = 1.0
        if whole is not None:
            return whole, ""
        start = 0
        for dim, count in enumerate(strips(self.shapes[name])):
            factors = []
            for i in range(start, start + count):
                strip = slice(i, i + 1)
                factors.append(self.factor(a[:, strip], b[:, strip]))
            wrong = [r for r in factors if r is not None and r != 1]
            if wrong and None not in factors and np.allclose(wrong, wrong[0], rtol=1e-3):
                return wrong[0], name_strips([r != 1 for r in factors], dim, self.sizes.get("tp", ()))
            start += count
        return None, ""

    def factor(self, a: np.ndarray, b: np.ndarray) -> float | None:
        """Return r with b = r * a, for norms (row 0) and projections (row 1); None if no r fits."""
        if self.same(a, b):
            return 1.0
        if np.abs(a).max() <= self.noise:
            return math.inf
        r = _fit(b[1], a[1])
        if self.same(_times(r, a), b):
            return r
        return None

    def _is_amplified(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Return whether updates differ by no factor and so little that it is rounding, made larger by AdamW.

        It divides a gradient by its own size plus eps: where single elements are about eps,
        rounding is a part of them.
        """
        if self.update_limit is None or abs(_fit(b[1], a[1]) - 1) > self.limit:
            return False
        return self._within(self.update_limit, a, b)

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Return whether rounding explains the difference, on the scale of the largest strip."""
        return self._within(self.limit, a, b)

    def _within(self, limit: float, a: np.ndarray, b: np.ndarray) -> bool:
        largest = max(np.abs(a).max(), np.abs(b).max())
        return bool(np.abs(a - b).max() <= limit * largest + self.noise)

    def norm_ratios(self) -> dict[str, float | None]:
        """Return B's gradient norm / A's for each parameter.

        It is None where the gradients are equal, and nan if one is not finite.
        """
        ratios: dict[str, float | None] = {}
        for name in self.shapes:
            key = f"gradient/{name}"
            a = self.a[key]
            b = self.b[key]
            if self.where_not_finite(key):
                ratios[name] = math.nan if self.wrongly_not_finite(key) else None
                continue
            with np.errstate(over="ignore"):
                equal = self.same(a, b)
            norm_a = math.hypot(*a[0])
            norm_b = math.hypot(*b[0])
            if equal:
                ratios[name] = None
            else:
                ratios[name] = norm_b / norm_a if norm_a else math.inf
        return ratios

    # ---- causes of gradients without a ratio -------------------------------------------------------------------------

    def _left_from(self, before: StepComparison) -> Difference | None:
        """Return the difference "the gradients of the step before are still in these", if all that differs is that.

        Projections are linear: those of one run are then those of the other, plus c times those of
        the step before. c is one number for all parameters: 1, or less if the gradients were
        clipped meanwhile.
        """
        ratios = {}
        for name in self.shapes:
            if not self.where_not_finite(f"gradient/{name}"):
                ratios[name], _ = self.ratio("gradient", name)
        names = [name for name, ratio in ratios.items() if ratio != 1]
        if all(ratios[name] is not None for name in names):  # a constant ratio says more
            return None
        pairs = (("B", self.b, self.a, before.b), ("A", self.a, self.b, before.a))
        for run, more, less, last in pairs:
            c = _fit(_joined(more, names) - _joined(less, names), _joined(last, names))
            if 0.01 < c < 1.001 and all(self._is_sum(name, more, less, c, last) for name in names):
                times = "" if c > 0.999 else f"{c:.4g} times "
                cause = f"{times}the gradient of the step before is still in {run}'s"
                cause += ": no zero_grad between the steps"
                group = describe(names, self.shapes)
                return Difference("gradient", None, group, tuple(names), (cause,))
        return None

    def _is_sum(self, name: str, whole: Arrays, part: Arrays, c: float, other: Arrays) -> bool:
        """Return whether a gradient is part + c * other within rounding, by its projections."""
        parts = [arrays[f"gradient/{name}"][1] for arrays in (whole, part, other)]
        rest = parts[0] - parts[1] - c * parts[2]
        largest = max(np.abs(one).max() for one in parts)
        return bool(np.abs(rest).max() <= self.limit * largest + 2 * self.noise)

    def _causes_without_ratio(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the usual causes of gradients of no constant ratio, those that fit their direction and length first.

        A sum of the same parts with other weights, as of ranks that count too much or clip, points
        almost where the right one does, in every parameter that has a gradient. What each rank
        clips is shorter, and its loss is right.
        """
        others = [name for name in self.shapes if name not in names]
        if any(np.abs(self.a[f"gradient/{name}"]).max() > self.noise for name in others):
            return (OTHER,)
        a = _joined(self.a, names)
        b = _joined(self.b, names)
        r = _fit(b, a)
        found = []
        if r > 0 and r * _fit(a, b) > NEARLY_PARALLEL**2:
            loss_is_right = self._values_equal(float(self.a["loss"]), float(self.b["loss"]))
            if r < 1 and loss_is_right:
                found.append(CLIPPED + self._norm_of_other_gradients())
            found.append(MEANS)
        return (*found, OTHER)

    def _norm_of_other_gradients(self) -> str:
        """Say so if B's gradient norm is larger than that of its recorded gradients, as if clipped in between."""
        squares = 0.0
        for name, shape in self.shapes.items():
            norms = self.b[f"gradient/{name}"][0, : strips(shape)[0]]
            squares += float(norms @ norms)
        norm = float(self.b["grad_norm"])
        recorded = math.sqrt(squares)
        if norm <= 1.01 * recorded:
            return ""
        what = f"the norm of its recorded gradients is {recorded:.4g}"
        return f" (B's grad_norm is {norm:.4g}, but {what})"


def _in_order(found: Sequence[Difference]) -> list[Difference]:
    """Put the groups with a ratio that has a known cause first, and of the others those of most parameters."""
    return sorted(found, key=lambda each: (each.ratio is None or not each.causes, -len(each.parameters)))


def _times(r: float, measured: np.ndarray) -> np.ndarray:
    """Return the norms and projections of r times the array whose norms and projections are given."""
    return np.array([abs(r) * measured[0], r * measured[1]])


def _fit(values: np.ndarray, parts: np.ndarray) -> float:
    """Return the number c for which c * parts is nearest to values; 0 if the parts are zero."""
    largest = np.abs(parts).max()
    if not largest > 0:
        return 0.0
    unit = parts / largest  # the squares of large values would overflow
    return float(unit @ values / (unit @ parts))


def _joined(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    """Return the projections of the gradients of these parameters side by side."""
    return np.concatenate([arrays[f"gradient/{name}"][1] for name in names])
