// Ragged paged attention on CPU, straight from the pages: nothing is gathered. Blocks of kTokens positions are
// reduced with the online softmax of FlashAttention (Dao et al. 2022, section 3.1), parts of kPart positions each
// by itself, so that threads share a long context (Flash-Decoding, Dao et al. 2023); a row's sums are added in an
// order that depends on its own context alone.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "native/ffi.h"
#include "native/lanes.h"
#include "native/vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define JAXSERVE_AMX 1
#include "ragged_paged_attention/amx.h"
#endif

namespace {

using jaxserve::Broadcast, jaxserve::Exp, jaxserve::Integers, jaxserve::kWidth, jaxserve::Load, jaxserve::Store,
    jaxserve::Vector;

constexpr int64_t kLanes = 128;
constexpr int64_t kTokens = 16;   // of a block; pages are a multiple
constexpr int64_t kQueries = 48;  // that share a block, rows times queries of a KV head, where that is more than one row
constexpr int64_t kManyPieces = 32;  // of which threads make even shares
constexpr float kMasked = -std::numeric_limits<float>::infinity();

constexpr int64_t kPart = 256;    // a multiple of kTokens
#if defined(__AVX512F__)
constexpr int kTogether = 8;  // queries that share a block's numbers in registers
#else
constexpr int kTogether = 4;
#endif
constexpr int64_t kVectors = kTokens / kWidth;

float Highest(Vector v) {
  typedef float Quarter __attribute__((vector_size(kWidth)));
  Quarter parts[4];
  std::memcpy(parts, &v, sizeof v);
  const Quarter low = parts[0] > parts[1] ? parts[0] : parts[1], high = parts[2] > parts[3] ? parts[2] : parts[3];
  const Quarter all = low > high ? low : high;
  float highest = all[0];
  for (int64_t i = 1; i < kWidth / 4; ++i) highest = std::max(highest, all[i]);
  return highest;
}

enum Format { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

struct Problem {
  // Static.
  int64_t page_size, num_kv_heads, head_size, planes, window, format;
  float scale, softcap;
  // Operands.
  const float* q;
  const void* pool;
  const float* scales;  // of an int8 pool
  const int32_t *page_table, *query_start, *context_len;
  int64_t first_page, num_heads, pages_per_sequence;
  float* out;

