#include "zero3/torch/residency.h"

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/mapped_region.h"
#include "zero3/torch/raw_access.h"

namespace offload::zero3 {
namespace {

constexpr size_t kBytes = 4096;

// Keeps its bytes in an ordinary buffer; they may only be read while it is pinned.
class BufferResidency final : public Residency {
 public:
  explicit BufferResidency(std::vector<std::string>* log = nullptr)
      : BufferResidency(*MappedRegion::Reserve(kBytes), log) {}

  // Takes the storage of a tensor over, with its bytes.
  void Adopt(const at::Tensor& tensor) {
    std::lock_guard lock(mutex_);
    const c10::DataPtr before = swap_.Manage(
        tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), ReleasedText());
    std::memcpy(bytes_.data(), before.get(), kBytes);
  }
  at::Tensor MakeTensor() {
    std::lock_guard lock(mutex_);
    return MakeManagedTensor(swap_.MakeStorage(ReleasedText()),
                             at::empty({kBytes / sizeof(float)}, at::kFloat));
  }
  void GiveBack() {
    c10::DataPtr ordinary = c10::GetAllocator(c10::kCPU)->allocate(kBytes);
    std::memcpy(ordinary.get(), bytes_.data(), kBytes);
    std::lock_guard lock(mutex_);
    swap_.HandOver(std::move(ordinary));
  }

  void Pin(Access) override {
    std::lock_guard lock(mutex_);
    if (fails_) throw std::runtime_error("no bytes");
    ++uses_;
    if (pins_++ == 0) swap_.PointTo(bytes_.data(), /*throws=*/false);
  }
  void Unpin(Completion* done) override {
    {
      std::lock_guard lock(mutex_);
      if (--pins_ == 0) swap_.PointHome();
    }
    if (done == nullptr) return static_cast<void>(--uses_);
    Reference();
    done->WhenDone([this] {
      --uses_;
      Unreference();
    });
  }

  int pins() const { return pins_; }
  int uses() const { return uses_; }
  bool storage_died() const { return died_; }
  void Fail() { fails_ = true; }

 private:
  BufferResidency(MappedRegion home, std::vector<std::string>* log)
      : Residency("x", "parameter 'x'", c10::kCPU, kBytes, home.data()),
        home_(std::move(home)),
        bytes_(kBytes),
        log_(log) {}
  ~BufferResidency() override {
    if (log_ != nullptr) log_->push_back("gone");
  }
  void ForgetStorage() override { died_ = true; }

