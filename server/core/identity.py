"""Which model answers, and in what precision: what a receipt is made of."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import EngineConfig
from jaxserve.opened_model import OpenedModel
from jaxserve.quantization import precision_of
from jaxserve.text import tokenizer_fingerprint


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """One served model, as far as it does not change while the server runs."""

    name: str
    """What requests call it: the name of its route."""
    model: str
    """Its own name."""
    path: str
    """Where it was read from."""
    family: str
    """Its architecture, such as "llama"."""
    fingerprint: str
    """Changes with the config and the weights."""
    tokenizer_fingerprint: str
    """Changes with the vocabulary, the rules of the tokenizer and the chat templates."""
    precision: str
    """Of weights and activations."""
    kv_format: str
    """Of the KV pool."""
    device: str
    """The platform that it runs on, such as "cpu"."""
    manifest: str = ""
    """The hash of all that can change an answer or its speed; "" where nobody has made one."""


def identify(
    name: str, model_name: str, model: OpenedModel, config: EngineConfig, device: str, manifest: str = ""
) -> ModelIdentity:
    """The identity of a loaded model.

    Args:
        name: what requests call it.
        model_name: its own name.
        model: its files.
        config: what the engine was compiled for.
        device: the platform that it runs on.
        manifest: the hash of its manifest.
    """
    return ModelIdentity(
        name=name,
        model=model_name,
        path=str(model.checkpoint.path),
        family=config.model.family,
        fingerprint=model.checkpoint.fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(model.tokenizer),
        precision=precision_of(config),
        kv_format=config.cache.kv_format,
        device=device,
        manifest=manifest,
    )
