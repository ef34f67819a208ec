"""jaxserve: LLM inference on JAX for TPU, GPU and CPU.

Importing it is cheap: each public name brings in what it needs when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxserve.siblings import check_siblings
from jaxserve.version import __version__

if TYPE_CHECKING:
    from jaxserve.async_engine import AnswerStream, Engine
    from jaxserve.llm import LLM
    from jaxserve.loop import HostLoop, LoopStoppedError
    from jaxserve.offline import AnswerIterator
    from jaxserve.opened_model import OpenedModel, open_model, start_engine
    from jaxserve.outputs import AnswerDelta, CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from jaxserve.plan import Grammar, SamplingParams

check_siblings()

_HOMES = {
    "AnswerDelta": "jaxserve.outputs",
    "AnswerIterator": "jaxserve.offline",
    "AnswerStream": "jaxserve.async_engine",
    "CompletionOutput": "jaxserve.outputs",
    "Engine": "jaxserve.async_engine",
    "Grammar": "jaxserve.plan",
    "HostLoop": "jaxserve.loop",
    "LLM": "jaxserve.llm",
    "Logprob": "jaxserve.outputs",
    "LoopStoppedError": "jaxserve.loop",
    "OpenedModel": "jaxserve.opened_model",
    "RequestMetrics": "jaxserve.outputs",
    "RequestOutput": "jaxserve.outputs",
    "SamplingParams": "jaxserve.plan",
    "open_model": "jaxserve.opened_model",
    "start_engine": "jaxserve.opened_model",
}

__all__ = [
    "AnswerDelta",
    "AnswerIterator",
    "AnswerStream",
    "CompletionOutput",
    "Engine",
    "Grammar",
    "HostLoop",
    "LLM",
    "Logprob",
    "LoopStoppedError",
    "OpenedModel",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "open_model",
    "start_engine",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
