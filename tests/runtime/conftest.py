"""Models that the tests of the decoder share."""

from __future__ import annotations

import pytest

from tests.runtime.tiny import Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny target with its drafters."""
    return Tiny(tmp_path_factory.mktemp("tiny"))
