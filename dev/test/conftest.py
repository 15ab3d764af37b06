"""Fixtures of several test files, which pytest finds here."""

import pytest
from trainer import make_data


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Makes a data set, once for all tests of a process. Returns the options that name it."""
    return make_data(tmp_path_factory.mktemp("data"))
