// A mixture of experts on a CPU as one custom call: products.h, each product over the rows that one expert gets.
//
// Rows are put in the order of their experts, so that an expert that nobody is sent to is not read, and every other one
// is read once for up to kFewRows rows. All threads share the products of all experts. A row's result is bitwise the
// same whatever other rows it is computed with: that holds for each product, and a token's experts are added up in the
// order of their weights.

#include "products.h"

namespace jaxpaged {
namespace {

// Products that do not depend on one another. As in linear.cc, a helper that starts late finds no items and touches
// nothing else, and the caller waits for items, never for threads.
class GroupedCall {
 public:
  GroupedCall(int64_t threads, std::vector<Product> products) : threads_(threads), products_(std::move(products)) {
    int64_t floats = 0, streams = 0, panels = 0;
    for (const Product& p : products_) {
      if (is_panels(p)) panels += div_up(p.out, kPanel) * div_up(p.rows, kMaxPanelRows);
      else floats += p.partials(), streams += p.blocks();
    }
    memory_ = allocate(std::max<int64_t>(floats, 1));
    float* partials = memory_.get();
    for (const Product& p : products_) {
      if (is_panels(p)) {
        plan_panels(p, panels);
      } else {
        plan_stream(p, streams, partials);
        partials += p.partials();
      }
    }
    // The longest first, so that the threads finish together.
    std::stable_sort(items_.begin(), items_.end(), [](const Work& a, const Work& b) { return cost(a) > cost(b); });
    unfinished_ = items_.size();
    partials = memory_.get();
    for (const Product& p : products_) {
      if (is_panels(p)) continue;
      const int64_t parts = p.rows * p.out < kSmallFinish ? 1 : std::min(threads_, p.rows);
      for (int64_t i = 0; i < parts; ++i) {
        const int64_t row = p.rows * i / parts;
        items_.push_back({{Kind::kFinish, 0, 0, 0, row, p.rows * (i + 1) / parts - row}, &p, partials});
      }
      partials += p.partials();
    }
  }

  void work() {
    Buffer scratch;
    for (size_t mine; (mine = taken_.fetch_add(1)) < items_.size(); done_.fetch_add(1, std::memory_order_release)) {
      const Work& work = items_[mine];
      if (work.item.kind == Kind::kFinish) wait_for(unfinished_);
      if (work.item.kind == Kind::kPanel && !scratch) scratch = allocate((kDepth + 2 * kMaxPanelRows) * kPanel);
      switch (work.item.kind) {
        case Kind::kStream: stream(*work.product, work.item, work.partials); break;
        case Kind::kFinish: finish(*work.product, work.item, work.partials); break;
        default: panel(*work.product, work.item, next(mine), scratch.get());
      }
    }
  }

  void end() {
    wait_for(items_.size());
    memory_.reset();
  }

  size_t num_items() const { return items_.size(); }

 private:
  struct Work {
    Item item;
    const Product* product;
    float* partials;
  };

  static bool is_panels(const Product& p) { return p.rows > kFewRows; }

  static int64_t cost(const Work& work) {
    const Product& p = *work.product;
    return work.item.kind == Kind::kStream ? work.item.columns * p.depth() * div_up(p.rows, kRows)
                                           : work.item.columns * p.matrices() * p.in * div_up(work.item.rows, kRows);
  }

  // Whole rows of the weights where all experts together give every thread something to do.
  void plan_stream(const Product& p, int64_t streams, float* partials) {
    const int64_t max_columns = kStreamBytes / (kBytes * std::max<int64_t>(8, 2 * p.rows));
    const int64_t columns = round_up(std::min(max_columns, div_up(p.stride(), div_up(threads_, streams))), kPanel);
    for (int64_t block = 0; block < p.blocks(); ++block)
      for (int64_t c = 0; c < p.stride(); c += columns)
        items_.push_back({{Kind::kStream, block, c, std::min(columns, p.stride() - c), 0, 0}, &p, partials});
  }

  void plan_panels(const Product& p, int64_t panels) {
    int64_t rows = std::min(p.rows, kMaxPanelRows);
    while (panels * div_up(kMaxPanelRows, rows) < 2 * threads_ && rows > 8 * kRows) rows = round_up(rows / 2, kRows);
    for (int64_t row = 0; row < p.rows; row += rows)
      for (int64_t c = 0; c < p.out; c += kPanel)
        items_.push_back({{Kind::kPanel, 0, c, std::min<int64_t>(kPanel, p.out - c), row, std::min(rows, p.rows - row)},
                          &p, nullptr});
  }

