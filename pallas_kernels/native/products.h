// The products that linear.cc and experts.cc are made of: their micro-kernel, and two of the ways that use it.

#ifndef JAXPAGED_PRODUCTS_H_
#define JAXPAGED_PRODUCTS_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "weights.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {
namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kRows = 8;  // kRows * kVectors sums, kVectors weights and one input fit the registers
#else
constexpr int kRows = 4;
#endif
constexpr int kVectors = 3;
constexpr int kPanel = kVectors * kLanes;      // columns
constexpr int64_t kFewRows = 32;               // more are computed by panels
constexpr int64_t kDepth = 384;                // longest block of depth
constexpr int64_t kGroup = 32;                 // quantized weights along the depth that share a scale
constexpr int64_t kMaxPanelRows = 256;        // rows that one item of a panel holds
constexpr int64_t kStreamBytes = 96 * 1024;    // weights between two visits of the same sums; twice that stays cached
constexpr int64_t kByRowsOut = 256;            // outputs of one item
constexpr int64_t kSmallFinish = 8192;         // sums that are not worth another thread
constexpr int64_t kBytes = sizeof(Weight);
constexpr int64_t kLine = 64 / kBytes;         // weights of a cache line

int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

struct Free { void operator()(void* memory) const { std::free(memory); } };
using Buffer = std::unique_ptr<float, Free>;

Buffer allocate(int64_t floats) {
  void* memory = std::aligned_alloc(64, round_up(4 * floats, 64));
  if (!memory) throw std::bad_alloc();
  return Buffer(static_cast<float*>(memory));
}

// The weights to be read next: `width` of each row, rows `stride` apart. Asked for evenly, so that the memory is
// never waited for nor idle: `lines` of them before every step of depth, or before each `every` steps.
struct Ahead {
  const Weight* row;
  int64_t width, stride;
  int lines;
  int64_t every;
  int64_t offset = 0;

  void prefetch() {
    for (int i = 0; i < lines; ++i) {
      __builtin_prefetch(row + offset, 0, 2);
      offset += kLine;
      if (offset >= width) offset = 0, row += stride;
    }
  }
};

enum class Sums { kFresh, kContinued, kAdded };  // from zero; on from `to`; from zero, then added to `to`

enum class Mode { kEveryStep, kPaced, kCopying };  // when weights are fetched; the last is paced, and copies weights

// to[r][v] = the sum over the depth of x[r][k] * w[k][v], for R rows and V vectors. A copy of the weights has its rows
// as neighbors. GCC keeps the sums in registers only where every loop over them is unrolled.
template <int R, int V, Mode mode, class W>
void multiply(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t depth, float* to,
              int64_t to_stride, Sums sums, Ahead* ahead, float* copy) {
#define JAXPAGED_EACH_SUM \
  _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r) _Pragma("GCC unroll 3") for (int v = 0; v < V; ++v)
  Floats sum[R][V];
  JAXPAGED_EACH_SUM sum[r][v] = Floats{};
  if (sums == Sums::kContinued) JAXPAGED_EACH_SUM sum[r][v] = load(to + r * to_stride + v * kLanes);
  for (int64_t k = 0; k < depth;) {
    const int64_t until = mode == Mode::kEveryStep ? k + 1 : std::min(depth, k + ahead->every);
    ahead->prefetch();
    for (; k < until; ++k) {
      Floats weights[V];
      for (int v = 0; v < V; ++v) weights[v] = load(w + k * w_stride + v * kLanes);
      if (mode == Mode::kCopying) for (int v = 0; v < V; ++v) store(copy + (k * V + v) * kLanes, weights[v]);
      JAXPAGED_EACH_SUM sum[r][v] = multiply_add(weights[v], broadcast(x[r * x_stride + k]), sum[r][v]);
    }
  }
  if (sums == Sums::kAdded) JAXPAGED_EACH_SUM sum[r][v] = load(to + r * to_stride + v * kLanes) + sum[r][v];
  JAXPAGED_EACH_SUM store(to + r * to_stride + v * kLanes, sum[r][v]);
#undef JAXPAGED_EACH_SUM
}

template <class W>
using Multiply = void (*)(const float*, int64_t, const W*, int64_t, int64_t, float*, int64_t, Sums, Ahead*, float*);

template <Mode mode, class W, int R>
Multiply<W> with_vectors(int vectors) {
  return vectors == 1 ? multiply<R, 1, mode, W> : vectors == 2 ? multiply<R, 2, mode, W> : multiply<R, 3, mode, W>;
}

