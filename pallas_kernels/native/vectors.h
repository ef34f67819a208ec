// Vectors of float32, as wide as the processor has them, and what kernels compute with them.

#ifndef JAXSERVE_PALLAS_KERNELS_NATIVE_VECTORS_H_
#define JAXSERVE_PALLAS_KERNELS_NATIVE_VECTORS_H_

#include <cstdint>
#include <cstring>

namespace jaxserve {

#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;  // floats of a Vector
#else
constexpr int64_t kWidth = 8;
#endif
typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

inline Vector Load(const float* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

inline void Store(float* x, Vector v) { std::memcpy(x, &v, sizeof v); }

inline Vector Broadcast(float x) { return x - Vector{}; }

// e^x for x <= 0 to about one unit in the last place: 2^n times a polynomial in the rest (Cephes' expf).
inline Vector Exp(Vector x) {
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

}  // namespace jaxserve

#endif  // JAXSERVE_PALLAS_KERNELS_NATIVE_VECTORS_H_
