#include "tests/standin_torch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero3/torch/devices.h"

namespace offload {
namespace {

using accelerator::HostAccelerator;
using accelerator::Stream;
using accelerator::Use;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
HostAccelerator* device = nullptr;
thread_local Stream current;

c10::Stream Wrap(Stream stream) {
  return c10::Stream(c10::Stream::UNSAFE, StandinDevice(),
                     static_cast<c10::StreamId>(stream.handle));
}
Stream Unwrap(const c10::Stream& stream) { return {static_cast<uintptr_t>(stream.id())}; }

void Check(const absl::Status& status) { TORCH_CHECK(status.ok(), status.message()); }
template <typename T>
T Check(absl::StatusOr<T> result) {
  Check(result.status());
  return *std::move(result);
}

// ---- Memory ------------------------------------------------------------------------------------

struct Block {
  std::byte* bytes = nullptr;
  Stream stream;
  std::mutex mutex;
  std::vector<Stream> others;  // record_stream
};

void WaitFor(Stream stream, Stream other) {
  const accelerator::Event event = Check(device->EventCreate());
  Check(device->EventRecord(event, other));
  Check(device->StreamWaitEvent(stream, event));
  Check(device->EventDestroy(event));
}

void FreeBlock(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  for (const Stream other : block->others) WaitFor(block->stream, other);
  device->FreeAsync(block->bytes, block->stream);
}

void RecordBlock(const c10::DataPtr& pointer, Stream stream) {
  if (pointer.get_deleter() != &FreeBlock) return;  // somebody else's, as in CUDA
  auto* const block = static_cast<Block*>(pointer.get_context());
  const std::lock_guard lock(block->mutex);
  if (stream != block->stream && std::ranges::find(block->others, stream) == block->others.end())
    block->others.push_back(stream);
}

struct StandinAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return {nullptr, StandinDevice()};
    auto block = std::make_unique<Block>();
    block->bytes = Check(device->Malloc(size_bytes));
    block->stream = current;
    std::byte* const bytes = block->bytes;
    return {bytes, block.release(), &FreeBlock, StandinDevice()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    device->RunStream(current);
    default_copy_data(to, from, size_bytes);
  }
};

// Memory of the host that is page-locked for the device, until it is freed.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex mutex;
  static std::map<const std::byte*, size_t> sizes;
  struct Piece {
    HostAccelerator* device;
    std::unique_ptr<std::byte[]> bytes;
  };
  static void Free(void* context) {
    const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
    {
      const std::lock_guard lock(mutex);
      sizes.erase(piece->bytes.get());
    }
    piece->device->HostUnregister(piece->bytes.get()).IgnoreError();
  }
  static bool Has(const std::byte* bytes) {
    const std::lock_guard lock(mutex);
    const auto behind = sizes.upper_bound(bytes);
    return behind != sizes.begin() && bytes < std::prev(behind)->first + std::prev(behind)->second;
  }
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes == 0) return {nullptr, c10::kCPU};
    auto piece = std::make_unique<Piece>(device, std::make_unique<std::byte[]>(size_bytes));
    std::byte* const bytes = piece->bytes.get();
    TORCH_CHECK(
        Check(device->HostRegister(bytes, size_bytes, accelerator::HostAccess::kReadWrite)));
    const std::lock_guard lock(mutex);
    sizes[bytes] = size_bytes;
    return {bytes, piece.release(), &Free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size_bytes) const override {
    default_copy_data(to, from, size_bytes);
  }
};

std::mutex PinnedAllocator::mutex;
std::map<const std::byte*, size_t> PinnedAllocator::sizes;

// ---- Kernels -----------------------------------------------------------------------------------

bool IsOurs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// The same memory as a tensor of the CPU.
at::Tensor AsCpu(const at::Tensor& tensor) {
  if (!IsOurs(tensor)) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor FromCpu(const at::Tensor& cpu) {
  if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
  const auto options = cpu.options().device(StandinDevice());
  at::Tensor result = cpu.is_non_overlapping_and_dense()
                          ? at::empty_strided(cpu.sizes(), cpu.strides(), options)
                          : at::empty(cpu.sizes(), options);
  AsCpu(result).copy_(cpu);
  return result;
}

// Tells the checker that the operator which the current stream is given next uses a tensor.
void Note(const at::Tensor& tensor, Use use) {
  if (!IsOurs(tensor) || tensor.numel() == 0) return;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  device->NoteUse(current, use, static_cast<const std::byte*>(tensor.const_data_ptr()),
                  (last + 1) * tensor.element_size());
}

void Note(const c10::IValue& value, Use use) {
  if (value.isTensor()) return Note(value.toTensor(), use);
  if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) Note(tensor, use);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor.has_value()) Note(*tensor, use);
    }
  }
}