template <Mode mode, class W, int R = kRows>
Multiply<W> find_multiply(int64_t rows, int vectors) {
  if constexpr (R > 1) {
    if (rows < R) return find_multiply<mode, W, R - 1>(rows, vectors);
  }
  return with_vectors<mode, W, R>(vectors);
}

template <class W>
Multiply<W> fetching(const Ahead& ahead, int64_t rows, int vectors) {
  return ahead.lines ? find_multiply<Mode::kEveryStep, W>(rows, vectors) : find_multiply<Mode::kPaced, W>(rows, vectors);
}

// y = x @ w; or, gated, silu(x @ g) * (x @ u) of w = [g | u]. With a bias [2 * out], that is added to both products;
// with a limit, both are bounded by it, and what is computed of them is gpt-oss's.
struct Product {
  const float* x;
  const Weight* w;
  float* y;
  int64_t rows, in, out;
  bool gated = false;
  const float* bias = nullptr;
  float limit = 0, growth = 1;

  // Blocks of whole groups of quantized weights, so that packed_linear.cc can take its sums in the same order.
  int64_t depth() const { return round_up(div_up(in, std::max<int64_t>(2, div_up(in, kDepth))), kGroup); }
  int64_t blocks() const { return div_up(in, depth()); }
  int matrices() const { return gated ? 2 : 1; }
  const Weight* matrix(int m) const { return w + m * out; }
  int64_t stride() const { return matrices() * out; }  // of the weights
  // Floats between rows of sums. Multiples of such a power of two would make them displace one another in caches.
  int64_t padded() const {
    const int64_t whole = round_up(stride(), kLanes);
    return whole % 256 ? whole : whole + kLanes;
  }
  int64_t partials() const { return blocks() * rows * padded(); }

  Floats hidden(Floats gate, Floats up) const {
    if (limit <= 0) return silu(gate) * up;
    const Floats most = Floats{} + limit;
    gate = gate > most ? most : gate;
    up = up > most ? most : up;
    up = up < -most ? -most : up;
    return silu(gate * growth) / growth * (up + 1.0f);
  }

  // Outputs `first` to `last` of one row from its finished sums.
  void finish(int64_t row, int64_t first, int64_t last, const float* sums, const float* up_sums) const {
    float* to = y + row * out + first;
    const int64_t count = last - first;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Floats value = load(sums + i);
      if (gated) {
        Floats up = load(up_sums + i);
        if (bias) value = value + load(bias + first + i), up = up + load(bias + out + first + i);
        value = hidden(value, up);
      }
      store(to + i, value);
    }
    if (i == count) return;
    float rest[kLanes] = {}, up_rest[kLanes] = {};
    std::copy(sums + i, sums + count, rest);
    if (gated) {
      std::copy(up_sums + i, up_sums + count, up_rest);
      for (int64_t k = i; bias && k < count; ++k) rest[k - i] += bias[first + k], up_rest[k - i] += bias[out + first + k];
      store(rest, hidden(load(rest), load(up_rest)));
    }
    std::copy(rest, rest + (count - i), to + i);
  }
};

enum class Kind { kStream, kFinish, kPanel, kByRows };

struct Item {
  Kind kind;
  int64_t block;            // kStream
  int64_t column, columns;  // all but kFinish
  int64_t row, rows;        // kFinish, kPanel
};

// Copy `depth` rows of a panel so that they are neighbors, zeros where the matrix ends.
void copy_panel(const Weight* w, int64_t stride, int64_t depth, int64_t columns, int64_t padded, float* to) {
  for (int64_t k = 0; k < depth; ++k, w += stride, to += padded) {
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) store(to + c, load(w + c));
    for (; c < padded; ++c) to[c] = c < columns ? widened(w[c]) : 0.0f;
  }
}

