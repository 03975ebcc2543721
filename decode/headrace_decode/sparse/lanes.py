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

from headrace_decode.sparse.layout import Layout

F32, I32, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
LANES = 16
LOG2E = 1.4426950408889634
CUT = 60.0 * LOG2E
"""Exponents of 2 are cut here: 512 of them sum to no infinity."""
POWERS = 1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558
"""2^f = sum POWERS[k] f^k for |f| <= 1/2, to 3e-6 of it."""
SUM = "contract", "reassoc", "nsz"


def query_floats(layout: Layout) -> int:
    """Of a prepared query (`scoring`): itself; its weights of coordinates; itself beside each own
    direction; and what the sums of coordinates and of all others begin with."""
    return layout.head_dim + layout.coordinates + layout.rank * layout.head_dim + 2


@intrinsic(prefer_literal=True)
def unit_mass(
    context: Any,
    tokens: Any,
    dim: Any,
    rank: Any,
    coordinates: Any,
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
        tokens, dim, rank, coordinates, group: of the `Layout`, and queries of a KV head; literals.
        codes, code: uint8 array, and where the unit's codes begin in it.
        scales, scale: float32 array, and where the unit's scales begin.
        queries: float32 [group][query_floats], prepared.
    """
    shape = tokens, dim, rank, coordinates, group
    if not all(isinstance(one, types.IntegerLiteral) for one in shape):
        return None
    *sizes, queries_of_head = (one.literal_value for one in shape)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(signature.args[n])(context, builder, args[n]).data
            for n in (5, 7, 9, 10, 11)
        ]
        unit = _Unit(builder, Layout(*sizes), queries_of_head, *arrays)
        unit.generate(*(args[n] for n in (6, 8, 12, 13)))
        return context.get_dummy_value()

    place = types.intp
    arrays = codes, place, scales, place, queries, means, sums, place, place
    return types.none(*shape, *arrays), generate


class _Unit:
    """Vector code for one unit."""

    def __init__(
        self,
        builder: Any,
        layout: Layout,
        group: int,
        codes: Any,
        scales: Any,
        queries: Any,
        means: Any,
        sums: Any,
    ) -> None:
        self.b, self.layout, self.group = builder, layout, group
        self.codes, self.scales, self.queries = codes, scales, queries
        self.means, self.sums = means, sums

    def generate(self, code: Any, scale: Any, at: Any, stride: Any) -> None:
        b = self.b
        codes, scales = b.gep(self.codes, [code]), b.gep(self.scales, [scale])
        means, exponents = self._means(codes), self._exponents(codes, scales)
        for g in range(self.group):
            place = b.add(at, b.mul(stride, stride.type(g)))
            found = b.fmul(b.fmul(means[g], b.load(scales)), F32(LOG2E))
            b.store(found, b.gep(self.means, [place]))
            b.store(self._sum(self._exp2(exponents[g])), b.gep(self.sums, [place]))

    def _exponents(self, codes: Any, scales: Any) -> list[Any]:
        """Of each query: log2(e) times what each token adds to q.mu."""
        b, layout = self.b, self.layout
        found = self._shared(codes, scales) if layout.coordinates else [None] * self.group
        along, coefficients = self._along(codes), self._coefficients(codes)
        for j in range(layout.rank):
            scale = b.load(b.gep(scales, [I32(layout.first_own + j)]))
            factor = b.fmul(scale, F32(LOG2E))
            for g in range(self.group):
                weight = self._all(b.fmul(along[g][j], factor), layout.unit_tokens)
                found[g] = self._plus(found[g], coefficients[j], weight)
        return found

    def _means(self, codes: Any) -> list[Any]:
        """q.mu of each query, less its scale."""
        b, found = self.b, []
        parts = self._row(codes, 0, self.layout.head_dim)
        for g in range(self.group):
            total = None
            for at, values in parts:
                total = self._plus(total, values, self._query(g, at, values.type.count))
            found.append(b.fadd(self._sum(total), self._number(g, -1)))
        return found

    def _shared(self, codes: Any, scales: Any) -> list[Any]:
        """What coordinates say: of each query, log2(e) q.c of each token."""
        dim, count = self.layout.head_dim, self.layout.coordinates
        tokens = self.layout.unit_tokens
        found = [self._all(self._number(g, -2), tokens) for g in range(self.group)]
        for j in range(count // 2):
            low, high = self._halves(codes, dim // 2 + j * tokens, tokens)
            for values, row in ((low, j), (high, count // 2 + j)):
                for g in range(self.group):
                    weight = self._all(self._number(g, dim + row), tokens)
                    found[g] = self._plus(found[g], values, weight)
        wider = self._all(self.b.load(self.b.gep(scales, [I32(1)])), tokens)
        return [self.b.fmul(one, wider) for one in found]

    def _along(self, codes: Any) -> list[list[Any]]:
        """q.V_j of each query and own direction, less its scale."""
        b, dim, rank = self.b, self.layout.head_dim, self.layout.rank
        first, begin = self.layout.directions_at, dim + self.layout.coordinates
        # As many steps of 4 dimensions side by side as fill a vector.
        steps = next(n for n in (4, 2, 1) if 4 * rank * n <= LANES or n == 1)
        while dim // 8 % steps:
            steps //= 2
        lanes, half = 4 * rank * steps, rank * dim // 2
        totals: list[Any] = [None] * self.group
        for at in range(0, half, lanes):
            low, high = self._halves(codes, first + at, lanes)
            for values, place in ((low, at), (high, half + at)):
                for g in range(self.group):
                    query = self._query(g, begin + place, lanes)
                    totals[g] = self._plus(totals[g], values, query)
        found = []
        for g in range(self.group):
            total = totals[g]
            for by in [4 * rank * n for n in (2, 1) if n < steps] + [2, 1]:
                order = [(n + by) % lanes for n in range(lanes)]
                total = b.fadd(total, self._shuffled(total, order), flags=SUM)
            each = (b.extract_element(total, I32(4 * j)) for j in range(rank))
            found.append([b.fadd(one, self._number(g, -1)) for one in each])
        return found

    def _coefficients(self, codes: Any) -> list[Any]:
        found, tokens = [], self.layout.unit_tokens
        for j in range(self.layout.rank):
            first = self.layout.coefficients_at + j * tokens // 2
            low, high = self._halves(codes, first, tokens // 2)
            order = list(range(tokens))
            values = self.b.shuffle_vector(low, high, ir.VectorType(I32, len(order))(order))
            found.append(self.b.fsub(values, self._all(F32(8.0), tokens)))
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
        """One of a prepared query; a negative one counts from its end."""
        return self.b.load(self._place(g, at % query_floats(self.layout)))

    def _place(self, g: int, at: int) -> Any:
        return self.b.gep(self.queries, [I32(g * query_floats(self.layout) + at)])

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
        b, lanes = self.b, self.layout.unit_tokens
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
