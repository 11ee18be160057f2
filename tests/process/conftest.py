"""The ``world`` fixture for every test of this folder."""

from serving_world import world

__all__ = ["world"]
