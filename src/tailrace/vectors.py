"""Vectors of eight floats for compiled kernels: what numba lacks to say how a loop uses registers and memory.

A vector is a value of a compiled function, held in registers. It is read from and written to a
C-contiguous float32 array of any number of axes; an offset counts floats from the array's start and is not
checked. Vectors are added, subtracted, multiplied and divided lane by lane. Sums and products may be
contracted and reordered, as compiling.py says.

Each function below is called in a compiled function only. After a change here, touch the files that use it:
numba's cache looks only at the file of the function that it compiled.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

from tailrace.compiling import kernel

WIDTH = 8
"""Lanes; two registers where the processor has only half as wide ones."""

_FLOAT, _INT, _BYTES = ir.FloatType(), ir.IntType(32), ir.IntType(8).as_pointer()
_FLOATS, _INTS, _BITS = (ir.VectorType(kind, WIDTH) for kind in (_FLOAT, _INT, ir.IntType(1)))
_FLAGS = ("reassoc", "nsz", "contract", "arcp")
_LANES = ir.Constant(_INTS, list(range(WIDTH)))
_ALIGNMENT = 4

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic

Emit = Callable[..., Any]
"""(builder, values of the arguments) -> value."""


class VectorType(types.Type):  # type: ignore[misc]  # numba has no types
    """How numba names a vector."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


VECTOR = VectorType()


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]  # numba has no types
    """How LLVM does."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _lanewise(result: Any, *arguments: Any) -> Callable[[Emit], Any]:
    """An intrinsic of so many vectors and scalars, of numba's types."""

    def made(emit: Emit) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return emit(builder, *values)

        if len(arguments) == 1:
            return intrinsic(lambda typing, a: (result(*arguments), generate))
        if len(arguments) == 2:
            return intrinsic(lambda typing, a, b: (result(*arguments), generate))
        return intrinsic(lambda typing, a, b, c: (result(*arguments), generate))

    return made


def _address(context: Any, builder: Any, kind: Any, pointer: Any, array: Any, offset: Any) -> Any:
    """Of array[offset], an array of numba's type `kind`, as an LLVM pointer."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), pointer)


def _same(builder: Any, value: Any, kind: Any = _FLOATS) -> Any:
    """A vector of equal lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, _INT(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * WIDTH))


def _below(builder: Any, count: Any) -> Any:
    """The mask of the first `count` lanes."""
    return builder.icmp_signed("<", _LANES, _same(builder, builder.trunc(count, _INT), _INTS))


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _fold(builder: Any, vector: Any, combine: Emit) -> Any:
    """All lanes combined into one number."""
    width = WIDTH
    while width > 1:
        width //= 2
        upper = [(lane + width) % WIDTH for lane in range(WIDTH)]
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, ir.Constant(_INTS, upper)))
    return builder.extract_element(vector, _INT(0))


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=_FLAGS)


@_intrinsic
def load(typing: Any, array: Any, offset: Any) -> Any:
    """array[offset:offset + WIDTH]"""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _address(context, builder, signature.args[0], _FLOATS.as_pointer(), *values)
        return builder.load(place, align=_ALIGNMENT)

    return VECTOR(array, types.intp), generate


@_intrinsic
def load_first(typing: Any, array: Any, offset: Any, count: Any) -> Any:
    """The same, but zero from lane `count` on, where nothing is read."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, count = values
        place = _address(context, builder, signature.args[0], _FLOATS.as_pointer(), array, offset)
        zeros, mask = ir.Constant(_FLOATS, [0.0] * WIDTH), _below(builder, count)
        name = f"llvm.masked.load.v{WIDTH}f32.p0"
        return _call(builder, name, _FLOATS, place, _INT(_ALIGNMENT), mask, zeros)

    return VECTOR(array, types.intp, types.intp), generate


@_intrinsic
def load_same(typing: Any, array: Any, offset: Any) -> Any:
    """array[offset] in every lane"""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _address(context, builder, signature.args[0], _FLOAT.as_pointer(), *values)
        return _same(builder, builder.load(place))

    return VECTOR(array, types.intp), generate


@_intrinsic
def store(typing: Any, array: Any, offset: Any, vector: Any) -> Any:
    """array[offset:offset + WIDTH] = vector"""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, vector = values
        place = _address(context, builder, signature.args[0], _FLOATS.as_pointer(), array, offset)
        builder.store(vector, place, align=_ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@_intrinsic
def store_first(typing: Any, array: Any, offset: Any, vector: Any, count: Any) -> Any:
    """The same for the first `count` lanes only."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        array, offset, vector, count = values
        place = _address(context, builder, signature.args[0], _FLOATS.as_pointer(), array, offset)
        name = f"llvm.masked.store.v{WIDTH}f32.p0"
        _call(builder, name, ir.VoidType(), vector, place, _INT(_ALIGNMENT), _below(builder, count))
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR, types.intp), generate


