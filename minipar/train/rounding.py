"""The loss and the gradient of one step, computed twice: by the ranks and by one device.

What rounding explains. Both start from the same parameters, so no training lies between them that
could amplify a difference. Each operation between a parameter and the loss, and back, rounds its
result by at most eps/2 of its size, in either direction. A hundred such errors add up to about
sqrt(100) eps/2 = 5 eps of a gradient's norm; 16 are allowed (ROUNDINGS), in any dtype and after any
number of steps. (Small layouts differ by up to 3 eps, sums over 2,048 tokens by 20.) A gradient
that is zero but for rounding, as that of a router with one expert for each token, has no size of
its own: one eps of the norm of all gradients is allowed besides.

A difference beyond that is held against what one device itself does (a multiple of the largest of
up to MOVES samples):

- In float32 and float64 all parameters are moved by up to two roundings, at random, and the gradient is computed
  again. That shows a gradient that is ill-conditioned: where activations are large, or where two experts are equally
  probable for a token.
- In 2 bytes 16 eps are 12 % of a gradient, and would hide much. There the rounding itself is measured, and nothing is
  allowed without it: one device computes the gradient in 2 bytes and in float32, from the same parameters.

Loads of experts are counts, so they are equal, or differ by tokens whose experts such a sample
changes as well.
"""

from collections.abc import Sequence

import numpy as np

from minipar.backend import Array, from_host, to_host
from minipar.train.one_device import OneDevice

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDINGS = 16
MOVES = 32
# How many times the largest sample is allowed. Independent moves of the h elements of a row average
# out in a product, by sqrt(h), and rounding errors of the product do not: 16 where parameters are
# moved.
MOVED = 16
MEASURED = 4
LOADS = 2

Quantities = dict[str, np.ndarray]  # "loss", "gradient of NAME" for each parameter, and perhaps "loads"


def quantities(loss: float, gradients: dict[str, np.ndarray], loads: np.ndarray) -> Quantities:
    """Name what is compared; `loads` (L, E + 1) counts each layer's assignments to experts, if the step uses them."""
    named = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    if loads.size:
        named["loads"] = loads
    return {"loss": np.array(loss), **named}


def is_finite(values: Quantities) -> bool:
    """Return whether no value is infinite or NaN."""
    return all(bool(np.isfinite(array).all()) for array in values.values())


