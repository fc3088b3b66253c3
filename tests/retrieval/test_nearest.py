from __future__ import annotations

import numpy as np
import pytest

from samrag.errors import UserError
from samrag.retrieval import nearest
from samrag.retrieval.nearest import ExactSearch


def vectors(count: int, dimension: int = 48, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def by_hand(queries: np.ndarray, documents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    scores = queries.astype(np.float64) @ documents.T.astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(scores, order, axis=1)


@pytest.mark.parametrize(("num_documents", "k"), [(1, 1), (40, 40), (700, 5), (5000, 60), (9000, 3)])
def test_finds_what_the_definition_finds(num_documents, k):
    queries, documents = vectors(300, seed=1), vectors(num_documents)
    found = ExactSearch(documents).search(queries, k)
    positions, scores = by_hand(queries, documents, k)
    np.testing.assert_allclose(found.scores, scores, atol=1e-6)
    assert (found.positions == positions).mean() > 0.999  # float32 may turn round two that differ by less than 1e-7


def test_lengths_that_differ_and_components_that_stand_out_change_nothing():
    queries, documents = vectors(50, seed=1), vectors(6000)
    documents *= np.random.default_rng(2).lognormal(0, 1, (6000, 1)).astype(np.float32)
    documents[:, 7] += 3
    found = ExactSearch(documents).search(queries, 20)
    np.testing.assert_allclose(found.scores, by_hand(queries, documents, 20)[1], rtol=1e-5, atol=1e-5)


def test_equal_vectors_keep_the_order_of_the_documents():
    documents = np.repeat(vectors(40), 150, axis=0)
    found = ExactSearch(documents).search(documents[::150], 100)
    np.testing.assert_array_equal(found.positions, np.arange(100) + 150 * np.arange(40)[:, None])


def test_what_is_found_does_not_depend_on_the_other_queries():
    queries, search = vectors(600, seed=1), ExactSearch(vectors(5000))
    together, alone = search.search(queries, 9), search.search(queries[431:432], 9)
    np.testing.assert_array_equal(together.positions[431:432], alone.positions)
    np.testing.assert_array_equal(together.scores[431:432], alone.scores)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_documents_in_several_arrays_are_found_as_in_one(dtype):
    queries, documents = vectors(70, seed=1), np.repeat(vectors(1500), 2, axis=0).astype(dtype)
    whole, parts = ExactSearch(documents), ExactSearch(*np.split(documents, [1, 700, 701, 2500]))
    found, wanted = parts.search(queries, 12), whole.search(queries, 12)
    np.testing.assert_array_equal(found.positions, wanted.positions)
    np.testing.assert_array_equal(found.scores, wanted.scores)
    np.testing.assert_array_equal(parts.scores_of(queries, found.positions), wanted.scores)
    np.testing.assert_allclose(wanted.scores, by_hand(queries, documents, 12)[1], atol=1e-6)


def test_fewer_documents_than_asked_for_leave_the_rest_empty():
    found = ExactSearch(vectors(3)).search(vectors(2, seed=1), 5)
    assert (found.positions[:, 3:] == -1).all() and np.isneginf(found.scores[:, 3:]).all()
    assert np.sort(found.positions[:, :3]).tolist() == [[0, 1, 2]] * 2


def test_without_exact_integer_products_the_result_is_the_same(monkeypatch):
    queries, search = vectors(64, seed=1), ExactSearch(vectors(5000))
    expected = search.search(queries, 10)
    monkeypatch.setattr(nearest, "_multiplies_integers", lambda: False)
    found = search.search(queries, 10)
    np.testing.assert_array_equal(found.positions, expected.positions)


def test_an_error_beyond_the_expected_one_is_noticed_and_made_good(monkeypatch):
    queries, documents = vectors(64, seed=1), vectors(5000)
    monkeypatch.setattr(nearest, "_DEVIATIONS", 0.02)
    found = ExactSearch(documents).search(queries, 10)
    np.testing.assert_allclose(found.scores, by_hand(queries, documents, 10)[1], atol=1e-6)


def test_vectors_of_zeros_are_no_error():
    found = ExactSearch(np.zeros((5, 8), dtype=np.float32)).search(np.zeros((2, 8), dtype=np.float32), 3)
    assert found.positions.tolist() == [[0, 1, 2]] * 2 and (found.scores == 0).all()


def test_scores_of_given_documents():
    queries, documents = vectors(2, seed=1), vectors(4)
    scores = ExactSearch(documents).scores_of(queries, np.array([[3, -1], [0, 2]]))
    assert scores[0, 0] == pytest.approx(queries[0] @ documents[3], abs=1e-6)
    assert np.isneginf(scores[0, 1])


def test_bad_vectors_are_refused_in_a_sentence():
    broken = vectors(4)
    broken[2, 0] = np.nan
    with pytest.raises(UserError, match="vector 2 of documents is not finite"):
        ExactSearch(broken)
    with pytest.raises(UserError, match="vector 2 of queries is not finite"):
        ExactSearch(vectors(4)).search(broken, 1)
    with pytest.raises(UserError, match="8 dimensions and documents 48"):
        ExactSearch(vectors(4)).search(vectors(1, dimension=8), 1)
    with pytest.raises(UserError, match="shape"):
        ExactSearch(np.zeros(4, dtype=np.float32))
    with pytest.raises(UserError, match="no document vectors"):
        ExactSearch(np.zeros((0, 4), dtype=np.float32))
    with pytest.raises(UserError, match="k is 0"):
        ExactSearch(vectors(4)).search(vectors(1), 0)
