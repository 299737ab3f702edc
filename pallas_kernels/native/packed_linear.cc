// Products of float32 activations with weights that stay in 4 or 8 bits, for CPUs, called through XLA's FFI. A library
// is compiled for one type of weights: -DJAXPAGED_BLOCK=Q4_0, Q4_1, Q8_0, Q4_K, Q5_K or Q6_K, which are GGUF's blocks,
// or I4_F16, I8_BF16, F8_F32 and so on: integers or floats of so many bits, with scales of that type.
//
// How weights lie is said in packed_types.h. Each is rebuilt in float32 as the loader would widen it: a 16-bit scale
// times a small integer is exact, so there is at most one rounding; with a float32 scale the zero point is subtracted
// first. Sums are taken in the order of linear.cc: up the depth within a block, then block after block; results are
// bitwise those of the widened weights there. The blocks are the same, too: both round them to 32 rows.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "packed_types.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {
namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kRows = 8, kVectors = 3;  // of widened weights: kRows * kVectors sums and the weights fit the registers
constexpr int kFewRows = 16;            // more are computed from widened weights
#else
constexpr int kRows = 4, kVectors = 2;
constexpr int kFewRows = 8;
#endif
// With the scales, too, there is room for fewer sums: most rows of so many vectors.
constexpr int most_rows(int vectors) { return vectors == 1 ? kFewRows : vectors == 2 ? kFewRows / 2 : kFewRows / 4; }
constexpr int kParts = kTile / kLanes;   // vectors of a panel
constexpr int64_t kDepth = 384;          // longest block of sums, as in linear.cc
constexpr int64_t kUnpacked = 128;       // rows that are widened at a time for many rows of x
constexpr int64_t kAhead = 1536;         // bytes of a stream that are fetched before they are needed

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <int n, class F>
inline void times(F f) { if constexpr (n > 0) times<n - 1>(f), f(std::integral_constant<int, n - 1>()); }

enum class Sums { kFresh, kContinued, kAdded };  // from zero; on from `to`; from zero, then added to `to`

#define JAXPAGED_EACH_SUM \
  _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r) _Pragma("GCC unroll 3") for (int v = 0; v < V; ++v)
#define JAXPAGED_EACH_VECTOR _Pragma("GCC unroll 3") for (int v = 0; v < V; ++v)

template <int R, int V>
void finish_sums(const Floats (&sum)[R][V], float* to, Sums sums) {
  JAXPAGED_EACH_SUM {
    float* at = to + (r * V + v) * kLanes;
    store(at, sums == Sums::kAdded ? load(at) + sum[r][v] : sum[r][v]);
  }
}

// to[r][v] = the sum over `depth` rows of x[r][k] * w[k][v]; the weights are widened in registers.
template <class S, int R, int V>
void multiply_packed(const float* x, int64_t x_stride, const Packed& w, int64_t in, int64_t column, int64_t first,
                     int64_t depth, float* to, Sums sums) {
  Floats sum[R][V];
  JAXPAGED_EACH_SUM sum[r][v] = Floats{};
  Stream<S> stream[V];
  JAXPAGED_EACH_VECTOR stream[v] = Stream<S>(w, in, column + v * kLanes, first);
  for (int64_t k = 0; k < depth; k += kBlock) {
    S scheme[V];
    JAXPAGED_EACH_VECTOR scheme[v] = stream[v].scheme();
    for (int i = 0; i < kBlock / S::kLine; ++i) {
      decltype(stream[0].word(i)) word[V];
      JAXPAGED_EACH_VECTOR {
        word[v] = stream[v].word(i);
        __builtin_prefetch(stream[v].q + 4 * kTile * i + kAhead, 0, 2);
      }
      const float* at = x + k + i * S::kLine;
      times<S::kLine>([&](auto j) {
        Floats weight[V];
        JAXPAGED_EACH_VECTOR weight[v] = scheme[v].template weight<j>(word[v]);
        JAXPAGED_EACH_SUM sum[r][v] = multiply_add(weight[v], broadcast(at[r * x_stride + j]), sum[r][v]);
      });
    }
    JAXPAGED_EACH_VECTOR stream[v].advance();
  }
  finish_sums<R, V>(sum, to, sums);
}

// The same from weights that are widened already, [depth][V vectors].
template <int R, int V>
void multiply(const float* x, int64_t x_stride, const float* w, int64_t depth, float* to, Sums sums) {
  Floats sum[R][V];
  JAXPAGED_EACH_SUM sum[r][v] = sums == Sums::kContinued ? load(to + (r * V + v) * kLanes) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    Floats weight[V];
    JAXPAGED_EACH_VECTOR weight[v] = load(w + (k * V + v) * kLanes);
    JAXPAGED_EACH_SUM sum[r][v] = multiply_add(weight[v], broadcast(x[r * x_stride + k]), sum[r][v]);
  }
  finish_sums<R, V>(sum, to, sums);
}

