// Rows of int8 or int16 times an int8 matrix, summed exactly in int32 and scaled: the same numbers as XLA's own
// product, read at the speed of memory for few rows and multiplied 16 at a time for many.

#include <cstdint>
#include <cstring>
#include <vector>

#include "int8_matmul/scaled.h"
#include "native/ffi.h"
#include "native/lanes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__AVX512BW__) && defined(__linux__)
#define JAXSERVE_AMX 1
#include "int8_matmul/amx.h"
#endif

namespace {

using jaxserve::Scaled;
using jaxserve::Unroll;

#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define JAXSERVE_AVX512 1
#endif

constexpr int64_t kRows = 4;  // of a tile
#if JAXSERVE_AVX512
constexpr int64_t kOutputs = 4;  // of a tile: its sums are then the lanes of one vector
#else
constexpr int64_t kOutputs = 3;  // of a tile: with kRows this fills AVX2's registers
#endif
constexpr int64_t kAhead = kOutputs;  // outputs whose weights are fetched while those before are multiplied
constexpr int64_t kChunk = 48;  // outputs that a thread takes at a time, a multiple of kOutputs
constexpr int64_t kBlock = 16;  // rows that stay in the first caches while those outputs pass by

#if JAXSERVE_AVX512

// Lane i becomes the sum of the lanes of sums[i].
INLINE inline __m512i SumEach(const __m512i sums[16]) {
  __m512i pairs[8], fours[4], eights[2];
  Unroll<8>([&](auto i) INLINE {
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(sums[2 * i], sums[2 * i + 1]),
                                _mm512_unpackhi_epi32(sums[2 * i], sums[2 * i + 1]));
  });
  Unroll<4>([&](auto i) INLINE {
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  });
  Unroll<2>([&](auto i) INLINE {  // Every 128 bits of fours[i] have a part of the sums of four.
    eights[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                 _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
  });
  return _mm512_add_epi32(_mm512_shuffle_i32x4(eights[0], eights[1], 0x88),
                          _mm512_shuffle_i32x4(eights[0], eights[1], 0xdd));
}

// Of a tile: x [R][n], widened to int16, times w [O][n], scaled by x_scale [R] and w_scale [O].
template <int R, int O>
void Tile(const int16_t* x, const int8_t* w, int64_t n, const Scaled& out) {
  __m512i sums[kRows * kOutputs];
  Unroll<kRows * kOutputs>([&](auto i) INLINE { sums[i] = _mm512_setzero_si512(); });
  const auto step = [&](int64_t k, __mmask32 some) INLINE {
    __m512i wide[O];
    Unroll<O>([&](auto o) INLINE {
      wide[o] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, w + o * n + k));
      _mm_prefetch(w + (o + kAhead) * n + k, _MM_HINT_T0);
    });
    Unroll<R>([&](auto r) INLINE {
      const __m512i row = _mm512_maskz_loadu_epi16(some, x + r * n + k);
      Unroll<O>([&](auto o) INLINE {
        sums[r * kOutputs + o] = _mm512_dpwssd_epi32(sums[r * kOutputs + o], row, wide[o]);
      });
    });
  };
  int64_t k = 0;
  for (; k + 32 <= n; k += 32) step(k, ~__mmask32{0});
  if (k < n) step(k, (__mmask32{1} << (n - k)) - 1);
  const __m512i all = SumEach(sums);
  const __m128i rows[kRows] = {_mm512_castsi512_si128(all), _mm512_extracti32x4_epi32(all, 1),
                               _mm512_extracti32x4_epi32(all, 2), _mm512_extracti32x4_epi32(all, 3)};
  constexpr __mmask8 kSome = (1 << O) - 1;
  const __m128 w_scale = _mm_maskz_loadu_ps(kSome, out.w_scale);
  Unroll<R>([&](auto r) INLINE {
    const __m128 scale = _mm_mul_ps(_mm_set1_ps(out.x_scale[r]), w_scale);
    _mm_mask_storeu_ps(out.numbers + r * out.stride, kSome, _mm_mul_ps(_mm_cvtepi32_ps(rows[r]), scale));
  });
}

#else

#if defined(__AVX2__)
int32_t Sum(__m256i lanes) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

__m256i Wide(const int8_t* w) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
}

__m256i Load(const int16_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }

