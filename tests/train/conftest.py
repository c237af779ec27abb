"""What the source alone decides is computed once for all tests of training."""

from functools import cache

import pytest

from train import flags
from train.studies import cells, engine


@pytest.fixture(scope="session", autouse=True)
def source_is_read_once():
    """A study hashes its source for a second, and each flag reads the types of all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "field_kind", cache(flags.field_kind))
        patch.setattr(engine, "source_hash", lambda make: cells.source_hash(getattr(make, "func", make)))
        yield
