"""Which family of systems pays where, over a grid of points."""

from .grid import FAMILIES, MapGrid, Point
from .survey import Map, PointResult, break_even, survey

__all__ = [
    "FAMILIES",
    "Map",
    "MapGrid",
    "Point",
    "PointResult",
    "break_even",
    "survey",
]
