"""Nearest vectors of many queries at once, on the CPU: screened in integers, decided in float32.

Nearly all of an exact search is spent on products that decide nothing. Here all pairs are screened by 8-bit products,
a quarter of the work, and those that may be among the k best are computed again in float32. The vectors are turned by
one random rotation first, which evens out their components: rounding errors are then small and alike in all
directions, so that their size is known (the argument of RaBitQ, Gao and Long, 2405.12497). Every product that is
computed again shows its error; where one is larger than expected, its queries are searched by the worst-case bound.

The documents may lie in several arrays mapped from files, of float32 or float16: one is searched after the other, and
only the 8-bit codes, a byte a component, stay in memory. Left out: accelerators.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from samrag.errors import UserError

if TYPE_CHECKING:
    import torch

TILE = 4096
"""Documents multiplied at a time: with 256 queries, products of 4 MiB."""
GROUP = 32
"""Neighbouring documents of which only the best is looked at first."""
_CELLS = 2**25
"""Products held at a time: 128 MiB."""
_MAX_QUERIES = 256
_PAIRS = 1024
"""Pairs computed in float32 at a time."""
_LARGEST_CODE = 127
_SPREAD = 5.5
"""Largest component that documents' codes hold, in standard deviations: 1 in 26 million is larger, and cut."""
_DEVIATIONS = 5.0
"""Expected errors lie within so many standard deviations: 1 in 1.7 million is larger. A document is missed only where
two of them, its own and another one's, add up to twice as much."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The best documents of each query, best first; equal scores in the order of the documents."""

    positions: NDArray[np.int64]
    """[Q, K]; -1 where there are fewer than K documents."""
    scores: NDArray[np.float32]
    """[Q, K]; minus infinity where there is no document."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """Vectors as integers: `values * step` is the rotated vector, but for an error of a known length."""

    values: torch.Tensor
    """[N, D], int8."""
    step: NDArray[np.float64]
    """[N]."""
    norm: NDArray[np.float64]
    """Lengths of the vectors, [N]."""
    error: NDArray[np.float64]
    """Lengths of the errors, [N]."""


class ExactSearch:
    """Inner-product search over documents; what it finds depends neither on how queries nor how documents are grouped.

    Args:
        *shards: the documents' vectors[N, D] in one or several arrays, float32 or float16; they need no unit length.

    Raises:
        UserError: there are none, or one is not finite.
    """

    def __init__(self, *shards: NDArray[Any]) -> None:
        self._shards = [_Shard(shard) for shard in shards]
        if not len(self):
            raise UserError("there are no document vectors to search in.")

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """The k best documents of each query[Q, D].

        Memory beyond the result and the codes is bounded, whatever the number of queries and documents.

        Raises:
            UserError: k is below 1, or queries are not finite or of another dimension.
        """
        if k < 1:
            raise UserError(f"k is {k}; at least one document must be asked for.")
        queries = _checked(queries, "queries")
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        for start, shard in self._placed():
            found = shard.search(queries, k)
            moved = np.where(found.positions < 0, -1, found.positions + start)
            both = np.concatenate([scores, found.scores], axis=1)
            order = np.argsort(-both, axis=1, kind="stable")[:, :k]  # of equal ones, those of earlier shards
            scores = np.take_along_axis(both, order, axis=1)
            positions = np.take_along_axis(np.concatenate([positions, moved], axis=1), order, axis=1)
        return Nearest(positions, scores)

    def scores_of(self, queries: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores[Q, K] of queries[Q, D] with the documents at positions[Q, K]; minus infinity at -1."""
        scores = np.full(positions.shape, -np.inf, dtype=np.float32)
        for start, shard in self._placed():
            rows, columns = np.nonzero((positions >= start) & (positions < start + len(shard)))
            scores[rows, columns] = shard.products(queries, rows, positions[rows, columns] - start)
        return scores

    def _placed(self) -> Iterator[tuple[int, _Shard]]:
        """The shards with the positions of their first documents."""
        start = 0
        for shard in self._shards:
            yield start, shard
            start += len(shard)


