// Vectors of the widest kind that the compiler's target has, and the functions of them that the kernels share.

#ifndef JAXPAGED_LANES_H_
#define JAXPAGED_LANES_H_

#include <cstdint>

namespace jaxpaged {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef float AnyFloats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));  // wherever floats lie

inline Floats load(const float* from) { return *reinterpret_cast<const AnyFloats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<AnyFloats*>(to) = value; }

// 2^x for x <= 126 to about 1e-7; NaN stays NaN, and everything below -126 counts as -126.
inline Floats exp2(Floats x) {
  const Floats least = Floats{} - 126.0f;
  x = x < least ? least : x;
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, which lies in the low bits
  const Floats r = x - (shifted - 12582912.0f);
  Floats y = r * 1.52527336e-5f + 1.54035297e-4f;
  y = y * r + 1.33335581e-3f;
  y = y * r + 9.61812910e-3f;
  y = y * r + 5.55041087e-2f;
  y = y * r + 2.40226507e-1f;
  y = y * r + 6.93147181e-1f;
  y = y * r + 1.0f;
  return y * (Floats)(((Ints)shifted << 23) + 0x3f800000);
}

// x / (1 + e^-x), as in Elfwing et al. (2018).
inline Floats silu(Floats x) {
  const Floats most = Floats{} + 126.0f;
  Floats power = x * -1.44269504f;
  power = power > most ? most : power;
  return x / (exp2(power) + 1.0f);
}

}  // namespace jaxpaged

#endif  // JAXPAGED_LANES_H_
