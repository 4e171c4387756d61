// The spine: the real daemon, started by client::Session, takes steps over every kind of plan and
// is compared, plane by plane and bit by bit, with the kernels run in memory over fp32 masters.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "client/session.h"
#include "gtest/gtest.h"
#include "kernels/update.h"
#include "proto/shm_abi.h"
#include "proto/slab_layout.h"

namespace offload {
namespace {

using proto::Dtype;
using proto::OptimizerState;

constexpr uint64_t kRamBytes = 128ull << 20;

// The bf16 that a trainer casts to: nearest, ties to even. Finite values only.
uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
float FromBFloat16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

struct Variant {
  Dtype dtype = Dtype::kFloat32;
  OptimizerState optimizer = OptimizerState::kAdam;
  double momentum = 0;  // of SGD
  uint32_t pipeline_blocks = 2;
  uint32_t state_resident = 0;  // leading extents of every tensor
  bool weights_resident = false;
  bool spill = false;  // gradients of big tensors
  bool schedule = true;
  std::string io_engine = "auto";
  std::string durability = "step";
  uint32_t generations = 0;
};

struct TensorShape {
  const char* name;
  std::vector<int64_t> shape;
  bool trainable;
};
// Two extents with a tail, odd lengths, bundled ones, frozen ones.
const TensorShape kShapes[] = {
    {"embedding", {300, 1001}, true}, {"norm.weight", {333}, true}, {"attention", {256, 390}, true},
    {"norm.bias", {5}, true},         {"frozen", {35000}, false},   {"mlp", {70001}, true},
    {"frozen.bias", {77}, false},     {"head", {3, 16384}, true},   {"scale", {32768}, true},
};

// A tensor as a trainer in memory has it: fp32 master and moments.
struct Reference {
  std::vector<float> master, exp_avg, exp_avg_sq;
  uint64_t update_count = 0;
};
using References = std::vector<Reference>;

class Job {
 public:
  Job(std::string pool, std::string name, Variant variant)
      : pool_(std::move(pool)), name_(std::move(name)), variant_(std::move(variant)) {
    std::vector<proto::Tensor> tensors;
    for (const TensorShape& shape : kShapes) {
      tensors.push_back({.name = shape.name,
                         .shape = shape.shape,
                         .dtype = variant_.dtype,
                         .trainable = shape.trainable});
    }
    catalogue_ = *proto::BuildCatalogue(std::move(tensors));
    MakePlan();
  }

  // Connects, opens, and for a new job puts the initial weights.
  void Open() {
    auto session = client::Session::Connect(connect_);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    auto info = session_->OpenJob({.job = name_,
                                   .pool = pool_,
                                   .ram_bytes = kRamBytes,
                                   .io_engine = variant_.io_engine,
                                   .durability = variant_.durability,
                                   .generations = variant_.generations});
    ASSERT_TRUE(info.ok()) << info.status();
    info_ = *info;
    ASSERT_TRUE(session_->DeclareTensors(catalogue_.tensors).ok());
    const absl::Status sealed = session_->Seal(variant_.optimizer, plan_, pins_offset_, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed;
    step_ = info_.step;
    if (info_.exists) return;
    references_ = InitialWeights();
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) Put(tensor);
    const absl::Status published = session_->Publish("begin");
    ASSERT_TRUE(published.ok()) << published;
    history_ = {references_};
  }

  // Takes the working bytes of a tensor from its reference.
  void Put(uint32_t tensor) {
    const uint64_t element_bytes = proto::DtypeBytes(variant_.dtype);
    const std::vector<std::byte> bytes = WorkingBytes(tensor);
    for (uint64_t begin = 0; begin < count(tensor); begin += proto::kExtentElements) {
      const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count(tensor) - begin);
      std::memcpy(session_->region() + staging_offset_, bytes.data() + begin * element_bytes,
                  elements * element_bytes);
      const absl::Status status =
          session_->Wait(session_->Put(tensor, begin, elements, staging_offset_));
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // One step with random gradients; the reference takes it, too. `skipped` tensors have none.
  void Step(const std::vector<uint32_t>& skipped = {}) {
    client::StepCommand command;
    command.step = ++step_;
    command.groups = {Group(1e-2), Group(3e-2)};
    command.has_trainer_state = true;
    command.trainer_state = absl::StrCat("after ", step_);
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      if (!catalogue_.tensors[tensor].trainable ||
          std::count(skipped.begin(), skipped.end(), tensor) != 0)
        continue;
      const float scale = tensor % 2 == 0 ? 1.0f : 0.37f;
      const uint32_t group = tensor % 3 == 0 ? 1 : 0;
      const std::vector<std::byte> gradient = Gradient(tensor);
      HandOver(tensor, gradient);
      Update(tensor, command.groups[group], gradient, scale);
      command.updates.push_back({tensor, group, references_[tensor].update_count, scale});
    }
    const absl::Status status = session_->Step(command);
    ASSERT_TRUE(status.ok()) << status;
    history_.push_back(references_);
  }

