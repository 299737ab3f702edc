// The type that a library's weights are stored in: float32, or with -DJAXPAGED_STORED_16=bf16 or f16 sixteen bits.

#ifndef JAXPAGED_WEIGHTS_H_
#define JAXPAGED_WEIGHTS_H_

#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "xla/ffi/api/ffi.h"

// A name of its own for each type, as the libraries of several types are in one process.
#define JAXPAGED_JOIN_(name, suffix) name##_##suffix
#define JAXPAGED_JOIN(name, suffix) JAXPAGED_JOIN_(name, suffix)
#ifdef JAXPAGED_STORED_16
#define JAXPAGED_NAMED(name) JAXPAGED_JOIN(name, JAXPAGED_STORED_16)
#else
#define JAXPAGED_NAMED(name) name
#endif

namespace jaxpaged {

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// GCC would convert either half of a vector by itself.
inline Ints integers(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return __builtin_convertvector(halves, Ints);
#endif
}

struct bf16 {
  static constexpr xla::ffi::DataType kType = xla::ffi::DataType::BF16;
  static Floats load(const uint16_t* from) { return (Floats)(integers(from) << 16); }
};

struct f16 {
  static constexpr xla::ffi::DataType kType = xla::ffi::DataType::F16;
  static Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    const Ints bits = integers(from), size = bits & 0x7fff, exponent = bits & 0x7c00;
    // The exponent's bias differs by 112. Small numbers have no leading one: it is added, and subtracted as a number,
    // since the runtime may have the CPU take float32 numbers that lack it for zeros.
    const Ints normal = (size << 13) + (112 << 23) + (exponent == 0x7c00 ? Ints{} + (112 << 23) : Ints{});
    const Floats small = (Floats)((size << 13) + (113 << 23)) - (Floats)(Ints{} + (113 << 23));
    return (Floats)((exponent == 0 ? (Ints)small : normal) | (bits & 0x8000) << 16);
#endif
  }
};

#ifdef JAXPAGED_STORED_16
typedef uint16_t Weight;
constexpr xla::ffi::DataType kWeightType = JAXPAGED_STORED_16::kType;
inline Floats load(const uint16_t* from) { return JAXPAGED_STORED_16::load(from); }
inline float widened(uint16_t value) {
  uint16_t values[kLanes] = {value};
  return load(values)[0];
}
#else
typedef float Weight;
constexpr xla::ffi::DataType kWeightType = xla::ffi::DataType::F32;
inline float widened(float value) { return value; }
#endif

}  // namespace jaxpaged

#endif  // JAXPAGED_WEIGHTS_H_