template <class S, int V>
void unpack(const Packed& w, int64_t in, int64_t column, int64_t first, int64_t depth, float* to) {
  JAXPAGED_EACH_VECTOR {
    Stream<S> stream(w, in, column + v * kLanes, first);
    float* into = to + v * kLanes;
    for (int64_t k = 0; k < depth; k += kBlock, stream.advance()) {
      const S scheme = stream.scheme();
      for (int i = 0; i < kBlock / S::kLine; ++i) {
        const auto word = stream.word(i);
        times<S::kLine>([&](auto j) { store(into, scheme.template weight<j>(word)), into += V * kLanes; });
      }
    }
  }
}

// y = x @ w; or, gated, silu(x @ g) * (x @ u) of w = [g | u].
struct Product {
  const float* x;
  Packed w;
  float* y;
  int64_t rows, in, out;
  bool gated, one_sum;  // the latter: over the whole depth, as linear.cc's products with transposed weights take it

  // Columns that are computed together.
  int64_t width() const {
    int vectors = kVectors;
    while (rows <= kFewRows && rows > most_rows(vectors)) --vectors;
    return vectors * kLanes;
  }
  int64_t depth() const {
    if (one_sum) return in;
    const int64_t blocks = std::max<int64_t>(2, div_up(in, kDepth));
    return div_up(div_up(in, blocks), kBlock) * kBlock;
  }
};

template <class S>
struct Work {
  template <int V, int R = most_rows(V)>
  static void few(const Product& p, int64_t column, float* sums) {
    if constexpr (R > 1) if (p.rows < R) return few<V, R - 1>(p, column, sums);
    for (int64_t k = 0; k < p.in; k += p.depth())
      multiply_packed<S, R, V>(p.x + k, p.in, p.w, p.in, column, k, std::min(p.depth(), p.in - k), sums,
                               k ? Sums::kAdded : Sums::kFresh);
  }

  template <int V, int R = kRows>
  static void group(const float* x, int64_t stride, const float* w, int64_t rows, int64_t depth, float* to, Sums sums) {
    if constexpr (R > 1) if (rows < R) return group<V, R - 1>(x, stride, w, rows, depth, to, sums);
    multiply<R, V>(x, stride, w, depth, to, sums);
  }

  template <int V>
  static void many(const Product& p, int64_t column, float* sums, float* partial, float* widened) {
    const int64_t groups = div_up(p.rows, kRows), size = p.rows * V * kLanes;
    for (int64_t k = 0; k < p.in; k += p.depth()) {
      const int64_t end = std::min(p.in, k + p.depth());
      float* into = k ? partial : sums;
      for (int64_t first = k; first < end; first += kUnpacked) {
        const int64_t depth = std::min(kUnpacked, end - first);
        unpack<S, V>(p.w, p.in, column, first, depth, widened);
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t row = p.rows * g / groups, rows = p.rows * (g + 1) / groups - row;
          group<V>(p.x + row * p.in + first, p.in, widened, rows, depth, into + row * V * kLanes,
                   first == k ? Sums::kFresh : Sums::kContinued);
        }
      }
      if (k) for (int64_t i = 0; i < size; i += kLanes) store(sums + i, load(sums + i) + load(partial + i));
    }
  }

  template <int V>
  static void columns(const Product& p, int64_t column, std::vector<float>& memory) {
    const int64_t size = p.rows * V * kLanes;
    memory.resize(3 * size + kUnpacked * V * kLanes);
    float *sums = memory.data(), *up = sums + size, *partial = up + size, *widened = partial + size;
    for (int m = 0; m < (p.gated ? 2 : 1); ++m) {
      const int64_t first = column + m * p.out;
      p.rows <= kFewRows ? few<V>(p, first, m ? up : sums) : many<V>(p, first, m ? up : sums, partial, widened);
    }
    for (int64_t r = 0; r < p.rows; ++r)
      for (int v = 0; v < V; ++v) {
        const int64_t at = (r * V + v) * kLanes;
        const Floats value = load(sums + at);
        store(p.y + r * p.out + column + v * kLanes, p.gated ? silu(value) * load(up + at) : value);
      }
  }

  static void run(const Product& p, int64_t first, int64_t last, std::vector<float>& memory) {
    for (int64_t c = first; c < last; c += p.width()) {
      const int64_t vectors = std::min(p.width(), last - c) / kLanes;
      if (vectors == 1) columns<1>(p, c, memory);
      if (vectors == 2) columns<2>(p, c, memory);
      if constexpr (kVectors == 3) if (vectors == 3) columns<3>(p, c, memory);
    }
  }

  // Columns as rows: y [count, in], as an embedding looks them up.
  static void look_up(const Packed& w, const int32_t* ids, int64_t count, int64_t in, float* y) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t lane = ids[t] % kLanes;
      Stream<S> stream(w, in, ids[t] - lane, 0);
      for (int64_t k = 0; k < in; k += kBlock, stream.advance()) {
        const S scheme = stream.scheme();
        for (int i = 0; i < kBlock / S::kLine; ++i) {
          const auto word = stream.word(i);
          times<S::kLine>([&](auto j) { *y++ = scheme.template weight<j>(word)[lane]; });
        }
      }
    }
  }
};

