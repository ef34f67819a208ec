"""A model without files: the fake engine behind a tokenizer of single bytes and a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxserve.opened_model import OpenedModel
from jaxserve.plan import EngineLimits
from jaxserve.run_manifest import RunManifest
from jaxserve.scheduling import DEFAULT_POLICY, CacheIdentity, SchedulerPolicy
from jaxserve.text import Tokenizer
from tests.fake_engine import FakeEngine
from tests.fake_limits import make_limits

BOS, EOS = 0, 1
CACHE = CacheIdentity(model="fake", kv_format="int8")
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """258 ids: `<s>`, which begins every text, `</s>`, and each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: token_id for token_id, token in enumerate(["<s>", "</s>", *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>"},
        eos_token_ids=[EOS],
        chat_templates={} if template is None else {"default": template},
    )


class FakeModel:
    """Stands for an OpenedModel. `device` is the engine that the last `build_engine` returned."""

    def __init__(self, engine: type[FakeEngine] = FakeEngine, *, template: str | None = TEMPLATE) -> None:
        self.tokenizer = byte_tokenizer(template)
        self.sampling_defaults: dict[str, Any] = {}
        self.options: Any = None
        self.device = engine(fake_limits())
        self._engine = engine

    def build_engine(self, options: Any, *, progress: bool = False) -> FakeEngine:
        self.options = options
        self.device = self._engine(self.configure(options))
        return self.device

    def configure(self, options: Any) -> EngineLimits:
        """An engine's config, of which the limits are all that a fake one has."""
        limits = fake_limits(options.max_model_len or 128, options.num_slots or 4)
        return limits if options.speculative is None else replace(limits, max_drafts=options.max_drafts)

    def draft_checkpoint(self, options: Any, *, progress: bool = False) -> None:
        """Nothing drafts."""

    def cache_identity(self, engine: FakeEngine) -> CacheIdentity:
        return CACHE

    def manifest(
        self,
        config: EngineLimits,
        options: Any,
        *,
        kernels: Mapping[str, str] | None = None,
        policy: SchedulerPolicy = DEFAULT_POLICY,
        prefix_caching: bool = True,
        sampling_defaults: Mapping[str, Any] | None = None,
    ) -> RunManifest:
        entries = {
            "model": {"fingerprint": "fake"},
            "sampling": {"defaults": sampling_defaults},
            "engine": {"num_slots": config.num_slots},
        }
        return RunManifest(entries if kernels is None else entries | {"kernels": kernels})

    def opened(self) -> OpenedModel:
        """Itself, in the eyes of a type checker."""
        return cast(OpenedModel, self)


def fake_limits(max_model_len: int = 128, num_slots: int = 4) -> EngineLimits:
    return make_limits(num_slots=num_slots, max_model_len=max_model_len, vocab_size=258, eos_token_ids=(EOS,))
