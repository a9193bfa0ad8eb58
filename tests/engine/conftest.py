"""What the tests of the engine share."""

from __future__ import annotations

import pytest

from tests.helpers.engine import ScriptedEngine, scripted


@pytest.fixture(params=[(12, 1), (3, 4)], ids=["12 drafts", "3 drafts, 4 steps a dispatch"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    """A model that says what it is told, after drafts that are as right as they are told to be."""
    return scripted(*request.param)
