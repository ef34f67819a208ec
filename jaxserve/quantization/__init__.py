"""Number formats of weights and the recipes that give each parameter one.

Recipes and formats are plain descriptions, free of jax; `weight` and `products` compute with them.
"""

from jaxserve.quantization.formats import FORMATS, WeightFormat, format_named, weight_format
from jaxserve.quantization.recipes import (
    RECIPES,
    STORED,
    Recipe,
    precision_of,
    recipe_in_force,
    recipe_named,
    recipe_of_label,
)

__all__ = [
    "FORMATS",
    "RECIPES",
    "STORED",
    "Recipe",
    "WeightFormat",
    "format_named",
    "precision_of",
    "recipe_in_force",
    "recipe_named",
    "recipe_of_label",
    "weight_format",
]