  // Touches every tensor in the order of a forward and checks its bytes.
  void Forward() {
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      session_->SetSchedulePosition(tensor);
      if (tensor + 1 < catalogue_.tensors.size()) session_->Prefetch(tensor + 1);
      auto bytes = session_->Acquire(tensor);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      const std::vector<std::byte> expected = WorkingBytes(tensor);
      EXPECT_EQ(std::memcmp(*bytes, expected.data(), expected.size()), 0)
          << catalogue_.tensors[tensor].name;
      session_->Release(tensor);
    }
    session_->SetSchedulePosition(0);
  }

  void SetSchedule() {
    std::vector<uint32_t> touches;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor)
      touches.push_back(tensor);
    for (uint32_t tensor = catalogue_.tensors.size(); tensor > 0; --tensor)
      touches.push_back(tensor - 1);
    ASSERT_TRUE(session_->SetSchedule(touches).ok());
  }

  // Compares every plane of every tensor.
  void ExpectEqual() {
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      SCOPED_TRACE(catalogue_.tensors[tensor].name);
      ExpectPlane(tensor, proto::RingPlane::kWeight, WorkingBytes(tensor));
      if (!catalogue_.tensors[tensor].trainable) continue;
      ExpectPlane(tensor, proto::RingPlane::kMaster, BytesOf(references_[tensor].master));
      if (variant_.optimizer != OptimizerState::kNone) {
        ExpectPlane(tensor, proto::RingPlane::kExpAvg, BytesOf(references_[tensor].exp_avg));
      }
      if (variant_.optimizer == OptimizerState::kAdam) {
        ExpectPlane(tensor, proto::RingPlane::kExpAvgSq, BytesOf(references_[tensor].exp_avg_sq));
      }
    }
  }

  void Close() {
    const absl::Status status = session_->CloseJob();
    EXPECT_TRUE(status.ok()) << status;
    session_.reset();
  }

  // Connects to the daemon of OFFLOADD_SOCKET instead of a private one.
  void UseNodeDaemon() { connect_ = {.allow_private = false}; }

  // Ends the session without closing the job.
  void Leave() { session_.reset(); }

  absl::Status SealOn(client::Session& session) {
    return session.Seal(variant_.optimizer, plan_, pins_offset_, nullptr);
  }

  void KillDaemon() {
    ASSERT_EQ(kill(session_->daemon_pid(), SIGKILL), 0);
    session_.reset();
  }

  // After a resume: the state in memory is the one of that step.
  void ReturnToStep(uint64_t step) {
    ASSERT_LT(step, history_.size());
    step_ = step;
    history_.resize(step + 1);
    references_ = history_.back();
  }

  // Knows what the other one knows: for a job that was made of it.
  void Follow(const Job& other) {
    history_ = other.history_;
    references_ = other.references_;
  }

  void ChangeWeights(uint32_t tensor, float by) {
    for (float& value : references_[tensor].master) {
      value = variant_.dtype == Dtype::kFloat32 ? value + by : FromBFloat16(ToBFloat16(value + by));
    }
    history_.back() = references_;
  }

  client::Session& session() { return *session_; }
  const client::JobInfo& info() const { return info_; }
  uint64_t step() const { return step_; }
  const proto::Catalogue& catalogue() const { return catalogue_; }

 private:
  uint64_t count(uint32_t tensor) const { return catalogue_.tensors[tensor].element_count; }

  void MakePlan() {
    plan_.pipeline_blocks = variant_.pipeline_blocks;
    plan_.pipeline_gradients = variant_.spill;
    uint64_t largest_slot = 0;
    for (const proto::StoreTensor& tensor : catalogue_.store_tensors) {
      plan_.weight_resident.push_back(tensor.bundle || variant_.weights_resident);
      const uint32_t extents = proto::ExtentCount(tensor.element_count);
      plan_.state_resident.push_back(tensor.trainable ? std::min(extents, variant_.state_resident)
                                                      : 0);
      largest_slot = std::max(largest_slot, proto::WeightSlotBytes(tensor));
    }
    plan_.window_bytes =
        variant_.weights_resident ? 0 : largest_slot + 65536;  // far smaller than the model
    staging_offset_ = proto::kRegionFixedBytes;
    pins_offset_ = staging_offset_ + proto::kLoadingStagingBytes;
    uint64_t end = pins_offset_ + 4096;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      proto::GradientPlacement placement;
      const uint64_t bytes = proto::PaddedBytes(count(tensor) * proto::DtypeBytes(variant_.dtype));
      const bool bundled =
          catalogue_.store_tensors[catalogue_.placements[tensor].store_tensor].bundle;
      if (catalogue_.tensors[tensor].trainable) {
        const bool spilled = variant_.spill && !bundled;
        placement.home = spilled ? proto::GradientHome::kScratch : proto::GradientHome::kRegion;
        uint64_t& cursor = spilled ? plan_.scratch_bytes : end;
        placement.offset_bytes = cursor;
        cursor += bytes;
      }
      plan_.gradients.push_back(placement);
    }
    plan_.region_bytes = end;
  }

  References InitialWeights() {
    References references;
    for (uint32_t tensor = 0; tensor < catalogue_.tensors.size(); ++tensor) {
      Reference reference;
      reference.master.resize(count(tensor));
      for (float& value : reference.master) {
        value = normal_(random_);
        if (variant_.dtype == Dtype::kBFloat16) value = FromBFloat16(ToBFloat16(value));
      }
      reference.exp_avg.resize(count(tensor), 0);
      reference.exp_avg_sq.resize(count(tensor), 0);
      references.push_back(std::move(reference));
    }
    return references;
  }

  std::vector<std::byte> BytesOf(const std::vector<float>& values) const {
    std::vector<std::byte> bytes(values.size() * sizeof(float));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }

  std::vector<std::byte> CastBytes(const std::vector<float>& values) const {
    if (variant_.dtype == Dtype::kFloat32) return BytesOf(values);
    std::vector<std::byte> bytes(values.size() * 2);
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t cast = ToBFloat16(values[i]);
      std::memcpy(bytes.data() + 2 * i, &cast, 2);
    }
    return bytes;
  }
  std::vector<std::byte> WorkingBytes(uint32_t tensor) const {
    return CastBytes(references_[tensor].master);
  }

  std::vector<std::byte> Gradient(uint32_t tensor) {
    std::vector<float> values(count(tensor));
    for (float& value : values) value = normal_(random_);
    return CastBytes(values);
  }

  void HandOver(uint32_t tensor, const std::vector<std::byte>& gradient) {
    const proto::GradientPlacement& placement = plan_.gradients[tensor];
    // The update of the step before may still be reading the gradient: a tensor that is not pending
    // any more has taken it.
    if (session_->State(tensor) == proto::kPending) {
      ASSERT_TRUE(session_->Acquire(tensor).ok());
      session_->Release(tensor);
    }
    if (placement.home == proto::GradientHome::kRegion) {
      std::memcpy(session_->region() + placement.offset_bytes, gradient.data(), gradient.size());
      return;
    }
    const uint64_t bytes = proto::PaddedBytes(gradient.size());
    std::memcpy(session_->region() + staging_offset_, gradient.data(), gradient.size());
    const absl::Status status =
        session_->Wait(session_->ScratchWrite(placement.offset_bytes, bytes, staging_offset_));
    ASSERT_TRUE(status.ok()) << status;
  }

  client::Group Group(double lr) const {
    client::Group group;
    group.is_adamw = variant_.optimizer == OptimizerState::kAdam;
    group.adamw = {
        .lr = lr, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .flavour = 0};
    group.sgd = {.lr = lr,
                 .momentum = variant_.momentum,
                 .dampening = 0,
                 .weight_decay = 0.01,
                 .nesterov = false};
    return group;
  }

  void Update(uint32_t tensor, const client::Group& group, const std::vector<std::byte>& gradient,
              float scale) {
    Reference& reference = references_[tensor];
    ++reference.update_count;
    kernels::Run run;
    run.count = run.tensor_count = reference.master.size();
    run.weight_dtype = kernels::Dtype::kFloat32;
    run.weight = reference.master.data();
    run.exp_avg = reference.exp_avg.data();
    run.exp_avg_sq = reference.exp_avg_sq.data();
    run.gradient_dtype =
        variant_.dtype == Dtype::kFloat32 ? kernels::Dtype::kFloat32 : kernels::Dtype::kBFloat16;
    run.gradient = gradient.data();
    run.gradient_scale = scale;
    if (group.is_adamw) {
      kernels::AdamWParameters parameters;
      parameters.lr = group.adamw.lr;
      parameters.beta1 = group.adamw.beta1;
      parameters.beta2 = group.adamw.beta2;
      parameters.eps = group.adamw.eps;
      parameters.weight_decay = group.adamw.weight_decay;
      parameters.step = static_cast<int64_t>(reference.update_count);
      return kernels::UpdateAdamW(parameters, run);
    }
    run.exp_avg_sq = nullptr;
    if (variant_.momentum == 0) run.exp_avg = nullptr;
    kernels::SgdParameters parameters;
    parameters.lr = group.sgd.lr;
    parameters.momentum = group.sgd.momentum;
    parameters.weight_decay = group.sgd.weight_decay;
    parameters.first = reference.update_count == 1;
    kernels::UpdateSgd(parameters, run);
  }

  void ExpectPlane(uint32_t tensor, proto::RingPlane plane,
                   const std::vector<std::byte>& expected) {
    const uint64_t element_bytes = expected.size() / count(tensor);
    for (uint64_t begin = 0; begin < count(tensor); begin += proto::kExtentElements) {
      const uint64_t elements = std::min<uint64_t>(proto::kExtentElements, count(tensor) - begin);
      const absl::Status status =
          session_->Wait(session_->Get(tensor, plane, begin, elements, staging_offset_));
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(std::memcmp(session_->region() + staging_offset_,
                            expected.data() + begin * element_bytes, elements * element_bytes),
                0)
          << "plane " << static_cast<int>(plane) << " from element " << begin;
    }
  }

  std::string pool_, name_;
  Variant variant_;
  proto::Catalogue catalogue_;
  proto::MemoryPlan plan_;
  uint64_t staging_offset_ = 0, pins_offset_ = 0;
  client::ConnectOptions connect_ = {.only_private = true};
  std::unique_ptr<client::Session> session_;
  client::JobInfo info_;
  uint64_t step_ = 0;
  References references_;
  std::vector<References> history_;  // by step
  std::mt19937 random_{20240817};
  std::normal_distribution<float> normal_{0.0f, 0.1f};
};

