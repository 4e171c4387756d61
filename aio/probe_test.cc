#include "aio/probe.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "aio/sector_4096_mount.h"
#include "base/error.h"

namespace offload::aio {
namespace {

TEST(ProbeTest, ThreadsWorkEverywhereAndTheOthersOrTheirRefusalsAreTold) {
  const char* const scratch = std::getenv("TEST_TMPDIR");
  for (const std::string& folder :
       {std::string(scratch == nullptr ? "." : scratch), std::string()}) {
    const absl::StatusOr<Capabilities> found = ProbeCapabilities(folder);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_FALSE(found->kernel_release.empty());
    ASSERT_EQ(found->engines.size(), 3u);
    EXPECT_EQ(found->engines[0].engine, Engine::kUring);
    EXPECT_EQ(found->engines[2].engine, Engine::kThreads);
    EXPECT_EQ(found->engines[2].status, absl::OkStatus());
    EXPECT_FALSE(found->engines[2].registers_buffers);
    for (const EngineCapability& each : found->engines) {
      EXPECT_TRUE(each.status.ok() || ErrorIdOf(each.status) == ErrorId::kEngineUnavailable)
          << each.status;
    }
    EXPECT_EQ(found->geometry.size_bytes, 64u << 10);
  }
}

TEST(ProbeTest, DriveOf4KibSectorsIsKnownAsOne) {
  const absl::StatusOr<std::string>& folder = Sector4096Mount::Folder();
  if (!folder.ok()) GTEST_SKIP() << folder.status();
  const absl::StatusOr<Capabilities> found = ProbeCapabilities(*folder);
  ASSERT_TRUE(found.ok()) << found.status();
  if (!found->geometry_is_known) GTEST_SKIP() << "this kernel does not tell alignments";
  EXPECT_EQ(found->geometry.offset_alignment, 4096u);
}

TEST(ProbeTest, FolderThatIsNotThereIsAnError) {
  EXPECT_EQ(ErrorIdOf(ProbeCapabilities("/nowhere/at/all").status()), ErrorId::kPoolNotUsable);
}

}  // namespace
}  // namespace offload::aio
