"""Recipes: which format each parameter of a model is stored in, under a name and a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jaxserve.config import EngineConfig, FloatFormat
from jaxserve.quantization.formats import FORMATS, WeightFormat, format_named

STORED = "stored"
"""The recipe that keeps weights in the formats that their checkpoint has, which brings the rules."""


@dataclass(frozen=True)
class Recipe:
    """Rules by parameter name. Norms, biases and routers stay float32 whatever the rules say."""

    name: str
    version: int
    """Raised whenever the same checkpoint would give other numbers than before."""
    rules: tuple[tuple[str, str], ...] = ()
    """Pairs of a pattern of names (`embed`, `head`, `layers.*.down`) and a format; the first that fits
    counts. A parameter that none fits keeps the compute format."""
    compute_format: FloatFormat | None = None
    """Of activations and of whatever is not quantised; None leaves it to the other options."""

    def __post_init__(self) -> None:
        for pattern, name in self.rules:
            try:
                format_named(name)
            except ValueError as error:
                raise ValueError(f"recipe {self.name!r}, {pattern!r}: {error}") from error

    @property
    def label(self) -> str:
        """Name and version, as receipts and caches know it."""
        return f"{self.name}@{self.version}"

    @property
    def sums_integers(self) -> bool:
        """Whether rows times any matrix are summed as integers: exactly, so in whatever order."""
        formats = [format_named(name) for _, name in self.rules]
        return any(pattern == "*" for pattern, _ in self.rules) and all(one.row_bits for one in formats)

    def format_of(self, parameter: str) -> WeightFormat | None:
        """The format of a parameter by its full name; None for the compute format."""
        for pattern, name in self.rules:
            if fnmatchcase(parameter, pattern):
                return format_named(name)
        return None


def _everywhere(format_name: str) -> tuple[tuple[str, str], ...]:
    """Rules that give every matrix a format, where that does no harm."""
    if format_named(format_name).storage == "int8":
        return (("*", format_name),)
    # Fewer bits than int8's for a token's only vector, and for all tokens' scores, lose more than they save.
    return (("embed", "int8-weight-only"), ("head", "int8-weight-only"), ("*", format_name))


_RECIPES = (
    Recipe("f32", 1, compute_format="float32"),
    Recipe("bf16", 1, compute_format="bfloat16"),
    Recipe("int8", 2, (("*", "int8"),)),
    Recipe("w8a8", 1, (("*", "w8a8"),)),
    Recipe("int8-weight-only", 1, (("*", "int8-weight-only"),)),
    Recipe("fp8", 2, _everywhere("fp8")),
    Recipe("int4", 1, _everywhere("int4-32")),
    Recipe(STORED, 1),
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}
"""Every recipe by its name."""


def recipe_named(name: str) -> Recipe:
    """A recipe by its name, or made of what the name says.

    Args:
        name: one of `RECIPES`; one of `FORMATS`, for every matrix (embedding and head stay in int8 beside
            fp8 and four bits); or rules by parameter name, the first that fits counts: "head=int8,*=fp8".

    Raises ValueError, listing the names, for one that is not known.
    """
    if name in RECIPES:
        return RECIPES[name]
    if name in FORMATS:
        return Recipe(name, 1, _everywhere(name))
    if "=" not in name:
        raise ValueError(
            f"quantize {name!r} is not one of {', '.join(RECIPES)}, nor a format ({', '.join(FORMATS)}), nor "
            'rules of those by parameter name ("head=int8,*=int4-64")'
        )
    rules = tuple((pattern.strip(), format.strip()) for pattern, _, format in map(_parts, name.split(",")))
    return Recipe(name, 1, rules)


def _parts(rule: str) -> tuple[str, str, str]:
    parts = rule.partition("=")
    if not all(part.strip() for part in parts):
        raise ValueError(f"quantize: {rule!r} is no rule like *.down=int4-64")
    return parts


def recipe_of_label(label: str, rules: tuple[tuple[str, str], ...] = ()) -> Recipe:
    """The recipe that has this name and version, or that a checkpoint brought along with its rules.

    Raises ValueError where it brought none and this version has another recipe, or none, under the name.
    """
    name, _, version = label.partition("@")
    if rules:
        return Recipe(name, int(version), rules)
    try:
        recipe = recipe_named(name)
    except ValueError as error:
        raise ValueError(f"recipe {label!r}: {error}") from error
    if recipe.label != label:
        raise ValueError(f"recipe {label!r} is {recipe.label} in this version")
    return recipe


def recipe_in_force(config: EngineConfig) -> Recipe | None:
    """What gives an engine's weights their formats; None where all are in the compute format."""
    if config.recipe is None:
        return None
    if config.stored_formats:
        return recipe_of_label(config.recipe, config.stored_formats)
    return recipe_named(config.recipe)


def precision_of(config: EngineConfig) -> str:
    """What an engine computes in: the compute format, after the recipe of its weights if they have one.

    Where those are not as the checkpoint stored them, after that: "gguf q4_1 -> float32".
    """
    recipe = recipe_in_force(config)
    precision = f"{recipe.label} {config.compute_format}" if recipe else config.compute_format
    if config.num_widened:
        precision += f", {config.num_widened} widened"
    return f"{config.converted_from} -> {precision}" if config.converted_from else precision
