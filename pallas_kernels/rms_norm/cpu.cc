// Root-mean-square norm of rows of float32, in one pass over memory; a row's squares are added in an order that
// depends on its length alone.

#include <cmath>
#include <cstdint>

#include "native/ffi.h"
#include "native/vectors.h"

namespace {

using jaxserve::kWidth, jaxserve::Load, jaxserve::Store, jaxserve::Vector;

struct Problem {
  const float *x, *y, *weight;  // y: what is added to x first, or null
  int64_t size;                 // of a row
  float eps;
  float *total, *normed;  // total: x + y, or null
};

void Normalise(const Problem& p, int64_t row) {
  const float* x = p.x + row * p.size;
  float* out = p.normed + row * p.size;
  if (p.y) {
    const float* y = p.y + row * p.size;
    float* total = p.total + row * p.size;
    for (int64_t i = 0; i < p.size; ++i) total[i] = x[i] + y[i];
    x = total;
  }
  constexpr int64_t kSums = 4;  // Vectors of sums that do not wait for each other.
  Vector sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= p.size; i += kSums * kWidth) {
    for (int64_t j = 0; j < kSums; ++j) {
      const Vector v = Load(x + i + j * kWidth);
      sums[j] += v * v;
    }
  }
  const Vector all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0.0f;
  for (int64_t lane = 0; lane < kWidth; ++lane) sum += all[lane];
  for (; i < p.size; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(p.size) + p.eps);
  for (i = 0; i < p.size; ++i) out[i] = x[i] * factor * p.weight[i];
}

}  // namespace

// Operands: x [..., D] float32, weight [D], eps, and what is added to x if that is wanted. Results: the sum, if it
// is, and its norm.
extern "C" XLA_FFI_Error* JaxserveRmsNorm(XLA_FFI_CallFrame* frame) {
  using jaxserve::Data, jaxserve::Operand, jaxserve::Result;
  if (jaxserve::AnswersMetadata(frame)) return nullptr;
  const bool adds = frame->args.size == 4;
  if (frame->rets.size != (adds ? 2 : 1)) return jaxserve::Fail(frame, "four operands and two results, or three and one");
  const auto& x = Operand(frame, 0);
  const int64_t size = x.dims[x.rank - 1];
  Problem p{Data<const float>(x), adds ? Data<const float>(Operand(frame, 3)) : nullptr,
            Data<const float>(Operand(frame, 1)), size, *Data<const float>(Operand(frame, 2)),
            adds ? Data<float>(Result(frame)) : nullptr, Data<float>(Result(frame, adds))};
  jaxserve::ForRows(frame, jaxserve::NumRows(x), size, [&](int64_t row) { Normalise(p, row); });
  return nullptr;
}