class _Shard:
    """Search within one array of documents."""

    def __init__(self, documents: NDArray[Any]) -> None:
        self._documents = _checked(documents, "documents")

    def __len__(self) -> int:
        return len(self._documents)

    @functools.cached_property
    def _codes(self) -> _Codes:
        return _encode(self._documents, _rotation(self._documents.shape[1]), shared_step=True)

    def search(self, queries: NDArray[np.float32], k: int) -> Nearest:
        """The k best documents of each query[Q, D]."""
        if queries.shape[1] != self._documents.shape[1]:
            raise UserError(
                f"queries have {queries.shape[1]} dimensions and documents {self._documents.shape[1]}; "
                "both must come from one embedder."
            )
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        screen = _Screen(self._codes, k)
        for start in range(0, len(queries), screen.num_queries):
            rows = slice(start, start + screen.num_queries)
            self._search_block(queries[rows], screen, positions[rows], scores[rows])
        return Nearest(positions, scores)

    def _search_block(
        self,
        queries: NDArray[np.float32],
        screen: _Screen,
        positions: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> None:
        """Search for a block of queries, and write what is found into its rows of the result."""
        codes = _encode(queries, _rotation(queries.shape[1]), shared_step=False)
        unit = codes.step * self._codes.step[0]  # one unit of an integer product, [Q]
        expected, worst = _error_bounds(codes, self._codes)
        screen.multiply(codes)
        rows, found, products = screen.candidates(expected / unit)
        exact = self.products(queries, rows, found)
        astray = np.abs(exact - products * unit[rows]) > expected[rows]
        if astray.any():
            bound = expected.copy()
            bound[rows[astray]] = worst[rows[astray]]
            rows, found, _ = screen.candidates(bound / unit)
            exact = self.products(queries, rows, found)
        _rank(rows, found, exact, positions, scores)

    def products(
        self, queries: NDArray[np.float32], rows: NDArray[np.int64], found: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Inner products of pairs, sorted by row; summed in one order, so that equal vectors have equal scores."""
        exact = np.empty(len(rows), dtype=np.float32)
        edges = np.flatnonzero(np.diff(rows, prepend=-1, append=-1)).tolist()
        gathered = np.empty((min(len(rows), _PAIRS), self._documents.shape[1]), dtype=self._documents.dtype)
        for first, last in itertools.pairwise(edges):
            query = queries[rows[first]]
            for start in range(first, last, _PAIRS):
                pairs = slice(start, min(start + _PAIRS, last))
                chosen = gathered[: pairs.stop - pairs.start]
                np.take(self._documents, found[pairs], axis=0, out=chosen, mode="clip")
                np.vecdot(chosen.astype(np.float32, copy=False), query, out=exact[pairs])
        return exact


class _Screen:
    """Integer products of a block of queries with all documents, and which of them may be among the k best."""

    def __init__(self, documents: _Codes, k: int) -> None:
        import torch

        self._documents = documents.values
        self._k = k
        self._group = GROUP
        while self._group > 1 and len(self._documents) < 8 * k * self._group:
            self._group //= 2
        num_tiles = -(-len(self._documents) // TILE)
        self.num_queries = max(1, min(_MAX_QUERIES, _CELLS // (num_tiles * TILE)))
        self._lowest = torch.iinfo(torch.int32).min
        self._buffer = torch.empty((num_tiles, self.num_queries, TILE), dtype=torch.int32)
        self._products = self._buffer
        self._best = torch.empty(0)

    def multiply(self, queries: _Codes) -> None:
        """Fill products[tiles, Q, TILE] and the best product of each group[Q, groups]."""
        import torch

        count = len(queries.values)
        self._products = self._buffer.view(-1)[: len(self._buffer) * count * TILE].view(-1, count, TILE)
        best = []
        for number, products in enumerate(self._products):
            tile = self._documents[number * TILE : (number + 1) * TILE]
            if len(tile) == TILE:
                _integer_products(queries.values, tile, products)
            else:
                products[:, len(tile) :] = self._lowest
                products[:, : len(tile)] = _integer_products(queries.values, tile)
            best.append(products.view(count, -1, self._group).amax(2))
        self._best = torch.cat(best, dim=1)

    def candidates(self, bound: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Query rows, document positions and products of all pairs that may belong to the k best; sorted by both.

        Args:
            bound: the error of a query's products at most, in integer units, [Q].
        """
        import torch

        num_groups = self._best.shape[1]
        if num_groups <= self._k:
            limit = torch.full((len(bound),), self._lowest + 1, dtype=torch.int32)
        else:  # k groups reach the k-th best group's product, so k documents do; both may err by the bound
            reached = torch.topk(self._best, self._k, dim=1).values[:, -1]
            limit = (reached.double() - 2 * torch.from_numpy(bound)).floor()
            limit = limit.clamp(min=self._lowest + 1).to(torch.int32)
        rows, groups = (self._best >= limit[:, None]).nonzero(as_tuple=True)
        per_tile = TILE // self._group
        places = (groups // per_tile * len(bound) + rows) * per_tile + groups % per_tile
        members = self._products.view(-1, self._group).index_select(0, places)
        chosen, inside = (members >= limit[rows][:, None]).nonzero(as_tuple=True)
        found = groups[chosen] * self._group + inside
        return rows[chosen].numpy(), found.numpy(), members[chosen, inside].numpy()


def _integer_products(queries: torch.Tensor, documents: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Products[Q, N] in int32 of int8 codes[Q, D] and [N, D]."""
    import torch

    if _multiplies_integers():
        if out is None:
            return torch._int_mm(queries, documents.t())
        return torch._int_mm(queries, documents.t(), out=out)
    products = queries.float() @ documents.float().t()  # near enough: the error bounds leave room for it
    return products.round().int() if out is None else out.copy_(products.round())


@functools.cache
def _multiplies_integers() -> bool:
    """Whether 8-bit products are exact here: processors without VNNI may cut sums off at 16 bits."""
    import torch

    codes = torch.full((64, 256), _LARGEST_CODE, dtype=torch.int8)
    try:
        products = torch._int_mm(codes, codes.t())
    except (RuntimeError, AttributeError):
        return False
    return bool((products == 256 * _LARGEST_CODE**2).all())


@functools.cache
def _rotation(dimension: int) -> NDArray[np.float32]:
    square = np.random.default_rng(0).standard_normal((dimension, dimension))
    rotation: NDArray[np.float32] = np.linalg.qr(square)[0].astype(np.float32)
    return rotation


def _encode(vectors: NDArray[Any], rotation: NDArray[np.float32], shared_step: bool) -> _Codes:
    """Rotate and round vectors[N, D], by steps of their own or by one of all."""
    import torch

    parts = [slice(start, start + _PAIRS) for start in range(0, len(vectors), _PAIRS)]
    norm = np.empty(len(vectors))
    for part in parts:
        wide = vectors[part].astype(np.float32, copy=False)
        norm[part] = np.sqrt(np.vecdot(wide, wide).astype(np.float64))
    shared = norm.max(initial=0.0) * _SPREAD / np.sqrt(vectors.shape[1]) / _LARGEST_CODE
    step = np.full_like(norm, shared or 1.0)
    error = np.empty_like(norm)
    values = torch.empty(vectors.shape, dtype=torch.int8)
    for part in parts:
        scaled = vectors[part].astype(np.float32, copy=False) @ rotation
        if not shared_step:
            largest = np.abs(scaled).max(axis=1)
            step[part] = np.where(largest > 0, largest, 1.0) / _LARGEST_CODE
        scaled *= (1 / step[part, None]).astype(np.float32)
        codes = np.rint(scaled).clip(-_LARGEST_CODE, _LARGEST_CODE)
        scaled -= codes
        error[part] = np.sqrt(np.vecdot(scaled, scaled)) * step[part]
        values.numpy()[part] = codes
    return _Codes(values, step, norm, error)


def _error_bounds(queries: _Codes, documents: _Codes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Errors of a query's products, [Q]: within which they are expected, and the largest there can be."""
    dimension = queries.values.shape[1]
    longest = documents.norm.max()
    of_query, of_document = queries.error * longest, (queries.norm + queries.error) * documents.error.max()
    of_sums = dimension * np.finfo(np.float32).eps * queries.norm * longest
    expected = _DEVIATIONS * np.sqrt((of_query**2 + of_document**2) / dimension) + of_sums
    return expected, of_query + of_document + of_sums


def _rank(
    rows: NDArray[np.int64],
    found: NDArray[np.int64],
    exact: NDArray[np.float32],
    positions: NDArray[np.int64],
    scores: NDArray[np.float32],
) -> None:
    """Write the best of the pairs into positions[Q, K] and scores[Q, K]; pairs are sorted by row and position."""
    counts = np.bincount(rows, minlength=len(positions))
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    column = np.arange(len(rows)) - first[rows]
    padded = np.full((len(positions), counts.max()), np.inf, dtype=np.float32)
    padded[rows, column] = -exact
    order = padded.argsort(axis=1, kind="stable")[:, : positions.shape[1]]
    filled = np.arange(order.shape[1]) < counts[:, None]
    pairs = np.where(filled, first[:, None] + order, 0)
    width = order.shape[1]
    positions[:, :width] = np.where(filled, found[pairs], -1)
    scores[:, :width] = np.where(filled, exact[pairs], -np.inf)


def _checked(vectors: NDArray[Any], name: str) -> NDArray[Any]:
    """Vectors[N, D], contiguous, as float32 or, if they are, float16; none of them may hold NaN or infinity."""
    array = np.ascontiguousarray(vectors, dtype=np.float16 if vectors.dtype == np.float16 else np.float32)
    if array.ndim != 2:
        raise UserError(f"the vectors of {name} have shape {array.shape}; [N, D] is needed.")
    for start in range(0, len(array), TILE):
        finite = np.isfinite(array[start : start + TILE]).all(axis=1)
        if not finite.all():
            number = start + int(finite.argmin())
            raise UserError(f"vector {number} of {name} is not finite; look at its text and the embedder.")
    return array