  int64_t queries_per_kv() const { return num_heads / num_kv_heads; }
  // Of a key or value in whole pairs of vectors; lanes past the head size are zeros.
  int64_t depth() const { return (head_size + 2 * kWidth - 1) / (2 * kWidth) * (2 * kWidth); }
};

// Some rows of one sequence, for one KV head.
struct Piece {
  int64_t sequence, head, first_row, num_rows, first_position;
};

// One past the last row's position.
int64_t End(const Piece& piece) { return piece.first_position + piece.num_rows; }

// The first position that a row may read.
int64_t Low(const Problem& p, const Piece& piece) {
  return p.window ? std::max<int64_t>(0, piece.first_position - p.window + 1) : 0;
}

int64_t NumQueries(const Problem& p, const Piece& piece) { return piece.num_rows * p.queries_per_kv(); }

// Where a query's numbers lie, of q and of the result.
int64_t Place(const Problem& p, const Piece& piece, int64_t query) {
  const int64_t group = p.queries_per_kv();
  return ((piece.first_row + query / group) * p.num_heads + piece.head * group + query % group) * p.head_size;
}

// A query, scaled, to its place among [queries][depth] zeros.
void CopyQuery(const Problem& p, const Piece& piece, int64_t query, float* queries) {
  for (int64_t d = 0; d < p.head_size; ++d)
    queries[query * p.depth() + d] = p.q[Place(p, piece, query) + d] * p.scale;
}

Vector Numbers(const float* x) { return Load(x); }

Vector Numbers(const uint16_t* x) {  // bfloat16: the upper half of a float32
  typedef uint16_t Halves __attribute__((vector_size(2 * kWidth)));
  typedef uint32_t Bits __attribute__((vector_size(4 * kWidth)));
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  Vector v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

Vector Numbers(const int8_t* x) {
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, x, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vector);
}

// rows[i][j] becomes rows[j][i].
#if defined(__AVX512F__)
void Transpose(Vector rows[kWidth]) {
  __m512i lanes[kWidth];
  std::memcpy(lanes, rows, sizeof lanes);
  jaxserve::Transpose(lanes);
  std::memcpy(rows, lanes, sizeof lanes);
}
#else
void Transpose(Vector rows[kWidth]) {
  Vector a[kWidth], b[kWidth];
  for (int i = 0; i < 4; ++i) {  // Pairs of rows interleaved, within each half of 128 bits.
    a[2 * i] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], Integers{0, 8, 1, 9, 4, 12, 5, 13});
    a[2 * i + 1] = __builtin_shuffle(rows[2 * i], rows[2 * i + 1], Integers{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 2; ++i) {  // Pairs of pairs.
    for (int j = 0; j < 2; ++j) {
      b[4 * i + 2 * j] = __builtin_shuffle(a[4 * i + j], a[4 * i + 2 + j], Integers{0, 1, 8, 9, 4, 5, 12, 13});
      b[4 * i + 2 * j + 1] =
          __builtin_shuffle(a[4 * i + j], a[4 * i + 2 + j], Integers{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (int i = 0; i < 4; ++i) {  // The halves.
    rows[i] = __builtin_shuffle(b[i], b[4 + i], Integers{0, 1, 2, 3, 8, 9, 10, 11});
    rows[4 + i] = __builtin_shuffle(b[i], b[4 + i], Integers{4, 5, 6, 7, 12, 13, 14, 15});
  }
}
#endif

// Where a block's numbers lie, and which of its positions may be read.
struct Block {
  int64_t head;      // First row of the head's planes.
  int64_t token;     // Of the page: its first.
  int64_t from, to;  // Of the block, readable.
  const float *key_scales, *value_scales;
};

Block FindBlock(const Problem& p, const Piece& piece, int64_t first, int64_t high) {
  const int64_t entry = piece.sequence * p.pages_per_sequence + first / p.page_size;
  const int64_t head = (p.first_page + p.page_table[entry]) * p.num_kv_heads + piece.head;
  const int64_t token = first % p.page_size;
  const float* scales = p.scales + (p.format == kInt8 ? head * 2 * p.page_size + token : 0);
  return {head * p.planes * p.page_size, token, std::max<int64_t>(0, Low(p, piece) - first),
          std::min(kTokens, high - first), scales, scales + p.page_size};
}

// The keys of a block, transposed to [depth][kTokens], and its values [kTokens][depth]; zeros for positions that
// nobody may read, where a page may hold anything, NaN included.
template <typename T, bool kWhole>
void ReadBlock(const Problem& p, const Block& block, float* keys, float* values) {
  const int64_t depth = p.depth(), value_lane = p.planes == 1 ? 64 : p.planes * kLanes / 2;
  const auto* pool = static_cast<const T*>(p.pool) + (block.head + block.token) * kLanes;
  const auto numbers = [&](const T* lane, int64_t t, const float* scales) {
    if (!kWhole && (t < block.from || t >= block.to)) return Broadcast(0.0f);
    const Vector stored = Numbers(lane + t * kLanes);
    return std::is_same_v<T, int8_t> ? stored * scales[t] : stored;
  };
  const auto lane = [&](int64_t d) { return pool + d / kLanes * p.page_size * kLanes + d % kLanes; };
  for (int64_t d = 0; d < depth; d += kWidth) {
    const T *key = lane(d), *value = lane(value_lane + d);
    for (int64_t start = 0; start < kTokens; start += kWidth) {
      Vector rows[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) rows[i] = numbers(key, start + i, block.key_scales);
      Transpose(rows);
      for (int64_t i = 0; i < kWidth; ++i) Store(keys + (d + i) * kTokens + start, rows[i]);
    }
    for (int64_t t = 0; t < kTokens; ++t) Store(values + t * depth + d, numbers(value, t, block.value_scales));
  }
}

template <typename T>
void ReadBlock(const Problem& p, const Block& block, float* keys, float* values) {
  if (block.from == 0 && block.to == kTokens)
    ReadBlock<T, true>(p, block, keys, values);
  else
    ReadBlock<T, false>(p, block, keys, values);
}

// Of some queries over some positions: the highest score, and sums of weights (lane by lane) and weighted values.
struct Sums {
  int64_t depth;
  std::vector<float> peak, total, out;

  Sums(int64_t depth, int64_t num_queries)
      : depth(depth), peak(num_queries, kMasked), total(num_queries * kWidth), out(num_queries * depth) {}

  void Scale(int64_t query, float factor) {
    float *weights = total.data() + query * kWidth, *values = out.data() + query * depth;
    Store(weights, Load(weights) * factor);
    for (int64_t d = 0; d < depth; d += kWidth) Store(values + d, Load(values + d) * factor);
  }

  // Those of later positions beside these, which stay as they are where there are none.
  void Add(Sums& later) {
    for (int64_t query = 0; query < static_cast<int64_t>(peak.size()); ++query) {
      const float highest = std::max(peak[query], later.peak[query]);
      if (later.peak[query] == kMasked) continue;
      Scale(query, std::exp(peak[query] - highest));
      later.Scale(query, std::exp(later.peak[query] - highest));
      peak[query] = highest;
      const auto add = [](float* x, const float* y) { Store(x, Load(x) + Load(y)); };
      add(total.data() + query * kWidth, later.total.data() + query * kWidth);
      for (int64_t d = query * depth; d < (query + 1) * depth; d += kWidth) add(out.data() + d, later.out.data() + d);
    }
  }
};

// What a thread needs for a piece.
struct Buffers {
  std::vector<float> keys, values, queries;

  Buffers(const Problem& p, const Piece& piece)
      : keys(p.depth() * kTokens), values(p.depth() * kTokens), queries(NumQueries(p, piece) * p.depth()) {
    for (int64_t query = 0; query < NumQueries(p, piece); ++query) CopyQuery(p, piece, query, queries.data());
  }
};

// The weights of a block for one query, from its scores; the query's sums so far are scaled to the new peak.
void Weigh(const Problem& p, Sums& sums, int64_t query, int64_t from, int64_t to, float* weights) {
  if (p.softcap != 0.0f)
    for (int64_t t = 0; t < kTokens; ++t) weights[t] = p.softcap * std::tanh(weights[t] / p.softcap);
  if (from > 0 || to < kTokens)
    for (int64_t t = 0; t < kTokens; ++t)
      if (t < from || t >= to) weights[t] = kMasked;
  Vector highest = Load(weights);
  for (int64_t i = kWidth; i < kTokens; i += kWidth) {
    const Vector other = Load(weights + i);
    highest = highest > other ? highest : other;
  }
  const float peak = std::max(sums.peak[query], Highest(highest));
  if (peak > sums.peak[query]) {
    sums.Scale(query, std::exp(sums.peak[query] - peak));
    sums.peak[query] = peak;
  }
  Vector total = Load(sums.total.data() + query * kWidth);
  for (int64_t i = 0; i < kTokens; i += kWidth) {
    const Vector score = Load(weights + i);
    const Vector weight = score > kMasked ? Exp(score - peak) : Broadcast(0.0f);
    Store(weights + i, weight);
    total += weight;
  }
  Store(sums.total.data() + query * kWidth, total);
}

// Takes a block into the sums of N neighbouring queries, which share its numbers in registers.
template <int N>
void Reduce(const Problem& p, const Piece& piece, const Buffers& b, Sums& sums, int64_t query, int64_t first) {
  const int64_t depth = p.depth();
  Vector scores[N][kVectors] = {};
  for (int64_t d = 0; d < depth; ++d) {
    for (int n = 0; n < N; ++n)
      for (int64_t i = 0; i < kVectors; ++i)
        scores[n][i] += b.queries[(query + n) * depth + d] * Load(b.keys.data() + d * kTokens + i * kWidth);
  }
  float weights[N][kTokens];
  std::memcpy(weights, scores, sizeof weights);
  for (int n = 0; n < N; ++n) {
    const int64_t position = piece.first_position + (query + n) / p.queries_per_kv();
    const int64_t from = p.window ? position - p.window + 1 - first : 0, to = position + 1 - first;
    if (to > 0 && from < kTokens)
      Weigh(p, sums, query + n, from, to, weights[n]);
    else
      std::memset(weights[n], 0, sizeof weights[n]);
  }
  for (int64_t d = 0; d < depth; d += 2 * kWidth) {
    Vector low[N], high[N];
    for (int n = 0; n < N; ++n) {
      low[n] = Load(sums.out.data() + (query + n) * depth + d);
      high[n] = Load(sums.out.data() + (query + n) * depth + d + kWidth);
    }
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* values = b.values.data() + t * depth + d;
      for (int n = 0; n < N; ++n) {
        low[n] += weights[n][t] * Load(values);
        high[n] += weights[n][t] * Load(values + kWidth);
      }
    }
    for (int n = 0; n < N; ++n) {
      Store(sums.out.data() + (query + n) * depth + d, low[n]);
      Store(sums.out.data() + (query + n) * depth + d + kWidth, high[n]);
    }
  }
}

template <int N = kTogether>
void ReduceAll(const Problem& p, const Piece& piece, const Buffers& b, Sums& sums, int64_t num_queries,
               int64_t query, int64_t first) {
  for (; query + N <= num_queries; query += N) Reduce<N>(p, piece, b, sums, query, first);
  if constexpr (N > 1)
    if (query < num_queries) ReduceAll<N - 1>(p, piece, b, sums, num_queries, query, first);
}

// Takes positions [from, to), at least one, into the sums.
void Attend(const Problem& p, const Piece& piece, int64_t from, int64_t to, Buffers& b, Sums& sums) {
  for (int64_t first = from / kTokens * kTokens; first < to; first += kTokens) {
    const Block block = FindBlock(p, piece, first, to);
    if (p.format == kFloat32)
      ReadBlock<float>(p, block, b.keys.data(), b.values.data());
    else if (p.format == kBfloat16)
      ReadBlock<uint16_t>(p, block, b.keys.data(), b.values.data());
    else
      ReadBlock<int8_t>(p, block, b.keys.data(), b.values.data());
    ReduceAll(p, piece, b, sums, sums.peak.size(), 0, first);
  }
}

#if JAXSERVE_AMX

using jaxserve::amx::kSide, jaxserve::amx::kDeep, jaxserve::amx::kTile, jaxserve::amx::kTerms;

constexpr int64_t kTogetherTokens = 4 * kSide;  // whose scores are computed at once

// Lines for one use, of this thread's own, kept for the next piece: new ones would be mapped and cleared each time.
template <int kUse>
uint16_t* KeptLines(int64_t num_numbers) {
  static thread_local std::unique_ptr<jaxserve::amx::Line[]> lines;
  static thread_local int64_t size = 0;
  if (num_numbers > size) lines.reset(new jaxserve::amx::Line[num_numbers / kDeep]);
  size = std::max(size, num_numbers);
  return lines[0].numbers;
}

// What a thread needs for a piece where it computes with tiles, a part of the context at a time.
struct TileBuffers {
  uint16_t* const keys;     // [kPart / 64][depth / 32][4] tiles: of 32 lanes, 16 tokens
  uint16_t* const values;   // [depth / 64][kPart / 32][4, or 2 for the last] tiles: of 32 tokens, 16 lanes
  uint16_t* const queries;  // [kTerms][queries][depth]
  alignas(64) float scores[kSide * kPart];
  alignas(64) uint16_t weights[kTerms * kSide * kPart];  // [kTerms][16 queries][kPart]

  TileBuffers(const Problem& p, const Piece& piece)
      : keys(KeptLines<0>(kPart * p.depth())),
        values(KeptLines<1>(kPart * p.depth())),
        queries(KeptLines<2>(kTerms * NumQueries(p, piece) * p.depth())) {
    const int64_t size = NumQueries(p, piece) * p.depth();
    std::vector<float> wide(size);
    for (int64_t query = 0; query < NumQueries(p, piece); ++query) CopyQuery(p, piece, query, wide.data());
    for (int64_t i = 0; i < size; i += kDeep)
      jaxserve::amx::Split(_mm512_loadu_ps(&wide[i]), _mm512_loadu_ps(&wide[i + kSide]), queries + i, size);
  }
};

// The keys and values of positions [from, to), all of one part, as tiles; zeros beyond, to whole kTogetherTokens.
void ReadTiles(const Problem& p, const Piece& piece, int64_t from, int64_t to, TileBuffers& b) {
  const int64_t depth = p.depth(), value_lane = p.planes == 1 ? 64 : p.planes * kLanes / 2;
  const int64_t start = from / kTogetherTokens * kTogetherTokens;
  for (int64_t first = start; first < to || first % kTogetherTokens; first += kTokens) {
    const bool readable = first + kTokens > from && first < to;
    const Block block = readable ? FindBlock(p, piece, first, to) : Block{};
    const auto* pool = static_cast<const uint16_t*>(p.pool) + (block.head + block.token) * kLanes;
    const auto load = [&](int64_t d, __m512i* rows) {
      const auto* lane = pool + d / kLanes * p.page_size * kLanes + d % kLanes;
      jaxserve::amx::LoadRows(lane, kLanes, block.from, block.to, rows);
    };
    const int64_t tile = first % kPart / kTokens;
    for (int64_t d = 0; d < depth; d += kDeep) {
      __m512i rows[kSide];
      load(d, rows);
      jaxserve::amx::PackColumns(rows, b.keys + ((tile / 4 * depth + d) / kDeep * 4 + tile % 4) * kTile);
      load(value_lane + d, rows);
      const int64_t num_tiles = std::min<int64_t>(4, (depth - d / 64 * 64) / kSide);
      auto* values = b.values + d / 64 * 64 * kPart + (tile / 2 * num_tiles + d % 64 / kSide) * kTile;
      jaxserve::amx::PackSummands(rows, values + tile % 2 * (kTile / 2));
    }
  }
}

// The weights of a part's positions [first, end) for one query, which may read [from, to), from their scores.
void WeighPart(const Problem& p, Sums& sums, int64_t query, int64_t first, int64_t end, int64_t from, int64_t to,
               float* scores, uint16_t* weights) {
  typedef int32_t Lanes __attribute__((vector_size(4 * kWidth)));
  const Lanes lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vector highest = Broadcast(kMasked);
  for (int64_t i = first; i < end; i += kWidth) {
    if (p.softcap != 0.0f)
      for (int64_t t = i; t < i + kWidth; ++t) scores[t] = p.softcap * std::tanh(scores[t] / p.softcap);
    const Lanes position = lanes + static_cast<int32_t>(i);
    const Lanes some = (position >= static_cast<int32_t>(from)) & (position < static_cast<int32_t>(to));
    const Vector score = some ? Load(scores + i) : Broadcast(kMasked);
    Store(scores + i, score);
    highest = highest > score ? highest : score;
  }
  const float peak = sums.peak[query] = Highest(highest);
  Vector total = Broadcast(0.0f);
  const auto weigh = [&](int64_t i) {
    const Vector score = Load(scores + i);
    const Vector weight = score > kMasked ? Exp(score - peak) : Broadcast(0.0f);
    total += weight;
    return reinterpret_cast<__m512>(weight);
  };
  for (int64_t i = first; i < end; i += 2 * kWidth) {
    const __m512 low = weigh(i), high = weigh(i + kWidth);
    jaxserve::amx::Split(low, high, weights + i, kSide * kPart);
  }
  Store(sums.total.data() + query * kWidth, total);
}

// Takes positions [from, to), all of one part, into sums of none yet.
void Attend(const Problem& p, const Piece& piece, int64_t from, int64_t to, TileBuffers& b, Sums& sums) {
  using jaxserve::amx::MultiplySplit;
  ReadTiles(p, piece, from, to, b);
  const int64_t depth = p.depth(), num_queries = NumQueries(p, piece), part = from / kPart * kPart;
  for (int64_t query = 0; query < num_queries; query += kSide) {
    const int64_t num = std::min(kSide, num_queries - query);
    const auto position = [&](int64_t n) { return piece.first_position + (query + n) / p.queries_per_kv(); };
    const int64_t last = std::min(to, position(num - 1) + 1);
    const int64_t least = p.window ? std::max(from, position(0) - p.window + 1) : from;
    if (last <= least) continue;
    // Of the part: whole kTogetherTokens.
    const int64_t first = (least - part) / kTogetherTokens * kTogetherTokens;
    const int64_t end = (last - part + kTogetherTokens - 1) / kTogetherTokens * kTogetherTokens;
    const jaxserve::amx::Tiles tiles(num);
    for (int64_t token = first; token < end; token += kTogetherTokens)
      MultiplySplit<4>({b.queries + query * depth, depth, num_queries * depth}, b.keys + token * depth,
                       depth / kDeep, b.scores + token, kPart);
    for (int64_t n = 0; n < num; ++n)
      WeighPart(p, sums, query + n, first, end, p.window ? position(n) - p.window + 1 - part : 0,
                position(n) + 1 - part, b.scores + n * kPart, b.weights + n * kPart);
    for (int64_t d = 0; d < depth; d += 64) {
      const bool whole = depth - d >= 64;
      const auto multiply = whole ? MultiplySplit<4> : MultiplySplit<2>;
      multiply({b.weights + first, kPart, kSide * kPart}, b.values + d * kPart + first * (whole ? 64 : 32),
               (end - first) / kDeep, sums.out.data() + query * depth + d, depth);
    }
  }
}

#endif

int64_t FirstPart(const Problem& p, const Piece& piece) { return Low(p, piece) / kPart; }
int64_t EndPart(const Piece& piece) { return (End(piece) + kPart - 1) / kPart; }

// The sums of some consecutive parts of a piece's context, one at least.
template <typename Buffers>
Sums AttendParts(const Problem& p, const Piece& piece, int64_t first_part, int64_t end_part) {
  Buffers b(p, piece);
  const auto attend = [&](int64_t part) {
    Sums sums(p.depth(), NumQueries(p, piece));
    Attend(p, piece, std::max(part * kPart, Low(p, piece)), std::min((part + 1) * kPart, End(piece)), b, sums);
    return sums;
  };
  Sums sums = attend(first_part);
  for (int64_t part = first_part + 1; part < end_part; ++part) {
    Sums later = attend(part);
    sums.Add(later);
  }
  return sums;
}

Sums AttendParts(const Problem& p, const Piece& piece, int64_t first_part, int64_t end_part) {
#if JAXSERVE_AMX
  if (p.format == kBfloat16 && jaxserve::amx::Allowed())
    return AttendParts<TileBuffers>(p, piece, first_part, end_part);
#endif
  return AttendParts<Buffers>(p, piece, first_part, end_part);
}

void Write(const Problem& p, const Piece& piece, const Sums& sums) {
  for (size_t query = 0; query < sums.peak.size(); ++query) {
    float total = 0.0f;
    for (int64_t i = 0; i < kWidth; ++i) total += sums.total[query * kWidth + i];
    for (int64_t d = 0; d < p.head_size; ++d)
      p.out[Place(p, piece, query) + d] = sums.out[query * sums.depth + d] / total;
  }
}

// Every sequence's rows, cut so that enough of them share the reading of a block.
std::vector<Piece> Pieces(const Problem& p, int64_t num_sequences, bool single) {
  std::vector<Piece> pieces;
  const int64_t most_rows = std::max<int64_t>(1, kQueries / p.queries_per_kv());
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t start = single ? sequence : p.query_start[sequence];
    const int64_t context = p.context_len[sequence];
    const int64_t end = single ? start + (context > 0) : p.query_start[sequence + 1];
    for (int64_t row = start; row < end; row += most_rows)
      for (int64_t head = 0; head < p.num_kv_heads; ++head)
        pieces.push_back({sequence, head, row, std::min(most_rows, end - row), context - (end - row)});
  }
  return pieces;
}

}  // namespace

// Operands: q [T, H, h] float32, pool, scales, page_table [S, P], query_start [S + 1], context_len [S], first_page,
// and what is static: int32 [page_size, num_kv_heads, head_size, planes, window, format, single] and float32
// [scale, softcap]. Result: [T, H, h] float32, zeros for rows of no sequence.
extern "C" XLA_FFI_Error* JaxserveRaggedPagedAttention(XLA_FFI_CallFrame* frame) {
  using jaxserve::Data, jaxserve::Operand;
  if (jaxserve::AnswersMetadata(frame)) return nullptr;
  if (frame->args.size != 9) return jaxserve::Fail(frame, "nine operands");
  const auto *sizes = Data<const int32_t>(Operand(frame, 7));
  const auto *factors = Data<const float>(Operand(frame, 8));
  const auto &q = Operand(frame, 0), &page_table = Operand(frame, 3);
  Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], factors[0], factors[1],
            Data<const float>(q), Operand(frame, 1).data, Data<const float>(Operand(frame, 2)),
            Data<const int32_t>(page_table), Data<const int32_t>(Operand(frame, 4)),
            Data<const int32_t>(Operand(frame, 5)), *Data<const int32_t>(Operand(frame, 6)), q.dims[1],
            page_table.dims[1], Data<float>(jaxserve::Result(frame))};
  std::memset(p.out, 0, sizeof(float) * q.dims[0] * q.dims[1] * q.dims[2]);
  const std::vector<Piece> pieces = Pieces(p, page_table.dims[0], sizes[6] != 0);
  if (static_cast<int64_t>(pieces.size()) >= kManyPieces) {
    jaxserve::ParallelFor(frame, pieces.size(), [&](int64_t index) {
      const Piece& piece = pieces[index];
      Write(p, piece, AttendParts(p, piece, FirstPart(p, piece), EndPart(piece)));
    });
    return nullptr;
  }
  // Too few for all threads to be busy to the end: every part of a context is a job of its own.
  std::vector<std::pair<size_t, int64_t>> jobs;
  for (size_t index = 0; index < pieces.size(); ++index)
    for (int64_t part = FirstPart(p, pieces[index]); part < EndPart(pieces[index]); ++part)
      jobs.emplace_back(index, part);
  std::vector<Sums> sums(jobs.size(), Sums(0, 0));
  jaxserve::ParallelFor(frame, jobs.size(), [&](int64_t job) {
    const auto [index, part] = jobs[job];
    sums[job] = AttendParts(p, pieces[index], part, part + 1);
  });
  for (size_t first = 0, next; first < jobs.size(); first = next) {
    for (next = first + 1; next < jobs.size() && jobs[next].first == jobs[first].first; ++next)
      sums[first].Add(sums[next]);
    Write(p, pieces[jobs[first].first], sums[first]);
  }
  return nullptr;
}
