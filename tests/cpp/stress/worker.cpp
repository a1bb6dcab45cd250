#include "stress/worker.h"

#include <algorithm>
#include <sstream>

#include "nybble/cuda.h"
#include "nybble/error.h"

namespace nybble::stress {
namespace {

constexpr int64_t kActivationBytes = 2 * kMaxActivations + 2 * kPoolSlack;
constexpr int64_t kRefreshSlack = 1 << 20;  // bytes by which the activations of one run differ from those of another
constexpr int64_t kWorkspaceBytes = int64_t{96} << 20;
constexpr int64_t kArenaBytes = int64_t{96} << 20;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

Pools::Pools(uint64_t seed)
    : bytes(kMaxWeights / 2 + 4 * kPoolSlack),
      scales(kMaxWeights / 32 * 4 + 2 * kPoolSlack),
      activations{Memory(kActivationBytes + kRefreshSlack), Memory(kActivationBytes + kRefreshSlack)},
      code(256 * sizeof(float)),
      offset(256) {
  fill_bytes(bytes.data(), bytes.bytes(), seed, nullptr);
  fill_scales(reinterpret_cast<float*>(scales.data()), scales.bytes() / 4, seed + 1, nullptr);
  fill_activations(activations[0].data(), DType::kFloat16, activations[0].bytes() / 2, seed + 2, nullptr);
  fill_activations(activations[1].data(), DType::kBFloat16, activations[1].bytes() / 2, seed + 3, nullptr);
  check(cudaMemcpy(code.data(), nested_code_table().data(), 256 * sizeof(float), cudaMemcpyHostToDevice));
  const float mean = 0.11f;  // above the largest nested scale, so that every scale is positive
  check(cudaMemcpy(offset.data(), &mean, sizeof mean, cudaMemcpyHostToDevice));
  check(cudaDeviceSynchronize());
}

Worker::Worker(const Options& options, const Pools& pools, const DeviceModel& device, int index)
    : options_(options),
      pools_(pools),
      device_(device),
      random_(options.seed * 1000 + static_cast<uint64_t>(index)),
      activations_{Memory(kActivationBytes), Memory(kActivationBytes)},
      first_(kArenaBytes),
      second_(kArenaBytes),
      workspace_(kWorkspaceBytes),
      dense_(2 * kMaxWeights),
      report_(sizeof(Report)) {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  if (options.poison) check(cudaMemset(workspace_.data(), kPoison, static_cast<size_t>(kWorkspaceBytes)));
  check(cudaMemset(report_.data(), 0, sizeof(Report)));
  check(cudaDeviceSynchronize());
}

Worker::~Worker() { cudaStreamDestroy(stream_); }

void Worker::draw(int count) {
  items_.clear();
  out_bytes_ = 0;
  while (static_cast<int>(items_.size()) < count) {
    const Kernels kernels = options_.kernels[random_.next() % options_.kernels.size()];
    Item item{draw_case(random_.next(), kernels, device_, options_.size), {}, 0};
    const LinearProblem& p = item.c.problem;
    item.bytes = p.m * item.c.columns() * 2;
    item.c.out_offset = out_bytes_ + kGuardBytes;
    const int64_t end = item.c.out_offset + round_up(item.bytes, 256) + kGuardBytes;
    if (end > kArenaBytes) break;
    if (item.c.plan.workspace_bytes > kWorkspaceBytes) fail(ErrorKind::kValue, "workspace of ", to_string(item.c));
    out_bytes_ = end;
    LinearArgs& a = item.args;
    a.in = activations_[Pools::of(p.dtype)].data() + item.c.in_offset;
    a.in_row_stride = item.c.in_row_stride;
    a.weight = {pools_.bytes.data() + item.c.packed_offset, {}, p.n, p.k, p.block_size, p.quant_type};
    const float* scales = reinterpret_cast<const float*>(pools_.scales.data() + item.c.scales_offset);
    if (p.nested) {
      a.weight.scales = {nullptr,
                         pools_.bytes.data() + item.c.codes_offset,
                         scales,
                         reinterpret_cast<const float*>(pools_.code.data()),
                         reinterpret_cast<const float*>(pools_.offset.data()),
                         p.nested_dtype};
    } else {
      a.weight.scales.absmax = scales;
    }
    a.bias = p.bias ? pools_.activations[Pools::of(p.dtype)].data() + item.c.bias_offset : nullptr;
    a.workspace = workspace_.data();
    items_.push_back(item);
  }
}

void Worker::refresh_activations() {
  for (int i = 0; i < 2; i++) {
    const uint8_t* from = pools_.activations[i].data() + 16 * random_.in(0, kRefreshSlack / 16 - 1);
    check(cudaMemcpyAsync(activations_[i].data(), from, kActivationBytes, cudaMemcpyDeviceToDevice, stream_));
  }
}

void Worker::poison_outputs(const Memory& arena) {
  if (options_.poison) {
    check(cudaMemsetAsync(arena.data(), kPoison, static_cast<size_t>(out_bytes_), stream_));
    return;
  }
  for (const Item& item : items_) {  // the guards only
    uint8_t* out = arena.data() + item.c.out_offset;
    check(cudaMemsetAsync(out - kGuardBytes, kPoison, kGuardBytes, stream_));
    check(cudaMemsetAsync(out + item.bytes, kPoison, static_cast<size_t>(round_up(item.bytes, 256) - item.bytes + kGuardBytes), stream_));
  }
}

void Worker::launch(const Memory& arena, bool backwards) {
  for (size_t i = 0; i < items_.size(); i++) {
    Item& item = items_[backwards ? items_.size() - 1 - i : i];
    item.args.out = arena.data() + item.c.out_offset;
    linear_cuda(item.c.plan, item.c.problem, item.args, stream_);
  }
}

void Worker::run_eager() {
  refresh_activations();
  poison_outputs(first_);
  poison_outputs(second_);
  launch(second_, true);
  launch(first_, false);
  if (options_.poison) check_equal(first_.data(), second_.data(), out_bytes_, reinterpret_cast<Report*>(report_.data()), stream_);
}

void Worker::run_graph() {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  launch(first_, false);
  check(cudaStreamEndCapture(stream_, &graph));
  check(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; replay++) {
    refresh_activations();
    poison_outputs(first_);
    check(cudaGraphLaunch(executable, stream_));
  }
  check(cudaStreamSynchronize(stream_));
  check(cudaGraphExecDestroy(executable));
  check(cudaGraphDestroy(graph));
}

// Each case gets activations of its own; cases with a bias, or without room, drop out.
void Worker::run_one_hot() {
  exact_ = true;
  int64_t used[2] = {0, 0};
  std::vector<Item> kept;
  for (Item& item : items_) {
    const LinearProblem& p = item.c.problem;
    const int of = Pools::of(p.dtype);
    const int64_t stride = item.c.in_row_stride ? item.c.in_row_stride : item.c.reduction();
    const int64_t begin = used[of] + item.c.in_offset % 256, end = round_up(begin + 2 * p.m * stride, 256);
    if (p.bias || end > kActivationBytes) continue;
    item.args.in = activations_[of].data() + begin;
    used[of] = end;
    fill_one_hot(activations_[of].data() + begin, p.dtype, p.m, item.c.reduction(), stride, static_cast<int>(random_.in(0, 1000)), stream_);
    kept.push_back(item);
  }
  items_ = std::move(kept);
  poison_outputs(first_);
  launch(first_, false);
}

bool Worker::judge() {
  Report* report = reinterpret_cast<Report*>(report_.data());
  for (size_t i = 0; i < items_.size(); i++) {
    check_case(items_[i].c, static_cast<int>(i), exact_, items_[i].args, dense_.data(), report, stream_);
    check_guards(first_.data() + items_[i].c.out_offset, items_[i].bytes, static_cast<int>(i), report, stream_);
  }
  Report found{};
  check(cudaMemcpyAsync(&found, report, sizeof found, cudaMemcpyDeviceToHost, stream_));
  check(cudaStreamSynchronize(stream_));
  if (found.count == 0) return true;
  size_t index = static_cast<size_t>(std::max(found.index, 0));
  if (found.element == -2) {  // tolerance holds the byte
    while (index + 1 < items_.size() && static_cast<double>(items_[index + 1].c.out_offset) <= found.tolerance) index++;
  }
  std::ostringstream text;
  text << found.count
       << (found.element == -1   ? " bytes beside the output written; first "
           : found.element == -2 ? " words differ between two runs; first "
                                 : " wrong outputs; first ")
       << found.found << ", expected " << found.expected << ", tolerance " << found.tolerance << ", element " << found.element << " of "
       << to_string(items_[index].c);
  failure_ = text.str();
  return false;
}

bool Worker::run_batch(int count) {
  draw(count);
  beats++;
  exact_ = false;
  const int64_t kind = random_.in(0, 9);
  kind < 5 ? run_eager() : kind < 8 ? run_graph() : run_one_hot();
  beats++;
  if (!judge()) return false;
  beats++;
  for (const Item& item : items_) {
    const LinearPlan& plan = item.c.plan;
    counts_[std::string(name(plan.path)) + " variant " + std::to_string(plan.variant) +
            (item.c.problem.direction == Direction::kForward ? " forward" : " grad_x") + (exact_ ? ", exact" : "")]++;
  }
  done += static_cast<int64_t>(items_.size());
  return true;
}

std::string Worker::latest() const {
  std::string text;
  for (const Item& item : items_) text += "  " + to_string(item.c) + "\n";
  return text;
}

}  // namespace nybble::stress
