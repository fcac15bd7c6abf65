"""What would be silently wrong inside a model is refused at its line by every rank, and what looks like it is exact."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch_geometric")

from . import inside_counts as counts
from . import inside_rows as rows
from .inside_model import GRAPH, TEAMS, Together, built, called, cases, refused_or_why

REFUSED = cases(
    rows.MIXING_BY_PLACE,
    counts.POSITIONS,
    counts.CONSTANTS,
    counts.TURNED,
    counts.NUMPY,
    counts.SCRIPTED,
    counts.ESCAPES,
    counts.SCALARS,
    counts.LEAVING,
)
EXACT = cases(rows.ROW_WISE, counts.STAYING)


@pytest.fixture(scope="module")
def together(doubles, tmp_path_factory):
    return Together(EXACT, tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_its_line_by_every_rank(name, doubles, tmp_path):
    case = REFUSED[name]
    model = built(case, tmp_path)
    called(copy.deepcopy(model), dict(GRAPH.node | GRAPH.edge), GRAPH.edge_index)  # it runs on the whole graph
    wrong = refused_or_why(model, case, TEAMS)
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("name", EXACT)
def test_exact_on_any_number_of_ranks(name, together):
    wrong = together.wrong(name)
    assert not wrong, "\n".join([str(EXACT[name]), *wrong])
