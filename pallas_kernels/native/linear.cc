// Products of activations and weights, and norms, for CPUs, called through XLA's FFI; float32 throughout.
//
// Weights may be stored in 16 bits; `Weight` is their type in this library, see weights.h. Each is widened as it is
// loaded, which is exact: results are bitwise those of the same weights in float32.
//
// Three ways, one micro-kernel: kRows x kVectors vectors of sums stay in registers while the depth runs.
//   stream   few rows, weights [in, out]: reading the weights is all that counts. Threads take blocks of depth, so that
//            each reads whole rows of the weights, one after the other as they lie in memory, which gave a third more
//            bandwidth than columns did. Sums of blocks are added afterwards.
//   panels   many rows, weights [in, out]: threads take panels of columns, copied so that their lines are neighbors.
//   by_rows  weights [out, in], as tied embeddings are: lanes hold the rows of x, so that no sum runs across lanes.
//
// Every sum is taken in one order: up the depth within a block, then block after block. The blocks depend on the depth
// alone, so a row's result is bitwise the same whatever other rows, however many, and on however many threads.

#include <cstring>

#include "products.h"

namespace jaxpaged {
namespace {

// The numbers in float32: themselves, or `to` after it is filled with them.
const float* widened_rows(const Weight* from, [[maybe_unused]] int64_t count, [[maybe_unused]] float* to) {
#ifdef JAXPAGED_STORED_16
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widened(from[i]);
  return to;
#else
  return from;
#endif
}

// Here the weights are what a micro-kernel has few of, and lanes are rows of x, which come transposed: [in][padded].
void by_rows(const Product& p, const Item& item, const float* x) {
  const int64_t padded = round_up(p.rows, kLanes), last = item.column + item.columns;
  float sums[kRows * kPanel];
  Buffer wide;
  if constexpr (!std::is_same_v<Weight, float>) wide = allocate(kRows * p.in);
  for (int64_t n = item.column; n < last; n += kRows) {
    const int64_t count = std::min<int64_t>(kRows, last - n);
    Ahead ahead{p.w + std::min(n + 2 * kRows, p.out - 1) * p.in, p.in, p.in, 1, p.in};
    const float* weights = widened_rows(p.w + n * p.in, count * p.in, wide.get());
    for (int64_t first = 0; first < p.rows; first += kPanel) {
      const int64_t rows = std::min<int64_t>(kPanel, p.rows - first);
      const int vectors = static_cast<int>(div_up(rows, kLanes));
      const Multiply<float> run = first ? find_multiply<Mode::kPaced, float>(count, vectors)
                                        : find_multiply<Mode::kEveryStep, float>(count, vectors);
      run(weights, p.in, x + first, padded, p.in, sums, kPanel, Sums::kFresh, &ahead, nullptr);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) p.y[(first + row) * p.out + n + i] = sums[i * kPanel + row];
    }
  }
}

// What the threads of one call share. A helper that starts late finds no items and touches nothing else, so the caller
// waits for items, never for threads, and cannot deadlock with a busy pool.
class Call {
 public:
  Call(int64_t threads, const Product& product) : threads_(threads), product_(product) {}

  // Weights [in, out].
  void plan() {
    const Product& p = product_;
    if (p.rows > kFewRows) return plan_panels();
    memory_ = allocate(p.partials());
    // Whole rows where that gives every thread something to do, and if for each row of x the weights between two visits
    // of its sums are deep enough to be worth them.
    const int64_t max_columns = kStreamBytes / (kBytes * std::max<int64_t>(8, 2 * p.rows));
    const int64_t columns = round_up(std::min(max_columns, div_up(p.stride(), div_up(threads_, p.blocks()))), kPanel);
    for (int64_t block = 0; block < p.blocks(); ++block)
      for (int64_t c = 0; c < p.stride(); c += columns)
        items_.push_back({Kind::kStream, block, c, std::min(columns, p.stride() - c), 0, 0});
    unfinished_ = items_.size();
    const int64_t parts = p.rows * p.out < kSmallFinish ? 1 : std::min(threads_, p.rows);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t row = p.rows * i / parts;
      items_.push_back({Kind::kFinish, 0, 0, 0, row, p.rows * (i + 1) / parts - row});
    }
  }

  // Weights [out, in].
  void plan_by_rows() {
    const Product& p = product_;
    const int64_t padded = round_up(p.rows, kLanes);
    memory_ = allocate(p.in * padded);
    for (int64_t k = 0; k < p.in; ++k)
      for (int64_t row = 0; row < padded; ++row)
        memory_.get()[k * padded + row] = row < p.rows ? p.x[row * p.in + k] : 0.0f;
    for (int64_t n = 0; n < p.out; n += kByRowsOut)
      items_.push_back({Kind::kByRows, 0, n, std::min(kByRowsOut, p.out - n), 0, 0});
    unfinished_ = items_.size();
  }