c10::IValue ToCpu(const c10::IValue& value) {
  if (value.isTensor()) return AsCpu(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(AsCpu(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional(AsCpu(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return c10::Device(c10::kCPU);
  return value;
}

c10::IValue FromCpu(const c10::IValue& value) {
  if (value.isTensor()) return FromCpu(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(FromCpu(tensor));
  return list;
}

bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// What was written through an alias is the argument itself; out= may have made it larger.
void KeepWritten(const c10::FunctionSchema& schema, size_t i, const c10::IValue& argument,
                 const c10::IValue& on_cpu, std::vector<c10::IValue>& results) {
  if (!IsWritten(schema.arguments()[i]) || !argument.isTensor()) return;
  const at::Tensor& mine = argument.toTensor();
  if (IsOurs(mine) && mine.sizes() != on_cpu.toTensor().sizes()) {
    at::native::resize_(mine, on_cpu.toTensor().sizes());
    AsCpu(mine).copy_(on_cpu.toTensor());
  }
  for (size_t r = 0; r < results.size(); ++r) {
    const c10::AliasInfo* const result = schema.returns()[r].alias_info();
    if (result != nullptr && *result == *schema.arguments()[i].alias_info()) results[r] = mine;
  }
}

// The operator makes it as large as it has to be, which an alias cannot become.
bool IsEmptyResult(const c10::Argument& argument, const c10::IValue& value) {
  return argument.is_out() && value.isTensor() && IsOurs(value.toTensor()) &&
         value.toTensor().numel() == 0;
}

void RunOnCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  device->RunStream(current);
  const c10::FunctionSchema& schema = op.schema();
  const std::vector<c10::IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  std::vector<c10::IValue> on_cpu;
  for (size_t i = 0; i < arguments.size(); ++i) {
    Note(arguments[i], IsWritten(schema.arguments()[i]) ? Use::kWrite : Use::kRead);
    on_cpu.push_back(IsEmptyResult(schema.arguments()[i], arguments[i])
                         ? at::empty({0}, arguments[i].toTensor().options().device(at::kCPU))
                         : ToCpu(arguments[i]));
    torch::jit::push(*stack, on_cpu.back());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  std::vector<c10::IValue> results = torch::jit::pop(*stack, schema.returns().size());
  for (size_t i = 0; i < arguments.size(); ++i)
    KeepWritten(schema, i, arguments[i], on_cpu[i], results);
  for (const c10::IValue& result : results) torch::jit::push(*stack, FromCpu(result));
}

at::Tensor Empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                        std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The host waits for what it reads, as in CUDA where its memory is pageable.
void SynchronizeStream(Stream stream) {
  const accelerator::Event event = Check(device->EventCreate());
  Check(device->EventRecord(event, stream));
  Check(device->EventSynchronize(event));
  Check(device->EventDestroy(event));
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool) {
  device->RunStream(current);
  Note(from, Use::kRead);
  Note(to, Use::kWrite);
  if (!IsOurs(to)) SynchronizeStream(current);
  for (const at::Tensor& host : {from, to}) {
    if (host.is_cpu()) {
      device->CountCopy(static_cast<const std::byte*>(host.const_data_ptr()),
                        host.numel() * host.element_size());
    }
  }
  AsCpu(to).copy_(AsCpu(from));
  return to;
}
at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return CopyFrom(from, to, false);
}
// As CUDA's: in another order than that of the kernel for one tensor, whatever else is in the list.
std::vector<at::Tensor> ListNorm(at::TensorList tensors, const at::Scalar& order,
                                 std::optional<at::ScalarType> dtype) {
  device->RunStream(current);
  std::vector<at::Tensor> norms;
  for (const at::Tensor& tensor : tensors) {
    Note(tensor, Use::kRead);
    const at::Tensor values = AsCpu(tensor);
    const bool is_slow = order.toDouble() != 2 || dtype.has_value() || tensor.numel() == 0 ||
                         !at::isFloatingType(tensor.scalar_type()) ||
                         !tensor.is_non_overlapping_and_dense();
    if (is_slow) {
      norms.push_back(FromCpu(at::linalg_vector_norm(values, order, std::nullopt, false, dtype)));
      continue;
    }
    at::Tensor squares = values.as_strided({values.numel()}, {1}).flip(0);
    if (at::isReducedFloatingType(values.scalar_type())) squares = squares.to(at::kFloat);
    const at::Tensor sum = at::cumsum(squares * squares, 0).select(0, -1);
    norms.push_back(FromCpu(sum.sqrt().to(values.scalar_type())));
  }
  return norms;
}
at::Scalar Item(const at::Tensor& tensor) {
  Note(tensor, Use::kRead);
  SynchronizeStream(current);
  return AsCpu(tensor).item();
}

// torch asks backends that it does not know for these two.
at::Tensor Convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  device->RunStream(current);
  for (const at::Tensor& used : {input, weight, bias.value_or(at::Tensor())})
    Note(used, Use::kRead);
  const std::optional<at::Tensor> bias_on_cpu =
      bias.has_value() && bias->defined() ? std::optional(AsCpu(*bias)) : std::nullopt;
  return FromCpu(at::convolution(AsCpu(input), AsCpu(weight), bias_on_cpu, stride, padding,
                                 dilation, transposed, output_padding, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> ConvolutionBackward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> needed) {
  device->RunStream(current);
  for (const at::Tensor& used : {gradient, input, weight}) Note(used, Use::kRead);
  const int64_t bias_size = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      AsCpu(gradient), AsCpu(input), AsCpu(weight), c10::IntArrayRef(&bias_size, 1), stride,
      padding, dilation, transposed, output_padding, groups, needed);
  return {FromCpu(of_input), FromCpu(of_weight), FromCpu(of_bias)};
}
at::Tensor View(const at::Tensor& tensor, c10::IntArrayRef sizes) {
  return at::native::view(tensor, sizes);
}
at::Tensor AsStrided(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}
at::Tensor ReshapeAlias(const at::Tensor& tensor, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  return at::native::_reshape_alias(tensor, sizes, strides);
}
const at::Tensor& Resize(const at::Tensor& tensor, c10::IntArrayRef sizes,
                         std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(tensor, sizes, format);
}
at::Tensor& SetStorage(at::Tensor& tensor, c10::Storage storage, int64_t offset,
                       c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, sizes, strides);
}
void RecordStream(at::Tensor& tensor, c10::Stream stream) {
  RecordBlock(tensor.storage().data_ptr(), Unwrap(stream));
}

// torch knows the backends whose tensors set_data() may put into each other's place; this one says
// it itself.
bool HasCompatibleType(const at::Tensor& tensor, const at::Tensor& from) {
  return tensor.layout() == at::kStrided && from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", Empty);
  library.impl("empty_strided", EmptyStrided);
  library.impl("_copy_from", CopyFrom);
  library.impl("_copy_from_and_resize", CopyFromAndResize);
  library.impl("_foreach_norm.Scalar", ListNorm);
  library.impl("convolution_overrideable", Convolution);
  library.impl("convolution_backward_overrideable", ConvolutionBackward);
  library.impl("_local_scalar_dense", Item);
  library.impl("view", View);
  library.impl("as_strided", AsStrided);
  library.impl("_reshape_alias", ReshapeAlias);
  library.impl("resize_", Resize);
  library.impl("set_.source_Storage_storage_offset", SetStorage);
  library.impl("record_stream", RecordStream);
  library.impl("_has_compatible_shallow_copy_type", HasCompatibleType);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
}

// Operators with a kernel of the CPU's own get it here, too: else a decomposition would be taken
// before the fallback (layer_norm has one), with other roundings.
void TakeKernelsOfCpu() {
  static auto* const library = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op.has_value() || name.name.rfind("aten::", 0) != 0 ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        name.name.rfind("aten::set_", 0) == 0)
      continue;
    const auto& returns = op->schema().returns();
    if (std::ranges::any_of(returns, [](const c10::Argument& result) {
          return result.alias_info() != nullptr && !result.alias_info()->isWrite();
        }))
      continue;  // a view
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&RunOnCpu>());
  }
}

// ---- Devices, streams, events ------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Event = accelerator::Event;

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return StandinDevice(); }
  c10::Device getDevice() const override { return StandinDevice(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return device == nullptr ? 0 : 1; }

  c10::Stream getStream(c10::Device) const override { return Wrap(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return Wrap(Stream{}); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return Wrap(Check(device->StreamCreate()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return Wrap(std::exchange(current, Unwrap(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(Unwrap(stream).handle);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    SynchronizeStream(Unwrap(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    RecordBlock(pointer, Unwrap(stream));
  }

  static Event Of(void* event) { return {reinterpret_cast<uintptr_t>(event)}; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(Check(device->EventCreate()).handle);
    Check(device->EventRecord(Of(*event), Unwrap(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Check(device->StreamWaitEvent(Unwrap(stream), Of(event)));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Check(device->EventQuery(Of(event)));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Check(device->EventSynchronize(Of(event)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) device->EventDestroy(Of(event)).IgnoreError();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  Generator() {
    device_ = StandinDevice();
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

// at::manual_seed() seeds every device; random operators draw from the CPU's generator.
struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto* const generator = new at::Generator(at::make_generator<Generator>());
    return *generator;
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return StandinDevice(); }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::Has(static_cast<const std::byte*>(data));
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const allocator = new PinnedAllocator;
    return allocator;
  }
};

void Register() {
  c10::register_privateuse1_backend("standin");
  c10::SetAllocator(kType, new StandinAllocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  TakeKernelsOfCpu();
  zero3::RegisterAccelerator(
      kType, [](c10::Device) -> absl::StatusOr<std::shared_ptr<accelerator::Accelerator>> {
        return std::shared_ptr<accelerator::Accelerator>(device, [](accelerator::Accelerator*) {});
      });
}

}  // namespace

c10::Device StandinDevice() { return {kType, 0}; }

void UseStandin(HostAccelerator& accelerator) {
  static std::once_flag registered;
  device = &accelerator;
  std::call_once(registered, &Register);
}

c10::Stream NewStandinStream() { return Wrap(Check(device->StreamCreate())); }

}  // namespace offload
