"""How a checkpoint's weights are quantised, in short: what an engine makes its recipe of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.model.parameters import layer_parameters, model_parameters
from jaxserve.quantization import Recipe, WeightFormat
from jaxserve.weights.quantised import QuantisedModules
from jaxserve.weights.quantised.modules import StoredModule
from jaxserve.weights.quantised.parameter import Source, exact_format, is_quantised
from jaxserve.weights.tensors import StoredTensor

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
    is_gguf: bool = False
    """Whether they are blocks of a GGUF file, which CPUs widen once, as they load, unless told to keep them:
    what people run there must be quick, and XLA would widen them at each product."""

    @property
    def label(self) -> str:
        """What another form of the weights is said to be made from: that of the recipe, or else the name."""
        return self.recipe.label if self.recipe and not self.is_gguf else self.name

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
    found = [source for entries in sources.values() for _, source in entries if is_quantised(source)]
    if not found:
        return None
    formats: dict[str, WeightFormat] = {}
    widened: dict[str, str] = {}
    for name, info in model_parameters(config):
        format = exact_format(info, sources[name])
        if isinstance(format, WeightFormat):
            formats[name] = format
        elif format is not None:
            widened[name] = format
    for name in _uneven(config, formats):
        del formats[name]
        widened[name] = "not all layers have it in the same format"
    name = _name([source for source in found if isinstance(source, StoredModule)]) or _gguf_name(found)
    recipe = Recipe(name, VERSION, _rules(config, formats)) if formats else None
    notes = quantised.notes if quantised else ()
    return StoredWeights(name, formats, recipe, widened, notes, is_gguf=quantised is None)


def _name(modules: Sequence[StoredModule]) -> str | None:
    if not modules:
        return None
    labels = "+".join(sorted({module.scheme.label for module in modules}))
    return f"{modules[0].scheme.method}-{labels}"


def _gguf_name(found: Sequence[StoredTensor | StoredModule]) -> str:
    """The encodings of a GGUF file, those of most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in found:
        if isinstance(tensor, StoredTensor):
            sizes[tensor.encoding.name.lower()] += tensor.num_bytes
    return f"gguf {'+'.join(name for name, _ in sizes.most_common())}"


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
