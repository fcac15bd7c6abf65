"""Numbers of own rows are what they look like, and what is computed of them is known."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from shardpass.core.following.own_numbers import OwnFloat, OwnInt, is_own_number, own_number

NUMBER = own_number(5)
SHAPE = own_number(torch.Size([5, 3]))


@pytest.mark.parametrize(("made", "value"), [
    (lambda n: 100.0 / n, 20.0), (lambda n: n / 2, 2.5), (lambda n: 1 / n, 0.2), (lambda n: 0.5 / n * 3, 0.3),
    (lambda n: 2 * n, 10), (lambda n: n + n, 10), (lambda n: n - 1, 4), (lambda n: 7 % n, 2), (lambda n: n // 2, 2),
    (lambda n: -n, -5), (lambda n: n**2, 25), (lambda n: n**0.5, 5**0.5), (lambda n: round(n / 3, 2), 1.67),
    (lambda n: n * np.float32(2), 10.0), (lambda n: math.prod(SHAPE), 15),
])  # fmt: skip
def test_arithmetic_makes_own_numbers(made, value):
    found = made(NUMBER)
    assert is_own_number(found) and type(found) in (OwnInt, OwnFloat) and math.isclose(found, value)


def test_they_are_sizes_indices_and_keys():
    rows = torch.zeros(5, 3)
    assert isinstance(NUMBER, int) and NUMBER == 5 and {5: 1}[NUMBER] == 1 and [*range(NUMBER)] == [0, 1, 2, 3, 4]
    assert f"{NUMBER:03d} {NUMBER} {[NUMBER]} {SHAPE}" == "005 5 [5] (5, 3)" and repr(NUMBER) == str(NUMBER) == "5"
    assert rows.view(NUMBER, 3).shape == torch.zeros(SHAPE).shape == rows.expand(SHAPE).shape == SHAPE
    assert torch.tensor(NUMBER) == torch.arange(NUMBER).numel() == np.array([NUMBER])[0] == NUMBER.item() == 5
    assert type(pickle.loads(pickle.dumps(NUMBER))) is int and copy.deepcopy(NUMBER) == 5
    assert NUMBER * torch.linspace(0, 1, NUMBER).sum() == 12.5 and rows[:NUMBER].shape == SHAPE
    assert type(NUMBER == 5) is type(NUMBER > 4) is type(torch.Size([5, 3]) == SHAPE) is bool
