"""An array module that behaves as CuPy does on a machine without a GPU: NumPy inside, no implicit way in or out.

    with using(strict_array):              # of training.py
        ...                                 # `xp.add`, `xp.zeros`, ... come from here

- A name is there only if the real `cupy` has it (CuPy can be imported without a GPU), and keyword arguments
  are those of CuPy's function, not NumPy's.
- Nothing turns an array into a NumPy array but `.get()` (or `asnumpy`); nothing turns a NumPy array into one of these
  but `asarray` and `array`. Every other mixture of the two raises TypeError, as do lists where CuPy wants arrays.
- Reductions and single elements are arrays of no dimensions, not NumPy scalars.

Stricter than CuPy in two places, on purpose: `numpy.exp(array)` raises (CuPy would compute it on the device, but the
library should say `xp`), and so does an index or a value that is a NumPy array. Programs of users, who write `numpy`,
run inside `as_cupy()`, where NumPy's functions and such an index are what they are under CuPy. `waits` has a name for
each time that something waited for the device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

try:
    import cupy
except ImportError as error:  # not a skip: without it the names would go unchecked
    raise ImportError("the strict array checks names against CuPy, which needs no GPU for that: make test") from error

_SCALARS = (bool, int, float, complex, np.generic)
_DOORS = {"asarray", "array"}  # the functions that take host arrays
# Methods that are a function of the same name and arguments; the compiled method itself does not say what it takes.
_REDUCTIONS = set("all any argmax argmin clip cumsum max mean min prod std sum take var".split())
_UFUNC_KEYWORDS = {"out", "dtype", "casting"}
_SHAPED_BY_VALUES = {"flatnonzero", "nonzero", "argwhere", "unique", "bincount", "repeat"}  # CuPy waits for the shape

waits: list[str] = []


def _refuse(value: Any, where: str) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__name__}"
    return TypeError(f"Unsupported type {kind} in {where}: it does not live on the device (use asarray or .get())")


def _inward(value: Any, where: str) -> Any:
    """Arguments for NumPy: strict arrays unwrapped, also in tuples, lists and slices; NumPy arrays refused."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray):
        raise _refuse(value, where)
    if isinstance(value, (tuple, list)):
        return type(value)(_inward(item, where) for item in value)
    return value


def _outward(value: Any) -> Any:
    """Results from NumPy: arrays and NumPy scalars wrapped, also in tuples and lists."""
    if isinstance(value, (np.ndarray, np.generic)):
        return ndarray(np.asarray(value))
    if isinstance(value, (tuple, list)):
        return [_outward(item) for item in value] if isinstance(value, list) else tuple(map(_outward, value))
    return value


