"""The device state: everything that a step reads and writes, donated from step to step."""

from __future__ import annotations

import enum

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
"""Columns of `SlotSampling.floats`; those of biases follow."""
NUM_FLOATS = len(FLOAT_FIELDS) + MAX_BIASES


class Column(enum.IntEnum):
    """Columns of `SlotSampling.numbers`; lists of ids follow."""

    TOP_K = 0
    """0 for all."""
    MIN_LEN = enum.auto()
    """Known tokens below which no stop id is sampled."""
    MAX_KNOWN = enum.auto()
    """Known tokens with which the answer is at its longest."""
    MASKED = enum.auto()
    """1 if any bit of the slot's masks is clear."""
    NUM_BIASES = enum.auto()
    WANTS_LOGPROBS = enum.auto()
    """1 if it does."""
    KEY = enum.auto()
    """From the request's seed and its sample's index: this one's 32 bits and the next one's."""


_FIRST_ID, _NUM_ENDS = Column.KEY + 2, MAX_STOP_IDS + MAX_EOS_IDS
STOP_IDS = slice(_FIRST_ID, _FIRST_ID + _NUM_ENDS)
"""Columns of ids withheld below the least length, -1 where unused."""
END_IDS = slice(STOP_IDS.stop, STOP_IDS.stop + _NUM_ENDS)
"""Columns of ids that end the answer, -1 where unused."""
BIAS_IDS = slice(END_IDS.stop, END_IDS.stop + MAX_BIASES)
"""Columns of ids that have a bias, V (out of range) where unused."""
NUM_NUMBERS = BIAS_IDS.stop


@flax.struct.dataclass
class SlotSampling:
    """How each slot samples. N + 1 rows: the last is the padding's.

    Few arrays: a step's call takes a microsecond and more for each, on a processor whose caches the weights
    have just passed through.
    """

    floats: jax.Array
    """[N + 1, NUM_FLOATS] float32, in the order of FLOAT_FIELDS; then the values of biases."""
    numbers: jax.Array
    """[N + 1, NUM_NUMBERS] int32, by Column, STOP_IDS, END_IDS, BIAS_IDS."""
    masks: jax.Array
    """[N + 1, 2 + K, ceil(V / 32)] uint32, a bit for each token that the request lets be sampled; a bit for
    each that its grammar lets come next; and after each of its K drafts at most."""

    def number(self, slot_R: jax.Array, column: Column) -> jax.Array:
        """[R] int32 that of each slot."""
        return self.numbers[slot_R, column]

    def is_set(self, slot_R: jax.Array, column: Column) -> jax.Array:
        """[R] bool whether that of each slot is not 0."""
        return self.number(slot_R, column) != 0

    def ids(self, slot_R: jax.Array, columns: slice) -> jax.Array:
        """[R, columns] int32 those of each slot."""
        return self.numbers[:, columns][slot_R]

    def key(self, slot_R: jax.Array) -> jax.Array:
        """[R, 2] uint32."""
        words_R2 = self.ids(slot_R, slice(Column.KEY, Column.KEY + 2))
        return jax.lax.bitcast_convert_type(words_R2, jnp.uint32)

    def bias_values(self, slot_R: jax.Array) -> jax.Array:
        """[R, MAX_BIASES] float32."""
        return self.floats[:, len(FLOAT_FIELDS) :][slot_R]

    def allowed(self, slot_R: jax.Array, ahead_R: jax.Array) -> jax.Array:
        """[R, ceil(V / 32)] uint32 a bit for each token that may come after so many drafts."""
        return self.masks[slot_R, 0] & self.masks[slot_R, 1 + ahead_R]


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
    numbers = jnp.zeros((rows, NUM_NUMBERS), jnp.int32)
    numbers = numbers.at[:, STOP_IDS].set(-1).at[:, END_IDS].set(-1).at[:, BIAS_IDS].set(vocab)
    sampling = SlotSampling(
        floats=jnp.zeros((rows, NUM_FLOATS), jnp.float32),
        numbers=numbers,
        masks=jnp.full((rows, 2 + config.max_drafts, mask_words(vocab)), 0xFFFFFFFF, jnp.uint32),
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
