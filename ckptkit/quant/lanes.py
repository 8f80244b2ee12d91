"""Sixteen float32 or int32 values at a time: LLVM IR, through llvmlite, for the inner loops of the encoders.

A sum must run in the reference's order to give its bits, so a compiler may not vectorise it. Putting sixteen blocks
side by side, one in each lane, keeps the order within each block and still fills the register. `Lanes` carries a vector
value and emits one instruction an operator; a Python loop over Lanes is an unrolled loop, `loop` emits a real one. No
operation is marked fast or contractible: each rounds once, as the reference does when compiled without fused
multiply-add.
"""

# mypy: ignore-errors

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import llvmlite.binding as llvm
from llvmlite import ir

N = 16
F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer, ties to even, in the low mantissa bits


class Lanes:
    """A vector of `N` values of one scalar type, or a single scalar, and the builder that emits operations on it."""

    __slots__ = ("b", "v")

    def __init__(self, b: ir.IRBuilder, v: ir.Value):
        self.b, self.v = b, v

    @property
    def scalar(self):
        """LLVM type of one lane."""
        return self.v.type.element if isinstance(self.v.type, ir.VectorType) else self.v.type

    def like(self, other):
        """A Python number, or a scalar beside a vector, as a value of this one's shape."""
        vector = isinstance(self.v.type, ir.VectorType)
        if not isinstance(other, Lanes):
            one = ir.Constant(self.scalar, other)
            return Lanes(self.b, ir.Constant(self.v.type, [one] * N) if vector else one)
        if vector and not isinstance(other.v.type, ir.VectorType):
            first = self.b.insert_element(ir.Constant(ir.VectorType(other.v.type, N), ir.Undefined), other.v, I32(0))
            zeros = ir.Constant(ir.VectorType(I32, N), [I32(0)] * N)
            return Lanes(self.b, self.b.shuffle_vector(first, first, zeros))
        return other

    def _op(self, other, for_float, for_int):
        name = for_int if isinstance(self.scalar, ir.IntType) else for_float
        return Lanes(self.b, getattr(self.b, name)(self.v, self.like(other).v))

    def __add__(self, o):
        return self._op(o, "fadd", "add")

    def __sub__(self, o):
        return self._op(o, "fsub", "sub")

    def __mul__(self, o):
        return self._op(o, "fmul", "mul")

    def __truediv__(self, o):
        return self._op(o, "fdiv", "sdiv")

    def __and__(self, o):
        return self._op(o, "and_", "and_")

    def __or__(self, o):
        return self._op(o, "or_", "or_")

    def __lshift__(self, o):
        return self._op(o, "shl", "shl")

    def __rshift__(self, o):
        return self._op(o, "lshr", "lshr")

    def _compare(self, sign, other):
        other = self.like(other)
        if isinstance(self.scalar, ir.IntType):
            emit = self.b.icmp_signed
        else:
            emit = self.b.fcmp_unordered if sign == "!=" else self.b.fcmp_ordered
        return Lanes(self.b, emit(sign, self.v, other.v))

    def __lt__(self, o):
        return self._compare("<", o)

    def __gt__(self, o):
        return self._compare(">", o)

    def equals(self, o):
        """Lane by lane: ordered and equal."""
        return self._compare("==", o)

    def differs(self, o):
        """Lane by lane: not equal, or unordered, as C's `!=`."""
        return self._compare("!=", o)

    def where(self, mask, other):
        """This value where the mask is set, the other elsewhere."""
        return Lanes(self.b, self.b.select(mask.v, self.v, self.like(other).v))

    def mask(self):
        """Lane by lane all bits for true, none for false: what comparing leaves in a register, while 0 or 1 costs."""
        return Lanes(self.b, self.b.sext(self.v, ir.VectorType(I32, N)))

    def bits(self):
        """The same bits as integers."""
        return Lanes(self.b, self.b.bitcast(self.v, _shape(self.v.type, I32)))

    def from_bits(self):
        """The same bits as floats."""
        return Lanes(self.b, self.b.bitcast(self.v, _shape(self.v.type, F32)))

    def to_float(self):
        """Signed integers as floats."""
        return Lanes(self.b, self.b.sitofp(self.v, _shape(self.v.type, F32)))

    def to_int(self):
        """Floats as integers, towards zero; out of range is 0x80000000 on x86, which the reference relies on."""
        return Lanes(self.b, self.b.fptosi(self.v, _shape(self.v.type, I32)))

    def as_int8(self):
        """Low byte of each integer, sign-extended again: C's `(int8_t)`."""
        return Lanes(self.b, self.b.ashr((self << 24).v, self.like(24).v))

    def abs(self):
        """Floats without their sign."""
        return (self.bits() & 0x7FFFFFFF).from_bits()

    def at_most(self, limit):
        """The smaller of two integers."""
        return self.where(self < limit, limit)

    def at_least(self, limit):
        """The larger of two integers."""
        return self.where(self > limit, limit)

    def nearest(self):
        """Floats to the nearest integer, ties to even; beyond 2**22, what the reference's bit trick makes of it."""
        return ((self + MAGIC).bits() & 0x007FFFFF) - 0x00400000

    def call(self, name):
        """A one-argument LLVM intrinsic of the same type: llvm.sqrt, llvm.round."""
        suffix = f"v{N}f32" if isinstance(self.v.type, ir.VectorType) else "f32"
        return self._declared(f"{name}.{suffix}", self.v.type)

    def reduce(self, name):
        """An LLVM reduction over integer lanes, in any order: smax, smin, or."""
        return self._declared(f"llvm.vector.reduce.{name}.v{N}i32", I32)

    def _declared(self, name, returns):
        module = self.b.module
        f = module.globals.get(name) or ir.Function(module, ir.FunctionType(returns, [self.v.type]), name)
        return Lanes(self.b, self.b.call(f, [self.v]))

    def squared(self):
        """Squares in float64, so that millions of them can be added."""
        wide = self.b.fpext(self.v, ir.VectorType(F64, N))
        return Lanes(self.b, self.b.fmul(wide, wide))

    def bytes_to(self, at, width=I8):
        """Store the low byte (or 16 bits) of each integer lane at an address."""
        store(self.b, self.b.trunc(self.v, ir.VectorType(width, N)), at)

    def half(self):
        """Floats to the 16 bits of an IEEE half in an integer: ties to even, overflow to infinity, NaN quiet."""
        bits = self.bits()
        size = bits & 0x7FFFFFFF
        normal = (size + 0xFFF + ((size >> 13) & 1) - 0x38000000) >> 13
        small = (
            size.from_bits() + 0.5
        ).bits() - 0x3F000000  # one ulp of 0.5 is the smallest half: the sum rounds to it
        h = small.where(size < 0x38800000, normal)
        h = h.like(0x7C00).where(size > 0x477FEFFF, h)
        h = h.like(0x7E00).where(size > 0x7F800000, h)
        return h | ((bits >> 16) & 0x8000)

    def half_to(self, at):
        """Store this scalar as a half, two bytes, at an address; gives what it decodes to."""
        h = self.half()
        store(self.b, self.b.trunc(h.v, I16), at)
        return from_half(h)