class ndarray:
    """Stands for `cupy.ndarray`."""

    __array_ufunc__ = None  # numpy_array + this: NumPy stands back, and __radd__ below refuses
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray) -> None:
        if not isinstance(host, np.ndarray):
            raise TypeError("an array is made by asarray, zeros, ...")
        object.__setattr__(self, "_host", host)

    # ---- the doors ----

    def get(self) -> np.ndarray:
        """A copy on the host."""
        waits.append("get")
        return self._host.copy()

    def set(self, array: np.ndarray) -> None:
        """Copy from the host, same shape and dtype."""
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (self.shape, self.dtype):
            raise TypeError("set takes a NumPy array of the same shape and dtype")
        self._host[...] = array

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one.")

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was given a device array; say xp.{function.__name__}")

    # ---- what CuPy's array has ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(cupy.ndarray, name):
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name in ("data", "base", "cstruct", "device"):  # they exist, but mean another thing than NumPy's
            raise AttributeError(f"the stand-in has no {name!r}: device memory cannot be reached from the host")
        if name == "flags":
            flags = self._host.flags
            return SimpleNamespace(
                c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, owndata=flags.owndata
            )
        if name in _REDUCTIONS:
            return functools.partial(getattr(_names, name), self)
        value = getattr(self._host, name)
        if name in ("item", "tolist", "tobytes"):  # a copy to the host, asked for by name
            waits.append(name)
            return value
        return _Function(f"ndarray.{name}", value, getattr(cupy.ndarray, name)) if callable(value) else _outward(value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"cannot set {name!r}")

    def __getitem__(self, key: Any) -> ndarray:
        return _outward(self._host[_key(key, self.shape)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, (ndarray, *_SCALARS)):
            raise _refuse(value, "an assignment")
        self._host[_key(key, self.shape)] = _inward(value, "an assignment")

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        return (_outward(row) for row in self._host)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __index__(self) -> int:
        return operator.index(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __copy__(self) -> ndarray:
        return ndarray(self._host.copy())

    def __deepcopy__(self, _: Any) -> ndarray:
        return ndarray(self._host.copy())

    def __format__(self, spec: str) -> str:
        return format(self._host, spec)

    def __repr__(self) -> str:
        return f"strict{self._host!r}"


def _is_mask(part: Any) -> bool:
    return isinstance(part, np.ndarray) and part.dtype.kind == "b"


def _key(key: Any, shape: tuple[int, ...]) -> Any:
    """An index for NumPy. CuPy waits for the number of True elements, and takes integers modulo the size of the dim."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if ndarray.__array_ufunc__ is None:
        _inward(key, "an index")
    parts = [part._host if isinstance(part, ndarray) else part for part in parts]
    taken = [0 if p is None or p is ... else p.ndim if _is_mask(p) else 1 for p in parts]
    dim = 0
    for i, part in enumerate(parts):
        if part is ...:
            dim += len(shape) - sum(taken)
        elif _is_mask(part):
            waits.append("an index of booleans")
        elif isinstance(part, np.ndarray):
            parts[i] = part % shape[dim]
        dim += taken[i]
    return tuple(parts) if isinstance(key, tuple) else parts[0]


@contextlib.contextmanager
def as_cupy() -> Any:
    """Let NumPy's functions work on these arrays as on CuPy's: on the device, and without NumPy's arrays."""

    def ufunc(self: ndarray, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if "out" in options:
            (options["out"],) = options["out"]
        return getattr(_names, function.__name__)(*inputs, **options) if method == "__call__" else NotImplemented

    def any_function(self: ndarray, function: Any, _: Any, args: Any, options: Any) -> Any:
        path = [*function.__module__.split(".")[1:], function.__name__]
        return functools.reduce(getattr, path, _names)(*args, **options)

    before = ndarray.__array_function__
    ndarray.__array_ufunc__, ndarray.__array_function__ = ufunc, any_function
    try:
        yield
    finally:
        ndarray.__array_ufunc__, ndarray.__array_function__ = None, before


def _operators() -> None:
    """Arithmetic and comparison: with another such array or a scalar, never with a NumPy array or a list."""

    def binary(name: str, function: Any, reflected: bool = False) -> Any:
        def method(self: ndarray, other: Any) -> Any:
            if isinstance(other, (np.ndarray, list)):
                raise _refuse(other, name)
            if not isinstance(other, (ndarray, *_SCALARS)):
                return NotImplemented
            theirs = _inward(other, name)
            return _outward(function(theirs, self._host) if reflected else function(self._host, theirs))

        return method

    def in_place(name: str, function: Any) -> Any:
        def method(self: ndarray, other: Any) -> ndarray:
            if not isinstance(other, (ndarray, *_SCALARS)):
                raise _refuse(other, name)
            function(self._host, _inward(other, name))
            return self

        return method

    def unary(function: Any) -> Any:
        return lambda self: _outward(function(self._host))

    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(ndarray, f"__{name}__", binary(name, getattr(operator, name)))
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split():
        function = getattr(operator, f"__{name}__")
        setattr(ndarray, f"__{name}__", binary(name, function))
        setattr(ndarray, f"__r{name}__", binary(name, function, reflected=True))
        if hasattr(cupy.ndarray, f"__i{name}__"):  # CuPy has no @=
            setattr(ndarray, f"__i{name}__", in_place(name, getattr(operator, f"__i{name}__")))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(ndarray, f"__{name}__", unary(getattr(operator, f"__{name}__")))


_operators()


class _Function:
    """NumPy's function with CuPy's manners: its keywords, and device arrays only."""

    def __init__(self, name: str, function: Any, real: Any) -> None:
        self._name, self._function, self._real = name, function, real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._real, cupy.ufunc):
            wrong = sorted(set(kwargs) - _UFUNC_KEYWORDS)
            if wrong:
                raise TypeError(f"cupy.{self._name} takes no {', '.join(wrong)}")
            for value in args:
                if not isinstance(value, (ndarray, *_SCALARS)):
                    raise _refuse(value, f"xp.{self._name}")
        else:
            self._check_signature(args, kwargs)
        where = f"xp.{self._name}"
        if self._name in _SHAPED_BY_VALUES:
            waits.append(self._name)
        if self._name in _DOORS and isinstance(args[0], np.ndarray):
            inward = (args[0].copy(), *args[1:])  # to the device is a copy: later changes on the host stay there
        else:
            inward = _inward(args, where)
        result = self._function(*inward, **{name: _inward(value, where) for name, value in kwargs.items()})
        for value in (*args, *kwargs.values()):
            if isinstance(value, ndarray) and value._host is result:
                return value  # out=, or asarray of what is one already
        return _outward(result)

    def _check_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self._real)
        except (TypeError, ValueError):
            return  # compiled: it does not say
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cupy.{self._name}{signature}: {error}") from None

    def __getattr__(self, name: str) -> Any:  # add.outer, add.reduce
        if name in ("at", "reduceat"):
            raise AttributeError(f"CuPy's {self._name}.{name} has no fixed order, or takes differences of long sums")
        real = getattr(self._real, name)
        return _Function(f"{self._name}.{name}", getattr(self._function, name), real)


class _Names:
    """The names of `cupy` (or of one of its submodules), with NumPy's implementations."""

    def __init__(self, name: str, numpy: ModuleType, real: ModuleType) -> None:
        self._name, self._numpy, self._real = name, numpy, real

    def __getattr__(self, name: str) -> Any:
        try:
            real = getattr(self._real, name)
        except AttributeError:
            raise AttributeError(f"module {self._name} has no attribute {name!r}") from None
        if real is cupy.ndarray:
            return ndarray
        if real is cupy.asnumpy:
            return lambda array: array.get()
        if real is cupy.fuse:  # NumPy has none: the rule runs operation by operation
            return lambda rule: rule
        if isinstance(real, type) or not (callable(real) or isinstance(real, ModuleType)):
            return real  # float32, dtype, newaxis, pi
        numpy = getattr(self._numpy, name)  # AttributeError: only CuPy has it, so the stand-in cannot
        if isinstance(real, ModuleType):
            return _Names(f"{self._name}.{name}", numpy, real)
        return _Function(name, numpy, real)


_names = _Names("cupy", np, cupy)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_names, name)