def norm(array: np.ndarray) -> float:
    """Return the 2-norm of all elements, computed in float64."""
    return float(np.linalg.norm(array.astype(np.float64)))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the 2-norm of a - b, computed in float64."""
    return norm(a.astype(np.float64) - b.astype(np.float64))


class GradientCheck:
    """The comparison of each step's loss and gradient with those that `device` computes from the same parameters.

    `exact` demands the same bits. `loads` says whether the loads of experts are compared too.
    `sharper` is a device in float32 with the same parameters, if `device` computes in 2 bytes: it
    measures the rounding.

    largest     the largest difference so far, relative to a gradient's norm plus 1/16 of that of all gradients
    largest_in  the gradient, and the step, in which it was
    compared    the number of comparisons
    rounded     how many of them did not have the same bits
    explained   how many of them exceeded ROUNDINGS and were explained by samples of one device
    """

    def __init__(self, device: OneDevice, *, exact: bool, loads: bool, sharper: OneDevice | None = None) -> None:
        self.device = device
        self.exact = exact
        self.loads = loads
        self.sharper = sharper
        self.eps = EPSILON[device.config.run.dtype]
        self.largest = 0.0
        self.largest_in = ""
        self.compared = self.rounded = self.explained = 0

    def problem(self, step: int, ranks: Quantities) -> str:
        """Return how the ranks' loss and gradients differ from one device's by more than rounding; "" if they do not.

        A step that overflows on the ranks must overflow on one device too, and the other way round,
        but for a loss scale that is larger or smaller by as much as roundings explain.
        """
        device = compute(self.device, step, self.loads)
        if ranks.keys() != device.keys():
            return f"only the ranks, or only one device, have {min(ranks.keys() ^ device.keys())}"
        if self.exact:
            return self._different_bits(ranks, device)
        if is_finite(ranks) and is_finite(device):
            return self._beyond_rounding(step, ranks, device, 1.0)
        margin = ROUNDINGS * self.eps
        if is_finite(ranks):
            device = compute(self.device, step, self.loads, 1 - margin)
            if is_finite(device):
                return self._beyond_rounding(step, ranks, device, 1 - margin)
            return "all values are finite on the ranks, but not on one device"
        if is_finite(device) and is_finite(compute(self.device, step, self.loads, 1 + margin)):
            return "a value is not finite on the ranks, but all are on one device"
        return ""

    def found(self) -> str:
        """Return the largest difference and the bound, for the line of a proof."""
        text = f"{self.largest:.2g} of their norm"
        if self.largest_in:
            text += f" ({self.largest_in})"
        if self.sharper is not None:
            return f"{text}, bound {MEASURED} times the rounding"
        text += f", bound {ROUNDINGS * self.eps:.2g}"
        if self.explained:
            text += f", but for {self.explained} of {self.compared} whose condition explains more"
        return text

    def _different_bits(self, ranks: Quantities, device: Quantities) -> str:
        self.compared += len(device)
        different = [name for name in device if not same_bits(ranks[name], device[name])]
        if not different:
            return ""
        return f"{described(different)} not bit for bit one device's, as --reduction ordered promises"

    def _beyond_rounding(self, step: int, ranks: Quantities, device: Quantities, factor: float) -> str:
        """Return which quantity differs most beyond what rounding explains, and by how much."""
        whole = norm(np.array([norm(array) for name, array in device.items() if name.startswith("gradient")]))
        limits: dict[str, float] = {}  # for the quantities that differ by more
        for name, array in device.items():
            self.compared += 1
            if same_bits(ranks[name], array):
                continue
            self.rounded += 1
            difference = distance(ranks[name], array)
            limit = self._allowed(name, norm(array), whole)
            size = norm(array) + whole / ROUNDINGS
            relative = difference / size if size > 0 else difference  # all gradients may be zero
            within = difference <= limit or self.sharper is not None
            if name.startswith("gradient") and within and relative > self.largest:
                self.largest = relative
                self.largest_in = f"{name.removeprefix('gradient of ')}, step {step + 1}"
            if difference > limit:
                limits[name] = limit
        if self.sharper is None:
            self.explained += len(limits)
        for sample in range(MOVES):
            if not limits:
                break
            noise = self._noise(step, sample, device, factor)
            for name in tuple(limits):
                limits[name] = max(limits[name], self._times(name) * noise.get(name, 0.0))
                if distance(ranks[name], device[name]) <= limits[name]:
                    del limits[name]
        return self._worst(ranks, device, limits)

    def _allowed(self, name: str, size: float, whole: float) -> float:
        """Return the difference that needs no sample, of a quantity of this norm."""
        if name == "loads":
            return 0.0
        if name == "loss":  # a mean over the tokens: their roundings have either sign
            return self.eps * size * (1 / ROUNDINGS if self.sharper is not None else ROUNDINGS)
        eps = EPSILON["float32"] if self.sharper is not None else self.eps
        return eps * (ROUNDINGS * size + whole)

    def _times(self, name: str) -> int:
        """Return how many times the largest sample explains."""
        if name == "loads":
            mesh = self.device.layout
            return 0 if mesh.tp == mesh.cp == 1 else LOADS  # no layer is split, so no token changes its expert
        return MOVED if self.sharper is None else MEASURED

    def _noise(self, step: int, sample: int, device: Quantities, factor: float) -> dict[str, float]:
        """Return how much one device itself differs by rounding, by quantity; {} if a value is not finite."""
        if self.sharper is None:
            moves = self._moves(sample)
            return distances(self._moved(self.device, moves, step, factor), device)
        if sample == 0:
            return distances(device, compute(self.sharper, step, self.loads))
        moves = self._moves(sample)
        moved = self._moved(self.device, moves, step, factor)
        return distances(moved, self._moved(self.sharper, moves, step, 1.0))

    def _moves(self, sample: int) -> list[np.ndarray]:
        """Return the values of all parameters, each moved by up to two roundings, at random."""
        random = np.random.Generator(np.random.Philox(key=sample))
        moved = []
        for p in self.device.optimizer.parameters:
            values = to_host(p.data)
            factors = 1 + 2 * self.eps * random.uniform(-1, 1, values.shape)
            moved.append((values * factors).astype(values.dtype))
        return moved

    def _moved(self, device: OneDevice, moves: Sequence[Array], step: int, factor: float) -> Quantities:
        """Compute the step with other values of the parameters, and put the old ones back."""
        kept = [to_host(p.data).copy() for p in device.optimizer.parameters]
        put(device, moves)
        moved = compute(device, step, self.loads, factor)
        put(device, kept)
        return moved

    def _worst(self, ranks: Quantities, device: Quantities, limits: dict[str, float]) -> str:
        """Describe the quantity that exceeds its limit most; "" if there is none."""
        if not limits:
            return ""
        differences = {name: distance(ranks[name], device[name]) for name in limits}
        worst = max(limits, key=lambda name: differences[name] / max(limits[name], 1e-300))
        others = f" (and {len(limits) - 1} more)" if len(limits) > 1 else ""
        sizes = f"norm {norm(ranks[worst]):.6g} on the ranks, {norm(device[worst]):.6g} on one device"
        explained = f"they differ by {differences[worst]:.3g}, rounding explains {limits[worst]:.3g}"
        return f"{worst}{others}: {sizes}; {explained}"


def compute(device: OneDevice, step: int, loads: bool, factor: float = 1.0) -> Quantities:
    """Compute a step's loss and gradients on one device, with `factor` times its loss scale."""
    scale = device.scaler.scale
    device.scaler.scale *= factor
    loss = device.compute_gradient(step)
    device.scaler.scale = scale
    counts = [[*moe.load, moe.dropped] for moe in device.moes] if loads else []
    return quantities(loss, device.state_dict(gradients=True), np.array(counts))


def put(device: OneDevice, values: Sequence[Array]) -> None:
    """Set all parameters of a device."""
    for p, array in zip(device.optimizer.parameters, values, strict=True):
        p.data[...] = from_host(array.astype(p.dtype))


def distances(a: Quantities, b: Quantities) -> dict[str, float]:
    """Return the distance of each quantity; {} if a value is not finite."""
    if not is_finite(a) or not is_finite(b):
        return {}
    return {name: distance(a[name], b[name]) for name in b}


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays have the same shape, dtype and bytes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def described(names: Sequence[str]) -> str:
    """Name the first of several things, and how many more there are: "x is", "x and 2 more are"."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{names[0]} and {len(names) - 1} more are"
