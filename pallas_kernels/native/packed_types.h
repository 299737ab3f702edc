// Types of weights of 4 to 8 bits, and how they are read and widened.
//
// Weights [in, out] lie in panels of 16 columns, each one stream: `q`, words of 32 bits, one per column, that hold the
// next 8 (4-bit) or 4 (8-bit) rows; and for each group of rows, a multiple of 32, the columns' scales `d` and maybe
// minimums or zero points `m`: for GGUF's blocks, whose groups are 32, in float16, else as bytes.
//
//   Q4_0   w = d * (q - 8)      a word's byte b: rows b (low bits) and b + 4
//   Q4_1   w = d * q + m        likewise
//   Q8_0   w = d * (q - 128)    a word's byte b: row b; the file's numbers plus 128
//   I4     w = d * (q - m)      as Q4_0; without m it is 8
//   I8     w = d * (q - m)      as Q8_0; without m it is 128
//   F8     w = d * q            as Q8_0; q in e4m3 (Micikevicius et al., 2022)
//   Q4_K   w = s * d * q - t * m  as Q4_0; for each 32 rows d and m as bytes, for each 256 the scales s, then t
//   Q5_K   likewise             `h` has the fifth bits: a word's bit r is that of row r of 32
//   Q6_K   w = s * d * (q - 32) for each 16 rows d as signed bytes; `h` has bits 5 and 6 of 16 rows in a word

#ifndef JAXPAGED_PACKED_TYPES_H_
#define JAXPAGED_PACKED_TYPES_H_

#include <cstdint>
#include <type_traits>

#include "lanes.h"
#include "weights.h"

namespace jaxpaged {

constexpr int kTile = 16;      // columns of a panel
constexpr int64_t kBlock = 32;  // a multiple of them share a scale

typedef int32_t AnyInts __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

template <int shift>
inline Floats nibble(Ints word) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);  // looks at 4 bits alone
  return (Floats)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)word, shift), table);
#else
  return __builtin_convertvector((word >> shift) & 15, Floats);
#endif
}

struct Packed {
  const uint8_t *q, *d, *m, *s, *h;
  int64_t group;  // rows that share a scale
};

struct f32 {
  static Floats load(const float* from) { return jaxpaged::load(from); }
};

template <class T>
inline Floats scales_at(const uint8_t* from) {
  if constexpr (std::is_same_v<T, f32>) return f32::load(reinterpret_cast<const float*>(from));
  else return T::load(reinterpret_cast<const uint16_t*>(from));
}

inline Floats bytes_at(const uint8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Ints found;
  for (int i = 0; i < kLanes; ++i) found[i] = from[i];
  return __builtin_convertvector(found, Floats);
#endif
}

inline Floats signed_bytes_at(const uint8_t* from) {
  Ints found;
  for (int i = 0; i < kLanes; ++i) found[i] = static_cast<int8_t>(from[i]);
  return __builtin_convertvector(found, Floats);
}

// The scales of a group, and how a word becomes weights. kScale and kMinimum are bytes of one number.
struct Q4_1 {
  static constexpr int kLine = 8, kScale = 2, kMinimum = 2;  // kLine: rows of a word
  static constexpr bool kSuper = false;
  Floats d, m;
  void read(const uint8_t* scales, const uint8_t* minimums) {
    d = scales_at<f16>(scales), m = scales_at<f16>(minimums);
  }
  template <int j>
  Floats weight(Ints word) const { return multiply_add(nibble<j % 4 * 8 + j / 4 * 4>(word), d, m); }
};

struct Q4_0 : Q4_1 {
  void read(const uint8_t* scales, const uint8_t*) { d = scales_at<f16>(scales), m = d * -8.0f; }
};

struct Q8_0 {
  static constexpr int kLine = 4, kScale = 2, kMinimum = 2;
  static constexpr bool kSuper = false;
  Floats d, m;
  void read(const uint8_t* scales, const uint8_t*) { d = scales_at<f16>(scales), m = d * -128.0f; }
  template <int j>
  Floats weight(Ints word) const {
    return multiply_add(__builtin_convertvector((word >> (8 * j)) & 255, Floats), d, m);
  }
};

// Integers less their zero points, times scales of type T.
template <int bits, class T>
struct Integers {
  static constexpr int kLine = 32 / bits, kScale = std::is_same_v<T, f32> ? 4 : 2, kMinimum = 1;
  static constexpr bool kSuper = false;
  static constexpr bool kExact = !std::is_same_v<T, f32>;  // the product of scale and zero point
  Floats d, m;
  void read(const uint8_t* scales, const uint8_t* zeros) {
    d = scales_at<T>(scales);
    const Floats zero = zeros ? bytes_at(zeros) : Floats{} + float(1 << (bits - 1));
    m = kExact ? d * -zero : zero;
  }
  template <int j>
  Floats weight(Ints word) const {
    Floats q;
    if constexpr (bits == 4) q = nibble<j % 4 * 8 + j / 4 * 4>(word);
    else q = __builtin_convertvector((word >> (8 * j)) & 255, Floats);
    if constexpr (kExact) return multiply_add(q, d, m);
    else return (q - m) * d;
  }
};