// A variable of the environment for as long as the object lives.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value) : name_(name) {
    setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

// A daemon for everybody on this machine, as an administrator starts it; killed with the object.
class NodeDaemon {
 public:
  explicit NodeDaemon(const std::vector<std::string>& flags = {}) {
    std::string directory = "/tmp/offloadd-node-XXXXXX";
    directory_ = mkdtemp(directory.data());
    std::vector<std::string> arguments = {getenv("OFFLOADD_BINARY"), "--socket", socket_path()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, pointers[0], nullptr, nullptr, pointers.data(), environ), 0);
    while (!std::filesystem::exists(directory_ + "/control.sock") &&
           waitpid(pid_, nullptr, WNOHANG) == 0)
      usleep(1000);
    socket_ = std::make_unique<ScopedVariable>("OFFLOADD_SOCKET", socket_path());
  }
  ~NodeDaemon() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }
  NodeDaemon(const NodeDaemon&) = delete;
  NodeDaemon& operator=(const NodeDaemon&) = delete;

  // Sends SIGTERM and waits for the end: the exit status, or -1 for a signal.
  int Terminate() {
    kill(pid_, SIGTERM);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  std::string socket_path() const { return directory_ + "/offloadd.sock"; }

  std::string directory_;
  pid_t pid_ = -1;
  std::unique_ptr<ScopedVariable> socket_;
};

class SpineTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* base = getenv("TEST_TMPDIR");
    ASSERT_NE(base, nullptr);
    pool_ = absl::StrCat(base, "/", testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(pool_);
    const char* binary = getenv("OFFLOADD_BINARY");
    ASSERT_NE(binary, nullptr);
    setenv("OFFLOADD_BINARY", std::filesystem::absolute(binary).c_str(), 1);
  }
  void TearDown() override { std::filesystem::remove_all(pool_); }

  // A whole life: build, train, look, close, resume, train on.
  void TrainAndResume(const Variant& variant) {
    Job job(pool_, "job", variant);
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_FALSE(job.info().exists);
    job.Forward();
    job.Step();
    if (variant.schedule) job.SetSchedule();
    job.Forward();
    job.Step({2});  // a tensor without gradient
    job.Step({1});  // a member of a bundle without one
    job.Forward();
    job.Forward();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    job.Close();

    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_TRUE(job.info().exists);
    EXPECT_EQ(job.info().step, 4u);
    EXPECT_EQ(job.info().trainer_state, "after 4");
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }

  std::string pool_;
};

TEST_F(SpineTest, Fp32AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kFloat32}); }
TEST_F(SpineTest, BFloat16AdamWFromTheDrive) { TrainAndResume({.dtype = Dtype::kBFloat16}); }
TEST_F(SpineTest, BFloat16AdamWWithOneBlockAndWithoutSchedule) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .pipeline_blocks = 1, .schedule = false});
}
TEST_F(SpineTest, BFloat16AdamWWithStatePartlyInMemory) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .pipeline_blocks = 3, .state_resident = 1});
}
TEST_F(SpineTest, BFloat16AdamWWithEverythingInMemory) {
  TrainAndResume({.dtype = Dtype::kBFloat16,
                  .pipeline_blocks = 2,
                  .state_resident = 9,
                  .weights_resident = true});
}
TEST_F(SpineTest, BFloat16AdamWWithSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .spill = true});
}
TEST_F(SpineTest, Fp32AdamWWithSpilledGradients) {
  TrainAndResume({.dtype = Dtype::kFloat32, .spill = true});
}
TEST_F(SpineTest, Fp32SgdWithMomentum) {
  TrainAndResume(
      {.dtype = Dtype::kFloat32, .optimizer = OptimizerState::kMomentum, .momentum = 0.9});
}
TEST_F(SpineTest, BFloat16SgdWithMomentum) {
  TrainAndResume(
      {.dtype = Dtype::kBFloat16, .optimizer = OptimizerState::kMomentum, .momentum = 0.9});
}
TEST_F(SpineTest, Fp32SgdWithoutState) {
  TrainAndResume(
      {.dtype = Dtype::kFloat32, .optimizer = OptimizerState::kNone, .pipeline_blocks = 1});
}
TEST_F(SpineTest, BFloat16SgdWithoutState) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .optimizer = OptimizerState::kNone});
}
TEST_F(SpineTest, BFloat16AdamWOverThreads) {
  TrainAndResume({.dtype = Dtype::kBFloat16, .io_engine = "threads"});
}

