// Rotary embedding and KV write, then paged attention, for CPUs, called through XLA's FFI. Attention follows
// attention_rule.py, as xla_paged_attention.py does, without its gathers.
//
// A step is cut into tiles: consecutive rows of one slot, as many as fill `kTileLanes` query lanes. A work item is one
// tile and one kv head; threads take items from a shared counter, the costliest first.
//
// Vector lanes hold queries (rows of the tile times heads of the group), never parts of a head: keys and values are
// read where they lie and broadcast, any head dim works, the softmax needs no horizontal sums, and a row's result does
// not depend on which rows share its tile. Queries, scores and sums are therefore stored transposed: [..][vectors].
// Chunks of context start at multiples of `kChunk` wherever a window begins, for the same reason.
//
// Memory is the bound of decode steps, and pages lie anywhere: while a chunk is computed, the next one is prefetched,
// across the border to the thread's next item too.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "lanes.h"
#include "xla/ffi/api/ffi.h"

namespace jaxpaged {
namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kBlock = 8;  // kBlock * kStrip sums fit the registers
#else
constexpr int kBlock = 4;
#endif
constexpr int kStrip = 3;        // lane vectors that a micro-kernel holds
constexpr int kTileLanes = 96;   // queries of a tile
constexpr int kChunk = 32;       // tokens of context between two updates of the softmax; a multiple of kBlock
constexpr int kCacheLine = 64;
constexpr float kLowest = -1e30f;  // finite, so that lanes that have seen nothing stay finite
constexpr float kLog2E = 1.44269504f;  // exp(x) = 2^(x log2 e)

struct Problem {
  const float *q, *keys, *values, *slopes, *sinks;  // `slopes`, `sinks`: null without any
  const int32_t *table, *slot, *position;
  float* out;
  float scale, softcap;  // `softcap`: 0 without one
  int64_t window;        // 0 without one
  int64_t tokens, heads, key_dim, value_dim, page_size, kv_heads, width, null_slot;

  int64_t group() const { return heads / kv_heads; }
  int64_t first_seen(int64_t row) const {
    return window ? std::max<int64_t>(0, position[row] + 1 - window) : 0;
  }
};

struct Item {
  int64_t row, rows, head;
  int64_t begin, end;  // positions that some row sees

  int64_t first_chunk() const { return begin / kChunk * kChunk; }
};

// A chunk of an item's context: where each token's key and value start in the pools. Only tokens `from` to `count` count:
// nothing of the others is read, not even their pages' numbers.
struct Chunk {
  int64_t key[kChunk], value[kChunk];
  int from = 0, count = 0;

  void find(const Problem& p, const Item& item, int64_t start) {
    from = static_cast<int>(std::max<int64_t>(0, item.begin - start));
    count = static_cast<int>(std::min<int64_t>(kChunk, item.end - start));
    const int32_t* pages = p.table + p.slot[item.row] * p.width;
    int64_t page = (start + from) / p.page_size, offset = (start + from) % p.page_size;
    for (int i = from; i < count; ++i) {
      const int64_t at = (pages[page] * p.page_size + offset) * p.kv_heads + item.head;
      key[i] = at * p.key_dim;
      value[i] = at * p.value_dim;
      if (++offset == p.page_size) ++page, offset = 0;
    }
    // Blocks of keys are computed whole: a neighbor fills them up, and those scores are not used.
    for (int i = from; i % kBlock; --i) key[i - 1] = key[from];
    for (int i = count; i % kBlock; ++i) key[i] = key[count - 1];
  }

  void prefetch(const float* pool, const int64_t* at, int64_t dim, int first, int last) const {
    for (int i = std::max(first, from); i < std::min(last, count); ++i)
      for (int64_t h = 0; h < dim; h += kCacheLine / 4) __builtin_prefetch(pool + at[i] + h, 0, 2);
  }
};

// Which tokens of a chunk a lane sees: every one; those up to its own; of those, the ones in its window.
enum class Mask { kNone, kCausal, kWindow };

// Whether lanes see token `i` of a chunk, from whose start their own tokens are `last` away.
template <Mask mask>
Ints sees(Ints last, int i, int window) {
  return mask == Mask::kWindow ? (last >= i) & (last < i + window) : last >= i;
}

// The loops below are unrolled by pragma: left to itself, GCC keeps copies of the sums in memory.

// scores[i][v] = the product of token i's key with lane vector v, for kBlock tokens and V lane vectors.
template <int V>
void score(const Floats* q, const float* keys, const int64_t* at, int64_t dim, int64_t stride, Floats* scores) {
  Floats sum[kBlock][V] = {};
  const float* key[kBlock];
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; ++i) key[i] = keys + at[i];
  for (int64_t h = 0; h < dim; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < kBlock; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[i][v] += q[h * stride + v] * key[i][h];
  }
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) scores[i * stride + v] = sum[i][v];
}

