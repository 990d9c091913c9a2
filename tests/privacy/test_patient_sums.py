"""Sums of gradients that are clipped by patient, by hand."""

import torch
from torch import nn

from polyclinic.privacy import clipped_sums as patient_sums
from polyclinic.privacy.clipped_sums import PatientSums


def linear():
    model = nn.Linear(2, 1, bias=False)
    return model, lambda x: model(x).flatten()  # the gradient of a row's loss is the row itself


def test_the_images_of_a_patient_are_added_up_before_they_are_clipped():
    """Patient 0: (3, 0) + (0, 4) has length 5 and is clipped to (0.6, 0.8). Patient 7: (0.1, 0.2) stays as it is."""
    model, losses = linear()
    batch = (torch.tensor([[3.0, 0.0], [0.1, 0.2], [0.0, 4.0]]), torch.tensor([0, 7, 0]))
    [total] = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(total, torch.tensor([[0.7, 1.0]]), atol=1e-5)


def test_a_patient_with_many_images_goes_through_in_pieces(monkeypatch):
    model, losses = linear()
    batch = (torch.randn(9, 2), torch.zeros(9, dtype=torch.int64))
    whole = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    monkeypatch.setattr(patient_sums, "MOST_ROWS", 2)
    pieces = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(whole[0], pieces[0], atol=1e-6)


def test_a_patient_whose_gradient_is_not_finite_counts_as_none():
    model, losses = linear()
    batch = (torch.tensor([[float("inf"), 0.0], [0.1, 0.2]]), torch.tensor([0, 1]))
    [total] = PatientSums().total(losses, [batch], 1.0, list(model.parameters()))
    assert torch.allclose(total, torch.tensor([[0.1, 0.2]]))


def test_an_empty_batch_and_a_parameter_without_part_give_zeros():
    model, losses = linear()
    unused = nn.Parameter(torch.ones(3))
    batch = (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    totals = PatientSums().total(losses, [batch], 1.0, [*model.parameters(), unused])
    assert [float(one.abs().sum()) for one in totals] == [0.0, 0.0]
