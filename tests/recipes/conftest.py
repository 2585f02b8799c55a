"""Recipes run phases in this process: the fixtures are those of the training tests."""

from tests.train.conftest import make_config, one_thread

__all__ = ["make_config", "one_thread"]
