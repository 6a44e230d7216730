"""Which family of systems pays where, over a grid of points; and which composition of their parts on one trace."""

from .grid import FAMILIES, Grid, Point
from .search import compositions, search_systems
from .survey import Found, Map, break_even, survey, turns_said

__all__ = [
    "FAMILIES",
    "Found",
    "Grid",
    "Map",
    "Point",
    "break_even",
    "compositions",
    "search_systems",
    "survey",
    "turns_said",
]
