// What holds on every device: copies, events, and the update, whose bits are the processor's.
#include "accelerator/any_device.h"

#include <bit>
#include <cstring>
#include <vector>

#include "accelerator/host_registration.h"
#include "accelerator/sums.h"
#include "base/random.h"
#include "gtest/gtest.h"
#include "kernels/adversarial.h"
#include "kernels/device_sum.h"
#include "kernels/device_update.h"
#include "kernels/update.h"

namespace offload::accelerator {
namespace {

using kernels::DeviceRun;
using kernels::Dtype;

class DeviceTest : public AnyDeviceTest {};
OFFLOAD_ON_ANY_DEVICE(DeviceTest);

// A stream and what a test has put on the device, taken back at its end.
class Bench {
 public:
  explicit Bench(Accelerator* device) : device_(device) {
    stream_ = *device->StreamCreate();
    event_ = *device->EventCreate();
  }
  ~Bench() {
    Finish();
    for (std::byte* bytes : allocations_) EXPECT_TRUE(device_->Free(bytes).ok());
    EXPECT_TRUE(device_->EventDestroy(event_).ok());
    EXPECT_TRUE(device_->StreamDestroy(stream_).ok());
  }

  void* Allocate(size_t size_bytes) {
    allocations_.push_back(*device_->Malloc(size_bytes));
    return allocations_.back();
  }
  // A copy on the device of `size_bytes` at `from`.
  void* Put(const void* from, size_t size_bytes) {
    if (from == nullptr || size_bytes == 0) return nullptr;
    auto* const to = static_cast<std::byte*>(Allocate(size_bytes));
    const auto* const bytes = static_cast<const std::byte*>(from);
    const auto registered =
        HostRegistration::Register(device_, {bytes, size_bytes}, {}, HostAccess::kReadWrite);
    EXPECT_TRUE(registered.ok() && registered->held());
    EXPECT_TRUE(device_->MemcpyToDevice(to, bytes, size_bytes, stream_).ok());
    Finish();
    return to;
  }
  void Get(const void* from, void* to, size_t size_bytes) {
    if (from == nullptr || size_bytes == 0) return;
    auto* const bytes = static_cast<std::byte*>(to);
    const auto registered =
        HostRegistration::Register(device_, {bytes, size_bytes}, {}, HostAccess::kReadWrite);
    EXPECT_TRUE(
        device_->MemcpyToHost(bytes, static_cast<const std::byte*>(from), size_bytes, stream_)
            .ok());
    Finish();
  }
  void Finish() {
    EXPECT_TRUE(device_->EventRecord(event_, stream_).ok());
    EXPECT_TRUE(device_->EventSynchronize(event_).ok());
    EXPECT_TRUE(*device_->EventQuery(event_));
  }

  Accelerator* device() const { return device_; }
  Stream stream() const { return stream_; }