TEST_F(SpineTest, BFloat16AdamWOverTwoPools) {
  const std::string first = pool_ + "/a", second = pool_ + "/b";
  std::filesystem::create_directories(first);
  std::filesystem::create_directories(second);
  pool_ = absl::StrCat(first, ",", second);
  TrainAndResume({.dtype = Dtype::kBFloat16});
  EXPECT_TRUE(std::filesystem::exists(second + "/job.offload.member-1"));
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  const absl::Status alone =
      (*session)->OpenJob({.job = "job", .pool = first, .ram_bytes = kRamBytes}).status();
  EXPECT_EQ(ErrorIdOf(alone), ErrorId::kPoolsDiffer) << alone;
  EXPECT_NE(alone.message().find(second), absl::string_view::npos) << alone;
  pool_ = std::filesystem::path(first).parent_path();
}

// A model with a larger tensor: it is named, with the way out. (Job catalogues compare the rest.)
TEST_F(SpineTest, AModelThatHasGrownIsRefusedAndTheFirstDifferenceNamed) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Close();
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->OpenJob({.job = "job", .pool = pool_, .ram_bytes = kRamBytes}).ok());
  std::vector<proto::Tensor> tensors = job.catalogue().tensors;
  tensors[5].shape = {80001};
  ASSERT_TRUE((*session)->DeclareTensors(tensors).ok());
  const absl::Status status = job.SealOn(**session);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kOtherModel) << status;
  EXPECT_NE(status.message().find("mlp"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("Choose another job name"), absl::string_view::npos) << status;
}

TEST_F(SpineTest, KilledDaemonResumesAtAWholeStep) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int round = 0; round < 4; ++round) {
    job.Step();
    job.Step();
    if (round % 2 == 0) {
      ASSERT_TRUE(job.session().WaitDurable().ok());
    }
    const uint64_t returned = job.step();
    job.KillDaemon();
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_GE(job.info().step + (round % 2 == 0 ? 0 : 1), returned);
    EXPECT_LE(job.info().step, returned);
    job.ReturnToStep(job.info().step);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  }
  job.Close();
}