  void work() {
    Buffer scratch;
    for (size_t mine; (mine = taken_.fetch_add(1)) < items_.size(); done_.fetch_add(1, std::memory_order_release)) {
      const Item& item = items_[mine];
      if (item.kind == Kind::kFinish) wait_for(unfinished_);
      if (item.kind == Kind::kPanel && !scratch) scratch = allocate((kDepth + 2 * kMaxPanelRows) * kPanel);
      const Item* next = mine + threads_ < unfinished_ ? &items_[mine + threads_] : nullptr;
      switch (item.kind) {
        case Kind::kStream: stream(product_, item, memory_.get()); break;
        case Kind::kFinish: finish(product_, item, memory_.get()); break;
        case Kind::kPanel: panel(product_, item, next, scratch.get()); break;
        case Kind::kByRows: by_rows(product_, item, memory_.get()); break;
      }
    }
  }

  // Wait for the other threads, which have at most one item left each: too short to sleep for. A helper that has not
  // started yet keeps this object for as long as the pool is busy, but no longer its memory.
  void end() {
    wait_for(items_.size());
    memory_.reset();
  }

  size_t num_items() const { return items_.size(); }

 private:
  void plan_panels() {
    const Product& p = product_;
    const int64_t columns = div_up(p.out, kPanel);
    int64_t rows = std::min(p.rows, kMaxPanelRows);
    while (columns * div_up(p.rows, rows) < 2 * threads_ && rows > 8 * kRows) rows = round_up(rows / 2, kRows);
    for (int64_t row = 0; row < p.rows; row += rows)
      for (int64_t c = 0; c < p.out; c += kPanel)
        items_.push_back({Kind::kPanel, 0, c, std::min<int64_t>(kPanel, p.out - c), row, std::min(rows, p.rows - row)});
    unfinished_ = items_.size();
  }

  void wait_for(size_t count) {
    while (done_.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }

  int64_t threads_;
  Product product_;
  std::vector<Item> items_;
  size_t unfinished_ = 0;  // items before the finishing ones
  Buffer memory_;          // partial sums, or x transposed
  std::atomic<size_t> taken_{0}, done_{0};
};

void run_on(ffi::ThreadPool& pool, const std::shared_ptr<Call>& call) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), call->num_items()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([call] { call->work(); });
  call->work();
  call->end();
}

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kWeightType> w,
                  ffi::Result<ffi::Buffer<ffi::F32>> y) {
  auto call = std::make_shared<Call>(pool.num_threads(), Product{
      x.typed_data(), w.typed_data(), y->typed_data(), x.dimensions()[0], w.dimensions()[0], w.dimensions()[1]});
  call->plan();
  run_on(pool, call);
  return ffi::Error::Success();
}

ffi::Error gated(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kWeightType> w,
                 ffi::Result<ffi::Buffer<ffi::F32>> y) {
  auto call = std::make_shared<Call>(pool.num_threads(), Product{
      x.typed_data(), w.typed_data(), y->typed_data(), x.dimensions()[0], w.dimensions()[0], w.dimensions()[1] / 2,
      true});
  call->plan();
  run_on(pool, call);
  return ffi::Error::Success();
}

ffi::Error transposed(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kWeightType> w,
                      ffi::Result<ffi::Buffer<ffi::F32>> y) {
  auto call = std::make_shared<Call>(pool.num_threads(), Product{
      x.typed_data(), w.typed_data(), y->typed_data(), x.dimensions()[0], w.dimensions()[1], w.dimensions()[0]});
  call->plan_by_rows();
  run_on(pool, call);
  return ffi::Error::Success();
}

#ifndef JAXPAGED_STORED_16
// A row after the other: what a step's rows take is too short to share.
ffi::Error rms_norm(float eps, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t rows = x.dimensions()[0], size = x.dimensions()[1], whole = size / kLanes * kLanes;
  const float* weight = scale.typed_data();
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x.typed_data() + row * size;
    float* to = y->typed_data() + row * size;
    Floats squares{};
    for (int64_t i = 0; i < whole; i += kLanes) squares += load(from + i) * load(from + i);
    float total = 0;
    for (int64_t i = whole; i < size; ++i) total += from[i] * from[i];
    for (int lane = 0; lane < kLanes; ++lane) total += squares[lane];
    const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i) * factor * load(weight + i));
    for (int64_t i = whole; i < size; ++i) to[i] = from[i] * factor * weight[i];
  }
  return ffi::Error::Success();
}
#endif

}  // namespace
}  // namespace jaxpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_NAMED(jaxpaged_linear), jaxpaged::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()    // x [T, in]
                                  .Arg<ffi::Buffer<jaxpaged::kWeightType>>()    // weights [in, out]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_NAMED(jaxpaged_gated), jaxpaged::gated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x [T, in]
                                  .Arg<ffi::Buffer<jaxpaged::kWeightType>>()   // gate and up [in, 2 * out]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, out]

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_NAMED(jaxpaged_transposed), jaxpaged::transposed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x [T, in]
                                  .Arg<ffi::Buffer<jaxpaged::kWeightType>>()   // weights [out, in]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, out]

#ifndef JAXPAGED_STORED_16
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_rms_norm, jaxpaged::rms_norm,
                              ffi::Ffi::Bind()
                                  .Attr<float>("eps")
                                  .Arg<ffi::Buffer<ffi::F32>>()    // x [T, D]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // scale [D]
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, D]
#endif