 private:
  Accelerator* const device_;
  Stream stream_;
  Event event_;
  std::vector<std::byte*> allocations_;
};

TEST_P(DeviceTest, BytesComeBack) {
  Bench bench(device_.get());
  std::vector<std::byte> sent(100'000), received(100'000);
  Random(1).Fill(sent);
  void* const bytes = bench.Put(sent.data(), sent.size());
  bench.Get(bytes, received.data(), received.size());
  EXPECT_EQ(received, sent);
  ASSERT_TRUE(device_->Memset(static_cast<std::byte*>(bytes), 0xFF, 500, bench.stream()).ok());
  bench.Get(bytes, received.data(), received.size());
  EXPECT_EQ(received[499], std::byte{0xFF});
  EXPECT_EQ(received[500], sent[500]);
  const auto memory = device_->MemGetInfo();
  ASSERT_TRUE(memory.ok());
  EXPECT_GE(memory->total_bytes, memory->free_bytes);
}

// Updates a run of host memory on the device.
void UpdateOnDevice(Bench* bench, const kernels::OptimizerSpec& optimizer, int64_t step,
                    const kernels::Run& run) {
  const size_t weight_bytes = run.count * kernels::DtypeBytes(run.weight_dtype);
  const size_t gradient_bytes = run.count * kernels::DtypeBytes(run.gradient_dtype);
  const bool is_split = run.weight_dtype == Dtype::kBFloat16;
  std::vector<uint32_t> ties(kernels::TieWords(run.count));
  if (is_split) kernels::UnpackTies(run.residual, run.count, run.ties_in, ties.data());
  DeviceRun on_device = {
      .count = run.count,
      .begin = run.begin,
      .tensor_count = run.tensor_count,
      .weight_dtype = run.weight_dtype,
      .weight = bench->Put(run.weight, weight_bytes),
      .residual = static_cast<int16_t*>(bench->Put(run.residual, run.count * 2)),
      .half_residual = static_cast<uint32_t*>(bench->Put(run.half_residual, run.count * 4)),
      .gradient_dtype = run.gradient_dtype,
      .gradient = bench->Put(run.gradient, gradient_bytes),
      .gradient_scale = run.gradient_scale};
  if (kernels::NeedsNorms(optimizer))
    on_device.norms = static_cast<double*>(bench->Allocate(kernels::NormBytes(run.count)));
  if (is_split)
    on_device.ties = static_cast<uint32_t*>(bench->Put(ties.data(), ties.size() * sizeof(ties[0])));
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    on_device.state[i] = static_cast<float*>(bench->Put(run.state[i], run.count * sizeof(float)));
    on_device.double_state[i] =
        static_cast<double*>(bench->Put(run.double_state[i], run.count * sizeof(double)));
  }
  ASSERT_TRUE(bench->device()->Update(optimizer, step, on_device, bench->stream()).ok());
  bench->Get(on_device.weight, run.weight, weight_bytes);
  bench->Get(on_device.residual, run.residual, run.count * 2);
  bench->Get(on_device.half_residual, run.half_residual, run.count * 4);
  bench->Get(on_device.ties, ties.data(), ties.size() * sizeof(ties[0]));
  for (size_t i = 0; i < kernels::kStatePlanesMax; ++i) {
    bench->Get(on_device.state[i], run.state[i], run.count * sizeof(float));
    bench->Get(on_device.double_state[i], run.double_state[i], run.count * sizeof(double));
  }
  if (is_split) kernels::PackTies(run.residual, run.count, ties.data(), run.ties_out);
}

// Finite numbers, subnormal and huge ones among them, so that every bit of a sum is defined.
std::vector<std::byte> Gradients(Dtype dtype, size_t count, Random& random) {
  std::vector<std::byte> bytes(count * kernels::DtypeBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    constexpr float kFactors[] = {1.0f, 1e-39f, 1e30f, -0.0f};
    const auto value = static_cast<float>(random.Unit() - 0.5) * kFactors[random.Below(4)];
    const auto bits = std::bit_cast<uint32_t>(value);
    const auto half = static_cast<uint16_t>(bits >> 16);
    if (dtype == Dtype::kFloat32) std::memcpy(&bytes[i * 4], &bits, 4);
    if (dtype == Dtype::kBFloat16) std::memcpy(&bytes[i * 2], &half, 2);
  }
  return bytes;
}

TEST_P(DeviceTest, UpdatesAreThoseOfTheProcessorBitForBit) {
  Random random(1);
  for (const kernels::OptimizerSpec& optimizer : kernels::ManyOptimizers()) {
    for (const kernels::Shape shape : kernels::kShapes) {
      for (const size_t count : {1, 67, 1003}) {
        Bench bench(device_.get());
        kernels::Tensor device(shape, count, &random);
        kernels::Tensor processor = device;
        for (const int64_t step : {1, 3}) {
          device.Apply({}, 0.37f, [&](const kernels::Run& run) {
            UpdateOnDevice(&bench, optimizer, step, run);
          });
          processor.Apply({}, 0.37f,
                          [&](const kernels::Run& run) { UpdateWhole(optimizer, step, run); });
        }
        ASSERT_EQ(device.Bits(), processor.Bits()) << optimizer.name() << " of " << count;
      }
    }
  }
}

// Of fp64 and fp16 models.
template <class Elements>
void ExpectBitsOfTheProcessor(Accelerator* accelerator, const kernels::OptimizerSpec& optimizer,
                              Random* random, kernels::MakeValue value = kernels::AdversarialValue,
                              const std::vector<size_t>& counts = {1, 67, 1003}) {
  for (const size_t count : counts) {
    Bench bench(accelerator);
    Elements device(count, random, value);
    Elements processor = device;
    for (const int64_t step : {1, 3}) {
      kernels::Run on_device = device.RunOf(0, count), on_processor = processor.RunOf(0, count);
      on_device.gradient_scale = on_processor.gradient_scale = 0.37f;
      UpdateOnDevice(&bench, optimizer, step, on_device);
      UpdateWhole(optimizer, step, on_processor);
    }
    ASSERT_EQ(device.Bits(), processor.Bits()) << optimizer.name() << " of " << count;
  }
}

TEST_P(DeviceTest, UpdatesOfDoublesAndHalvesAreThoseOfTheProcessorBitForBit) {
  Random random(3);
  for (kernels::OptimizerSpec optimizer : kernels::ManyOptimizers()) {
    ExpectBitsOfTheProcessor<kernels::Doubles>(device_.get(), optimizer, &random);
    ExpectBitsOfTheProcessor<kernels::Halves>(device_.get(), optimizer, &random);
    // Whose gradients are not scaled.
    if (optimizer.name() == "lion" || optimizer.name() == "lamb") continue;
    optimizer.Set("unscale", 0.3 / 65536);
    ExpectBitsOfTheProcessor<kernels::Halves>(device_.get(), optimizer, &random);
  }
}

// Sums of squares that are finite, also of tensors of several blocks.
TEST_P(DeviceTest, NormsAreThoseOfTheProcessorBitForBit) {
  Random random(4);
  const kernels::OptimizerSpec lamb("lamb", {{"weight_decay", 0.1}});
  const std::vector<size_t> counts = {1, 1003, kernels::Norms::kBlockElements + 1003};
  for (const size_t count : counts) {
    for (const kernels::Shape shape : kernels::kShapes) {
      Bench bench(device_.get());
      kernels::Tensor device(shape, count, &random, kernels::OrdinaryValue);
      kernels::Tensor processor = device;
      device.Apply({}, 0.37f,
                   [&](const kernels::Run& run) { UpdateOnDevice(&bench, lamb, 2, run); });
      processor.Apply({}, 0.37f, [&](const kernels::Run& run) { UpdateWhole(lamb, 2, run); });
      ASSERT_EQ(device.Bits(), processor.Bits()) << count;
    }
  }
  ExpectBitsOfTheProcessor<kernels::Doubles>(device_.get(), lamb, &random, kernels::OrdinaryValue,
                                             counts);
  ExpectBitsOfTheProcessor<kernels::Halves>(device_.get(), lamb, &random, kernels::OrdinaryValue,
                                            counts);
}

TEST_P(DeviceTest, SumsAreThoseOfTheProcessorBitForBit) {
  Random random(2);
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    for (const kernels::SumStart start :
         {kernels::SumStart::kNothing, kernels::SumStart::kZeros, kernels::SumStart::kSum}) {
      constexpr size_t kCount = 1003, kParts = 3;
      Bench bench(device_.get());
      const size_t size_bytes = kCount * kernels::DtypeBytes(dtype);
      std::vector<std::vector<std::byte>> arrays;  // the parts, and the sum before
      for (size_t i = 0; i <= kParts; ++i) arrays.push_back(Gradients(dtype, kCount, random));
      kernels::DeviceSum sum{.dtype = dtype,
                             .start = start,
                             .part_count = kParts,
                             .count = kCount,
                             .sum = bench.Put(arrays[kParts].data(), size_bytes),
                             .factor = 1.0 / kParts};
      std::vector<const void*> parts;
      for (size_t i = 0; i < kParts; ++i) {
        sum.parts[i] = bench.Put(arrays[i].data(), size_bytes);
        parts.push_back(arrays[i].data());
      }
      ASSERT_TRUE(SummingDeviceOf(device_.get())->AddParts(sum, bench.stream()).ok());
      std::vector<std::byte> added(size_bytes);
      bench.Get(sum.sum, added.data(), size_bytes);
      kernels::AddParts({.dtype = dtype,
                         .count = kCount,
                         .sum = arrays[kParts].data(),
                         .start = start,
                         .parts = parts.data(),
                         .part_count = kParts,
                         .factor = 1.0 / kParts});
      EXPECT_EQ(added, arrays[kParts]) << size_bytes;
    }
  }
}

}  // namespace
}  // namespace offload::accelerator
