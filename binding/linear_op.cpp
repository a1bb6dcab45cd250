// nybble::linear_4bit and nybble::linear_4bit_grad_input. One path for both: read arguments, check, plan, launch. CUDA work goes to torch's
// current stream, and every output and workspace comes from torch's allocator.
#include "linear_op.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/parallel.h"
#include "nybble/cuda.h"
#include "nybble/linear.h"
#include "nybble/tune.h"
#include "weight.h"

namespace nybble::binding {
namespace {

constexpr int64_t kPanelBytes = int64_t{32} << 20;  // dense W that the fp32 path on CUDA may hold

struct Call {
  Tensor in;  // x or grad_y
  WeightTensors weight;
  std::optional<Tensor> bias;
  DType state_dtype = DType::kBFloat16;
  LinearMode mode = LinearMode::kAuto;
  bool batch_invariant = false;
  Direction direction = Direction::kForward;

  int64_t in_columns() const { return direction == Direction::kForward ? weight.k : weight.n; }
  int64_t out_columns() const { return direction == Direction::kForward ? weight.n : weight.k; }
  const char* in_name() const { return direction == Direction::kForward ? "x" : "grad_y"; }
};

// The same call, checked, as the core takes it.
struct Operands {
  DType dtype = DType::kBFloat16;  // of in, bias and the output
  Device device;
  CudaStream stream = nullptr;
  Nf4Weight weight;
  std::optional<Tensor> bias;
  Rows in;
};

struct RawCall {
  Tensor in;
  WeightTensors weight;
  std::optional<Tensor> bias;
  int64_t state_dtype = 0, mode = 0;
  bool batch_invariant = false;
};

RawCall read(Arguments arguments, Direction direction) {
  Tensor in = arguments.tensor();
  Tensor packed = arguments.tensor(), absmax = arguments.tensor(), code = arguments.tensor();
  auto nested_absmax = arguments.optional_tensor(), nested_code = arguments.optional_tensor(), offset = arguments.optional_tensor();
  std::optional<Tensor> bias;
  if (direction == Direction::kForward) bias = arguments.optional_tensor();
  auto uid = arguments.optional_tensor();
  const int64_t n = arguments.integer(), k = arguments.integer(), block_size = arguments.integer(), quant_type = arguments.integer();
  const int64_t state_dtype = arguments.integer(), nested_dtype = arguments.integer(), mode = arguments.integer();
  return {in,   {packed, absmax, code, nested_absmax, nested_code, offset, uid, n, k, block_size, quant_type, nested_dtype},
          bias, state_dtype,
          mode, arguments.boolean()};
}

Call checked(RawCall&& raw, Direction direction) {
  if (raw.mode < 0 || raw.mode > 2) fail(ErrorKind::kValue, "mode code ", raw.mode, ", expected 0 (auto), 1 (fused) or 2 (dequant)");
  Call call{std::move(raw.in),
            std::move(raw.weight),
            std::move(raw.bias),
            dtype_from_code(raw.state_dtype, "state_dtype"),
            static_cast<LinearMode>(raw.mode),
            raw.batch_invariant,
            direction};
  const auto sizes = sizes_of(call.in);
  if (sizes.empty() || sizes.back() != call.in_columns()) {
    fail(ErrorKind::kValue, call.in_name(), " has shape ", shape_text(call.in), ", expected its last dimension to be ", call.in_columns(),
         " for a weight [", call.weight.n, ", ", call.weight.k, "]");
  }
  return call;
}

// The bias in the dtype of x. Cast here, never in the caller's tensor.
std::optional<Tensor> checked_bias(const Call& call, DType dtype, const Device& device) {
  if (!call.bias) return std::nullopt;
  Tensor bias = *call.bias;
  float_dtype(bias, "bias");
  if (bias.numel() != call.weight.n || !(device_of(bias) == device)) {
    fail(ErrorKind::kValue, "bias has shape ", shape_text(bias), " on ", name(device_of(bias)), ", expected [", call.weight.n, "] on ",
         name(device));
  }
  bias = to_dtype(bias, dtype);
  return as_contiguous(bias);
}

// Weights [first, first + count) of the flattened weight, in state_dtype.
void dequantize_range(const Call& call, const Operands& operands, int64_t first, int64_t count, Tensor& out) {
#ifdef NYBBLE_HAVE_CUDA
  if (operands.device.cuda()) {
    dequantize_4bit_cuda(operands.weight, call.state_dtype, first, count, out.mutable_data_ptr(), operands.stream);
    return;
  }
#endif
  dequantize_4bit(operands.weight, call.state_dtype, first, count, out.mutable_data_ptr());
}

// Sizes of the output: the leading dimensions of the input, then its own columns.
std::vector<int64_t> output_sizes(const Call& call) {
  std::vector<int64_t> sizes(sizes_of(call.in).begin(), sizes_of(call.in).end());
  sizes.back() = call.out_columns();
  return sizes;
}

// Exactly what dequantize_4bit(...).to(x.dtype) followed by torch's own linear or matmul gives.
Tensor run_dequant(const Call& call, const Operands& operands) {
  const std::array<int64_t, 2> sizes = {call.weight.n, call.weight.k};
  Tensor dense = empty(sizes, torch_dtype(call.state_dtype), operands.device, "the dense weight of the dequant path");
  dequantize_range(call, operands, 0, call.weight.n * call.weight.k, dense);
  dense = to_dtype(dense, operands.dtype);
  count_launch(LinearPath::kDequant, call.direction);
  return call.direction == Direction::kForward ? aten_linear(call.in, dense, operands.bias) : aten_matmul(call.in, dense);
}

// The dequant path with at most kPanelBytes of dense fp32 W: y in panels of columns, grad_x as an ascending sum over panels.
Tensor run_panels(const Call& call, const Operands& operands) {
  const auto [n, k] = std::pair{call.weight.n, call.weight.k};
  const int64_t panel_rows = std::clamp<int64_t>(kPanelBytes / (size_of(DType::kFloat32) * k), 1, n);
  if (panel_rows == n) return run_dequant(call, operands);
  Tensor buffer = empty(std::array<int64_t, 2>{panel_rows, k}, torch_dtype(call.state_dtype), operands.device, "a panel of the weight");
  Tensor matrix = torch::stable::reshape(operands.in.tensor, std::array<int64_t, 2>{operands.in.m, call.in_columns()});
  Tensor out = empty(std::array<int64_t, 2>{operands.in.m, call.out_columns()}, torch_dtype(operands.dtype), operands.device, "the output");
  if (call.direction == Direction::kGradInput) torch::stable::zero_(out);
  count_launch(LinearPath::kDequant, call.direction);
  for (int64_t first = 0; first < n; first += panel_rows) {
    const int64_t rows = std::min(panel_rows, n - first);
    Tensor panel = torch::stable::narrow(buffer, 0, 0, rows);
    dequantize_range(call, operands, first * k, rows * k, panel);
    panel = to_dtype(panel, operands.dtype);
    if (call.direction == Direction::kForward) {
      std::optional<Tensor> bias = operands.bias;
      if (bias) bias = torch::stable::narrow(*bias, 0, first, rows);
      Tensor columns = torch::stable::narrow(out, 1, first, rows);
      torch::stable::copy_(columns, aten_linear(matrix, panel, bias));
    } else {
      // out + term, spelled without a Scalar, which the stable ABI cannot carry.
      out = torch::stable::subtract(out, aten_matmul(torch::stable::narrow(matrix, 1, first, rows), panel), -1.0);
    }
  }
  return torch::stable::view(out, output_sizes(call));
}

LinearProblem problem_of(const Call& call, const Operands& operands) {
  const Nf4Weight& weight = operands.weight;
  LinearProblem problem;
  problem.m = operands.in.m;
  problem.n = weight.n;
  problem.k = weight.k;
  problem.direction = call.direction;
  problem.dtype = operands.dtype;
  problem.state_dtype = call.state_dtype;
  problem.quant_type = weight.quant_type;
  problem.block_size = weight.block_size;
  problem.nested = weight.scales.nested();
  problem.nested_dtype = weight.scales.nested_dtype;
  problem.bias = call.bias.has_value();
  problem.batch_invariant = call.batch_invariant;
  problem.mode = call.mode;
  problem.x_row_stride = operands.in.stride;
  problem.x_alignment = alignment_of(operands.in.data);
  problem.packed_alignment = alignment_of(weight.packed);
  problem.scales_alignment = weight.scales.nested()
                                 ? std::min(alignment_of(weight.scales.absmax_codes), alignment_of(weight.scales.nested_absmax))
                                 : alignment_of(weight.scales.absmax);
  return problem;
}

// The device as plan_linear() sees it. On the CPU the kernels take over torch's thread count.
DeviceModel model_of([[maybe_unused]] const Device& device) {
#ifdef NYBBLE_HAVE_CUDA
  if (device.cuda()) return cuda_device_model(device.index);
#endif
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  set_num_threads(static_cast<int>(threads));
  return {};
}

void launch(const LinearPlan& plan, const LinearProblem& problem, const LinearArgs& args, [[maybe_unused]] CudaStream stream) {
  if (plan.path == LinearPath::kCpu) {
    linear_cpu(problem, args);
    return;
  }
#ifdef NYBBLE_HAVE_CUDA
  linear_cuda(plan, problem, args, stream);
#endif
}

Tensor run_fused(const Call& call, const Operands& operands, const LinearProblem& problem, const LinearPlan& plan) {
  Tensor out = empty(output_sizes(call), torch_dtype(operands.dtype), operands.device, "the output");
  LinearArgs args;
  args.in = operands.in.data;
  args.in_row_stride = operands.in.stride;
  args.weight = operands.weight;
  args.bias = operands.bias ? operands.bias->const_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr();
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    const std::array<int64_t, 1> sizes = {plan.workspace_bytes};
    workspace = empty(sizes, aoti_torch_dtype_uint8(), operands.device, "the workspace of the multiply");
    args.workspace = workspace->mutable_data_ptr();
  }
  launch(plan, problem, args, operands.stream);
  return out;
}

Operands checked_operands(Call& call) {
  Operands operands;
  operands.dtype = float_dtype(call.in, call.in_name());
  operands.device = device_of(call.in);
  operands.stream = current_stream(operands.device);
  check_owner(call.weight, operands.device);
  operands.weight = checked_weight(call.weight, operands.device);
  operands.bias = checked_bias(call, operands.dtype, operands.device);
  operands.in = as_rows(call.in, call.in_columns());
  return operands;
}

Tensor run(Call& call) {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  const Device device = device_of(call.in);
  if (device.cuda()) guard.emplace(device.index);
  const Operands operands = checked_operands(call);
  if (operands.in.m == 0 || call.weight.n == 0) {
    Tensor out = empty(output_sizes(call), torch_dtype(operands.dtype), device, "the output");
    return out.numel() == 0 ? out : torch::stable::zero_(out);
  }
  const LinearProblem problem = problem_of(call, operands);
  const LinearPlan plan = plan_linear(problem, model_of(device), device.cuda() ? active_tune_table() : nullptr);
  if (plan.path != LinearPath::kDequant) return run_fused(call, operands, problem, plan);
  const bool panels = device.cuda() && operands.dtype == DType::kFloat32 && call.mode != LinearMode::kDequant;
  return panels ? run_panels(call, operands) : run_dequant(call, operands);
}

void boxed(StableIValue* stack, Direction direction) {
  RawCall raw = read(Arguments(stack), direction);
  try {
    Call call = checked(std::move(raw), direction);
    stack[0] = torch::stable::detail::from(run(call));
  } catch (...) {
    rethrow_for_python();
  }
}

}  // namespace

void linear_4bit(StableIValue* stack, uint64_t, uint64_t) { boxed(stack, Direction::kForward); }
void linear_4bit_grad_input(StableIValue* stack, uint64_t, uint64_t) { boxed(stack, Direction::kGradInput); }

}  // namespace nybble::binding
