"""Shared by the tests of `minipar.compare`."""

import warnings

import pytest


@pytest.fixture
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