// sums[h][v] = sums[h][v] * fade[v] + the weighted values of the chunk, for D elements of the head dim.
// The mask counts here too: a weight of zero would not keep a NaN out.
template <int V, int D, Mask mask>
void add_values(const Floats* weights, const float* values, const Chunk& chunk, int64_t stride, const Floats* fade,
                const Ints* last, int window, Floats* sums) {
  Floats sum[D][V];
#pragma GCC unroll 16
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[d][v] = sums[d * stride + v] * fade[v];
  for (int i = chunk.from; i < chunk.count; ++i) {
    const float* value = values + chunk.value[i];
#pragma GCC unroll 16
    for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) {
        const Floats next = sum[d][v] + weights[i * stride + v] * value[d];
        sum[d][v] = mask == Mask::kNone ? next : sees<mask>(last[v], i, window) ? next : sum[d][v];
      }
  }
#pragma GCC unroll 16
  for (int d = 0; d < D; ++d)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[d * stride + v] = sum[d][v];
}

// One thread's scratch for one tile.
class Worker {
 public:
  explicit Worker(const Problem& p)
      : p_(p), window_(static_cast<int>(std::min<int64_t>(p.window, kMaxWindow))),
        max_vectors_(vectors_of(std::max<int64_t>(kTileLanes, p.group()))),
        memory_(static_cast<Floats*>(std::aligned_alloc(  // of a multiple of the alignment
            kCacheLine, kCacheLine * max_vectors_ * (p.key_dim + p.value_dim + kChunk + 6)))) {
    if (!memory_) throw std::bad_alloc();
    q_ = memory_.get();
    sums_ = q_ + p.key_dim * max_vectors_;
    scores_ = sums_ + p.value_dim * max_vectors_;
    highest_ = scores_ + kChunk * max_vectors_;
    total_ = highest_ + max_vectors_;
    fade_ = total_ + max_vectors_;
    slopes_ = fade_ + max_vectors_;
    last_ = reinterpret_cast<Ints*>(slopes_ + max_vectors_);
    shifted_ = last_ + max_vectors_;
  }

  // Compute `item`, whose first chunk is `chunk_`; afterwards that of `next` is there.
  void run(const Item& item, const Item* next) {
    vectors_ = vectors_of(item.rows * p_.group());
    load(item);
    // Positions rise within a tile: all rows see what lies between the last one's begin and the first one's end.
    const int64_t all_from = p_.first_seen(item.row + item.rows - 1), all_to = p_.position[item.row] + 1;
    for (int64_t start = item.first_chunk(); start < item.end; start += kChunk) {
      if (start + kChunk < item.end) following_.find(p_, item, start + kChunk);
      else if (next) following_.find(p_, *next, next->first_chunk());
      else following_.from = following_.count = 0;
      for (int64_t v = 0; v < vectors_; ++v) shifted_[v] = last_[v] - static_cast<int32_t>(start);
      int ahead = 0;
      for (int i = chunk_.from / kBlock * kBlock; i < chunk_.count; i += kBlock) {
        const int to = i + kBlock < chunk_.count ? i + kBlock : kChunk;
        following_.prefetch(p_.keys, following_.key, p_.key_dim, ahead, to);
        ahead = to;
        strips([&](auto width, int64_t v) {
          score<width>(q_ + v, p_.keys, chunk_.key + i, p_.key_dim, vectors_, scores_ + i * vectors_ + v);
        });
      }
      if (p_.softcap || p_.slopes) adjust();
      if (start + chunk_.from < all_from) finish<Mask::kWindow>();
      else if (start + chunk_.count > all_to) finish<Mask::kCausal>();
      else finish<Mask::kNone>();
      std::swap(chunk_, following_);
    }
    store(item);
  }

