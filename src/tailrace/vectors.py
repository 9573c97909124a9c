"""Vectors of floats for compiled kernels: what numba lacks to say how a loop uses registers and memory.

A vector is a value of a compiled function, held in registers: `WIDTH` lanes, or `WIDE`. It is read from and
written to a C-contiguous float32 array of any number of axes; an offset counts floats from the array's start
and is not checked. Vectors are added, subtracted, multiplied and divided lane by lane, with each other or
with a number. Sums and products may be contracted and reordered, as compiling.py says.

Each function below is called in a compiled function only. After a change here, touch the files that use it:
numba's cache looks only at the file of the function that it compiled.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import float32, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from tailrace.compiling import kernel

WIDTH = 8
"""Lanes of what goes along a head; two registers where the processor has only half as wide ones."""
WIDE = 16 if binding.get_host_cpu_features().get("avx512f") else WIDTH
"""Lanes of what goes along positions: those of the processor's widest register, or `WIDTH`."""

_FLOAT, _INT, _BYTES = ir.FloatType(), ir.IntType(32), ir.IntType(8).as_pointer()
_FLAGS = ("reassoc", "nsz", "contract", "arcp")
_ALIGNMENT = 4

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic

Emit = Callable[..., Any]
"""(builder, values of the arguments) -> value."""


class VectorType(types.Type):  # type: ignore[misc]  # numba has no types
    """How numba names a vector."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vector{lanes}")


VECTOR, WIDE_VECTOR = VectorType(WIDTH), VectorType(WIDE)


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # numba has no types
    """How LLVM does."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _floats(kind.lanes))


def _floats(lanes: int) -> Any:
    return ir.VectorType(_FLOAT, lanes)


def _ints(value: Any, lanes: int) -> Any:
    """A constant: one number for all lanes, or a list."""
    return ir.Constant(ir.VectorType(_INT, lanes), value if isinstance(value, list) else [value] * lanes)


def _lanewise(*others: Any, result: Any = None) -> Callable[[Emit], Any]:
    """An intrinsic of a vector, of either width, and of others: of numba's types, None being the vector's.
    So is its result."""

    def made(emit: Emit) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return emit(builder, *values)

        def typed(vector: Any) -> Any:
            return (result or vector)(vector, *(other or vector for other in others)), generate

        if len(others) == 0:
            return intrinsic(lambda typing, a: typed(a))
        if len(others) == 1:
            return intrinsic(lambda typing, a, b: typed(a))
        return intrinsic(lambda typing, a, b, c: typed(a))

    return made


def _address(context: Any, builder: Any, kind: Any, pointee: Any, array: Any, offset: Any) -> Any:
    """Of array[offset], an array of numba's type `kind`, as an LLVM pointer."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), pointee.as_pointer())


def _same(builder: Any, value: Any, lanes: int) -> Any:
    """A vector of equal lanes."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(first, undefined, _ints(0, lanes))


def _below(builder: Any, count: Any, lanes: int) -> Any:
    """The mask of the first `count` lanes."""
    numbers = _ints(list(range(lanes)), lanes)
    return builder.icmp_signed("<", numbers, _same(builder, builder.trunc(count, _INT), lanes))


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _fold(builder: Any, vector: Any, combine: Emit) -> Any:
    """All lanes combined into one number."""
    width = lanes = vector.type.count
    while width > 1:
        width //= 2
        upper = _ints([(lane + width) % lanes for lane in range(lanes)], lanes)
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, upper))
    return builder.extract_element(vector, _INT(0))


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=_FLAGS)


def _loading(vector: Any) -> Any:
    @_intrinsic
    def load(typing: Any, array: Any, offset: Any) -> Any:
        """array[offset], and on for as many lanes."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = _address(context, builder, signature.args[0], _floats(vector.lanes), *values)
            return builder.load(place, align=_ALIGNMENT)

        return vector(array, types.intp), generate

    return load


load, load_wide = _loading(VECTOR), _loading(WIDE_VECTOR)


@_intrinsic
def load_first_wide(typing: Any, array: Any, offset: Any, count: Any) -> Any:
    """As `load_wide`, but zero from lane `count` on, where nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, count = values
        place = _address(context, builder, signature.args[0], _floats(WIDE), array, offset)
        zeros, mask = ir.Constant(_floats(WIDE), [0.0] * WIDE), _below(builder, count, WIDE)
        name = f"llvm.masked.load.v{WIDE}f32.p0"
        return _call(builder, name, _floats(WIDE), place, _INT(_ALIGNMENT), mask, zeros)

    return WIDE_VECTOR(array, types.intp, types.intp), generate


@_intrinsic
def load_like(typing: Any, vector: Any, array: Any, offset: Any) -> Any:
    """array[offset], and on for as many lanes as the vector has."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _address(context, builder, signature.args[1], values[0].type, *values[1:])
        return builder.load(place, align=_ALIGNMENT)

    return vector(vector, array, types.intp), generate


@_intrinsic
def load_one(typing: Any, array: Any, offset: Any) -> Any:
    """array[offset], a number."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], _FLOAT, *values))

    return types.float32(array, types.intp), generate


