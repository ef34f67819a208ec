"""The device state: everything that a step reads and writes, donated from step to step."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.model.cache import Cache, draft_layouts, make_cache
from jaxserve.plan import MAX_BIASES, MAX_STOP_IDS
from pallas_kernels.page_layout import PageLayout

MAX_EOS_IDS = 8
PROMPT_FLAG = 1 << 30
"""Added to a token's count if the prompt holds it."""
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@flax.struct.dataclass
class SlotSampling:
    """How each slot samples. N + 1 rows: the last is the padding's."""

    floats: jax.Array
    """[N + 1, 6] float32, in the order of FLOAT_FIELDS."""
    top_k: jax.Array
    """[N + 1] int32, 0 for all."""
    key: jax.Array
    """[N + 1, 2] uint32, from the request's seed and its sample's index."""
    min_len: jax.Array
    """[N + 1] int32 known tokens below which no stop id is sampled."""
    stop_ids: jax.Array
    """[N + 1, MAX_STOP_IDS + MAX_EOS_IDS] int32 ids withheld below min_len, -1 where unused."""
    end_ids: jax.Array
    """[N + 1, MAX_STOP_IDS + MAX_EOS_IDS] int32 ids that end the answer, -1 where unused."""
    max_known: jax.Array
    """[N + 1] int32 known tokens with which the answer is at its longest."""
    bias_ids: jax.Array
    """[N + 1, MAX_BIASES] int32, V (out of range) where unused."""
    bias_values: jax.Array
    """[N + 1, MAX_BIASES] float32."""
    allowed: jax.Array
    """[N + 1, ceil(V / 32)] uint32, a bit for each token that the request lets be sampled."""
    grammar: jax.Array
    """[N + 1, 1 + K, ceil(V / 32)] uint32, a bit for each token that its grammar lets come next, and after
    each of its K drafts at most."""
    masked: jax.Array
    """[N + 1] bool, whether any bit of `allowed` or `grammar` is clear."""
    num_biases: jax.Array
    """[N + 1] int32."""
    wants_logprobs: jax.Array
    """[N + 1] bool."""


@flax.struct.dataclass
class TicksInFlight:
    """The groups between the stages of a pipeline. N stages, S sequences of a group at most."""

    slot_NS: jax.Array
    """int32 whom each stage took through its layers in the latest tick, a row each; the padding's slot where
    it had nobody. These slots' known and computed tokens are those from before."""
    handed_NSD: jax.Array
    """In the compute format what each stage takes in the next tick, on its own devices: what the one before
    it has made of its group. Nothing for the first."""


@flax.struct.dataclass
class DeviceState:
    """The authority on every slot. N slots, M tokens at most, G cache groups, P pages a sequence."""

    cache: Cache
    page_table: jax.Array
    """[G, N + 1, P] int32 page ids; an entry counts once it is granted."""
    tokens: jax.Array
    """[N + 1, M + 1] int32 known tokens of each slot: the prompt, then what was sampled."""
    num_known: jax.Array
    """[N + 1] int32."""
    num_computed: jax.Array
    """[N + 1] int32 tokens whose keys and values are on pages."""
    counts: jax.Array
    """[N + 1, V] int32 occurrences in the answer, plus PROMPT_FLAG; kept only where penalties are used."""
    sampling: SlotSampling
    draft_cache: Cache = ()
    """Keys and values of a draft model, on the page ids of the model's full attention; empty without one.
    Of what it has read nothing depends but how good its drafts are."""
    ticks: TicksInFlight | None = None
    """None where a decode step takes its sequences through all stages."""


def make_state(config: EngineConfig, layouts: tuple[PageLayout, ...]) -> DeviceState:
    """An empty state."""
    rows, vocab = config.num_slots + 1, config.model.vocab_size
    stop_width = MAX_STOP_IDS + MAX_EOS_IDS
    sampling = SlotSampling(
        floats=jnp.zeros((rows, len(FLOAT_FIELDS)), jnp.float32),
        top_k=jnp.zeros((rows,), jnp.int32),
        key=jnp.zeros((rows, 2), jnp.uint32),
        min_len=jnp.zeros((rows,), jnp.int32),
        stop_ids=jnp.full((rows, stop_width), -1, jnp.int32),
        end_ids=jnp.full((rows, stop_width), -1, jnp.int32),
        max_known=jnp.zeros((rows,), jnp.int32),
        bias_ids=jnp.full((rows, MAX_BIASES), vocab, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_BIASES), jnp.float32),
        allowed=jnp.full((rows, mask_words(vocab)), 0xFFFFFFFF, jnp.uint32),
        grammar=jnp.full((rows, 1 + config.max_drafts, mask_words(vocab)), 0xFFFFFFFF, jnp.uint32),
        masked=jnp.zeros((rows,), jnp.bool_),
        num_biases=jnp.zeros((rows,), jnp.int32),
        wants_logprobs=jnp.zeros((rows,), jnp.bool_),
    )
    return DeviceState(
        cache=make_cache(config, layouts),
        page_table=jnp.zeros((len(layouts), rows, config.pages_per_sequence), jnp.int32),
        tokens=jnp.zeros((rows, config.max_model_len + 1), jnp.int32),
        num_known=jnp.zeros((rows,), jnp.int32),
        num_computed=jnp.zeros((rows,), jnp.int32),
        counts=jnp.zeros((rows, vocab), jnp.int32),
        sampling=sampling,
        draft_cache=make_cache(config.draft, draft_layouts(config, layouts)) if config.draft else (),
        ticks=_no_ticks(config) if config.decode_groups > 1 else None,
    )


def _no_ticks(config: EngineConfig) -> TicksInFlight:
    shape = config.decode_groups, config.decode_rows[-1]
    return TicksInFlight(
        slot_NS=jnp.full(shape, config.num_slots, jnp.int32),
        handed_NSD=jnp.zeros((*shape, config.model.hidden_size), jnp.dtype(config.compute_format)),
    )


def mask_words(vocab_size: int) -> int:
    """uint32 words that hold a bit for each token."""
    return -(-vocab_size // 32)