  void begin(const Item& item) { chunk_.find(p_, item, item.first_chunk()); }

 private:
  struct Free { void operator()(void* memory) const { std::free(memory); } };

  static int64_t vectors_of(int64_t lanes) { return (lanes + kLanes - 1) / kLanes; }

  template <typename F>
  void strips(F run) const {
    int64_t v = 0;
    for (; v + kStrip <= vectors_; v += kStrip) run(std::integral_constant<int, kStrip>(), v);
    if (vectors_ - v == 2) run(std::integral_constant<int, 2>(), v);
    if (vectors_ - v == 1) run(std::integral_constant<int, 1>(), v);
  }

  void load(const Item& item) {
    const int64_t group = p_.group(), lanes = item.rows * group, all = vectors_ * kLanes, dim = p_.key_dim;
    const float scale = p_.softcap ? p_.scale / p_.softcap : p_.scale * kLog2E;
    float* q = reinterpret_cast<float*>(q_);
    int32_t* last = reinterpret_cast<int32_t*>(last_);
    for (int64_t lane = 0; lane < all; ++lane) {
      const int64_t row = item.row + lane / group;
      const float* from = p_.q + (row * p_.heads + item.head * group + lane % group) * dim;
      for (int64_t h = 0; h < dim; ++h) q[h * all + lane] = lane < lanes ? from[h] * scale : 0.0f;
      last[lane] = lane < lanes ? p_.position[row] : -1;
    }
    std::fill(sums_, sums_ + p_.value_dim * vectors_, Floats{});
    std::fill(highest_, highest_ + vectors_, Floats{} + kLowest);
    std::fill(total_, total_ + vectors_, Floats{} + (p_.sinks ? 1.0f : 0.0f));
    std::fill(slopes_, slopes_ + vectors_, Floats{});
    float *highest = reinterpret_cast<float*>(highest_), *slopes = reinterpret_cast<float*>(slopes_);
    for (int64_t lane = 0; lane < lanes && (p_.sinks || p_.slopes); ++lane) {
      const int64_t head = item.head * group + lane % group;
      if (p_.sinks) highest[lane] = std::max(p_.sinks[head] * kLog2E, kLowest);
      if (p_.slopes) slopes[lane] = p_.slopes[head] * kLog2E;
    }
  }

  // Soft cap and ALiBi. With a cap, scores come divided by it.
  void adjust() {
    const float softcap = p_.softcap * kLog2E;
    for (int64_t v = 0; v < vectors_; ++v) {
      const Floats slope = slopes_[v], last = __builtin_convertvector(shifted_[v], Floats);
      for (int i = chunk_.from; i < chunk_.count; ++i) {
        Floats s = scores_[i * vectors_ + v];
        if (softcap) s = tanh(s) * softcap;
        scores_[i * vectors_ + v] = s + slope * (static_cast<float>(i) - last);
      }
    }
  }

  template <Mask mask>
  void finish() {
    softmax<mask>();
    weigh<mask>();
  }

  // Scores become weights; NaN passes the maximum by and arrives through the weight.
  template <Mask mask>
  void softmax() {
    for (int64_t v = 0; v < vectors_; ++v) {
      Floats highest = highest_[v], total{};
      for (int i = chunk_.from; i < chunk_.count; ++i) {
        Floats s = scores_[i * vectors_ + v];
        if (mask != Mask::kNone) s = sees<mask>(shifted_[v], i, window_) ? s : Floats{} + kLowest;
        highest = s > highest ? s : highest;
      }
      for (int i = chunk_.from; i < chunk_.count; ++i) {
        Floats& s = scores_[i * vectors_ + v];
        s = exp2(s - highest);
        if (mask != Mask::kNone) s = sees<mask>(shifted_[v], i, window_) ? s : Floats{};
        total += s;
      }
      fade_[v] = exp2(highest_[v] - highest);
      total_[v] = total_[v] * fade_[v] + total;
      highest_[v] = highest;
    }
  }

