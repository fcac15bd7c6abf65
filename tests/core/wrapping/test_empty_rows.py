"""Functions of no rows give no rows where they treat rows one by one."""

import pytest
import torch
from torch import nn

from shardpass.core.wrapping import EmptyRows

PROGRAMS = {
    "view": (lambda h, w: h.view(len(h), -1, 3), (0, 2, 3)),
    "Fourier transform": (lambda h, w: torch.fft.rfft(h, dim=1), (0, 4)),
    "quantile": (lambda h, w: h.quantile(0.3, dim=1), (0,)),
    "convolution along rows": (lambda h, w: nn.functional.conv1d(h.t()[None], w).squeeze(0).t(), (0, 2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_rows_of_no_rows(name):
    program, shape = PROGRAMS[name]
    with EmptyRows():
        assert program(torch.zeros(0, 6), torch.zeros(2, 6, 1)).shape == shape


def test_what_needs_rows_still_fails():
    with EmptyRows(), pytest.raises((RuntimeError, IndexError), match="dim"):
        torch.zeros(0, 6).max(0)
