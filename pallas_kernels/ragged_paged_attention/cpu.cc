// Ragged paged attention on CPU, straight from the pages: nothing is gathered. Blocks of kTokens positions are
// reduced with the online softmax of FlashAttention (Dao et al. 2022, section 3.1); a row's sums are added in an
// order that depends on its own context alone.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/ffi.h"

namespace {

constexpr int64_t kLanes = 128;
constexpr int64_t kTokens = 16;   // of a block; pages are a multiple
constexpr int64_t kQueries = 48;  // that share a block, rows times queries of a KV head, where that is more than one row
constexpr float kMasked = -std::numeric_limits<float>::infinity();

typedef float Vector __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(32)));
constexpr int64_t kWidth = 8;  // floats of a Vector
constexpr int64_t kVectors = kTokens / kWidth;

Vector Load(const float* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

void Store(float* x, Vector v) { std::memcpy(x, &v, sizeof v); }

Vector Broadcast(float x) { return Vector{x, x, x, x, x, x, x, x}; }

// e^x for x <= 0 to about one unit in the last place: 2^n times a polynomial in the rest (Cephes' expf).
Vector Exp(Vector x) {
  const Vector lowest = Broadcast(-87.0f);
  x = x > lowest ? x : lowest;
  const Vector shifted = x * 1.44269504f + 12582912.0f;  // The sum's low bits are x / ln 2, rounded.
  const Vector whole = shifted - 12582912.0f;
  const Vector rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vector p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  Integers bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const Integers power = (bits - 0x4b400000 + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
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
  int64_t depth() const { return (head_size + kWidth - 1) / kWidth * kWidth; }
};

// Some rows of one sequence, for one KV head.
struct Piece {
  int64_t sequence, head, first_row, num_rows, first_position;
};

float Number(const Problem& p, int64_t index) {
  switch (p.format) {
    case kBfloat16: {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(p.pool)[index]} << 16;
      float x;
      std::memcpy(&x, &bits, sizeof x);
      return x;
    }
    case kInt8:
      return static_cast<const int8_t*>(p.pool)[index];
    default:
      return static_cast<const float*>(p.pool)[index];
  }
}

// The keys of a block, transposed to [depth][kTokens], and its values [kTokens][depth]; zeros for positions that
// nobody may read, where a page may hold anything, NaN included.
void ReadBlock(const Problem& p, const Piece& piece, int64_t block, int64_t low, int64_t high, float* keys,
               float* values) {
  const int64_t depth = p.depth(), first = block * kTokens;
  const int64_t page =
      p.first_page + p.page_table[piece.sequence * p.pages_per_sequence + first / p.page_size];
  const int64_t lanes = p.planes == 1 ? 64 : p.planes * kLanes / 2;
  const int64_t head = (page * p.num_kv_heads + piece.head) * p.planes * p.page_size;
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t position = first + t, token = position % p.page_size;
    if (position < low || position >= high) {
      for (int64_t d = 0; d < depth; ++d) keys[d * kTokens + t] = values[t * depth + d] = 0.0f;
      continue;
    }
    float key_scale = 1.0f, value_scale = 1.0f;
    if (p.format == kInt8) {
      const float* scales = p.scales + (page * p.num_kv_heads + piece.head) * 2 * p.page_size;
      key_scale = scales[token];
      value_scale = scales[p.page_size + token];
    }
    for (int64_t start = 0; start < depth; start += kLanes) {
      const int64_t end = std::min(depth, start + kLanes);
      const int64_t key = (head + start / kLanes * p.page_size + token) * kLanes - start;
      const int64_t part = p.planes == 1 ? 0 : (lanes + start) / kLanes;
      const int64_t value = (head + part * p.page_size + token) * kLanes + (p.planes == 1 ? lanes : 0) - start;
      for (int64_t d = start; d < end; ++d) keys[d * kTokens + t] = Number(p, key + d) * key_scale;
      for (int64_t d = start; d < end; ++d) values[t * depth + d] = Number(p, value + d) * value_scale;
    }
  }
}

// What a thread needs for a piece.
struct Buffers {
  std::vector<float> keys, values, queries, out, peak, total;