@_intrinsic
def store(typing: Any, array: Any, offset: Any, vector: Any) -> Any:
    """array[offset], and on for as many lanes, = vector"""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, vector = values
        place = _address(context, builder, signature.args[0], vector.type, array, offset)
        builder.store(vector, place, align=_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@_intrinsic
def store_first(typing: Any, array: Any, offset: Any, vector: Any, count: Any) -> Any:
    """The same for the first `count` lanes only."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, vector, count = values
        lanes = vector.type.count
        place = _address(context, builder, signature.args[0], vector.type, array, offset)
        name = f"llvm.masked.store.v{lanes}f32.p0"
        mask = _below(builder, count, lanes)
        _call(builder, name, ir.VoidType(), vector, place, _INT(_ALIGNMENT), mask)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, types.intp), generate


@_intrinsic
def prefetch(typing: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of array[offset], which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.bitcast(_address(context, builder, signature.args[0], _FLOAT, *values), _BYTES)
        reading, keep, data = _INT(0), _INT(3), _INT(1)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, reading, keep, data)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _same_in(vector: Any) -> Any:
    @_intrinsic
    def same(typing: Any, x: Any) -> Any:
        """The number in every lane."""

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return _same(builder, values[0], vector.lanes)

        return vector(types.float32), generate

    return same


same, same_wide = _same_in(VECTOR), _same_in(WIDE_VECTOR)


@_lanewise(types.intp, types.float32)
def first(builder: Any, vector: Any, count: Any, x: Any) -> Any:
    """The vector, with the number in its lanes from `count` on."""
    lanes = vector.type.count
    return builder.select(_below(builder, count, lanes), vector, _same(builder, x, lanes))


@_lanewise()
def swap_pairs(builder: Any, vector: Any) -> Any:
    """Lanes 1, 0, 3, 2, and so on."""
    lanes = vector.type.count
    return builder.shuffle_vector(vector, vector, _ints([lane ^ 1 for lane in range(lanes)], lanes))


@_lanewise(None)
def greater(builder: Any, a: Any, b: Any) -> Any:
    """The greater of each lane; that of b where one is not a number."""
    return _greater(builder, a, b)


@_lanewise(types.float32)
def at_least(builder: Any, vector: Any, x: Any) -> Any:
    """The number, where a lane is less."""
    return _greater(builder, _same(builder, x, vector.type.count), vector)


@_intrinsic
def times_plus(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c as it is written, fused where the processor can; b may be a number."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        lanes = a.lanes
        sides = [values[0], values[1] if b == a else _same(builder, values[1], lanes), values[2]]
        return _call(builder, f"llvm.fmuladd.v{lanes}f32", _floats(lanes), *sides)

    return a(a, b, c), generate


@_lanewise()
def floor(builder: Any, vector: Any) -> Any:
    return _call(builder, f"llvm.floor.v{vector.type.count}f32", vector.type, vector)


@_lanewise()
def power_of_two(builder: Any, whole: Any) -> Any:
    """2^whole, for whole numbers from -126 to 127."""
    lanes = whole.type.count
    exponent = builder.add(builder.fptosi(whole, ir.VectorType(_INT, lanes)), _ints(127, lanes))
    return builder.bitcast(builder.shl(exponent, _ints(23, lanes)), whole.type)


@_lanewise(result=types.intp)
def num_lanes(builder: Any, vector: Any) -> Any:
    return ir.Constant(ir.IntType(64), vector.type.count)


@_lanewise(result=types.float32)
def total(builder: Any, vector: Any) -> Any:
    """The sum of all lanes."""
    return _fold(builder, vector, _sum)


@_lanewise(result=types.float32)
def largest(builder: Any, vector: Any) -> Any:
    """The greatest of all lanes."""
    return _fold(builder, vector, _greater)


def _define(instruction: str, *operations: Any) -> None:
    """Let compiled functions write the operations between vectors, and between a vector and a number."""

    @_intrinsic
    def apply(typing: Any, a: Any, b: Any) -> Any:
        vector = a if isinstance(a, VectorType) else b

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            sides = [
                value if isinstance(kind, VectorType) else _same(builder, value, vector.lanes)
                for kind, value in zip((a, b), values, strict=True)
            ]
            return getattr(builder, instruction)(*sides, flags=_FLAGS)

        return vector(a, b), generate

    def implementation(a, b):  # type: ignore[no-untyped-def]  # numba compares it with a lambda
        return apply(a, b)

    def fits(a: Any, b: Any) -> bool:
        kinds = {a, b} - {types.float32}
        return len(kinds) == 1 and isinstance(kinds.pop(), VectorType)

    for operation in operations:
        overload(operation)(lambda a, b: implementation if fits(a, b) else None)


_define("fadd", operator.add, operator.iadd)
_define("fsub", operator.sub)
_define("fmul", operator.mul, operator.imul)
_define("fdiv", operator.truediv)


@kernel()
def exp(x: Any) -> Any:
    """exp of each lane, relative error 2e-7, for results from 2^-126 to 2^126 (after Cephes' expf)."""
    x = at_least(x, float32(-87.3))
    x = float32(0.0) - at_least(float32(0.0) - x, float32(-87.3))
    whole = floor(x * float32(1.44269504) + float32(0.5))
    # x - whole * log(2), in two parts of which the first product is exact.
    r = times_plus(whole, float32(-0.693359375), x)
    r = times_plus(whole, float32(2.12194440e-4), r)
    p = r * float32(1.9875691500e-4) + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    return (times_plus(p * r, r, r) + float32(1.0)) * power_of_two(whole)


@kernel()
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of each lane."""
    return float32(1.0) / (exp(float32(0.0) - x) + float32(1.0))