  // What is likely to be this thread's next panel, if it is of the same product.
  const Item* next(size_t mine) const {
    const size_t place = mine + threads_;
    const bool same = place < unfinished_ && items_[place].product == items_[mine].product;
    return same ? &items_[place].item : nullptr;
  }

  void wait_for(size_t count) {
    while (done_.load(std::memory_order_acquire) < count) std::this_thread::yield();
  }

  int64_t threads_;
  std::vector<Product> products_;
  std::vector<Work> items_;
  size_t unfinished_ = 0;  // items before the finishing ones
  Buffer memory_;          // partial sums
  std::atomic<size_t> taken_{0}, done_{0};
};

void run_all(ffi::ThreadPool& pool, std::vector<Product> products) {
  if (products.empty()) return;
  auto call = std::make_shared<GroupedCall>(pool.num_threads(), std::move(products));
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), call->num_items()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([call] { call->work(); });
  call->work();
  call->end();
}

ffi::Error experts(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> expert,
                   ffi::Buffer<ffi::F32> weight, ffi::Buffer<kWeightType> gate_up, ffi::Buffer<kWeightType> down,
                   ffi::Buffer<ffi::F32> bias, float limit, float growth, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t tokens = x.dimensions()[0], model = x.dimensions()[1], top_k = expert.dimensions()[1];
  const int64_t count = down.dimensions()[0], mlp = down.dimensions()[1], pairs = tokens * top_k;
  const int32_t* chosen = expert.typed_data();
  const auto is_sent = [&](int64_t pair) { return chosen[pair] >= 0 && chosen[pair] < count; };
  std::vector<int64_t> first(count + 1, 0), row(pairs, -1);  // of each expert; of each pair
  for (int64_t pair = 0; pair < pairs; ++pair)
    if (is_sent(pair)) ++first[chosen[pair] + 1];
  for (int64_t e = 0; e < count; ++e) first[e + 1] += first[e];
  std::vector<int64_t> free_row(first.begin(), first.end() - 1);
  const int64_t rows = std::max<int64_t>(first[count], 1);
  Buffer inputs = allocate(rows * model), hidden = allocate(rows * mlp), outputs = allocate(rows * model);
  for (int64_t pair = 0; pair < pairs; ++pair)
    if (is_sent(pair)) {
      row[pair] = free_row[chosen[pair]]++;
      std::memcpy(inputs.get() + row[pair] * model, x.typed_data() + pair / top_k * model, 4 * model);
    }
  std::vector<Product> gated, last;
  for (int64_t e = 0; e < count; ++e) {
    const int64_t at = first[e], of_expert = first[e + 1] - at;
    if (!of_expert) continue;
    gated.push_back({inputs.get() + at * model, gate_up.typed_data() + e * model * 2 * mlp, hidden.get() + at * mlp,
                     of_expert, model, mlp, true,
                     bias.element_count() ? bias.typed_data() + e * 2 * mlp : nullptr, limit, growth});
    last.push_back({hidden.get() + at * mlp, down.typed_data() + e * mlp * model, outputs.get() + at * model, of_expert,
                    mlp, model});
  }
  run_all(pool, std::move(gated));
  run_all(pool, std::move(last));
  for (int64_t t = 0; t < tokens; ++t) {
    float* to = y->typed_data() + t * model;
    std::fill(to, to + model, 0.0f);
    for (int64_t pair = t * top_k; pair < (t + 1) * top_k; ++pair) {
      if (row[pair] < 0) continue;
      const float* from = outputs.get() + row[pair] * model;
      for (int64_t d = 0; d < model; ++d) to[d] += weight.typed_data()[pair] * from[d];
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxpaged

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(JAXPAGED_NAMED(jaxpaged_experts), jaxpaged::experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()    // x [T, D]
                                  .Arg<ffi::Buffer<ffi::S32>>()    // expert [T, k]; E: nobody
                                  .Arg<ffi::Buffer<ffi::F32>>()    // weight [T, k]
                                  .Arg<ffi::Buffer<jaxpaged::kWeightType>>()    // gate and up [E, D, 2 * F]
                                  .Arg<ffi::Buffer<jaxpaged::kWeightType>>()    // down [E, F, D]
                                  .Arg<ffi::Buffer<ffi::F32>>()    // bias of gate and up [E, 2 * F] or [0]
                                  .Attr<float>("limit")            // 0: silu and no bounds
                                  .Attr<float>("growth")
                                  .Ret<ffi::Buffer<ffi::F32>>());  // [T, D]