  template <Mask mask>
  void weigh() {
    const int64_t dim = p_.value_dim;
    const int per_block = static_cast<int>((kChunk * kBlock + dim - 1) / dim);
    int ahead = 0;
    int64_t h = 0;
    for (; h + kBlock <= dim; h += kBlock, ahead += per_block) {
      following_.prefetch(p_.values, following_.value, dim, ahead, ahead + per_block);
      strips([&](auto width, int64_t v) { weigh_strip<width, kBlock, mask>(h, v); });
    }
    for (; h < dim; ++h) strips([&](auto width, int64_t v) { weigh_strip<width, 1, mask>(h, v); });
  }

  template <int V, int D, Mask mask>
  void weigh_strip(int64_t h, int64_t v) {
    add_values<V, D, mask>(scores_ + v, p_.values + h, chunk_, vectors_, fade_ + v, shifted_ + v, window_,
                           sums_ + h * vectors_ + v);
  }

  void store(const Item& item) const {
    const int64_t group = p_.group(), all = vectors_ * kLanes, dim = p_.value_dim;
    const float *sums = reinterpret_cast<const float*>(sums_), *total = reinterpret_cast<const float*>(total_);
    for (int64_t lane = 0; lane < item.rows * group; ++lane) {
      float* to = p_.out + ((item.row + lane / group) * p_.heads + item.head * group + lane % group) * dim;
      for (int64_t h = 0; h < dim; ++h) to[h] = sums[h * all + lane] / total[lane];
    }
  }

  static constexpr int64_t kMaxWindow = 1 << 30;  // so that a token of a chunk plus this is still an int

  const Problem& p_;
  int window_;
  int64_t max_vectors_, vectors_ = 0;
  std::unique_ptr<Floats, Free> memory_;
  Floats *q_, *sums_, *scores_, *highest_, *total_, *fade_, *slopes_;
  Ints *last_, *shifted_;  // each lane's position, and the same counted from the chunk's start
  Chunk chunk_, following_;
};

// What the threads of one call share. A helper that starts late finds no items and touches nothing else, so the
// caller waits for items, never for threads, and cannot deadlock with a busy pool.
struct Shared {
  Problem problem;
  std::vector<Item> items;
  std::atomic<size_t> taken{0}, done{0};

  void work() {
    size_t mine = taken.fetch_add(1);
    if (mine >= items.size()) return;
    Worker worker(problem);
    worker.begin(items[mine]);
    while (mine < items.size()) {
      const size_t next = taken.fetch_add(1);
      worker.run(items[mine], next < items.size() ? &items[next] : nullptr);
      done.fetch_add(1, std::memory_order_release);
      mine = next;
    }
  }
};

std::vector<Item> make_items(const Problem& p) {
  std::vector<Item> items;
  const int64_t most = std::max<int64_t>(1, kTileLanes / p.group());
  for (int64_t row = 0, rows; row < p.tokens; row += rows) {
    for (rows = 1; row + rows < p.tokens && p.slot[row + rows] == p.slot[row];) {
      if (p.slot[row] != p.null_slot && rows == most) break;
      ++rows;
    }
    if (p.slot[row] == p.null_slot) {
      std::memset(p.out + row * p.heads * p.value_dim, 0, rows * p.heads * p.value_dim * sizeof(float));
      continue;
    }
    for (int64_t head = 0; head < p.kv_heads; ++head)
      items.push_back({row, rows, head, p.first_seen(row), p.position[row + rows - 1] + 1});
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.rows * (a.end - a.begin) > b.rows * (b.end - b.begin);
  });
  return items;
}

ffi::Error run(ffi::ThreadPool pool, float scale, float softcap, int64_t window, ffi::Buffer<ffi::F32> q,
               ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> table,
               ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> position, ffi::Buffer<ffi::F32> slopes,
               ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  const auto qd = q.dimensions(), kd = keys.dimensions(), vd = values.dimensions(), td = table.dimensions();
  auto shared = std::make_shared<Shared>();
  Problem& p = shared->problem;
  p.q = q.typed_data(), p.keys = keys.typed_data(), p.values = values.typed_data();
  p.slopes = slopes.element_count() ? slopes.typed_data() : nullptr;
  p.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  p.table = table.typed_data(), p.slot = slot.typed_data(), p.position = position.typed_data();
  p.out = out->typed_data();
  p.scale = scale, p.softcap = softcap, p.window = window;
  p.tokens = qd[0], p.heads = qd[1], p.key_dim = qd[2], p.value_dim = vd[3];
  p.page_size = kd[1], p.kv_heads = kd[2], p.width = td[1], p.null_slot = td[0] - 1;
  shared->items = make_items(shared->problem);
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), shared->items.size()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->work(); });
  shared->work();
  // At most one item per helper is left: too short to sleep for.
  while (shared->done.load(std::memory_order_acquire) < shared->items.size()) std::this_thread::yield();
  return ffi::Error::Success();
}