void stream(const Product& p, const Item& item, float* partials) {
  const int64_t padded = p.padded(), groups = div_up(p.rows, kRows);
  const int64_t first = item.block * p.depth(), last = std::min(p.in, first + p.depth());
  const int64_t step = std::max<int64_t>(8, kStreamBytes / (kBytes * item.columns) / 8 * 8);
  const Weight* w = p.w + item.column;
  float* sums = partials + item.block * p.rows * padded + item.column;
  if (first >= last) {  // a depth of one
    for (int64_t row = 0; row < p.rows; ++row) std::memset(sums + row * padded, 0, 4 * item.columns);
    return;
  }
  Buffer rest;
  for (int64_t k = first; k < last; k += step) {
    const int64_t depth = std::min(step, last - k);
    Ahead ahead{w + (k + depth) * p.stride(), item.columns, p.stride(), 0, depth};
    for (int64_t c = 0; c < item.columns; c += kPanel) {
      const int64_t columns = std::min<int64_t>(kPanel, item.columns - c);
      const int vectors = static_cast<int>(div_up(columns, kLanes));
      const Weight* from = w + k * p.stride() + c;
      const bool whole = columns % kLanes == 0;
      if (!whole) {
        if (!rest) rest = allocate(step * kPanel);
        copy_panel(from, p.stride(), depth, columns, vectors * kLanes, rest.get());
      }
      const int lines = static_cast<int>(div_up(columns, kLine));
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = g * kRows, rows = std::min<int64_t>(kRows, p.rows - row);
        // Spread over the first groups, so that the memory is never waited for nor idle.
        ahead.lines = groups == 1 ? lines : groups == 2 ? (g ? lines / 2 : lines - lines / 2) : g < lines;
        const Sums how = k == first ? Sums::kFresh : Sums::kContinued;
        const float* x = p.x + row * p.in + k;
        float* to = sums + row * padded + c;
        if (whole)
          fetching<Weight>(ahead, rows, vectors)(x, p.in, from, p.stride(), depth, to, padded, how, &ahead, nullptr);
        else
          fetching<float>(ahead, rows, vectors)(x, p.in, rest.get(), vectors * kLanes, depth, to, padded, how, &ahead,
                                                nullptr);
      }
    }
  }
}

void finish(const Product& p, const Item& item, float* partials) {
  const int64_t padded = p.padded(), size = p.rows * padded;
  for (int64_t row = item.row; row < item.row + item.rows; ++row) {
    float* sums = partials + row * padded;
    for (int64_t block = 1; block < p.blocks(); ++block)
      for (int64_t c = 0; c < p.stride(); c += kLanes)
        store(sums + c, load(sums + c) + load(sums + block * size + c));
    p.finish(row, 0, p.out, sums, sums + p.out);
  }
}

// The first rows copy the weights for the others. `next`: what is likely to be this thread's next panel, or null.
void panel(const Product& p, const Item& item, const Item* next, float* scratch) {
  const int vectors = static_cast<int>(div_up(item.columns, kLanes));
  const int64_t groups = div_up(item.rows, kRows), width = vectors * kLanes;
  const bool whole = item.columns % kLanes == 0;
  float *copy = scratch, *sums = scratch + kDepth * kPanel, *first_sums = sums;
  for (int m = 0; m < p.matrices(); ++m, sums += kMaxPanelRows * kPanel)
    for (int64_t first = 0; first < p.in; first += p.depth()) {
      const int64_t depth = std::min(p.in - first, p.depth());
      const bool ends = first + depth == p.in, last = ends && m + 1 == p.matrices();
      const Weight* w = p.matrix(m) + first * p.stride() + item.column;
      Ahead ahead{w + depth * p.stride(), width, p.stride(), static_cast<int>(div_up(width, kLine)), groups};
      if (ends && !last) ahead.row = p.matrix(m + 1) + item.column;
      if (last && next) ahead = {p.w + next->column, kPanel, p.stride(), static_cast<int>(div_up(kPanel, kLine)), groups};
      if (last && !next) ahead.lines = 0;
      if (!whole) copy_panel(w, p.stride(), depth, item.columns, width, copy);
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = item.rows * g / groups, rows = item.rows * (g + 1) / groups - row;
        const Sums how = first ? Sums::kAdded : Sums::kFresh;
        const float* x = p.x + (item.row + row) * p.in + first;
        float* to = sums + row * kPanel;
        if (whole && g == 0)
          find_multiply<Mode::kCopying, Weight>(rows, vectors)(x, p.in, w, p.stride(), depth, to, kPanel, how, &ahead,
                                                               copy);
        else
          find_multiply<Mode::kPaced, float>(rows, vectors)(x, p.in, copy, width, depth, to, kPanel, how, &ahead,
                                                            nullptr);
        for (int64_t r = row; last && r < row + rows; ++r)
          p.finish(item.row + r, item.column, item.column + item.columns, first_sums + r * kPanel, sums + r * kPanel);
      }
    }
}

}  // namespace
}  // namespace jaxpaged

#endif  // JAXPAGED_PRODUCTS_H_
