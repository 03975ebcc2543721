"""The inner step of scoring as vector code: one unit's summary against all queries of a head.

LLVM vectors as wide as a row lower to the SIMD registers of any CPU. Written as numba loops the
same step takes three times as long: there each of a unit's short sums is added up on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

F32, I32, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
LANES = 16
LOG2E = 1.4426950408889634
CUT = 60.0 * LOG2E
"""Exponents of 2 are cut here: 512 of them sum to no infinity."""
POWERS = 1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558
"""2^f = sum POWERS[k] f^k for |f| <= 1/2, to 3e-6 of it."""
SUM = "contract", "reassoc", "nsz"


def query_floats(dim: int, rank: int, shared: bool) -> int:
    """Of a prepared query (`scoring`): itself; its weights of coordinates, or itself beside each
    direction; and what its sums begin with."""
    return dim + rank + 2 if shared else (rank + 1) * dim + 4 * rank + 1


@intrinsic(prefer_literal=True)
def unit_mass(
    context: Any,
    tokens: Any,
    dim: Any,
    rank: Any,
    shared: Any,
    group: Any,
    codes: Any,
    code: Any,
    scales: Any,
    scale: Any,
    queries: Any,
    means: Any,
    sums: Any,
    at: Any,
    stride: Any,
) -> Any:
    """Of each query: means[at + g * stride] = q.mu log2(e), and
    sums[at + g * stride] = sum_i exp(q.(what the summary says of k_i - mu)).

    Args:
        tokens, dim, rank, shared, group: of the `Layout`, and queries of a KV head; literals.
        codes, code: uint8 array, and where the unit's codes begin in it.
        scales, scale: float32 array, and where the unit's scales begin.
        queries: float32 [group][query_floats], prepared.
    """
    shape = tokens, dim, rank, shared, group
    if not all(isinstance(one, types.IntegerLiteral) for one in shape):
        return None
    sizes = [one.literal_value for one in shape]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _Shared if sizes.pop(3) else _Own
        arrays = [
            context.make_array(signature.args[n])(context, builder, args[n]).data
            for n in (5, 7, 9, 10, 11)
        ]
        kind(builder, *sizes, *arrays).generate(*(args[n] for n in (6, 8, 12, 13)))
        return context.get_dummy_value()

    place = types.intp
    arrays = codes, place, scales, place, queries, means, sums, place, place
    return types.none(*shape, *arrays), generate


class _Unit:
    """Vector code for one unit; a subclass has the deviations from the mean."""

    def __init__(
        self,
        builder: Any,
        tokens: int,
        dim: int,
        rank: int,
        group: int,
        codes: Any,
        scales: Any,
        queries: Any,
        means: Any,
        sums: Any,
    ) -> None:
        self.b, self.group = builder, group
        self.tokens, self.dim, self.rank = tokens, dim, rank
        self.codes, self.scales, self.queries = codes, scales, queries
        self.means, self.sums = means, sums

    shared: bool

    def exponents(self, codes: Any, scales: Any) -> list[Any]:
        """Of each query: log2(e) times what each token adds to q.mu."""
        raise NotImplementedError

    def generate(self, code: Any, scale: Any, at: Any, stride: Any) -> None:
        b = self.b
        codes, scales = b.gep(self.codes, [code]), b.gep(self.scales, [scale])
        means, exponents = self._means(codes), self.exponents(codes, scales)
        for g in range(self.group):
            place = b.add(at, b.mul(stride, stride.type(g)))
            found = b.fmul(b.fmul(means[g], b.load(scales)), F32(LOG2E))
            b.store(found, b.gep(self.means, [place]))
            b.store(self._sum(self._exp2(exponents[g])), b.gep(self.sums, [place]))

    def _means(self, codes: Any) -> list[Any]:
        """q.mu of each query, less its scale."""
        b, dim, found = self.b, self.dim, []
        parts = self._row(codes, 0, dim)
        for g in range(self.group):
            total = None
            for at, values in parts:
                total = self._plus(total, values, self._query(g, at, values.type.count))
            start = self._number(g, query_floats(dim, self.rank, self.shared) - 1)
            found.append(b.fadd(self._sum(total), start))
        return found

    def _row(self, codes: Any, first: int, length: int) -> list[tuple[int, Any]]:
        """Codes of a row as floats, by position."""
        half, found = length // 2, []
        for at in range(0, half, LANES):
            lanes = min(LANES, half - at)
            low, high = self._halves(codes, first + at, lanes)
            found += [(at, low), (half + at, high)]
        return found

    def _halves(self, codes: Any, first: int, lanes: int) -> tuple[Any, Any]:
        """Low and high halves of so many bytes, as floats from 0 to 15."""
        b, wide = self.b, ir.VectorType(I32, lanes)
        begin = b.gep(codes, [I32(first)])
        pointer = b.bitcast(begin, ir.VectorType(I8, lanes).as_pointer())
        both = b.zext(b.load(pointer, align=1), wide)
        low, high = b.and_(both, wide([15] * lanes)), b.lshr(both, wide([4] * lanes))
        floats = ir.VectorType(F32, lanes)
        return b.sitofp(low, floats), b.sitofp(high, floats)

    def _query(self, g: int, at: int, lanes: int) -> Any:
        vector = ir.VectorType(F32, lanes)
        return self.b.load(self.b.bitcast(self._place(g, at), vector.as_pointer()), align=4)

    def _number(self, g: int, at: int) -> Any:
        return self.b.load(self._place(g, at))

    def _place(self, g: int, at: int) -> Any:
        floats = query_floats(self.dim, self.rank, self.shared)
        return self.b.gep(self.queries, [I32(g * floats + at)])

    def _plus(self, total: Any, a: Any, b: Any) -> Any:
        product = self.b.fmul(a, b, flags=SUM)
        return product if total is None else self.b.fadd(total, product, flags=SUM)

    def _all(self, value: Any, lanes: int) -> Any:
        vector = ir.VectorType(F32, lanes)
        first = self.b.insert_element(vector(ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(
            first, vector(ir.Undefined), ir.VectorType(I32, lanes)([0] * lanes)
        )

    def _shuffled(self, vector: Any, order: Sequence[int]) -> Any:
        mask = ir.VectorType(I32, len(order))(list(order))
        return self.b.shuffle_vector(vector, vector.type(ir.Undefined), mask)

    def _sum(self, vector: Any) -> Any:
        function = self._function("vector.reduce.fadd", F32, [F32, vector.type])
        return self.b.call(function, [F32(0.0), vector], fastmath=("reassoc",))

    def _function(self, name: str, result: Any, args: Sequence[Any]) -> Any:
        """An LLVM intrinsic, overloaded by the type of its last argument."""
        full, module = f"llvm.{name}.v{args[-1].count}f32", self.b.module
        return module.globals.get(full) or ir.Function(
            module, ir.FunctionType(result, list(args)), full
        )

    def _exp2(self, x: Any) -> Any:
        b, lanes = self.b, self.tokens
        wide, whole = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        for limit, less in ((CUT, "<"), (-CUT, ">")):
            bound = wide([limit] * lanes)
            x = b.select(b.fcmp_ordered(less, x, bound), x, bound)
        nearest = b.call(self._function("rint", wide, [wide]), [x])
        f = b.fsub(x, nearest)
        power = wide([POWERS[-1]] * lanes)
        for factor in POWERS[-2::-1]:
            power = self._plus(wide([factor] * lanes), power, f)
        bits = b.shl(b.fptosi(nearest, whole), whole([23] * lanes))
        return b.bitcast(b.add(b.bitcast(power, whole), bits), wide)


class _Own(_Unit):
    """Directions of the unit's own."""

    shared = False

    def exponents(self, codes: Any, scales: Any) -> list[Any]:
        b, dim, rank = self.b, self.dim, self.rank
        along = self._along(codes, dim // 2)
        coefficients = self._coefficients(codes, (rank + 1) * dim // 2)
        found = []
        for g in range(self.group):
            exponent = None
            for j in range(rank):
                factor = b.fmul(b.load(b.gep(scales, [I32(1 + j)])), F32(LOG2E))
                weight = b.fmul(b.extract_element(along[g], I32(4 * j)), factor)
                exponent = self._plus(exponent, coefficients[j], self._all(weight, self.tokens))
            found.append(exponent)
        return found

    def _along(self, codes: Any, first: int) -> list[Any]:
        """q.V_j of each query, less its scale, in lanes 4 j to 4 j + 3."""
        b, dim, rank, lanes = self.b, self.dim, self.rank, 4 * self.rank
        begin = (rank + 1) * dim
        totals = [self._query(g, begin, lanes) for g in range(self.group)]
        for step in range(dim // 8):
            low, high = self._halves(codes, first + step * lanes, lanes)
            for values, at in ((low, step), (high, step + dim // 8)):
                for g in range(self.group):
                    query = self._query(g, dim + at * lanes, lanes)
                    totals[g] = self._plus(totals[g], values, query)
        for g in range(self.group):
            for by in (1, 2):
                order = [4 * (n // 4) + (n % 4 ^ by) for n in range(lanes)]
                totals[g] = b.fadd(totals[g], self._shuffled(totals[g], order), flags=SUM)
        return totals

    def _coefficients(self, codes: Any, first: int) -> list[Any]:
        found = []
        for j in range(self.rank):
            low, high = self._halves(codes, first + j * self.tokens // 2, self.tokens // 2)
            order = list(range(self.tokens))
            values = self.b.shuffle_vector(low, high, ir.VectorType(I32, len(order))(order))
            found.append(self.b.fsub(values, self._all(F32(8.0), self.tokens)))
        return found


class _Shared(_Unit):
    """Coordinates in a basis: what they weigh is the same for all units."""

    shared = True

    def exponents(self, codes: Any, scales: Any) -> list[Any]:
        dim, rank, tokens = self.dim, self.rank, self.tokens
        start = dim + rank
        found = [self._all(self._number(g, start), tokens) for g in range(self.group)]
        for j in range(rank // 2):
            low, high = self._halves(codes, dim // 2 + j * tokens, tokens)
            for values, row in ((low, j), (high, rank // 2 + j)):
                for g in range(self.group):
                    weight = self._all(self._number(g, dim + row), tokens)
                    found[g] = self._plus(found[g], values, weight)
        wider = self._all(self.b.load(self.b.gep(scales, [I32(1)])), tokens)
        return [self.b.fmul(one, wider) for one in found]
