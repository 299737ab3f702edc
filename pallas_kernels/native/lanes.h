// Vectors of the widest kind that the compiler's target has, and the functions of them that the kernels share.

#ifndef JAXPAGED_LANES_H_
#define JAXPAGED_LANES_H_

#include <cstdint>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

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

// Folded away, unlike an addition of zero, which changes a negative zero.
inline Floats broadcast(float value) { return value - Floats{}; }

// a * b + c, in one rounding where the target has such an instruction. Left to itself, the compiler takes it in one
// loop and not in another, and equal sums differ.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

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

// By Eigen's rational approximation: within 2e-7 of the truth, relative to it; NaN stays NaN.
inline Floats tanh(Floats x) {
  const Floats max = Floats{} + 7.9053111f;
  x = x > max ? max : x;
  x = x < -max ? -max : x;
  const Floats square = x * x;
  Floats above = square * -2.76076847742355e-16f + 2.00018790482477e-13f;
  above = above * square - 8.60467152213735e-11f;
  above = above * square + 5.12229709037114e-08f;
  above = above * square + 1.48572235717979e-05f;
  above = above * square + 6.37261928935436e-04f;
  above = above * square + 4.89352455891786e-03f;
  Floats below = square * 1.19825839466702e-06f + 1.18534705686654e-04f;
  below = below * square + 2.26843463243900e-03f;
  below = below * square + 4.89352518554385e-03f;
  return x * above / below;
}

}  // namespace jaxpaged

#endif  // JAXPAGED_LANES_H_