def _shape(like, scalar):
    return ir.VectorType(scalar, N) if isinstance(like, ir.VectorType) else scalar


def address(b, base, index):
    """Pointer `index` elements (an LLVM value or a Python int) beyond `base`."""
    return b.gep(base, [index if isinstance(index, ir.Value) else I64(index)])


def load(b, at, scalar=F32):
    """`N` consecutive numbers from an address of any alignment."""
    pointer = b.bitcast(at, ir.VectorType(scalar, N).as_pointer())
    return Lanes(b, b.load(pointer, align=4, typ=ir.VectorType(scalar, N)))


def load_one(b, at):
    """One float as a scalar."""
    return Lanes(b, b.load(at, align=4, typ=F32))


def store(b, value, at):
    """A value of any type at an address of any alignment."""
    b.store(value, b.bitcast(at, value.type.as_pointer()), align=1)


@contextmanager
def loop(b: ir.IRBuilder, lo: ir.Value, hi: ir.Value, name: str = "i") -> Iterator[ir.Value]:
    """Emit what the with-body emits once for each lo <= i < hi; gives i."""
    before = b.block
    head = b.append_basic_block(name)
    body = b.append_basic_block(name + ".body")
    done = b.append_basic_block(name + ".done")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(lo.type, name)
    i.add_incoming(lo, before)
    b.cbranch(b.icmp_signed("<", i, hi), body, done)
    b.position_at_end(body)
    yield i
    i.add_incoming(b.add(i, lo.type(1)), b.block)
    b.branch(head)
    b.position_at_end(done)


