// What the ways to multiply share: where results go, and loops whose numbers the compiler knows.

#ifndef JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_
#define JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_

#include <cstdint>
#include <type_traits>
#include <utility>

#define INLINE __attribute__((always_inline))

namespace jaxserve {

// Where results go, and what scales them.
struct Scaled {
  const float *x_scale, *w_scale;  // of rows, of outputs
  float* numbers;
  int64_t stride;

  Scaled From(int64_t row, int64_t output) const {
    return {x_scale + row, w_scale + output, numbers + row * stride + output, stride};
  }
};

// f(0) to f(N - 1), each with a number that the compiler knows: what they index stays in registers.
template <typename F, int... I>
INLINE inline void Unroll(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

template <int N, typename F>
INLINE inline void Unroll(const F& f) {
  Unroll(f, std::make_integer_sequence<int, N>{});
}

}  // namespace jaxserve

#endif  // JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_
