// The product by Intel's AMX, where the processor has it: 16 outputs times 16 columns, 64 inputs deep, in one
// instruction (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
//
// The matrix is read as it lies. A column is a row of int8, or half of the bits of a row of int16: the upper ones
// and the lower 7 make two int8 products, whose sums are put together exactly. So as few as 8 rows of int16, or
// 16 of int8, cost one pass over the weights, at the speed of memory.

#ifndef JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_AMX_H_
#define JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_AMX_H_

#include <cstring>
#include <memory>

#include "int8_matmul/scaled.h"
#include "native/amx.h"
#include "native/ffi.h"
#include "native/lanes.h"

namespace jaxserve::amx {

constexpr int64_t kDeep = 64;     // inputs of a tile of weights or columns
constexpr int64_t kOutputs = 32;  // that a thread takes at a time: two tiles
constexpr int64_t kAhead = 4;     // tiles of weights: so far ahead they are fetched, along their own outputs
constexpr int kLowBits = 7;       // of an int16, in a column of their own
constexpr int64_t kTile = kSide * kDeep;

// Up to 64 inputs of a row: what is to be the column, and for int16 the column of its lower bits.
inline __mmask64 Some(int64_t count) { return count >= kDeep ? ~__mmask64{0} : (__mmask64{1} << count) - 1; }

inline void Columns(const int8_t* row, int64_t count, __m512i* column) {
  *column = _mm512_maskz_loadu_epi8(Some(count), row);
}

inline void Columns(const int16_t* row, int64_t count, __m512i* column) {
  const __mmask64 some = Some(count);
  const __m512i first = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), row);
  const __m512i second = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), row + 32);
  const __m512i low = _mm512_set1_epi16((1 << kLowBits) - 1);
  const auto both = [](__m512i a, __m512i b) INLINE {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
  };
  column[0] = both(_mm512_srai_epi16(first, kLowBits), _mm512_srai_epi16(second, kLowBits));
  column[kSide / 2] = both(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
}

// Rows that share a tile of columns.
template <typename T>
constexpr int64_t kGroup = kSide / sizeof(T);

// Rows x [rows, n] as tiles of columns, [group of rows][64 inputs][4 inputs][column][4]; zeros beyond their ends.
template <typename T>
void Pack(const T* x, int64_t rows, int64_t n, int8_t* tiles) {
  for (int64_t k = 0; k < n; k += kDeep, tiles += kTile) {
    __m512i columns[kSide] = {};
    for (int64_t r = 0; r < std::min(rows, kGroup<T>); ++r) Columns(x + r * n + k, n - k, columns + r);
    Transpose(columns);
    Unroll<kSide>([&](auto i) INLINE { _mm512_storeu_si512(tiles + i * kDeep, columns[i]); });
  }
}

// A tile of sums, [output][column], scaled into the rows of its group.
template <typename T>
void Store(const int32_t* sums, int64_t rows, const Scaled& out) {
  __m512i columns[kSide];
  Unroll<kSide>([&](auto i) INLINE { columns[i] = _mm512_loadu_si512(sums + i * kSide); });
  Transpose(columns);
  const __m512 w_scale = _mm512_loadu_ps(out.w_scale);
  Unroll<kGroup<T>>([&](auto r) INLINE {
    if (r >= rows) return;
    __m512i sum = columns[r];
    if constexpr (sizeof(T) == 2)
      sum = _mm512_add_epi32(_mm512_slli_epi32(sum, kLowBits), columns[r + kSide / 2]);
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(out.x_scale[r]), w_scale);
    _mm512_storeu_ps(out.numbers + r * out.stride, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
  });
}

// 32 outputs of up to two groups of rows. w [32, n]; columns [groups][n / 64] tiles. `fetch`: these weights, but
// for the first, and the first ones of the outputs that come next are fetched ahead of use.
template <typename T, int kGroups>
void Multiply(const int8_t* w, int64_t n, const int8_t* columns, int64_t rows, bool fetch, const Scaled& out) {
  const int64_t tiles_bytes = (n + kDeep - 1) / kDeep * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto step = [&](const int8_t* weights, int64_t stride, const int8_t* tile) INLINE {
    _tile_loadd(4, weights, stride);
    _tile_loadd(5, weights + kSide * stride, stride);
    _tile_loadd(6, tile, kDeep);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    if constexpr (kGroups == 2) {
      _tile_loadd(7, tile + tiles_bytes, kDeep);
      _tile_dpbssd(2, 4, 7);
      _tile_dpbssd(3, 5, 7);
    }
  };
  Written();
  int64_t k = 0;
  for (; k + kDeep <= n; k += kDeep, columns += kTile) {
    if (fetch) {
      const int64_t next = k + kAhead * kDeep;
      const int8_t* weights = next < n ? w + next : w + kOutputs * n + next - n;
      for (int64_t o = 0; o < kOutputs; ++o) _mm_prefetch(weights + o * n, _MM_HINT_T0);
    }
    step(w + k, n, columns);
  }
  if (k < n) {
    alignas(64) int8_t rest[kOutputs * kDeep] = {};
    for (int64_t o = 0; o < kOutputs; ++o) std::memcpy(rest + o * kDeep, w + o * n + k, n - k);
    Written();
    step(rest, kDeep, columns);
  }
  alignas(64) int32_t sums[4][kSide * kSide];
  _tile_stored(0, sums[0], kDeep);
  _tile_stored(1, sums[1], kDeep);
  Written();
  Store<T>(sums[0], rows, out);
  Store<T>(sums[1], rows, out.From(0, kSide));
  if constexpr (kGroups == 2) {
    _tile_stored(2, sums[2], kDeep);
    _tile_stored(3, sums[3], kDeep);
    Written();
    Store<T>(sums[2], rows - kGroup<T>, out.From(kGroup<T>, 0));
    Store<T>(sums[3], rows - kGroup<T>, out.From(kGroup<T>, kSide));
  }
}

// All outputs but the last ones that do not fill two tiles; returns how many.
template <typename T>
int64_t MultiplyAll(XLA_FFI_CallFrame* frame, const T* x, int64_t rows, const int8_t* w, int64_t outputs, int64_t n,
                    const Scaled& out) {
  const int64_t num_groups = (rows + kGroup<T> - 1) / kGroup<T>, bytes = (n + kDeep - 1) / kDeep * kTile;
  const std::unique_ptr<int8_t[]> columns(new int8_t[num_groups * bytes]);  // All of it is written first.
  const auto pack = [&](int64_t group) {
    const int64_t row = group * kGroup<T>;
    Pack(x + row * n, rows - row, n, columns.get() + group * bytes);
  };
  if (num_groups > 4)
    ParallelFor(frame, num_groups, pack);
  else
    for (int64_t group = 0; group < num_groups; ++group) pack(group);
  const auto multiply = [&](int64_t piece) {
    const int64_t o = piece * kOutputs;
    for (int64_t row = 0; row < rows; row += 2 * kGroup<T>) {
      const int8_t* packed = columns.get() + row / kGroup<T> * bytes;
      if (rows - row > kGroup<T>)
        Multiply<T, 2>(w + o * n, n, packed, rows - row, row == 0, out.From(row, o));
      else
        Multiply<T, 1>(w + o * n, n, packed, rows - row, row == 0, out.From(row, o));
    }
  };
  Share(frame, outputs / kOutputs, [&](const Job::Pieces& pieces) {
    const Tiles tiles;
    pieces.ForEach(multiply);
  });
  return outputs / kOutputs * kOutputs;
}

}  // namespace jaxserve::amx

#endif  // JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_AMX_H_
