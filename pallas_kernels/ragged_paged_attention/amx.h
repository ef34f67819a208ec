// Products of float32 and bfloat16 by Intel's AMX: a float32 is the sum of three numbers of bfloat16, which are all
// multiplied. Products are exact, and added up in float32.

#ifndef JAXSERVE_PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_AMX_H_
#define JAXSERVE_PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_AMX_H_

#include "native/amx.h"

namespace jaxserve::amx {

constexpr int64_t kDeep = 32;             // summands of a tile's sums, bfloat16
constexpr int64_t kTile = kSide * kDeep;  // of a right factor: [pair of summands][column][2]
constexpr int64_t kTerms = 3;             // of bfloat16 make up a float32

struct alignas(64) Line {  // Tiles are read faster from whole lines of the cache.
  uint16_t numbers[kDeep];
};

// 32 numbers, each cut into kTerms of bfloat16, which lie `distance` apart.
INLINE inline void Split(__m512 first, __m512 second, uint16_t* terms, int64_t distance) {
  const auto upper = [](__m512 numbers) INLINE { return _mm512_srli_epi32(_mm512_castps_si512(numbers), 16); };
  const auto rest = [](__m512 numbers, __m512i upper) INLINE {
    return _mm512_sub_ps(numbers, _mm512_castsi512_ps(_mm512_slli_epi32(upper, 16)));
  };
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // Packing takes turns between its operands.
  Unroll<kTerms>([&](auto term) INLINE {
    const __m512i a = upper(first), b = upper(second);
    _mm512_storeu_si512(terms + term * distance, _mm512_permutexvar_epi64(order, _mm512_packus_epi32(a, b)));
    first = rest(first, a);
    second = rest(second, b);
  });
}

// 16 rows of 32 numbers, `stride` apart; zeros for those before `from` and from `to` on, which are not read.
INLINE inline void LoadRows(const uint16_t* numbers, int64_t stride, int64_t from, int64_t to, __m512i rows[kSide]) {
  Unroll<kSide>([&](auto i) INLINE {
    const __mmask16 some = i >= from && i < to ? 0xffff : 0;
    rows[i] = _mm512_maskz_loadu_epi32(some, numbers + i * stride);
  });
}

// The numbers of each row become a column of a tile.
INLINE inline void PackColumns(__m512i rows[kSide], uint16_t* tile) {
  Transpose(rows);
  Unroll<kSide>([&](auto i) INLINE { _mm512_storeu_si512(tile + i * kDeep, rows[i]); });
}

// The rows become half of the summands of two neighbouring tiles, of 16 columns each.
INLINE inline void PackSummands(const __m512i rows[kSide], uint16_t* tiles) {
  alignas(64) static constexpr uint16_t kLow[kDeep] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(kSide));
  Unroll<kSide / 2>([&](auto i) INLINE {
    _mm512_storeu_si512(tiles + i * kDeep, _mm512_permutex2var_epi16(rows[2 * i], low, rows[2 * i + 1]));
    _mm512_storeu_si512(tiles + kTile + i * kDeep, _mm512_permutex2var_epi16(rows[2 * i], high, rows[2 * i + 1]));
  });
}

// A left factor [rows of the Tiles][32 * steps], split.
struct Left {
  const uint16_t* terms;
  int64_t stride, distance;  // of rows, of terms
};

// out [rows][kTiles * 16]: left times right, [steps][kTiles] tiles; kTiles is 2 or 4.
template <int kTiles>
void MultiplySplit(const Left& left, const uint16_t* right, int64_t steps, float* out, int64_t stride) {
  static_assert(kTiles == 2 || kTiles == 4);
  const int64_t left_bytes = left.stride * sizeof(uint16_t), out_bytes = stride * sizeof(float);
  Written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, right += kTiles * kTile) {
    _tile_loadd(6, right, 2 * kDeep);
    _tile_loadd(7, right + kTile, 2 * kDeep);
    for (int64_t term = 0; term < kTerms; ++term) {
      _tile_loadd(4, left.terms + term * left.distance + step * kDeep, left_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTiles == 4) {
      _tile_loadd(6, right + 2 * kTile, 2 * kDeep);
      _tile_loadd(7, right + 3 * kTile, 2 * kDeep);
      for (int64_t term = 0; term < kTerms; ++term) {
        _tile_loadd(4, left.terms + term * left.distance + step * kDeep, left_bytes);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
  }
  _tile_stored(0, out, out_bytes);
  _tile_stored(1, out + kSide, out_bytes);
  if constexpr (kTiles == 4) {
    _tile_stored(2, out + 2 * kSide, out_bytes);
    _tile_stored(3, out + 3 * kSide, out_bytes);
  }
  Written();
}

}  // namespace jaxserve::amx

#endif  // JAXSERVE_PALLAS_KERNELS_RAGGED_PAGED_ATTENTION_AMX_H_