  Buffers(int64_t depth, int64_t num_queries)
      : keys(depth * kTokens), values(depth * kTokens), queries(num_queries * depth), out(num_queries * depth),
        peak(num_queries, kMasked), total(num_queries) {}
};

// scores[kTokens] of one query against a block.
void Scores(const float* query, const float* keys, int64_t depth, Vector* scores) {
  for (int64_t i = 0; i < kVectors; ++i) scores[i] = Broadcast(0.0f);
  for (int64_t d = 0; d < depth; ++d) {
    const Vector factor = Broadcast(query[d]);
    for (int64_t i = 0; i < kVectors; ++i) scores[i] += factor * Load(keys + d * kTokens + i * kWidth);
  }
}

// Takes a block into one query's sums; `visible` are the positions [from, to) of the block.
void Reduce(const Problem& p, Buffers& b, int64_t query, int64_t from, int64_t to) {
  const int64_t depth = p.depth();
  Vector scores[kVectors];
  Scores(b.queries.data() + query * depth, b.keys.data(), depth, scores);
  float weights[kTokens];
  std::memcpy(weights, scores, sizeof weights);
  if (p.softcap != 0.0f)
    for (float& score : weights) score = p.softcap * std::tanh(score / p.softcap);
  for (int64_t t = 0; t < kTokens; ++t)
    if (t < from || t >= to) weights[t] = kMasked;
  const float peak = std::max(b.peak[query], *std::max_element(weights, weights + kTokens));
  float* out = b.out.data() + query * depth;
  if (peak > b.peak[query]) {
    const float decay = std::exp(b.peak[query] - peak);
    b.total[query] *= decay;
    for (int64_t d = 0; d < depth; d += kWidth) Store(out + d, Load(out + d) * decay);
    b.peak[query] = peak;
  }
  Vector sum = Broadcast(0.0f);
  for (int64_t i = 0; i < kTokens; i += kWidth) {
    const Vector masked = Load(weights + i);
    Vector weight = Exp(masked - peak);
    weight = masked > kMasked ? weight : Broadcast(0.0f);
    Store(weights + i, weight);
    sum += weight;
  }
  for (int64_t i = 0; i < kWidth; ++i) b.total[query] += sum[i];
  for (int64_t d = 0; d < depth; d += kWidth) {
    Vector mixed = Load(out + d);
    for (int64_t t = 0; t < kTokens; ++t) mixed += weights[t] * Load(b.values.data() + t * depth + d);
    Store(out + d, mixed);
  }
}

void Attend(const Problem& p, const Piece& piece) {
  const int64_t depth = p.depth(), group = p.queries_per_kv(), num_queries = piece.num_rows * group;
  Buffers b(depth, num_queries);
  const auto index = [&](int64_t query) {
    return ((piece.first_row + query / group) * p.num_heads + piece.head * group + query % group) * p.head_size;
  };
  for (int64_t query = 0; query < num_queries; ++query)
    for (int64_t d = 0; d < p.head_size; ++d) b.queries[query * depth + d] = p.q[index(query) + d] * p.scale;
  const int64_t last = piece.first_position + piece.num_rows;  // One past the last row's position.
  const int64_t low = p.window ? std::max<int64_t>(0, piece.first_position - p.window + 1) : 0;
  for (int64_t block = low / kTokens; block * kTokens < last; ++block) {
    ReadBlock(p, piece, block, low, last, b.keys.data(), b.values.data());
    for (int64_t query = 0; query < num_queries; ++query) {
      const int64_t position = piece.first_position + query / group;
      const int64_t from = p.window ? position - p.window + 1 - block * kTokens : 0;
      const int64_t to = position + 1 - block * kTokens;
      if (to > 0 && from < kTokens) Reduce(p, b, query, from, to);
    }
  }
  for (int64_t query = 0; query < num_queries; ++query)
    for (int64_t d = 0; d < p.head_size; ++d)
      p.out[index(query) + d] = b.out[query * depth + d] / b.total[query];
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
  jaxserve::ParallelFor(frame, pieces.size(), [&](int64_t index) { Attend(p, pieces[index]); });
  return nullptr;
}
