from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from samrag.training.contrastive import NO_KEY, InfoNceLoss, info_nce, known_positives_mask


def unit(rows: int, seed: int = 0) -> torch.Tensor:
    return functional.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), dim=-1)


class Rows(torch.nn.Module):
    """A model whose vectors are its input."""

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}


def test_identical_vectors_cost_q_log_p():
    same = unit(1).expand(12, 8)
    loss = info_nce(same[:4], same, torch.arange(4), temperature=0.02)
    assert loss.item() == pytest.approx(4 * math.log(12), rel=1e-5)


def test_the_loss_is_the_papers_equation():
    queries, passages, targets, tau = unit(3), unit(6, 1), torch.tensor([4, 0, 2]), 0.1
    exponents = torch.exp(queries @ passages.T / tau)
    expected = -torch.log(exponents[torch.arange(3), targets] / exponents.sum(1)).sum()
    assert torch.allclose(info_nce(queries, passages, targets, tau), expected, atol=1e-5)


def test_excluded_passages_do_not_matter_and_get_no_gradient():
    queries, passages, targets = unit(2), unit(5, 1).requires_grad_(), torch.tensor([0, 1])
    excluded = torch.zeros(2, 5, dtype=torch.bool)
    excluded[:, 3] = True
    loss = info_nce(queries, passages, targets, 0.05, excluded)
    kept = torch.tensor([0, 1, 2, 4])
    assert torch.allclose(loss, info_nce(queries, passages[kept], targets, 0.05), atol=1e-5)
    loss.backward()
    assert torch.equal(passages.grad[3], torch.zeros(8))


def test_a_target_is_never_excluded():
    queries, passages, targets = unit(2), unit(4, 1), torch.tensor([0, 1])
    assert info_nce(queries, passages, targets, 0.05, torch.ones(2, 4, dtype=torch.bool)).item() == 0


def test_half_precision_vectors_give_a_float32_loss():
    assert info_nce(unit(2).bfloat16(), unit(4, 1).bfloat16(), torch.tensor([0, 1]), 0.02).dtype == torch.float32


def test_keys_mark_the_known_positives_of_each_query():
    mask = known_positives_mask(torch.tensor([7, 8, 9]), torch.tensor([[7, NO_KEY], [9, 8]]))
    assert mask.tolist() == [[True, False, False], [False, True, True]]


def test_the_module_masks_other_rows_passages_that_are_known_positives():
    query, positive, negative = unit(2), unit(2, 1), unit(2, 2)
    features = [{"vectors": vectors} for vectors in (query, positive, negative)]
    # The first query also has the second row's negative (key 21) as a positive.
    labels = torch.tensor([[10, 20, 10, 21], [11, 21, 11, NO_KEY]])
    loss = InfoNceLoss(Rows(), 0.1)(features, labels)
    excluded = torch.tensor([[False, False, False, True], [False, False, False, False]])
    passages = torch.cat([positive, negative])
    assert torch.allclose(loss, info_nce(query, passages, torch.arange(2), 0.1, excluded) / 2)
    assert torch.allclose(InfoNceLoss(Rows(), 0.1)(features), info_nce(query, passages, torch.arange(2), 0.1) / 2)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature is 0"):
        InfoNceLoss(Rows(), 0)


def test_the_loss_equals_flagembeddings():
    modeling = pytest.importorskip("FlagEmbedding.finetune.embedder.encoder_only.base.modeling")
    queries, passages = unit(4), unit(12, 1)  # groups of three: the positive first

    class Reference(modeling.BiEncoderOnlyEmbedderModel):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.temperature = 0.02
            self.cross_entropy = torch.nn.CrossEntropyLoss()

    _, expected = Reference()._compute_in_batch_neg_loss(queries, passages)
    ours = info_nce(queries, passages, torch.arange(4) * 3, 0.02) / 4
    assert ours.item() == pytest.approx(expected.item(), abs=1e-5)
