// What a trainer is told when a drive, a plan, a model or the trainer itself is at fault, and that
// nothing is committed then that was not before.

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "tests/daemon_status.h"
#include "tests/node_daemon.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

class SpineFailureTest : public SpineFixture {};

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
  // To the last block.
  void FillUp() const {
    const int file = open((path() + "/filling").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    const std::vector<char> bytes(1 << 20, 'x');
    for (size_t size = bytes.size(); size >= 512; size /= 2) {
      while (write(file, bytes.data(), size) > 0) continue;
    }
    fsync(file);
    close(file);
  }
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

TEST_F(SpineFailureTest, ADriveThatFailsIsToldAtTheNextStepAndNothingIsAcknowledgedAnyMore) {
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

// All that it writes has its place already.
TEST_F(SpineFailureTest, AJobGoesOnOnADriveThatIsFull) {
  const FailingDrive drive(pool_);
  if (!drive.mounted()) GTEST_SKIP() << "a loop file system cannot be mounted (needs root)";
  Job job(drive.path(), "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  job.Close();
  drive.FillUp();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 1u);
  job.Step();
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
  Job other(drive.path(), "other", {.dtype = Dtype::kFloat32});
  const absl::Status status = other.TryOpen();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kPoolFull) << status;
  EXPECT_NE(status.message().find("needs"), absl::string_view::npos) << status;
}

// By rm, not by offloadctl rm.
TEST_F(SpineFailureTest, AStoreWhoseFileIsRemovedGoesOnAndIsThereAgainWhenTheRunHasEnded) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  std::filesystem::remove(pool_ + "/job.offload");
  job.Step();
  ASSERT_TRUE(job.session().WaitDurable().ok());
  job.Close();
  ASSERT_TRUE(std::filesystem::exists(pool_ + "/job.offload"));
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.step(), 2u);
  job.Step();
  job.Close();
}

TEST_F(SpineFailureTest, FlippedBitIsSeenAndStopsTheJob) {
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

// A model with a larger tensor: it is named, with the way out. (Job catalogues compare the rest.)
TEST_F(SpineFailureTest, AModelThatHasGrownIsRefusedAndTheFirstDifferenceNamed) {
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

TEST_F(SpineFailureTest, JobOfAnotherModelIsRefusedAndNamed) {
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
TEST_F(SpineFailureTest, AcquireWithoutRoomFailsInsteadOfWaitingForEver) {
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

// What is read back for its own sake makes no room: each of its reads counted as if it might.
TEST_F(SpineFailureTest, AcquireWithoutRoomFailsWhileTheStoreIsReadBack) {
  const ScopedVariable timeout("OFFLOADD_ROOM_TIMEOUT", "1.3");
  const ScopedVariable scrub("OFFLOADD_SCRUB", "1e6");  // of 6 MB, up to 1 MB at a time
  const NodeDaemon node;
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  job.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  job.Step();
  ASSERT_TRUE(job.session().WaitDurable().ok());
  ASSERT_TRUE(job.session().Acquire(0).ok());
  const absl::Status status = job.session().Acquire(2).status();
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kWindowExhausted) << status;
  EXPECT_EQ(StatusOfDaemon(node.socket_path()).jobs(0).scrub().passes(), 0u) << "it is not through";
  job.session().Release(0);
  job.Close();
}

TEST_F(SpineFailureTest, ClosingAJobDoesNotWaitForPinsAndAnswersWhatComesAfterIt) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_TRUE(job.session().Acquire(0).ok());  // and never released
  job.Step();
  EXPECT_TRUE(job.session().CloseJob().ok());
  const absl::Status status = job.session().Wait(
      job.session().Get(2, proto::Plane::kWeight, 0, 1, proto::kRegionFixedBytes));
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kSessionEnded) << status;
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 1u);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineFailureTest, NonsenseInTheRingEndsItsSessionAndAnswersAStepThatWaits) {
  Job job(pool_, "job", {.dtype = Dtype::kFloat32});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  ASSERT_TRUE(job.session().Acquire(0).ok());  // keeps the first step from ending
  job.Step();
  reinterpret_cast<proto::RegionHeader*>(job.session().region())
      ->submission_tail.fetch_add(1u << 20);
  EXPECT_FALSE(job.session().Step(StepByCall(2)).ok());
  job.Leave();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  EXPECT_EQ(job.info().step, 0u);
  job.ReturnToStep(0);
  ASSERT_NO_FATAL_FAILURE(job.ExpectEqual());
  job.Close();
}

TEST_F(SpineFailureTest, DurabilityThatIsNoneIsRefused) {
  for (const char* durability : {"checkpoint", "checkpoint:0", "checkpoint:x", "never"}) {
    auto session = client::Session::Connect({});
    ASSERT_TRUE(session.ok()) << session.status();
    const auto info = (*session)->OpenJob(
        {.job = "job", .pool = pool_, .ram_bytes = kRamBytes, .durability = durability});
    EXPECT_EQ(ErrorIdOf(info.status()), ErrorId::kBadValue) << durability << info.status();
  }
}

TEST_F(SpineFailureTest, ScratchSpaceBeyondAnyDriveIsRefused) {
  auto session = client::Session::Connect({.only_private = true});
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_TRUE((*session)->OpenJob({.job = "job", .pool = pool_, .ram_bytes = kRamBytes}).ok());
  EXPECT_EQ(ErrorIdOf((*session)->ReserveScratch(~uint64_t{0})), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf((*session)->ReserveScratch(uint64_t{1} << 49)), ErrorId::kPoolFull);
}

TEST_F(SpineFailureTest, PlanBeyondTheBudgetIsRefused) {
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
