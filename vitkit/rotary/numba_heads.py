"""One head of the rotary embedding as LLVM vectors, for numba: what `numba_kernels` calls in its loops.

numba's arrays hide the unit stride and the absence of aliasing from LLVM's vectoriser, so a head is written as
vectors, in LLVM's own instructions: a block reads its lanes of both halves before it writes either, hence in place is
the same code. bf16 and fp16 are loaded and stored as 16-bit integers and converted here, since numba has no fp16 on
the CPU: every conversion to float32 is exact, and those from it round to nearest even.
"""

import llvmlite.binding
import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# How values lie in memory. FLOAT16_F16C is FLOAT16 on an x86 CPU that converts by itself: same bits, 4 times faster.
FLOAT32, BFLOAT16, FLOAT16, FLOAT16_F16C = 0, 1, 2, 3
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
# numba compiles for this CPU, unless told to compile for another one
_HOST = numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None
if _HOST and llvmlite.binding.get_host_cpu_features().get("f16c"):
    KINDS[torch.float16] = FLOAT16_F16C


def _splat(lanes, value):
    return ir.Constant(ir.VectorType(ir.IntType(32), lanes), [value] * lanes)


def _memory(builder, address, kind, lanes):
    """Typed pointer and alignment: an element's, since a storage offset may be odd."""
    vector = ir.VectorType(ir.IntType(32 if kind == FLOAT32 else 16), lanes)
    return builder.inttoptr(address, vector.as_pointer()), 4 if kind == FLOAT32 else 2


def _load(builder, address, kind, lanes):
    """`lanes` float32 values from memory of the given kind; every conversion is exact."""
    f32, i32 = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(32), lanes)
    pointer, align = _memory(builder, address, kind, lanes)
    bits = builder.load(pointer, align=align)
    if kind == FLOAT32:
        return builder.bitcast(bits, f32)
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(bits, i32), _splat(lanes, 16)), f32)
    if kind == FLOAT16_F16C:
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), f32)
    # The sign on top, exponent and mantissa in float32's places; the exponent is still 127 - 15 too low.
    narrow = builder.and_(builder.shl(builder.sext(bits, i32), _splat(lanes, 13)), _splat(lanes, 0x8FFFE000))
    exponent = builder.and_(narrow, _splat(lanes, 0xFF << 23))
    wide = builder.add(narrow, _splat(lanes, 112 << 23))
    special = builder.icmp_unsigned("==", exponent, _splat(lanes, 31 << 23))  # infinity or NaN
    wide = builder.select(special, builder.or_(narrow, _splat(lanes, 0xFF << 23)), wide)
    # Subnormal: m * 2^-24 is (1 + m / 2^10) * 2^-14 - 2^-14, which needs no subnormal float32 on the way.
    shifted = builder.add(narrow, _splat(lanes, 113 << 23))
    power = builder.and_(shifted, _splat(lanes, 0xFF800000))
    small = builder.bitcast(builder.fsub(builder.bitcast(shifted, f32), builder.bitcast(power, f32)), i32)
    small = builder.or_(small, builder.and_(narrow, _splat(lanes, 1 << 31)))  # -0 keeps its sign
    wide = builder.select(builder.icmp_unsigned("==", exponent, _splat(lanes, 0)), small, wide)
    return builder.bitcast(wide, f32)


