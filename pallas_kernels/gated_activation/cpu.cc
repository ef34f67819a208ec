// Gated activations of rows of float32.

#include <cstdint>

#include "native/ffi.h"
#include "native/vectors.h"

namespace {

using jaxserve::Broadcast, jaxserve::Exp, jaxserve::kWidth, jaxserve::Load, jaxserve::Store, jaxserve::Vector;

enum Activation { kSilu = 0, kGeluTanh = 1 };

Vector Sigmoid(Vector x) {
  const Vector zero = Broadcast(0.0f), small = Exp(x < zero ? x : -x);
  return (x < zero ? small : Broadcast(1.0f)) / (small + 1.0f);
}

// gate times the sigmoid of itself, or of what makes it GELU: (1 + tanh(x)) / 2 is the sigmoid of 2 x.
template <Activation kind>
Vector Activate(Vector gate) {
  if constexpr (kind == kSilu) return gate * Sigmoid(gate);
  return gate * Sigmoid(gate * (gate * gate * 0.044715f + 1.0f) * 1.5957691216f);
}

template <Activation kind>
void ActivateRow(const float* gate, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) Store(out + i, Activate<kind>(Load(gate + i)) * Load(gate + size + i));
  if (i == size) return;
  Vector rest = {}, up = {};
  for (int64_t j = i; j < size; ++j) rest[j - i] = gate[j], up[j - i] = gate[size + j];
  rest = Activate<kind>(rest) * up;
  for (int64_t j = i; j < size; ++j) out[j] = rest[j - i];
}

}  // namespace

// Operands: [T, 2, F] float32, gates and what they gate, and int32, which activation. Result: [T, F] float32.
extern "C" XLA_FFI_Error* JaxserveGatedActivation(XLA_FFI_CallFrame* frame) {
  using jaxserve::Data, jaxserve::Operand;
  if (jaxserve::AnswersMetadata(frame)) return nullptr;
  if (frame->args.size != 2) return jaxserve::Fail(frame, "two operands");
  const auto& x = Operand(frame, 0);
  const int64_t size = x.dims[2];
  const auto* gates = Data<const float>(x);
  auto* out = Data<float>(jaxserve::Result(frame));
  const auto activate = *Data<const int32_t>(Operand(frame, 1)) == kSilu ? ActivateRow<kSilu> : ActivateRow<kGeluTanh>;
  jaxserve::ForRows(frame, x.dims[0], 4 * size,
                    [&](int64_t row) { activate(gates + row * 2 * size, size, out + row * size); });
  return nullptr;
}