// Floats of 8 bits, four of them the exponent's, times scales of type T.
template <class T>
struct Floats8 {
  static constexpr int kLine = 4, kScale = std::is_same_v<T, f32> ? 4 : 2, kMinimum = 1;
  static constexpr bool kSuper = false;
  Floats d;
  void read(const uint8_t* scales, const uint8_t*) { d = scales_at<T>(scales); }
  template <int j>
  Floats weight(Ints word) const {
    const Ints bits = word >> (8 * j), size = (bits & 127) << 20;
    // Small numbers have no leading one: it is added, and subtracted as a number. The biases differ by 120.
    const Floats small = (Floats)(size + (121 << 23)) - (Floats)(Ints{} + (121 << 23));
    const Ints normal = size + (120 << 23);
    return (Floats)((size < (1 << 23) ? (Ints)small : normal) | (bits & 128) << 24) * d;
  }
};

typedef Integers<4, f16> I4_F16;
typedef Integers<4, bf16> I4_BF16;
typedef Integers<4, f32> I4_F32;
typedef Integers<8, f16> I8_F16;
typedef Integers<8, bf16> I8_BF16;
typedef Integers<8, f32> I8_F32;
typedef Floats8<f16> F8_F16;
typedef Floats8<bf16> F8_BF16;
typedef Floats8<f32> F8_F32;

// GGUF's blocks of 256 with scales of their scales, 4 bits in words as of Q4_0, and so many more in `h`.
template <int high_bits>
struct SuperBlock {
  static constexpr int kLine = 8;
  static constexpr bool kSuper = true, kMinimums = high_bits < 2;
  static constexpr int kHigh = high_bits, kScales = kMinimums ? 1 : 2;  // of 32 rows
  struct Word {
    Ints low, high;
    bool second;  // half of the 32 rows
  };
  Floats d[2], m;
  void read(const uint8_t* scales, const uint8_t* minimums, const uint8_t* super) {
    const Floats s = scales_at<f16>(super);
    if constexpr (kMinimums) {
      d[0] = d[1] = s * bytes_at(scales);
      m = -(scales_at<f16>(super + 2 * kTile) * bytes_at(minimums));
    } else {
      d[0] = s * signed_bytes_at(scales), d[1] = s * signed_bytes_at(scales + kTile);
    }
  }
  template <int j>
  Floats weight(const Word& word) const {
    if constexpr (high_bits == 0) return multiply_add(nibble<j % 4 * 8 + j / 4 * 4>(word.low), d[0], m);
    const Ints low = (word.low >> (j % 4 * 8 + j / 4 * 4)) & 15;
    const Ints high = ((word.high >> (high_bits * j)) & ((1 << high_bits) - 1)) << 4;
    const Floats q = __builtin_convertvector(low | high, Floats);
    if constexpr (kMinimums) return multiply_add(q, d[0], m);
    return (q - 32.0f) * d[word.second];
  }
};
typedef SuperBlock<0> Q4_K;
typedef SuperBlock<1> Q5_K;
typedef SuperBlock<2> Q6_K;

// A vector of columns, from some row on.
template <class S>
struct SimpleStream {
  const uint8_t *q, *d, *m;
  int64_t left, group;  // rows until the next scales, and from these to those after them

  SimpleStream() = default;
  SimpleStream(const Packed& w, int64_t in, int64_t column, int64_t row)
      : left(w.group - row % w.group), group(w.group) {
    const int64_t panel = column / kTile, lane = column % kTile;
    q = w.q + ((panel * in + row) / S::kLine * kTile + lane) * 4;
    const int64_t scale = (panel * in + row) / w.group * kTile + lane;
    d = w.d + scale * S::kScale, m = w.m ? w.m + scale * S::kMinimum : nullptr;
  }
  Ints word(int i) const { return *reinterpret_cast<const AnyInts*>(q + 4 * kTile * i); }
  void advance() {
    q += kBlock / S::kLine * 4 * kTile;
    if (left -= kBlock) return;
    left = group, d += kTile * S::kScale;
    if (m) m += kTile * S::kMinimum;
  }
  S scheme() const {
    S found;
    found.read(d, m);
    return found;
  }
};

template <class S>
struct SuperStream {
  const uint8_t *q, *d, *m, *s, *h;
  int64_t left, group;

  SuperStream() = default;
  SuperStream(const Packed& w, int64_t in, int64_t column, int64_t row)
      : left(w.group - row % w.group), group(w.group) {
    const int64_t panel = column / kTile, lane = column % kTile, block = (panel * in + row) / kBlock;
    q = w.q + ((panel * in + row) / S::kLine * kTile + lane) * 4;
    d = w.d + block * S::kScales * kTile + lane, m = w.m + block * kTile + lane;
    s = w.s + ((panel * in + row) / w.group * (1 + S::kMinimums) * kTile + lane) * 2;
    h = w.h + (block * S::kHigh * kTile + lane) * 4;
  }
  typename S::Word word(int i) const {
    const Ints low = *reinterpret_cast<const AnyInts*>(q + 4 * kTile * i);
    if constexpr (S::kHigh == 0) {
      return {low, low, false};
    } else {
      constexpr int each = 4 / S::kHigh;  // words of `q` for one of `h`
      const Ints high = *reinterpret_cast<const AnyInts*>(h + 4 * kTile * (i / each));
      return {low, high >> (i % each * S::kLine * S::kHigh), i >= 2};
    }
  }
  void advance() {
    q += kBlock / S::kLine * 4 * kTile, d += S::kScales * kTile, m += kTile, h += S::kHigh * 4 * kTile;
    if (left -= kBlock) return;
    left = group, s += (1 + S::kMinimums) * kTile * 2;
  }
  S scheme() const {
    S found;
    found.read(d, m, s);
    return found;
  }
};

template <class S>
using Stream = std::conditional_t<S::kSuper, SuperStream<S>, SimpleStream<S>>;

}  // namespace jaxpaged

#endif  // JAXPAGED_PACKED_TYPES_H_