def _store(builder, value, address, kind, lanes):
    """float32 values to memory of the given kind, rounded to nearest even; NaN stays a (quiet) NaN."""
    f32, i32 = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(32), lanes)
    pointer, align = _memory(builder, address, kind, lanes)
    bits = builder.bitcast(value, i32)
    nan = builder.fcmp_unordered("uno", value, value)
    if kind == BFLOAT16:
        # Just under half of a last place, plus the last place itself: a carry exactly where nearest even rounds up.
        odd = builder.and_(builder.lshr(bits, _splat(lanes, 16)), _splat(lanes, 1))
        rounded = builder.add(builder.add(bits, _splat(lanes, 0x7FFF)), odd)
        rounded = builder.select(nan, builder.or_(bits, _splat(lanes, 0x400000)), rounded)
        bits = builder.lshr(rounded, _splat(lanes, 16))
    elif kind == FLOAT16:
        sign = builder.and_(builder.lshr(bits, _splat(lanes, 16)), _splat(lanes, 0x8000))
        magnitude = builder.and_(bits, _splat(lanes, 0x7FFFFFFF))
        # From 65536 on, all is cut to 65536, which becomes infinity below; 65520 up to 65536 is carried there.
        most = _splat(lanes, 143 << 23)
        magnitude = builder.select(builder.icmp_unsigned("<", magnitude, most), magnitude, most)
        odd = builder.and_(builder.lshr(magnitude, _splat(lanes, 13)), _splat(lanes, 1))
        rebiased = builder.add(magnitude, _splat(lanes, 0xFFF - (112 << 23)))
        rounded = builder.lshr(builder.add(rebiased, odd), _splat(lanes, 13))
        # Below 2^-14: adding 0.5 leaves the value in units of 2^-24, rounded by the adder, in the low mantissa bits.
        half = _splat(lanes, 126 << 23)
        small = builder.fadd(builder.bitcast(magnitude, f32), builder.bitcast(half, f32))
        small = builder.sub(builder.bitcast(small, i32), half)
        rounded = builder.select(builder.icmp_unsigned("<", magnitude, _splat(lanes, 113 << 23)), small, rounded)
        bits = builder.or_(builder.select(nan, _splat(lanes, 0x7E00), rounded), sign)
    elif kind == FLOAT16_F16C:
        bits = builder.bitcast(builder.fptrunc(value, ir.VectorType(ir.HalfType(), lanes)), pointer.type.pointee)
    if kind in (BFLOAT16, FLOAT16):
        bits = builder.trunc(bits, pointer.type.pointee)
    builder.store(bits, pointer, align=align)


def _for_each_block(builder, count, emit):
    """Loops over `count` elements, 16 at a time, then what is left 8, 4 and 1 at a time: emit(first element, lanes)."""
    done = count.type(0)
    for lanes in (16, 8, 4, 1):
        blocks = builder.udiv(builder.sub(count, done), count.type(lanes))
        with cgutils.for_range(builder, blocks) as loop:
            emit(builder.add(done, builder.mul(loop.index, count.type(lanes))), lanes)
        done = builder.add(done, builder.mul(blocks, count.type(lanes)))


@intrinsic(prefer_literal=True)
def rotate_head(typingctx, kind, half, x, out, cos, sin):
    """One head from address x to address out (which may be x); cos and sin are addresses of D/2 float32."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    form = kind.literal_value
    size = 4 if form == FLOAT32 else 2

    def codegen(context, builder, signature, args):
        half, x, out, cos, sin = args[1:]

        def at(base, i, size):
            return builder.add(base, builder.mul(i, i.type(size)))

        def block(i, lanes):
            upper = builder.add(i, half)
            x1, x2 = _load(builder, at(x, i, size), form, lanes), _load(builder, at(x, upper, size), form, lanes)
            c, s = _load(builder, at(cos, i, 4), FLOAT32, lanes), _load(builder, at(sin, i, 4), FLOAT32, lanes)
            # a - b is the same float as a + (-b)
            out1 = builder.fsub(builder.fmul(x1, c), builder.fmul(x2, s))
            out2 = builder.fadd(builder.fmul(x2, c), builder.fmul(x1, s))
            _store(builder, out1, at(out, i, size), form, lanes)
            _store(builder, out2, at(out, upper, size), form, lanes)

        _for_each_block(builder, half, block)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Asks for the cache line at an address, which need not be one that can be read: nothing else happens."""

    def codegen(context, builder, signature, args):
        pointer, i32 = builder.inttoptr(args[0], ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, i32(0), i32(3), i32(1)])  # to read, soon used again, data
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def widen(typingctx, kind, count, source, target):
    """`count` values of a 16-bit kind at one address to float32 at another."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    form = kind.literal_value

    def codegen(context, builder, signature, args):
        count, source, target = args[1:]

        def block(i, lanes):
            value = _load(builder, builder.add(source, builder.mul(i, i.type(2))), form, lanes)
            _store(builder, value, builder.add(target, builder.mul(i, i.type(4))), FLOAT32, lanes)

        _for_each_block(builder, count, block)
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.int64, types.int64), codegen
