"""The searches behind the K-quants, sixteen sub-blocks at a time, one in each lane.

A sub-block of n values is fitted by levels 0..top with a scale and an offset (`affine`), or by levels -half..half-1
with a scale (`symmetric` tries scales, `descent` changes one level at a time). Every sum runs over the values of a
sub-block in order, in float32, as in the reference quantisers of ggml (make_qkx2_quants, make_qx_quants,
make_q3_quants); a different order would give other bits.
"""

# mypy: ignore-errors
from __future__ import annotations

from .lanes import F32, I64, Cell, Column, Lanes, loop

TINY = 1e-15  # a sub-block without a larger magnitude counts as zero


def count(b, n):
    """An emitted loop of n rounds."""
    return loop(b, I64(0), I64(n))


def as_float(b, i):
    """A loop counter as a scalar float."""
    return Lanes(b, b.sitofp(i, F32))


def affine(x, weights, top, first, step, tries, absolute):
    """Scale, offset below zero (as a positive number) and levels of least weighted error.

    Candidates stretch the range over top + first + step * k levels, k = 0..tries. The offset a candidate settles on is
    where the next one starts from.
    """
    b, n = x.b, x.n
    low, high = Cell(x[0]), Cell(x[0])
    weight_sum = Cell(weights[0])
    weighted = Cell(weights[0] * x[0])
    with loop(b, I64(1), I64(n)) as i:
        v, w = x[i], weights[i]
        low.set(v.where(v < low.get(), low.get()))
        high.set(v.where(v > high.get(), high.get()))
        weight_sum.add(w)
        weighted.add(w * v)
    low.set(low.get().like(0.0).where(low.get() > 0.0, low.get()))
    sum_w, sum_x, high = weight_sum.get(), weighted.get(), high.get()
    flat = high.equals(low.get())

    def deviation(level, scale, offset, v, w):
        diff = scale * level + offset - v
        return w * (diff.abs() if absolute else diff * diff)

    def level(inverse, offset, v):
        return (inverse * (v - offset)).nearest().at_most(top).at_least(0)

    inverse = high.like(float(top)) / (high - low.get())
    scale = Cell(inverse.like(1.0) / inverse)
    best = Cell(inverse.like(0.0))
    with count(b, n) as i:
        best.add(deviation(level(inverse, low.get(), x[i]).to_float(), scale.get(), low.get(), x[i], weights[i]))
    best_inverse, best_low = Cell(inverse), Cell(low.get())

    levels = Column(b, n)
    with count(b, tries + 1) as k:
        stretch = as_float(b, k) * step + first + float(top)
        inverse, start = high.like(stretch) / (high - low.get()), low.get()
        sum_l, sum_l2, sum_xl = (Cell(high.like(0.0)) for _ in range(3))
        with count(b, n) as i:
            v, w = x[i], weights[i]
            levels[i] = q = level(inverse, start, v).to_float()
            wq = w * q
            sum_l.add(wq)
            sum_l2.add(wq * q)
            sum_xl.add(wq * v)
        l1, l2, xl = sum_l.get(), sum_l2.get(), sum_xl.get()
        determinant = sum_w * l2 - l1 * l1
        this_scale = (sum_w * xl - sum_x * l1) / determinant
        this_low = (l2 * sum_x - l1 * xl) / determinant
        above = this_low > 0.0
        this_low = this_low.like(0.0).where(above, this_low)
        this_scale = (xl / l2).where(above, this_scale)
        error = Cell(high.like(0.0))
        with count(b, n) as i:
            error.add(deviation(levels[i], this_scale, this_low, x[i], weights[i]))
        better = (determinant > 0.0) & (error.get() < best.get())
        best.set(error.get().where(better, best.get()))
        best_inverse.set(inverse.where(better, best_inverse.get()))
        best_low.set(start.where(better, best_low.get()))
        scale.set(this_scale.where(better, scale.get()))
        low.set(this_low.where(better, start))

    result = [level(best_inverse.get(), best_low.get(), x[i]) for i in range(n)]
    result = [q.like(0).where(flat, q) for q in result]
    below = Lanes(b, b.fneg(low.get().v))
    return high.like(0.0).where(flat, scale.get()), below, result


