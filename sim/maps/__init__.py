"""Which family of systems pays where, over a grid of points; and which composition of their parts on one trace."""

from .grid import FAMILIES, MapGrid, Point
from .search import compositions, search_systems
from .survey import Map, PointResult, break_even, survey

__all__ = [
    "FAMILIES",
    "Map",
    "MapGrid",
    "Point",
    "PointResult",
    "break_even",
    "compositions",
    "search_systems",
    "survey",
]
