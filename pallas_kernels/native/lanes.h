// What kernels do with the lanes of vectors, and loops whose numbers the compiler knows.

#ifndef JAXSERVE_PALLAS_KERNELS_NATIVE_LANES_H_
#define JAXSERVE_PALLAS_KERNELS_NATIVE_LANES_H_

#include <type_traits>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline))

namespace jaxserve {

// f(0) to f(N - 1), each with a number that the compiler knows: what they index stays in registers.
template <typename F, int... I>
INLINE inline void Unroll(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

template <int N, typename F>
INLINE inline void Unroll(const F& f) {
  Unroll(f, std::make_integer_sequence<int, N>{});
}

#if defined(__AVX512F__)

// v[i] gets lane i of each: 16 x 16 numbers of 32 bits, transposed.
INLINE inline void Transpose(__m512i v[16]) {
  __m512i a[16], b[16];
  Unroll<8>([&](auto i) INLINE {
    a[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  });
  Unroll<4>([&](auto i) INLINE {  // b[4 i + j] has, in its 128-bit part p, lane 4 p + j of v[4 i] to v[4 i + 3].
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  });
  Unroll<4>([&](auto j) INLINE {
    const __m512i low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    v[j] = _mm512_shuffle_i32x4(low, high, 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
    v[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  });
}

#endif

}  // namespace jaxserve

#endif  // JAXSERVE_PALLAS_KERNELS_NATIVE_LANES_H_
