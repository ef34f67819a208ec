// Where the results of a product go, and what scales them.

#ifndef JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_
#define JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_

#include <cstdint>

namespace jaxserve {

struct Scaled {
  const float *x_scale, *w_scale;  // of rows, of outputs
  float* numbers;
  int64_t stride;

  Scaled From(int64_t row, int64_t output) const {
    return {x_scale + row, w_scale + output, numbers + row * stride + output, stride};
  }
};

}  // namespace jaxserve

#endif  // JAXSERVE_PALLAS_KERNELS_INT8_MATMUL_SCALED_H_