def largest(x):
    """The value of largest magnitude of each lane, the first of several, and that magnitude."""
    size, value = Cell(x[0].like(0.0)), Cell(x[0].like(0.0))
    with count(x.b, x.n) as i:
        v = x[i]
        larger = v.abs() > size.get()
        size.set(v.abs().where(larger, size.get()))
        value.set(v.where(larger, value.get()))
    return value.get(), size.get()


def level_of(v, inverse, half):
    """Nearest of the levels -half..half-1."""
    return (inverse * v).nearest().at_most(half - 1).at_least(-half)


def sums(x, inverse, half, levels=None):
    """Sums of w * x * level and w * level**2, the weight being x**2; the levels too if a place for them is given."""
    products, squares = Cell(x[0].like(0.0)), Cell(x[0].like(0.0))
    with count(x.b, x.n) as i:
        v = x[i]
        q = level_of(v, inverse, half).to_float()
        w = v * v
        products.add(w * v * q)
        squares.add(w * q * q)
        if levels is not None:
            levels[i] = q
    return products, squares


def symmetric(x, half):
    """Scale and levels, from 0, of the best of 19 scales around the one that maps the largest magnitude to -half."""
    b, n = x.b, x.n
    value, size = largest(x)
    inverse = value.like(float(-half)) / value
    products, squares = sums(x, inverse, half)
    p, s = products.get(), squares.get()
    scale = Cell((p / s).where(s.differs(0.0), 0.0))
    best, best_inverse = Cell(scale.get() * p), Cell(inverse)
    with count(b, 18) as k:
        offset = b.sub(k, b.select(b.icmp_signed("<", k, I64(9)), I64(9), I64(8)))  # -9..-1, 1..9
        stretch = as_float(b, offset) * 0.1 + float(half)
        inverse = value.like(Lanes(b, b.fneg(stretch.v))) / value
        products, squares = sums(x, inverse, half)
        p, s = products.get(), squares.get()
        better = (s > 0.0) & (p * p > best.get() * s)
        scale.set((p / s).where(better, scale.get()))
        best.set((scale.get() * p).where(better, best.get()))
        best_inverse.set(inverse.where(better, best_inverse.get()))
    zero = size < TINY
    result = [(level_of(x[i], best_inverse.get(), half) + half) for i in range(n)]
    return scale.get().like(0.0).where(zero, scale.get()), [q.like(0).where(zero, q) for q in result]


def descent(x, half):
    """Scale and levels, from 0: five rounds over the values, each moving to the level that fits the others best."""
    b, n = x.b, x.n
    value, size = largest(x)
    levels = Column(b, n)
    products, squares = sums(x, value.like(float(-half)) / value, half, levels)
    with count(b, 5), count(b, n) as i:
        v, q, p, s = x[i], levels[i], products.get(), squares.get()
        w = v * v
        without_p, without_s = p - w * v * q, s - w * q * q
        new = (v * without_s / without_p).nearest().at_most(half - 1).at_least(-half).to_float()
        new_p, new_s = without_p + w * v * new, without_s + w * new * new
        better = (without_p > 0.0) & new.differs(q) & (new_s > 0.0) & (new_p * new_p * s > p * p * new_s)
        levels[i] = new.where(better, q)
        products.set(new_p.where(better, p))
        squares.set(new_s.where(better, s))
    p, s = products.get(), squares.get()
    zero = size < TINY
    scale = (p / s).where(s > 0.0, 0.0)
    result = [levels[i].to_int() + half for i in range(n)]
    return scale.like(0.0).where(zero, scale), [q.like(0).where(zero, q) for q in result]
