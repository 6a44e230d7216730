"""Which family of systems pays where: a grid of models, weights, schedules, contexts and loads, and what is found."""

from .grid import FAMILIES, Grid, Point
from .survey import Found, Map, survey

__all__ = ["FAMILIES", "Found", "Grid", "Map", "Point", "survey"]