// Runs offloadctl; its exit code.
int Offloadctl(const std::string& arguments) {
  const std::string binary = getenv("OFFLOADCTL_BINARY");
  const int status = std::system(absl::StrCat(binary, " ", arguments).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(SpineTest, ForkOfASnapshotEqualsTheStateThatItKept) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16, .state_resident = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  const std::string snapshot = absl::StrCat("snapshot create ", pool_, " job");
  EXPECT_EQ(Offloadctl(absl::StrCat(snapshot, " kept")), 0) << "says what it would take";
  ASSERT_EQ(Offloadctl(absl::StrCat(snapshot, " kept --yes")), 0) << "grows, beside the run";
  EXPECT_NE(Offloadctl(absl::StrCat(snapshot, " kept --yes")), 0) << "the name is taken";
  for (int i = 0; i < 3; ++i) job.Step();
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  const std::string fork = absl::StrCat("snapshot fork ", pool_, " job kept --yes --as ");
  ASSERT_EQ(Offloadctl(fork + "early"), 0) << "beside the run";
  job.Step();
  job.Close();
  ASSERT_EQ(Offloadctl(fork + "late"), 0);
  ASSERT_EQ(Offloadctl(absl::StrCat("snapshot fork ", pool_, " job --yes --as last")), 0);

  const std::pair<const char*, uint64_t> forks[] = {{"early", 2}, {"late", 2}, {"last", 6}};
  for (const auto& [name, step] : forks) {
    Job copy(pool_, name, {.dtype = Dtype::kBFloat16, .state_resident = 1});
    copy.Follow(job);
    ASSERT_NO_FATAL_FAILURE(copy.Open());
    EXPECT_EQ(copy.info().step, step);
    EXPECT_EQ(copy.info().trainer_state, absl::StrCat("after ", step));
    copy.ReturnToStep(step);
    ASSERT_NO_FATAL_FAILURE(copy.ExpectEqual()) << name;
    copy.Step();
    ASSERT_NO_FATAL_FAILURE(copy.ExpectEqual()) << name;
    copy.Close();
  }
  EXPECT_EQ(Offloadctl(absl::StrCat("snapshot rm ", pool_, " job kept --yes")), 0);
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 6u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  EXPECT_EQ(Offloadctl(absl::StrCat(snapshot, " again")), 0) << "in the generation that is free";
  EXPECT_EQ(Offloadctl(absl::StrCat("snapshot rm ", pool_, " job again --yes")), 0);
  job.Close();
}

TEST_F(SpineTest, CheckpointIntervalIsWhatAKilledDaemonLeaves) {
  Job job(pool_, "job",
          {.dtype = Dtype::kBFloat16, .state_resident = 1, .durability = "checkpoint:3"});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int i = 0; i < 5; ++i) job.Step();
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual()) << "what is not committed is read all the same";
  EXPECT_EQ(job.session().slab_header().durable_step.load(), 3u);
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 3u);
  EXPECT_EQ(job.info().trainer_state, "after 3");
  job.ReturnToStep(3);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Step();
  const auto durable = job.session().WaitDurable();
  ASSERT_TRUE(durable.ok()) << durable.status();
  EXPECT_EQ(*durable, 4u) << "whoever asks gets a commit inside an interval";
  job.Step();
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 4u);
  job.ReturnToStep(4);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Step();
  job.Close();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 5u) << "the end is a checkpoint, too";
  EXPECT_EQ(job.info().trainer_state, "after 5");
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, SnapshotInsideAnIntervalNamesTheStepThatItFinds) {
  Job job(pool_, "job",
          {.dtype = Dtype::kFloat32, .durability = "checkpoint:1000", .generations = 1});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  ASSERT_EQ(Offloadctl(absl::StrCat("snapshot create ", pool_, " job two")), 0);
  EXPECT_EQ(job.session().slab_header().durable_step.load(), 2u);
  job.Step();
  job.KillDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 2u);
  job.ReturnToStep(2);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, DurabilityThatIsNoneIsRefused) {
  for (const char* durability : {"checkpoint", "checkpoint:0", "checkpoint:x", "never"}) {
    auto session = client::Session::Connect({});
    ASSERT_TRUE(session.ok()) << session.status();
    const auto info = (*session)->OpenJob(
        {.job = "job", .pool = pool_, .ram_bytes = kRamBytes, .durability = durability});
    EXPECT_EQ(ErrorIdOf(info.status()), ErrorId::kBadValue) << durability << info.status();
  }
}

