"""What a model's activations are on a text: the float32 model reads it, and the largest are noted."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine.build import configure, layer_loop_for, load_parameters, local_target
from jaxserve.engine.options import EngineOptions
from jaxserve.model.cache import Cache, make_cache, page_layouts
from jaxserve.model.peaks import Peaks, no_peaks, peaks_by_name
from jaxserve.model.rows import sequence_rows
from jaxserve.model.transformer import Params, Transformer
from jaxserve.quantization import Recipe
from jaxserve.quantization.smoothing import check_smoothing
from jaxserve.text import Tokenizer
from jaxserve.text.windows import Window, cut_windows
from jaxserve.weights import Checkpoint
from pallas_kernels.rms_norm import rms_norm

WINDOW = 512
"""Tokens that are read on their own."""
DEFAULT_TOKENS = 8192
"""Read of a text, if it has so many."""
FEWEST_TOKENS = 256
"""Of which the largest activations are worth scaling by."""


@dataclass(frozen=True)
class Calibration:
    """A text to smooth a model by."""

    windows: Sequence[Window]
    alpha: float
    """How much of the difficulty moves into the weights: see `smooth_scales`."""
    text_sha256: str

    @property
    def num_tokens(self) -> int:
        return sum(len(window.token_ids) for window in self.windows)


def read_calibration(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    text: str,
    *,
    recipe: Recipe | None,
    alpha: float = 0.5,
    num_tokens: int | None = None,
) -> Calibration:
    """A text made ready, and all that can be wrong found before anything is loaded.

    Args:
        checkpoint: the model that is to read it.
        tokenizer: its own.
        text: what to read, from its beginning.
        recipe: what the model will be quantised with.
        alpha: see `Calibration`.
        num_tokens: to read; by default 8,192 or what there is.

    Raises ValueError, naming the value and the limit, for an alpha beyond 0 to 1, a recipe that rounds no
    activations, and a text that is shorter than it must be.
    """
    check_smoothing(recipe, alpha)
    if num_tokens is not None and num_tokens < FEWEST_TOKENS:
        raise ValueError(f"calibrate-tokens {num_tokens} is below {FEWEST_TOKENS}: too few to scale by")
    found = len(tokenizer.encode(text, add_special_tokens=False))
    needed = num_tokens or FEWEST_TOKENS
    if found < needed:
        raise ValueError(f"the calibration text has {found} tokens, and {needed} are needed")
    context = min(WINDOW, checkpoint.config.max_position)
    windows = cut_windows(tokenizer, text, context=context, max_tokens=num_tokens or DEFAULT_TOKENS)
    return Calibration(windows, alpha, hashlib.sha256(text.encode()).hexdigest())


def observe_peaks(
    checkpoint: Checkpoint,
    windows: Sequence[Window],
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, np.ndarray]:
    """For each matrix by its full name the largest absolute input of each channel, float32 `[*in]`.

    The model is in memory in float32 meanwhile. `on_progress` hears of "load" and "calibrate". Matrices whose
    inputs are not seen are left out: what experts' down reads, and a tied head.

    Raises ValueError, naming the matrix, where the model makes no numbers of the text.
    """
    longest = max(len(window.token_ids) for window in windows)
    options = EngineOptions(quantize="f32", max_model_len=longest, num_slots=1)
    config = configure(checkpoint, options)
    num_pages = 1 + -(-longest // config.cache.page_size)
    pages = (max(num_pages, 2),) * len(config.model.windows)
    reader = _Reader(replace(config, cache=replace(config.cache, num_pages=pages)))
    params = load_parameters(checkpoint, config, on_progress)
    for number, window in enumerate(windows):
        reader.read(params, window)
        on_progress("calibrate", number + 1, len(windows))
    peaks = reader.peaks()
    for name, peak in peaks.items():
        if not np.isfinite(peak).all():
            raise ValueError(f"{checkpoint.path}: what {name} reads of the text is not finite")
    return peaks


class _Reader:
    """Reads windows one after the other, from the same pages, and keeps the largest activations."""

    def __init__(self, config: EngineConfig) -> None:
        platform = jax.default_backend()
        layouts = page_layouts(config, platform)
        self._model = config.model
        self._num_rows = config.chunk_rows[-1]
        self._cache = make_cache(config, layouts)
        self._peaks = no_peaks(config.model)
        self._head_D = jnp.zeros(config.model.hidden_size, jnp.float32)
        target = local_target()
        transformer = Transformer(config, layouts, layer_loop_for(target), target=target)
        self._read = jax.jit(functools.partial(_read_chunk, transformer), donate_argnums=(1, 2, 3))

    def read(self, params: Params, window: Window) -> None:
        ids = window.token_ids
        for start in range(0, len(ids), self._num_rows):
            tokens = ids[start : start + self._num_rows]
            padded = np.pad(tokens, (0, self._num_rows - len(tokens)))
            self._cache, self._peaks, self._head_D = self._read(
                *(params, self._cache, self._peaks, self._head_D),
                *(padded, np.int32(start), np.int32(len(tokens))),
            )

    def peaks(self) -> dict[str, np.ndarray]:
        named = peaks_by_name(self._model, self._peaks)
        return named if self._model.tie_embeddings else named | {"head": np.asarray(self._head_D)}


def _read_chunk(
    transformer: Transformer,
    params: Params,
    cache: Cache,
    peaks: Peaks,
    head_D: jax.Array,
    token_T: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
) -> tuple[Cache, Peaks, jax.Array]:
    """One sequence's next tokens: the caches with them written, the peaks with them seen, the head's among
    them."""
    rows = sequence_rows(transformer.config, token_T.shape[0], start, num_tokens)
    hidden_TD, cache, peaks = transformer.observe(params, cache, peaks, token_T, rows)
    normed_TD = rms_norm(hidden_TD, params["final_norm"], transformer.model.norm_eps)
    largest_D = jnp.max(jnp.where(rows.valid_T[:, None], jnp.abs(normed_TD), 0.0), axis=0)
    return cache, peaks, jnp.maximum(head_D, largest_D.astype(jnp.float32))