// The barrier keeps each sum in its register: GCC would multiply ahead, and spill them.
#define STEP(r, o)                                                              \
  if constexpr (r < R && o < O) {                                               \
    sum##r##o = _mm256_add_epi32(sum##r##o, _mm256_madd_epi16(row, wide##o));   \
    __asm__ volatile("" : "+x"(sum##r##o));                                     \
  }
#define ROW(r)                                  \
  if constexpr (r < R) {                        \
    const __m256i row = Load(x + r * n + k);    \
    STEP(r, 0) STEP(r, 1) STEP(r, 2)            \
  }
#define STORE(r, o) \
  if constexpr (r < R && o < O) total[r][o] = Sum(sum##r##o);
#endif

// Of a tile: x [R][n], widened to int16, times w [O][n], scaled by x_scale [R] and w_scale [O].
template <int R, int O>
void Tile(const int16_t* x, const int8_t* w, int64_t n, const Scaled& out) {
  int32_t total[R][O] = {};
  int64_t k = 0;
#if defined(__AVX2__)
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum00 = zero, sum01 = zero, sum02 = zero, sum10 = zero, sum11 = zero, sum12 = zero;
  __m256i sum20 = zero, sum21 = zero, sum22 = zero, sum30 = zero, sum31 = zero, sum32 = zero;
  for (; k + 16 <= n; k += 16) {
    const __m256i wide0 = Wide(w + k), wide1 = O > 1 ? Wide(w + n + k) : zero;
    const __m256i wide2 = O > 2 ? Wide(w + 2 * n + k) : zero;
    for (int o = 0; o < O; ++o) _mm_prefetch(w + (o + kAhead) * n + k, _MM_HINT_T0);
    ROW(0) ROW(1) ROW(2) ROW(3)
  }
  STORE(0, 0) STORE(0, 1) STORE(0, 2) STORE(1, 0) STORE(1, 1) STORE(1, 2)
  STORE(2, 0) STORE(2, 1) STORE(2, 2) STORE(3, 0) STORE(3, 1) STORE(3, 2)
#endif
  for (int r = 0; r < R; ++r) {
    for (int o = 0; o < O; ++o) {
      for (int64_t i = k; i < n; ++i) total[r][o] += int32_t{x[r * n + i]} * w[o * n + i];
      out.numbers[r * out.stride + o] = static_cast<float>(total[r][o]) * (out.x_scale[r] * out.w_scale[o]);
    }
  }
}

#endif

template <int O>
void Column(const int16_t* x, const int8_t* w, int64_t rows, int64_t n, Scaled out) {
  for (; rows >= kRows; rows -= kRows, x += kRows * n, out = out.From(kRows, 0)) Tile<kRows, O>(x, w, n, out);
  switch (rows) {
    case 3: return Tile<3, O>(x, w, n, out);
    case 2: return Tile<2, O>(x, w, n, out);
    case 1: return Tile<1, O>(x, w, n, out);
  }
}

// Rows of floats, rounded: to values of up to `largest`, and their scales.
template <typename T>
void Round(XLA_FFI_CallFrame* frame, const float* x, int64_t rows, int64_t n, int32_t largest, T* values,
           float* scales) {
  constexpr float kSmallestScale = 1e-30f;
  const float step = 1.0f / static_cast<float>(largest);
  const auto round = [=](int64_t row) {
    const float* numbers = x + row * n;
    int32_t highest = 0;  // Bits of numbers without a sign are in their order.
    for (int64_t i = 0; i < n; ++i) {
      int32_t bits;
      std::memcpy(&bits, numbers + i, sizeof bits);
      highest = std::max(highest, bits & 0x7fffffff);
    }
    float peak;
    std::memcpy(&peak, &highest, sizeof peak);
    scales[row] = std::max(peak * step, kSmallestScale);
    const float inverse = 1.0f / scales[row];
    for (int64_t i = 0; i < n; ++i)
      values[row * n + i] = static_cast<T>(static_cast<int32_t>(__builtin_nearbyintf(numbers[i] * inverse)));
  };
  if (rows > kBlock)
    jaxserve::ParallelFor(frame, rows, round);
  else
    for (int64_t row = 0; row < rows; ++row) round(row);
}

// x [rows, n] of int8 or int16, times weights [outputs, n].
template <typename T>
void MultiplyAll(XLA_FFI_CallFrame* frame, const T* x, int64_t rows, const int8_t* weights, int64_t outputs,
                 int64_t n, const Scaled& all) {
  int64_t first = 0;  // Output that is left to do.
#if JAXSERVE_AMX
  if (jaxserve::amx::Allowed()) {
    first = jaxserve::amx::MultiplyAll(frame, x, rows, weights, outputs, n, all);
    if (first == outputs) return;
  }
#endif
  std::vector<int16_t> copy;
  const int16_t* wide;
  if constexpr (sizeof(T) == 2) {
    wide = x;
  } else {
    copy.assign(x, x + rows * n);
    wide = copy.data();
  }
  jaxserve::ParallelFor(frame, (outputs - first + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t end = std::min(outputs, first + (chunk + 1) * kChunk);
    for (int64_t row = 0; row < rows; row += kBlock) {
      const int64_t count = std::min(rows - row, kBlock);
      const int16_t* block = wide + row * n;
      int64_t o = first + chunk * kChunk;
      for (; o + kOutputs <= end; o += kOutputs)
        Column<kOutputs>(block, weights + o * n, count, n, all.From(row, o));
      for (; o < end; ++o) Column<1>(block, weights + o * n, count, n, all.From(row, o));
    }
  });
}

template <typename T>
void RoundAndMultiply(XLA_FFI_CallFrame* frame, const float* x, int64_t rows, const int8_t* weights, int64_t outputs,
                      int64_t n, int32_t largest, Scaled all) {
  auto* values = jaxserve::Data<T>(jaxserve::Result(frame, 1));
  auto* scales = jaxserve::Data<float>(jaxserve::Result(frame, 2));
  Round(frame, x, rows, n, largest, values, scales);
  all.x_scale = scales;
  MultiplyAll<T>(frame, values, rows, weights, outputs, n, all);
}

}  // namespace

// x [rows, n] int8 or int16, w [layers, outputs, n] int8, layer int32, x_scale [rows], w_scale [layers, outputs]
// -> [rows, outputs] float32. Or x in float32, and in place of its scales int32 [the largest integer]: then it is
// rounded into the second result, [rows, n] int8 or int16, and its scales are the third.
extern "C" XLA_FFI_Error* JaxserveInt8Matmul(XLA_FFI_CallFrame* frame) {
  using jaxserve::Data, jaxserve::Operand;
  if (jaxserve::AnswersMetadata(frame)) return nullptr;
  if (frame->args.size != 5) return jaxserve::Fail(frame, "five operands");
  const auto &x = Operand(frame, 0), &w = Operand(frame, 1), &given = Operand(frame, 3);
  if (w.dtype != XLA_FFI_DataType_S8 || x.rank != 2 || w.rank != 3 || x.dims[1] != w.dims[2])
    return jaxserve::Fail(frame, "operands must be [rows, n] and int8 [layers, outputs, n]");
  const int64_t rows = x.dims[0], outputs = w.dims[1], n = x.dims[1];
  const int64_t layer = *Data<const int32_t>(Operand(frame, 2));
  if (layer < 0 || layer >= w.dims[0]) return jaxserve::Fail(frame, "there is no such layer");
  const auto* weights = Data<const int8_t>(w) + layer * outputs * n;
  Scaled all{nullptr, Data<const float>(Operand(frame, 4)) + layer * outputs,
             Data<float>(jaxserve::Result(frame)), outputs};
  if (x.dtype == XLA_FFI_DataType_F32) {
    if (frame->rets.size != 3) return jaxserve::Fail(frame, "three results");
    const bool narrow = jaxserve::Result(frame, 1).dtype == XLA_FFI_DataType_S8;
    const auto run = narrow ? RoundAndMultiply<int8_t> : RoundAndMultiply<int16_t>;
    run(frame, Data<const float>(x), rows, weights, outputs, n, *Data<const int32_t>(given), all);
    return nullptr;
  }
  all.x_scale = Data<const float>(given);
  if (x.dtype == XLA_FFI_DataType_S8)
    MultiplyAll(frame, Data<const int8_t>(x), rows, weights, outputs, n, all);
  else if (x.dtype == XLA_FFI_DataType_S16)
    MultiplyAll(frame, Data<const int16_t>(x), rows, weights, outputs, n, all);
  else
    return jaxserve::Fail(frame, "rows must be int8, int16 or float32");
  return nullptr;
}