TEST_F(SpineTest, GoneRankLeavesItsRecordedStepCommitted) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32, .spill = true});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 1u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, TerminatedDaemonCommitsWhatWasRecorded) {
  Job job(pool_, "job", {.dtype = Dtype::kBFloat16});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Step();
  ASSERT_EQ(kill(job.session().daemon_pid(), SIGTERM), 0);
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 2u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

// A file system of its own, whose drive can be made to fail; needs root.
class FailingDrive {
 public:
  explicit FailingDrive(std::string folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(path());
    const std::string make =
        absl::StrCat("cd '", folder_, "' && truncate -s 192M image && mkfs.ext4 -q -F image && ",
                     "mount -o loop image mount");
    mounted_ = geteuid() == 0 && system(absl::StrCat("(", make, ") >/dev/null 2>&1").c_str()) == 0;
  }
  ~FailingDrive() {
    if (mounted_ && system(absl::StrCat("umount '", path(), "'").c_str()) != 0)
      ADD_FAILURE() << "umount " << path();
  }
  bool mounted() const { return mounted_; }
  std::string path() const { return folder_ + "/mount"; }
  // From now on every write, flush and read is EIO. False when the kernel cannot.
  bool Fail() const {
    constexpr unsigned long kShutdown = _IOR('X', 125, uint32_t);
    uint32_t without_log = 2;
    const int directory = open(path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool failed = ioctl(directory, kShutdown, &without_log) == 0;
    close(directory);
    return failed;
  }

 private:
  const std::string folder_;
  bool mounted_ = false;
};

TEST_F(SpineTest, ADriveThatFailsIsToldAtTheNextStepAndNothingIsAcknowledgedAnyMore) {
  const FailingDrive drive(pool_);
  if (!drive.mounted()) GTEST_SKIP() << "a loop file system cannot be mounted (needs root)";
  Job job(drive.path(), "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  ASSERT_TRUE(job.session().WaitDurable().ok());
  if (!drive.Fail()) {
    job.Leave();
    GTEST_SKIP() << "the kernel cannot shut a file system down";
  }
  client::StepCommand command;
  absl::Status status;
  for (uint64_t step = 2; status.ok() && step < 5; ++step) {
    command.step = step;
    status = job.session().Step(command);
    if (status.ok()) status = job.session().WaitDurable().status();
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_TRUE(ErrorIdOf(status) == ErrorId::kStoreFailed || ErrorIdOf(status) == ErrorId::kIo)
      << status;
  EXPECT_EQ(ErrorIdOf(job.session().Step(command)), ErrorIdOf(status)) << "and stays so";
  EXPECT_EQ(kill(job.session().daemon_pid(), 0), 0) << "the daemon lives";
  job.Leave();
}

TEST_F(SpineTest, FlippedBitIsSeenAndStopsTheJob) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Close();
  constexpr uint64_t kBehindTheTables = 6 << 20;
  std::fstream file(pool_ + "/job.offload", std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file.good());
  for (uint64_t at = kBehindTheTables + 100;
       at < std::filesystem::file_size(pool_ + "/job.offload"); at += 16384) {
    char byte = 0;
    file.seekg(static_cast<std::streamoff>(at)).read(&byte, 1);
    byte = static_cast<char>(byte ^ 4);
    file.seekp(static_cast<std::streamoff>(at)).write(&byte, 1);
  }
  file.close();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  absl::Status status;
  for (uint32_t tensor = 0; tensor < job.catalogue().tensors.size() && status.ok(); ++tensor) {
    status = job.session().Acquire(tensor).status();
    if (status.ok()) job.session().Release(tensor);
  }
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kChecksum) << status;
  EXPECT_EQ(ErrorIdOf(job.session().WaitDurable().status()), ErrorId::kChecksum);
  job.Leave();
}

TEST_F(SpineTest, PutBetweenStepsReplacesTheMasterAndKeepsTheMoments) {
  for (const uint32_t state_resident : {0u, 9u}) {
    SCOPED_TRACE(state_resident);
    Job job(pool_, absl::StrCat("job", state_resident),
            {.dtype = Dtype::kBFloat16, .state_resident = state_resident});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    job.Step();
    for (const uint32_t tensor :
         {0u, 1u, 8u}) {  // a big one, a bundled one, the largest bundled one
      job.ChangeWeights(tensor, 0.25f);
      job.Put(tensor);
    }
    job.Forward();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Step();
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.ChangeWeights(0, -0.5f);
    job.ChangeWeights(3, -0.5f);
    job.Put(0);
    job.Put(3);
    job.Close();  // commits what was put without a step
    ASSERT_NO_FATAL_FAILURE(job.Open());
    EXPECT_EQ(job.info().step, 2u);
    ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
    job.Close();
  }
}

TEST_F(SpineTest, JobOfAnotherModelIsRefusedAndNamed) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Close();
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->OpenJob({.job = "job", .pool = pool_, .ram_bytes = kRamBytes}).ok());
  std::vector<proto::Tensor> tensors = job.catalogue().tensors;
  tensors[2].shape = {390, 256};
  ASSERT_TRUE((*session)->DeclareTensors(tensors).ok());
  Job other(pool_, "job", {.dtype = Dtype::kFloat32});
  const absl::Status status = other.SealOn(**session);
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kOtherModel) << status;
  EXPECT_NE(status.message().find("attention"), absl::string_view::npos) << status;
}

