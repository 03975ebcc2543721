"""The inner step of scoring as vector code: one page's summary against all queries of a head.

Queries are integers of 8 bits and codes of 4, so that a CPU's dot products of bytes apply: AVX-512
VNNI takes 64 products an instruction, AVX2 32 in three. LLVM vectors of any width lower to the
registers of any CPU, and integers add up to the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headrace_decode.sparse.summary_layout import SummaryLayout

F32, I32, I16, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
LANES = 16
LOG2E = 1.4426950408889634
CUT = 60.0 * LOG2E
"""Limit of exponents of 2: the sum of 512 such powers is still finite."""
POWERS = 1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558
"""2^f = sum POWERS[k] f^k for |f| <= 1/2, to 3e-6 of it."""
SUM = "contract", "reassoc", "nsz"
VNNI = "avx512vnni", "avx512vl"
AVX2 = ("avx2",)


def rows_at_once(layout: SummaryLayout) -> int:
    """Return how many of the mean and own directions fill a register together."""
    lanes = layout.head_dim // 8
    return min(LANES // lanes, 1 + layout.rank) if LANES % lanes == 0 else 1


def query_bytes(layout: SummaryLayout) -> int:
    """Return the bytes of a prepared query: its first half, `rows_at_once` times; its second half,
    as often; and its weights of coordinates."""
    return rows_at_once(layout) * layout.head_dim + layout.coordinates


@intrinsic(prefer_literal=True)
def page_mass(
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
    starts: Any,
    factors: Any,
    means: Any,
    sums: Any,
    at: Any,
    stride: Any,
) -> Any:
    """Compute for each query: means[at + g * stride] = q.mu log2(e), and
    sums[at + g * stride] = sum_i exp(q.c_i), with c_i the summary's approximation of k_i - mu.

    Args:
        tokens, dim, rank, coordinates: of the `SummaryLayout`; literals.
        group: number of queries of a KV head; a literal.
        codes, code: uint8 array, and where the page's codes begin in it.
        scales, scale: float32 array, and where the page's scales begin.
        queries: int8 [group][query_bytes], prepared.
        starts: int32 [group][2], initial values of dot products with a query and with its weights.
        factors: float32 [group][2], factors of these dot products.
    """
    shape = tokens, dim, rank, coordinates, group
    if not all(isinstance(one, types.IntegerLiteral) for one in shape):
        return None
    *sizes, queries_of_head = (one.literal_value for one in shape)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(signature.args[n])(context, builder, args[n]).data
            for n in (5, 7, 9, 10, 11, 12, 13)
        ]
        dot = Dot(builder, features_of(context))
        page = _Page(builder, dot, SummaryLayout(*sizes), queries_of_head, *arrays)
        page.generate(*(args[n] for n in (6, 8, 14, 15)))
        return context.get_dummy_value()

    place = types.intp
    arrays = codes, place, scales, place, queries, starts, factors, means, sums, place, place
    return types.none(*shape, *arrays), generate


def features_of(context: Any) -> frozenset[str]:
    """Return the features of the CPU that code is made for."""
    _, _, features = context.codegen().magic_tuple()
    return frozenset(one[1:] for one in features.split(",") if one.startswith("+"))


class Dot:
    """Dot products of bytes, in groups of four.

    Args:
        features: features of the CPU.
    """

    def __init__(self, builder: Any, features: frozenset[str]) -> None:
        self.b = builder
        self._vnni, self._avx2 = features.issuperset(VNNI), features.issuperset(AVX2)

    def add(self, total: Any, codes: Any, query: Any) -> Any:
        """Add the dot product of four codes and four bytes of a query to each lane of `total`.

        Args:
            total: <n x i32>.
            codes: <n x i32>, of bytes from 0 to 15. query: <n x i32>, of bytes with a sign.
        """
        lanes = total.type.count
        if lanes > LANES:
            parts = [
                self.add(*(cut(self.b, one, at, LANES) for one in (total, codes, query)))
                for at in range(0, lanes, LANES)
            ]
            return joined(self.b, parts)
        if self._vnni and lanes in (4, 8, 16):
            return self._call(f"avx512.vpdpbusd.{32 * lanes}", total, codes, query)
        if self._avx2 and lanes == 16:
            parts = [
                self.add(*(cut(self.b, one, at, 8) for one in (total, codes, query)))
                for at in (0, 8)
            ]
            return joined(self.b, parts)
        if self._avx2 and lanes == 8:
            return self._pairs(total, codes, query)
        return self._plain(total, codes, query)

    def _pairs(self, total: Any, codes: Any, query: Any) -> Any:
        """Add with AVX2. The sum of two products fits into 16 bits."""
        b, narrow, wide = self.b, ir.VectorType(I8, 32), ir.VectorType(I16, 16)
        pairs = self._call(
            "avx2.pmadd.ub.sw", b.bitcast(codes, narrow), b.bitcast(query, narrow), result=wide
        )
        fours = self._call("avx2.pmadd.wd", pairs, wide([1] * 16), result=total.type)
        return b.add(total, fours)

    def _plain(self, total: Any, codes: Any, query: Any) -> Any:
        b, kind = self.b, total.type
        for k in range(4):
            code = b.and_(b.lshr(codes, kind([8 * k] * kind.count)), kind([15] * kind.count))
            of_query = b.shl(query, kind([24 - 8 * k] * kind.count))
            of_query = b.ashr(of_query, kind([24] * kind.count))
            total = b.add(total, b.mul(code, of_query))
        return total

    def _call(self, name: str, *args: Any, result: Any = None) -> Any:
        kind = ir.FunctionType(result or args[0].type, [one.type for one in args])
        module, full = self.b.module, f"llvm.x86.{name}"
        function = module.globals.get(full) or ir.Function(module, kind, full)
        return self.b.call(function, args)


def joined(builder: Any, parts: Sequence[Any]) -> Any:
    """Join vectors of one width, one after another. Their number is a power of 2."""
    while len(parts) > 1:
        order = list(range(2 * parts[0].type.count))
        parts = [
            builder.shuffle_vector(low, high, ir.VectorType(I32, len(order))(order))
            for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def cut(builder: Any, vector: Any, at: int, lanes: int) -> Any:
    """Return a part of a vector."""
    if lanes == vector.type.count:
        return vector
    order = list(range(at, at + lanes))
    mask = ir.VectorType(I32, lanes)(order)
    return builder.shuffle_vector(vector, vector.type(ir.Undefined), mask)


class _Page:
    """Vector code for one page."""

    def __init__(
        self,
        builder: Any,
        dot: Dot,
        layout: SummaryLayout,
        group: int,
        codes: Any,
        scales: Any,
        queries: Any,
        starts: Any,
        factors: Any,
        means: Any,
        sums: Any,
    ) -> None:
        self.b, self.dot, self.layout, self.group = builder, dot, layout, group
        self.codes, self.scales, self.queries = codes, scales, queries
        self.starts, self.factors = starts, factors
        self.means, self.sums = means, sums

    def generate(self, code: Any, scale: Any, at: Any, stride: Any) -> None:
        b = self.b
        codes, scales = b.gep(self.codes, [code]), b.gep(self.scales, [scale])
        along = self._along(codes, scales)
        exponents = self._exponents(codes, scales, along)
        for g in range(self.group):
            place = b.add(at, b.mul(stride, stride.type(g)))
            b.store(along[g][0], b.gep(self.means, [place]))
            b.store(self._sum(self._exp2(exponents[g])), b.gep(self.sums, [place]))

    def _along(self, codes: Any, scales: Any) -> list[list[Any]]:
        """Return, for each query, log2(e) q.mu, and log2(e) q.V_j for each own direction."""
        b, layout = self.b, self.layout
        half, at_once, rows = layout.head_dim // 2, rows_at_once(layout), 1 + layout.rank
        found: list[list[Any]] = [[] for _ in range(self.group)]
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            low, high = self._halves(codes, first * half, count * half)
            for g in range(self.group):
                total = low.type([0] * low.type.count)
                for values, at in ((low, 0), (high, at_once * half)):
                    total = self.dot.add(total, values, self._query(g, at, count * half))
                for row in range(count):
                    number = 0 if first + row == 0 else layout.first_own + first + row - 1
                    part = cut(b, total, row * half // 4, half // 4)
                    whole = b.add(self._whole_sum(part), b.load(self._of(self.starts, g, 0)))
                    factor = b.load(b.gep(scales, [I32(number)]))
                    factor = b.fmul(factor, b.load(self._of(self.factors, g, 0)))
                    found[g].append(b.fmul(b.sitofp(whole, F32), factor))
        return found

    def _exponents(self, codes: Any, scales: Any, along: list[list[Any]]) -> list[Any]:
        """Return, for each query, log2(e) times the amount that each token adds to q.mu."""
        b, layout = self.b, self.layout
        found = self._shared(codes, scales) if layout.coordinates else [None] * self.group
        for j in range(layout.rank):
            coefficients = self._coefficients(codes, j)
            for g in range(self.group):
                weight = self._all(along[g][1 + j], layout.page_tokens)
                product = b.fmul(coefficients, weight, flags=SUM)
                one = found[g]
                found[g] = product if one is None else b.fadd(one, product, flags=SUM)
        return found

    def _shared(self, codes: Any, scales: Any) -> list[Any]:
        """Return, for each query, the coordinates' part of log2(e) q.c for each token."""
        b, layout, tokens = self.b, self.layout, self.layout.page_tokens
        totals = [self._all(b.load(self._of(self.starts, g, 1)), tokens) for g in range(self.group)]
        for four in range(0, layout.coordinates // 4, 2):
            at = layout.coordinates_at + 2 * tokens * four
            if 4 * four + 8 <= layout.coordinates:
                fours = [*self._halves(codes, at, 4 * tokens)]
            else:
                fours = [joined(b, self._halves(codes, at, 2 * tokens))]
            for number, values in enumerate(fours, four):
                for g in range(self.group):
                    weights = self._all(self._weights(g, number), tokens)
                    totals[g] = self.dot.add(totals[g], values, weights)
        wider, found = b.load(b.gep(scales, [I32(1)])), []
        for g, total in enumerate(totals):
            factor = b.fmul(wider, b.load(self._of(self.factors, g, 1)))
            floats = b.sitofp(total, ir.VectorType(F32, tokens))
            found.append(b.fmul(floats, self._all(factor, tokens), flags=SUM))
        return found

    def _coefficients(self, codes: Any, j: int) -> Any:
        b, tokens = self.b, self.layout.page_tokens
        first = self.layout.coefficients_at + j * tokens // 2
        both = self._bytes(codes, first, tokens // 2)
        bytes_ = joined(b, self._split(both))
        wide = b.zext(bytes_, ir.VectorType(I32, tokens))
        return b.fsub(b.sitofp(wide, ir.VectorType(F32, tokens)), self._all(F32(8.0), tokens))

    def _bytes(self, codes: Any, first: int, count: int) -> Any:
        place = self.b.gep(codes, [I32(first)])
        return self.b.load(self.b.bitcast(place, ir.VectorType(I8, count).as_pointer()), align=1)

    def _split(self, both: Any) -> tuple[Any, Any]:
        kind = both.type
        low = self.b.and_(both, kind([15] * kind.count))
        return low, self.b.lshr(both, kind([4] * kind.count))

    def _halves(self, codes: Any, first: int, count: int) -> tuple[Any, Any]:
        """Return the low and high halves of so many bytes, in groups of four: <count / 4 x i32>."""
        low, high = self._split(self._bytes(codes, first, count))
        fours = ir.VectorType(I32, count // 4)
        return self.b.bitcast(low, fours), self.b.bitcast(high, fours)

    def _query(self, g: int, at: int, count: int) -> Any:
        place = self.b.gep(self.queries, [I32(g * query_bytes(self.layout) + at)])
        fours = ir.VectorType(I32, count // 4)
        return self.b.load(self.b.bitcast(place, fours.as_pointer()), align=1)

    def _weights(self, g: int, four: int) -> Any:
        end = (g + 1) * query_bytes(self.layout)
        place = self.b.gep(self.queries, [I32(end - self.layout.coordinates + 4 * four)])
        return self.b.load(self.b.bitcast(place, I32.as_pointer()), align=1)

    def _of(self, array: Any, g: int, which: int) -> Any:
        return self.b.gep(array, [I32(2 * g + which)])

    def _all(self, value: Any, lanes: int) -> Any:
        vector = ir.VectorType(value.type, lanes)
        first = self.b.insert_element(vector(ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(
            first, vector(ir.Undefined), ir.VectorType(I32, lanes)([0] * lanes)
        )

    def _whole_sum(self, vector: Any) -> Any:
        return self.b.call(self._function("vector.reduce.add", I32, [vector.type]), [vector])

    def _sum(self, vector: Any) -> Any:
        function = self._function("vector.reduce.fadd", F32, [F32, vector.type])
        return self.b.call(function, [F32(0.0), vector], fastmath=("reassoc",))

    def _function(self, name: str, result: Any, args: Sequence[Any]) -> Any:
        """Return an LLVM intrinsic, overloaded by the type of its last argument."""
        kind = "f32" if args[-1].element == F32 else "i32"
        full, module = f"llvm.{name}.v{args[-1].count}{kind}", self.b.module
        return module.globals.get(full) or ir.Function(
            module, ir.FunctionType(result, list(args)), full
        )

    def _exp2(self, x: Any) -> Any:
        b, lanes = self.b, self.layout.page_tokens
        wide, whole = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        for limit, less in ((CUT, "<"), (-CUT, ">")):
            bound = wide([limit] * lanes)
            x = b.select(b.fcmp_ordered(less, x, bound), x, bound)
        nearest = b.call(self._function("rint", wide, [wide]), [x])
        f = b.fsub(x, nearest)
        power = wide([POWERS[-1]] * lanes)
        for factor in POWERS[-2::-1]:
            product = b.fmul(power, f, flags=SUM)
            power = b.fadd(wide([factor] * lanes), product, flags=SUM)
        bits = b.shl(b.fptosi(nearest, whole), whole([23] * lanes))
        return b.bitcast(b.add(b.bitcast(power, whole), bits), wide)