@_intrinsic
def prefetch(typing: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of array[offset], which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _address(context, builder, signature.args[0], _BYTES, *values)
        reading, keep, data = _INT(0), _INT(3), _INT(1)
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), place, reading, keep, data)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@_lanewise(VECTOR, types.float32)
def same(builder: Any, x: Any) -> Any:
    """The number in every lane."""
    return _same(builder, x)


@_lanewise(VECTOR, VECTOR, types.intp, types.float32)
def first(builder: Any, vector: Any, count: Any, x: Any) -> Any:
    """The vector, with the number in its lanes from `count` on."""
    return builder.select(_below(builder, count), vector, _same(builder, x))


@_lanewise(VECTOR, VECTOR)
def swap_pairs(builder: Any, vector: Any) -> Any:
    """Lanes 1, 0, 3, 2, and so on."""
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, [lane ^ 1 for lane in range(WIDTH)]))


@_lanewise(VECTOR, VECTOR, VECTOR)
def greater(builder: Any, a: Any, b: Any) -> Any:
    """The greater of each lane; that of b where one is not a number."""
    return _greater(builder, a, b)


@_lanewise(VECTOR, VECTOR)
def floor(builder: Any, vector: Any) -> Any:
    return _call(builder, f"llvm.floor.v{WIDTH}f32", _FLOATS, vector)


@_lanewise(VECTOR, VECTOR)
def power_of_two(builder: Any, whole: Any) -> Any:
    """2^whole, for whole numbers from -126 to 127."""
    exponent = builder.add(builder.fptosi(whole, _INTS), ir.Constant(_INTS, [127] * WIDTH))
    return builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * WIDTH)), _FLOATS)


@_lanewise(types.float32, VECTOR)
def total(builder: Any, vector: Any) -> Any:
    """The sum of all lanes."""
    return _fold(builder, vector, _sum)


@_lanewise(types.float32, VECTOR)
def largest(builder: Any, vector: Any) -> Any:
    """The greatest of all lanes."""
    return _fold(builder, vector, _greater)


def _define(instruction: str, *operations: Any) -> None:
    """Let compiled functions write the operations between vectors."""

    @_lanewise(VECTOR, VECTOR, VECTOR)
    def apply(builder: Any, a: Any, b: Any) -> Any:
        return getattr(builder, instruction)(a, b, flags=_FLAGS)

    def implementation(a, b):  # type: ignore[no-untyped-def]  # numba compares it with a lambda
        return apply(a, b)

    for operation in operations:
        overload(operation)(lambda a, b: implementation if a == b == VECTOR else None)


_define("fadd", operator.add, operator.iadd)
_define("fsub", operator.sub)
_define("fmul", operator.mul, operator.imul)
_define("fdiv", operator.truediv)


@kernel()
def exp(x: Any) -> Any:
    """exp of each lane, relative error (2 + |x|) * 1e-7, for results from 2^-126 to 2^126."""
    exponent = greater(same(float32(-126.0)), x * same(float32(1.44269504)))
    exponent = same(float32(0.0)) - greater(same(float32(-126.0)), same(float32(0.0)) - exponent)
    whole = floor(exponent)
    f = exponent - whole
    # 2^f on [0, 1): least relative error among polynomials of degree 6.
    p = same(float32(2.161292654e-4))
    p = p * f + same(float32(1.246784327e-3))
    p = p * f + same(float32(9.675451892e-3))
    p = p * f + same(float32(5.548528047e-2))
    p = p * f + same(float32(2.402293056e-1))
    p = p * f + same(float32(6.931470444e-1))
    return (p * f + same(float32(1.0))) * power_of_two(whole)