// The window holds one big tensor: while the rank keeps it, no other can come.
TEST_F(SpineTest, AcquireWithoutRoomFailsInsteadOfWaitingForEver) {
  const ScopedVariable timeout("OFFLOADD_ROOM_TIMEOUT", "0.05");
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_TRUE(job.session().Acquire(0).ok());
  absl::Status status = job.session().Acquire(2).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kWindowExhausted) << status;
  EXPECT_NE(status.message().find("attention"), absl::string_view::npos) << status;
  job.session().Release(0);
  ASSERT_TRUE(job.session().Acquire(2).ok());
  job.session().Release(2);

  // The same while the other one waits for its update.
  ASSERT_TRUE(job.session().Acquire(0).ok());
  job.Step();
  status = job.session().Acquire(2).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kWindowExhausted) << status;
  job.session().Release(0);
  ASSERT_NO_FATAL_FAILURE(job.Forward());
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, ClosingAJobDoesNotWaitForPinsAndAnswersWhatComesAfterIt) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_TRUE(job.session().Acquire(0).ok());  // and never released
  job.Step();
  EXPECT_TRUE(job.session().CloseJob().ok());
  const absl::Status status = job.session().Wait(
      job.session().Get(2, proto::RingPlane::kWeight, 0, 1, proto::kRegionFixedBytes));
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kSessionEnded) << status;
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 1u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, NonsenseInTheRingEndsItsSessionAndAnswersAStepThatWaits) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_TRUE(job.session().Acquire(0).ok());  // keeps the first step from ending
  job.Step();
  reinterpret_cast<proto::RegionHeader*>(job.session().region())
      ->submission_tail.fetch_add(1u << 20);
  client::StepCommand command;
  command.step = 2;
  EXPECT_FALSE(job.session().Step(command).ok());
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 0u);
  job.ReturnToStep(0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineTest, NodeDaemonServesTwoJobsAndRefusesASecondRunOfOne) {
  NodeDaemon node;
  Job first(pool_, "first", {.dtype = Dtype::kFloat32});
  Job second(pool_, "second", {.dtype = Dtype::kBFloat16, .spill = true});
  for (Job* job : {&first, &second}) {
    job->UseNodeDaemon();
    ASSERT_NO_FATAL_FAILURE(job->Open());
    EXPECT_FALSE(job->session().daemon_is_private());
  }
  EXPECT_EQ(first.session().daemon_pid(), second.session().daemon_pid());
  for (int step = 0; step < 2; ++step) {
    for (Job* job : {&first, &second}) {
      ASSERT_NO_FATAL_FAILURE(job->Step());
      ASSERT_NO_FATAL_FAILURE(job->Forward());
    }
  }
  {
    auto session = client::Session::Connect({.allow_private = false});
    ASSERT_TRUE(session.ok()) << session.status();
    // The folder by another name is the same folder.
    const auto info =
        (*session)->OpenJob({.job = "first", .pool = pool_ + "/.", .ram_bytes = kRamBytes});
    EXPECT_EQ(ErrorIdOf(info.status()), ErrorId::kStoreLocked) << info.status();
    EXPECT_NE(info.status().message().find(absl::StrCat("process ", getpid())),
              absl::string_view::npos)
        << info.status();
  }
  // A run that follows at once finds the job free, however the one before ended.
  first.Leave();
  second.Close();
  for (Job* job : {&first, &second}) {
    ASSERT_NO_FATAL_FAILURE(job->Open());
    EXPECT_EQ(job->info().step, 2u);
    ASSERT_NO_FATAL_FAILURE(job->ExpectEqual());
    job->Close();
  }
  EXPECT_EQ(node.Terminate(), 0);
}

TEST_F(SpineTest, StoppedRankCannotKeepATerminatedDaemonAlive) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  job.UseNodeDaemon();
  {
    NodeDaemon node({"--drain-timeout", "0.2"});
    ASSERT_NO_FATAL_FAILURE(job.Open());
    ASSERT_TRUE(job.session().Acquire(0).ok());  // used for ever, so that the step cannot end
    job.Step();
    EXPECT_EQ(node.Terminate(), 1);
    EXPECT_EQ(ErrorIdOf(job.session().WaitDurable().status()), ErrorId::kDaemonLost);
    job.Leave();
  }
  NodeDaemon node;
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 0u);
  job.ReturnToStep(0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
  EXPECT_EQ(node.Terminate(), 0);
}

TEST_F(SpineTest, PrivateDaemonServesNobodyButTheProcessThatStartedIt) {
  NodeDaemon daemon({"--private", "--parent-pid", "1"});
  const auto session = client::Session::Connect({.allow_private = false});
  EXPECT_EQ(ErrorIdOf(session.status()), ErrorId::kRefused) << session.status();
}

TEST_F(SpineTest, ScratchSpaceBeyondAnyDriveIsRefused) {
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->OpenJob({.job = "job", .pool = pool_, .ram_bytes = kRamBytes}).ok());
  EXPECT_EQ(ErrorIdOf((*session)->ReserveScratch(~uint64_t{0})), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf((*session)->ReserveScratch(uint64_t{1} << 49)), ErrorId::kPoolFull);
}

TEST_F(SpineTest, PlanBeyondTheBudgetIsRefused) {
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  const auto info = (*session)->OpenJob({.job = "job", .pool = pool_, .ram_bytes = 24ull << 20});
  ASSERT_TRUE(info.ok()) << info.status();
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_TRUE((*session)->DeclareTensors(job.catalogue().tensors).ok());
  EXPECT_EQ(ErrorIdOf(job.SealOn(**session)), ErrorId::kBudgetTooSmall);
}

}  // namespace
}  // namespace offload
