#include "base/environment.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"

namespace offload {
namespace {

absl::Status Check(const std::string& entry) {
  return CheckEnvironment(std::vector<std::string>{"HOME=/root", entry});
}

TEST(EnvironmentTest, ValuesThatNobodyCanUseAreRefusedWithWhatMayBe) {
  for (const char* const entry :
       {"OFFLOADD_GPU_PEERS=nonsense", "OFFLOADD_JOIN_TIMEOUT=abc", "OFFLOADD_READ_AHEAD=x",
        "OFFLOADD_LOCK_TIMEOUT=-1", "OFFLOADD_SCRUB=16MB", "OFFLOADD_DISABLE=false",
        "OFFLOADD_ISA=avx", "OFFLOADD_REPLAN_STEPS=nan", "OFFLOADD_BORN_ABOVE=much"}) {
    const absl::Status status = Check(entry);
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kBadValue) << entry;
    const std::string text(status.message()), given(entry);
    EXPECT_NE(text.find(given.substr(0, given.find('='))), std::string::npos) << text;
    EXPECT_NE(text.find("\"" + given.substr(given.find('=') + 1) + "\""), std::string::npos);
    EXPECT_NE(text.find("Set it to "), std::string::npos) << text;
  }
  EXPECT_NE(std::string(Check("OFFLOADD_GPU_PEERS=x").message()).find("off, always"),
            std::string::npos);
}

TEST(EnvironmentTest, ValuesThatMayBeAndEmptyOnesAreFine) {
  for (const char* const entry :
       {"OFFLOADD_GPU_PEERS=always", "OFFLOADD_JOIN_TIMEOUT=0.5", "OFFLOADD_SCRUB=16e6",
        "OFFLOADD_DISABLE=1", "OFFLOADD_DISABLE=", "OFFLOADD_JOB=any thing", "OFFLOADD_READ_AHEAD",
        "OFFLOADD_NVMEPATH=/nvme0"})
    EXPECT_TRUE(Check(entry).ok()) << entry;
}

TEST(EnvironmentTest, WhatNobodyReadsIsToldWithTheNearestThatSomebodyDoes) {
  const std::vector<std::string> told = UnknownVariables(
      std::vector<std::string>{"OFFLOAD_RAM=8GiB", "OFFLOADD_SANDBOXES=off", "OFFLOADD_RAM=8GiB",
                               "OFFLOAD_TO_S3=1", "OMP_NUM_THREADS=1"});
  ASSERT_EQ(told.size(), 2);
  EXPECT_EQ(told[0],
            "the environment variable OFFLOAD_RAM means nothing here. Did you mean OFFLOADD_RAM?");
  EXPECT_NE(told[1].find("OFFLOADD_SANDBOX?"), std::string::npos) << told[1];
}

}  // namespace
}  // namespace offload