// Threads take pieces of columns. The caller waits for pieces, never for threads, and cannot deadlock with a busy pool.
class Call {
 public:
  using Run = void (*)(const Product&, int64_t, int64_t, std::vector<float>&);

  Call(Run run, const Product& product, int64_t threads) : run_(run), product_(product) {
    const int64_t groups = div_up(product.out, product.width());
    step_ = std::max<int64_t>(1, groups / (4 * threads)) * product.width();
  }

  void work() {
    std::vector<float> memory;
    for (int64_t mine; (mine = taken_.fetch_add(1)) < pieces(); done_.fetch_add(1, std::memory_order_release))
      run_(product_, mine * step_, std::min(product_.out, (mine + 1) * step_), memory);
  }

  void wait() const {
    while (done_.load(std::memory_order_acquire) < pieces()) std::this_thread::yield();
  }

  int64_t pieces() const { return div_up(product_.out, step_); }

 private:
  Run run_;
  Product product_;
  int64_t step_;
  std::atomic<int64_t> taken_{0}, done_{0};
};

typedef JAXPAGED_BLOCK Type;
typedef Work<Type> Works;

template <class S>
Packed packed(ffi::RemainingArgs& args, int64_t in) {
  const auto bytes = [&](int i) {
    return static_cast<const uint8_t*>((*args.get<ffi::AnyBuffer>(i)).untyped_data());
  };
  const auto rows = [&](int i) { return in / (*args.get<ffi::AnyBuffer>(i)).dimensions()[1]; };
  if constexpr (S::kSuper) {
    constexpr int s = S::kMinimums ? 3 : 2;
    return {bytes(0), bytes(1), bytes(2), bytes(s), bytes(s + (S::kHigh > 0)), rows(s)};
  } else {
    return {bytes(0), bytes(1), args.size() > 2 ? bytes(2) : nullptr, nullptr, nullptr, rows(1)};
  }
}

void multiply_all(ffi::ThreadPool& pool, const Product& product) {
  auto call = std::make_shared<Call>(Works::run, product, pool.num_threads());
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), call->pieces()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([call] { call->work(); });
  call->work();
  call->wait();
}

ffi::Error linear(ffi::ThreadPool pool, bool one_sum, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                  ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = y->dimensions()[1];
  multiply_all(pool, {x.typed_data(), packed<Type>(weights, in), y->typed_data(), rows, in, out, false, one_sum});
  return ffi::Error::Success();
}

ffi::Error gated(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                 ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t rows = x.dimensions()[0], in = x.dimensions()[1], out = y->dimensions()[1];
  multiply_all(pool, {x.typed_data(), packed<Type>(weights, in), y->typed_data(), rows, in, out, true, false});
  return ffi::Error::Success();
}

ffi::Error look_up(ffi::Buffer<ffi::S32> ids, ffi::RemainingArgs table, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t in = y->dimensions()[1];
  Works::look_up(packed<Type>(table, in), ids.typed_data(), ids.dimensions()[0], in, y->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_JOIN(jaxpaged_packed_linear, JAXPAGED_BLOCK), jaxpaged::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<bool>("one_sum")
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x [T, in]
                                  .RemainingArgs()               // q, d and maybe m, s, h
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_JOIN(jaxpaged_packed_gated, JAXPAGED_BLOCK), jaxpaged::gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()  // x [T, in]
                                  .RemainingArgs()               // of gate and up, [in, 2 * out]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_JOIN(jaxpaged_packed_look_up, JAXPAGED_BLOCK), jaxpaged::look_up,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // ids [T]
                                  .RemainingArgs()               // of the table's transpose, [in, rows]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, in]
