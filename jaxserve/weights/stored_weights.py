"""How a checkpoint's weights are quantised, in short: what an engine makes its recipe of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.model.parameters import layer_parameters, model_parameters
from jaxserve.quantization import Recipe, WeightFormat
from jaxserve.weights.quantised import QuantisedModules
from jaxserve.weights.quantised.modules import StoredModule
from jaxserve.weights.quantised.parameter import Source, exact_format
from jaxserve.weights.tensors import QUANTISED_ENCODINGS, StoredTensor

VERSION = 1
"""Raised whenever the same checkpoint would give other numbers than before."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint that is quantised."""

    name: str
    """Method and number format: awq-int4-128, say, or gguf q4_1."""
    formats: Mapping[str, WeightFormat]
    """The parameters that can be kept exactly as they are stored."""
    recipe: Recipe | None
    """What gives them these formats; None if there are none."""
    widened: Mapping[str, str]
    """The other quantised parameters, which are widened to floats, and why."""
    notes: tuple[str, ...] = ()
    """What else is not as the checkpoint has it, in words."""

    @property
    def label(self) -> str:
        """Of the recipe, or else the name."""
        return self.recipe.label if self.recipe else self.name

    def describe_widened(self, compute_format: str) -> str | None:
        """How many parameters are widened, and why, in a sentence; None where none is."""
        if not self.widened:
            return None
        counts = Counter(self.widened.values())
        reasons = "; ".join(f"{count}: {reason}" for reason, count in sorted(counts.items()))
        return f"{len(self.widened)} parameters of {self.name} were converted to {compute_format} ({reasons})"


def stored_weights(
    config: ModelConfig, sources: Mapping[str, tuple[Source, ...]], quantised: QuantisedModules | None
) -> StoredWeights | None:
    """What there is to say of parameters in these places; None where all are plain numbers."""
    if quantised is None:
        return _of_gguf(sources)
    modules = [
        source for entries in sources.values() for _, source in entries if isinstance(source, StoredModule)
    ]
    if not modules:
        return None
    formats: dict[str, WeightFormat] = {}
    widened: dict[str, str] = {}
    for name, info in model_parameters(config):
        found = exact_format(info, sources[name])
        if isinstance(found, WeightFormat):
            formats[name] = found
        elif found is not None:
            widened[name] = found
    for name in _uneven(config, formats):
        del formats[name]
        widened[name] = "not all layers have it in the same format"
    labels = "+".join(sorted({module.scheme.label for module in modules}))
    name = f"{modules[0].scheme.method}-{labels}"
    recipe = Recipe(name, VERSION, _rules(config, formats)) if formats else None
    return StoredWeights(name, formats, recipe, widened, quantised.notes)


def _of_gguf(sources: Mapping[str, tuple[Source, ...]]) -> StoredWeights | None:
    """The encodings of a GGUF file, those of most numbers first."""
    sizes: Counter[str] = Counter()
    widened: dict[str, str] = {}
    for name, entries in sources.items():
        for _, source in entries:
            if isinstance(source, StoredTensor) and source.encoding.name in QUANTISED_ENCODINGS:
                encoding = source.encoding.name.lower()
                sizes[encoding] += source.num_bytes
                widened[name] = f"no product is made of {encoding} blocks"
    if not widened:
        return None
    return StoredWeights(f"gguf {'+'.join(name for name, _ in sizes.most_common())}", {}, None, widened)


def _uneven(config: ModelConfig, formats: Mapping[str, WeightFormat]) -> list[str]:
    """The parameters that are stored otherwise in another repetition of their segment: see `Segment`.

    A segment runs as one loop, whose weights are stacks in one format.
    """
    uneven: list[str] = []
    for segment in config.segments:
        for position in range(len(segment.pattern)):
            first, step = segment.first + position, len(segment.pattern)
            for field in layer_parameters(config, segment.pattern[position]):
                names = [f"layers.{first + step * i}.{field}" for i in range(segment.count)]
                if len({formats.get(name) for name in names}) > 1:
                    uneven += [name for name in names if name in formats]
    return uneven


def _rules(config: ModelConfig, formats: Mapping[str, WeightFormat]) -> tuple[tuple[str, str], ...]:
    """Patterns and formats: one pattern for a field of the layers where all of them have one format."""
    by_field: dict[str, set[str | None]] = {}
    for name, _ in model_parameters(config):
        format = formats.get(name)
        by_field.setdefault(name.rpartition(".")[2], set()).add(format and format.name)
    rules: dict[str, str] = {}
    for name, format in formats.items():
        field = name.rpartition(".")[2]
        uniform = name.startswith("layers.") and len(by_field[field]) == 1
        rules[f"layers.*.{field}" if uniform else name] = format.name
    return tuple(rules.items())
