"""Which family of systems pays where, over a grid of points; and which composition of their parts on one trace."""

from .grid import FAMILIES, Grid, Point
from .search import compositions, search_systems
from .survey import Found, Map, survey

__all__ = ["FAMILIES", "Found", "Grid", "Map", "Point", "compositions", "search_systems", "survey"]
