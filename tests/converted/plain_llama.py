"""A Llama in numpy, one prompt at a time, that notes what its matrices are multiplied with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxserve.config import ModelConfig

Array = npt.NDArray[np.floating]


class PlainLlama:
    """Of one rope base, without windows, biases or experts; float64."""

    def __init__(self, model: ModelConfig, parameters: dict[str, np.ndarray]) -> None:
        self._model = model
        self._parameters = {name: array.astype(np.float64) for name, array in parameters.items()}
        self.peaks: dict[str, np.ndarray] = {}
        """Of each matrix by name the largest absolute input of each channel in all prompts so far."""

    def logits(self, ids: npt.NDArray[np.int32]) -> Array:
        """`[T, V]`."""
        model, own = self._model, self._parameters
        x = own["embed"][ids]
        for layer in range(model.num_layers):
            prefix = f"layers.{layer}."
            x = x + self._attention(prefix, self._norm(x, f"{prefix}attn_norm"))
            gate_up = self._product(f"{prefix}gate_up", self._norm(x, f"{prefix}mlp_norm"), "td,nfd->tnf")
            gate, up = gate_up[:, 0], gate_up[:, 1]
            x = x + self._product(f"{prefix}down", gate / (1 + np.exp(-gate)) * up, "tf,df->td")
        return self._product("head", self._norm(x, "final_norm"), "td,vd->tv")

    def _attention(self, prefix: str, x: Array) -> Array:
        qkv = self._product(f"{prefix}qkv", x, "td,kghd->tkgh")
        q, k, v = self._rotated(qkv[:, :, :-2]), self._rotated(qkv[:, :, -2:-1])[:, :, 0], qkv[:, :, -1]
        scores = np.einsum("tkgh,skh->kgts", q, k) * self._model.attention_scale
        scores[:, :, ~np.tri(len(x), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._product(f"{prefix}o", np.einsum("kgts,skh->tkgh", weights, v), "tkgh,dkgh->td")

    def _product(self, name: str, x: Array, axes: str) -> Array:
        peak = np.abs(x).max(axis=0)
        self.peaks[name] = np.maximum(self.peaks.get(name, 0.0), peak)
        matrix = self._parameters.get(name)
        return np.einsum(axes, x, self._parameters["embed"] if matrix is None else matrix)

    def _norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + self._model.norm_eps) * self._parameters[name]

    def _rotated(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        frequency = self._model.layers[0].rope_theta ** (-np.arange(half) / half)
        angle = np.arange(len(x))[:, None, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)],
            axis=-1,
        )