// Turn `heads` heads of a row by its angles; halves of the head dim form the pairs.
void rotate(const float* from, const float* cos, const float* sin, int64_t heads, int64_t half, float* to) {
  for (int64_t head = 0; head < heads; ++head, from += 2 * half, to += 2 * half)
    for (int64_t h = 0; h < half; ++h) {
      const float first = from[h], second = from[half + h];
      to[h] = first * cos[h] - second * sin[h];
      to[half + h] = second * cos[h] + first * sin[h];
    }
}

// A row after the other: what a step's rows take is too short to share. The pools are written where they lie. Queries,
// keys and values may be heads of larger arrays.
ffi::Error rotate_and_write(int64_t first_q, int64_t first_k, int64_t first_v, ffi::Buffer<ffi::F32> q,
                            ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v, ffi::Buffer<ffi::F32> cos,
                            ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> page, ffi::Buffer<ffi::S32> offset,
                            ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values,
                            ffi::Result<ffi::Buffer<ffi::F32>> turned, ffi::Result<ffi::Buffer<ffi::F32>> keys_out,
                            ffi::Result<ffi::Buffer<ffi::F32>> values_out) {
  if (keys.typed_data() != keys_out->typed_data() || values.typed_data() != values_out->typed_data())
    return ffi::Error::Internal("the pools are to be updated in place");
  const int64_t tokens = q.dimensions()[0], heads = turned->dimensions()[1], half = q.dimensions()[2] / 2;
  const int64_t kv_heads = keys.dimensions()[2], page_size = keys.dimensions()[1], width = kv_heads * 2 * half;
  const auto at = [half](const ffi::Buffer<ffi::F32>& array, int64_t row, int64_t head) {
    return array.typed_data() + (row * array.dimensions()[1] + head) * 2 * half;
  };
  for (int64_t row = 0; row < tokens; ++row) {
    const float *row_cos = cos.typed_data() + row * half, *row_sin = sin.typed_data() + row * half;
    rotate(at(q, row, first_q), row_cos, row_sin, heads, half, turned->typed_data() + row * heads * 2 * half);
    const int64_t to = (page.typed_data()[row] * page_size + offset.typed_data()[row]) * width;
    rotate(at(k, row, first_k), row_cos, row_sin, kv_heads, half, keys_out->typed_data() + to);
    std::memcpy(values_out->typed_data() + to, at(v, row, first_v), width * sizeof(float));
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_paged_attention, jaxpaged::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Arg<ffi::Buffer<ffi::F32>>()   // q [T, N, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // k_pool [P, S, K, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // v_pool [P, S, K, V]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // block_table [slots + 1, width]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // slot [T]
                                  .Arg<ffi::Buffer<ffi::S32>>()   // position [T]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // slopes [N] or [0]
                                  .Arg<ffi::Buffer<ffi::F32>>()   // sinks [N] or [0]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, N, V]

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rotary_kv_write, jaxpaged::rotate_and_write,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("first_q")
                                  .Attr<int64_t>("first_k")
                                  .Attr<int64_t>("first_v")
                                  .Arg<ffi::Buffer<ffi::F32>>()    // q [T, at least N, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // k [T, at least K, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // v [T, at least K, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // cos [T, H / 2]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // sin [T, H / 2]
                                  .Arg<ffi::Buffer<ffi::S32>>()    // page [T]
                                  .Arg<ffi::Buffer<ffi::S32>>()    // offset [T]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // k_pool [P, S, K, H]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // v_pool [P, S, K, H]
                                  .Ret<ffi::Buffer<ffi::F32>>()    // q, turned
                                  .Ret<ffi::Buffer<ffi::F32>>()    // k_pool, the same memory
                                  .Ret<ffi::Buffer<ffi::F32>>());  // v_pool, the same memory