  const MappedRegion home_;
  std::vector<std::byte> bytes_;
  std::vector<std::string>* const log_;
  int pins_ = 0, uses_ = 0;
  bool died_ = false, fails_ = false;
};

std::string ErrorOfAccess(const at::Tensor& tensor) {
  try {
    tensor.const_data_ptr();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(StorageSwapTest, ManagedStorageHasBytesOnlyWhilePinned) {
  const at::Tensor tensor = at::full({kBytes / sizeof(float)}, 2.5);
  auto* const residency = new BufferResidency;
  EXPECT_EQ(Residency::Of(tensor), nullptr);
  residency->Adopt(tensor);
  EXPECT_EQ(Residency::Of(tensor), residency);
  EXPECT_EQ(Residency::Of(tensor.view({2, -1})), residency) << "views share the storage";
  EXPECT_NE(ErrorOfAccess(tensor).find("parameter 'x'"), std::string::npos);
  EXPECT_NE(ErrorOfAccess(tensor).find("OFD-1603"), std::string::npos);
  {
    Pins pins;
    pins.Add(residency, Access::kRead);
    EXPECT_EQ(ErrorOfAccess(tensor), "");
    EXPECT_EQ(tensor.sum().item<float>(), 2.5f * kBytes / sizeof(float));
  }
  EXPECT_NE(ErrorOfAccess(tensor), "");
  EXPECT_EQ(tensor.storage().nbytes(), kBytes) << "its size never changes";
  residency->Unreference();
}

TEST(StorageSwapTest, ResidencyLivesAsLongAsTheStorage) {
  std::vector<std::string> log;
  at::Tensor tensor = at::zeros({kBytes / sizeof(float)});
  auto* const residency = new BufferResidency(&log);
  residency->Adopt(tensor);
  residency->Unreference();
  EXPECT_TRUE(log.empty());
  at::Tensor view = tensor.slice(0, 1);
  tensor.reset();
  EXPECT_TRUE(log.empty());
  view.reset();
  EXPECT_EQ(log, std::vector<std::string>{"gone"});
}

TEST(StorageSwapTest, ResidencyIsToldThatTheStorageDiedAndMayMakeAnother) {
  auto* const residency = new BufferResidency;
  at::Tensor tensor = residency->MakeTensor();
  EXPECT_TRUE(tensor.key_set().has(kManagedKey));
  EXPECT_TRUE(tensor.key_set().has(c10::DispatchKey::AutogradCPU));
  tensor.reset();
  EXPECT_TRUE(residency->storage_died());
  tensor = residency->MakeTensor();
  EXPECT_EQ(Residency::Of(tensor), residency);
  residency->Unreference();
}

TEST(StorageSwapTest, StorageThatIsHandedOverIsAnOrdinaryOne) {
  std::vector<std::string> log;
  const at::Tensor tensor = at::full({kBytes / sizeof(float)}, 3.0);
  auto* const residency = new BufferResidency(&log);
  residency->Adopt(tensor);
  residency->GiveBack();
  EXPECT_EQ(Residency::Of(tensor), nullptr);
  EXPECT_EQ(tensor.const_data_ptr<float>()[7], 3.0f);
  EXPECT_FALSE(residency->storage_died()) << "it left";
  residency->Unreference();
  EXPECT_EQ(log.size(), 1u) << "the storage has no reference any more";
}

TEST(StorageSwapTest, AStorageMayBeTakenOverFromAnotherResidency) {
  std::vector<std::string> log;
  const at::Tensor tensor = at::full({kBytes / sizeof(float)}, 4.0);
  auto* const first = new BufferResidency(&log);
  first->Adopt(tensor);
  {
    Pins pins;
    pins.Add(first, Access::kRead);
    pins.Finish();
  }
  class Taker final : public Residency {
   public:
    Taker(MappedRegion home, const at::Tensor& tensor)
        : Residency("y", "parameter 'y'", c10::kCPU, kBytes, home.data()), home_(std::move(home)) {
      std::lock_guard lock(mutex_);
      before_ = swap_.Manage(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(),
                             ReleasedText());
    }
    void Pin(Access) override {}
    void Unpin(Completion*) override {}
    c10::DataPtr& before() { return before_; }

   private:
    const MappedRegion home_;
    c10::DataPtr before_;
  };
  auto* const taker = new Taker(*MappedRegion::Reserve(kBytes), tensor);
  EXPECT_EQ(Residency::Of(tensor), taker);
  ASSERT_NE(StorageSwap::Named(taker->before()), nullptr);
  EXPECT_EQ(&StorageSwap::Named(taker->before())->owner(), first);
  first->LeaveStorage();
  first->Unreference();
  EXPECT_TRUE(log.empty()) << "the old pointer still names it";
  taker->before().clear();
  EXPECT_EQ(log.size(), 1u);
  taker->Unreference();
}

// Whose pages another thread's pointers take away between serving and the call, twice.
class BusyOwner final : public RawOwner {
 public:
  explicit BusyOwner(std::byte* range) : range_(range) {}
  void ServeRaw(bool) override {
    if (++times_ % 3 == 0) {
      ASSERT_EQ(::mprotect(range_, kBytes, PROT_READ | PROT_WRITE), 0);
    }
  }
  void TakeAway() { ASSERT_EQ(::mprotect(range_, kBytes, PROT_NONE), 0); }
  int times() const { return times_; }

 private:
  std::byte* const range_;
  int times_ = 0;
};

TEST(RawAccessTest, ACallWhoseBufferWasTakenAwayIsMadeAgain) {
  const MappedRegion home = *MappedRegion::Reserve(kBytes);
  BusyOwner owner(home.data());
  AddRawRange(home.data(), kBytes, &owner);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::write(ends[1], "twelve bytes", 12), 12);
  EXPECT_EQ(::read(ends[0], home.data(), 12), 12);
  EXPECT_EQ(owner.times(), 3);
  owner.TakeAway();
  EXPECT_EQ(::write(ends[1], home.data(), 12), 12);
  EXPECT_EQ(owner.times(), 6);
  std::FILE* const file = std::tmpfile();
  std::setvbuf(file, nullptr, _IONBF, 0);
  owner.TakeAway();
  EXPECT_EQ(std::fwrite(home.data(), 3, 4, file), 4u);
  std::rewind(file);
  owner.TakeAway();
  EXPECT_EQ(std::fread(home.data(), 3, 4, file), 4u);
  EXPECT_EQ(std::memcmp(home.data(), "twelve bytes", 12), 0);
  std::fclose(file);
  // Another buffer of the call is wrong.
  struct iovec parts[] = {{home.data(), 12}, {nullptr, 12}};
  EXPECT_EQ(::writev(-1, parts, 2), -1);
  RemoveRawRange(home.data());
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(PinsTest, PinsOfAThreadAreNestedAndCounted) {
  auto* const residency = new BufferResidency;
  const at::Tensor tensor = residency->MakeTensor();
  {
    Pins outer;
    outer.Add(residency, Access::kRead);
    {
      Pins inner;
      inner.Add(residency, Access::kWrite);
      EXPECT_EQ(Pins::CountOwn(residency), 2);
      EXPECT_EQ(Pins::Current(), &inner);
    }
    EXPECT_EQ(residency->pins(), 1);
    EXPECT_EQ(ErrorOfAccess(tensor), "");
  }
  EXPECT_EQ(residency->pins(), 0);
  residency->Unreference();
}

TEST(PinsTest, FailedPinLeavesNothingPinned) {
  auto* const good = new BufferResidency;
  auto* const bad = new BufferResidency;
  bad->Fail();
  try {
    Pins pins;
    pins.Add(good, Access::kRead);
    pins.Add(bad, Access::kRead);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(good->pins(), 0);
  good->Unreference();
  bad->Unreference();
}

// An accelerator that comes to its end when it is told.
class Late final : public Completion {
 public:
  void WhenDone(std::function<void()> then) override { later_.push_back(std::move(then)); }
  void Finish() {
    for (const auto& then : later_) then();
    later_.clear();
  }

 private:
  std::vector<std::function<void()>> later_;
};

TEST(PinsTest, BytesStayUntilTheCompletionAndThePointerGoesHomeBefore) {
  auto* const residency = new BufferResidency;
  at::Tensor tensor = residency->MakeTensor();
  Late late;
  {
    Pins pins;
    pins.Add(residency, Access::kRead);
    pins.Finish(&late);
  }
  EXPECT_NE(ErrorOfAccess(tensor), "");
  EXPECT_EQ(residency->pins(), 0);
  EXPECT_EQ(residency->uses(), 1);
  late.Finish();
  EXPECT_EQ(residency->uses(), 0);
  residency->Unreference();
}

}  // namespace
}  // namespace offload::zero3