def transposed(b, rows):
    """`N` vectors of `N` values with lanes and rows exchanged: four rounds of pairwise shuffles."""
    rows = [r.v for r in rows]
    for s in (8, 4, 2, 1):
        left = ir.Constant(ir.VectorType(I32, N), [I32(N + k - s if k & s else k) for k in range(N)])
        right = ir.Constant(ir.VectorType(I32, N), [I32(N + k if k & s else k + s) for k in range(N)])
        for i in range(N):
            if not i & s:
                a, c = rows[i], rows[i + s]
                rows[i], rows[i + s] = b.shuffle_vector(a, c, left), b.shuffle_vector(a, c, right)
    return [Lanes(b, r) for r in rows]


def from_half(h):
    """Integers holding the bits of an IEEE half to floats."""
    size = (h & 0x7FFF) << 13
    finite = (size.from_bits() * 2.0**112).bits()  # exact, subnormal halves included
    bits = (size | 0x7F800000).where((h & 0x7C00).equals(0x7C00), finite)
    return (bits | ((h & 0x8000) << 16)).from_bits()


class Cell:
    """A value that changes while emitted loops run."""

    __slots__ = ("at", "b")

    def __init__(self, value):
        self.b = value.b
        with self.b.goto_entry_block():
            self.at = self.b.alloca(value.v.type)
        self.set(value)

    def get(self):
        """The value now."""
        return Lanes(self.b, self.b.load(self.at))

    def set(self, value):
        """Change it."""
        self.b.store(value.v, self.at)

    def add(self, value):
        """Add to it, rounding once."""
        self.set(self.get() + value)


class Column:
    """`n` vectors in memory that an emitted loop can index."""

    __slots__ = ("at", "b", "n")

    def __init__(self, b, n, scalar=F32):
        self.b, self.n = b, n
        with b.goto_entry_block():
            self.at = b.alloca(ir.VectorType(scalar, N), size=I64(n))

    def __getitem__(self, i):
        return Lanes(self.b, self.b.load(address(self.b, self.at, i)))

    def __setitem__(self, i, value):
        self.b.store(value.v, address(self.b, self.at, i))


def record(errors, pairs):
    """Add what encoding made of some values, (value, stored) pairs, to the record at an address: 16 N bytes.

    One a lane of float64 sums of squares, then of float32 largest magnitudes, then of int32 counts of the lost: values
    other than 0 that are stored as 0.
    """
    b = pairs[0][0].b
    worst, squares, lost = None, None, None
    for value, stored in pairs:
        error = stored - value
        size, square = error.abs().bits(), error.squared()
        zeroed = value.differs(0.0).mask() & stored.equals(0.0).mask()
        worst = size if worst is None else worst.at_least(size)
        squares = square if squares is None else squares + square
        lost = zeroed if lost is None else lost + zeroed  # -1 for each
    store(b, (load(b, errors, F64) + squares).v, errors)
    at = address(b, errors, 8 * N)
    store(b, load(b, at, I32).at_least(worst).v, at)
    at = address(b, errors, 12 * N)
    store(b, (load(b, at, I32) - lost).v, at)


class Code:
    """A module as machine code for this processor, made by a thread of its own while its maker goes on."""

    def __init__(self, module: ir.Module):
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        self.engine = llvm.create_mcjit_compiler(parsed, machine)
        self.making = Thread(target=self.engine.finalize_object, name="LLVM")
        self.making.start()

    def function(self, name, returns, *arguments):
        """A function of the module for ctypes, which lets other threads run; waits until it is made."""
        self.making.join()
        call = ctypes.CFUNCTYPE(returns, *arguments)(self.engine.get_function_address(name))
        call.engine = self.engine  # the code lives as long as its engine
        return call
