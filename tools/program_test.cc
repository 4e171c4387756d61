#include "tools/program.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"

namespace offload::tools {
namespace {

class ProgramTest : public ::testing::Test {
 protected:
  ProgramTest() {
    const char* const parent = std::getenv("TEST_TMPDIR");
    std::string name = std::string(parent != nullptr ? parent : ".") + "/program-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~ProgramTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& bytes, int mode = 0755) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    ::chmod(path.c_str(), mode);
    return path;
  }

  std::filesystem::path folder_;
};

TEST(LoaderTraceTest, LibrariesHavePathsAndMissingOnesNone) {
  const auto libraries = ParseLoaderTrace(
      "\tlinux-vdso.so.1 (0x00007ffd)\n"
      "\tlibtorch_cpu.so => /opt/my torch/lib/libtorch_cpu.so (0x00007f01)\n"
      "\tlibmine.so => not found\n"
      "\t/lib64/ld-linux-x86-64.so.2 (0x00007f02)\n");
  ASSERT_EQ(libraries.size(), 2u);
  EXPECT_EQ(libraries[0].name, "libtorch_cpu.so");
  EXPECT_EQ(libraries[0].path, "/opt/my torch/lib/libtorch_cpu.so");
  EXPECT_EQ(libraries[1].name, "libmine.so");
  EXPECT_EQ(libraries[1].path, "");
}

TEST_F(ProgramTest, KindsAreToldByHowAFileBegins) {
  EXPECT_EQ(KindOf("/proc/self/exe")->kind, ProgramKind::kDynamic);
  EXPECT_TRUE(std::filesystem::exists(KindOf("/proc/self/exe")->interpreter));
  const auto script = KindOf(Write("script", "#!/usr/bin/env python3 -u \nprint()\n"));
  EXPECT_EQ(script->kind, ProgramKind::kScript);
  EXPECT_EQ(script->interpreter, "/usr/bin/env python3 -u");
  EXPECT_EQ(KindOf(Write("text", "just text"))->kind, ProgramKind::kOther);
  EXPECT_EQ(KindOf(Write("empty", ""))->kind, ProgramKind::kOther);
  EXPECT_EQ(KindOf(Write("cut", "\177ELF\2\1\1"))->kind, ProgramKind::kOther);
  EXPECT_EQ(ErrorIdOf(KindOf(folder_ / "missing").status()), ErrorId::kBadValue);
}

// Its headers begin, and the rest is not there.
TEST_F(ProgramTest, AnElfFileThatIsCutNamesNoLoader) {
  std::ifstream self("/proc/self/exe", std::ios::binary);
  std::string begin(64, '\0');
  self.read(begin.data(), static_cast<std::streamsize>(begin.size()));
  EXPECT_EQ(KindOf(Write("cut", begin))->kind, ProgramKind::kStatic);
}

TEST_F(ProgramTest, ProgramsAreFoundAsAShellFindsThem) {
  const std::string trainer = Write("bin/trainer", "#!/bin/sh\n");
  const std::string path = "/nowhere:" + (folder_ / "bin").string();
  EXPECT_EQ(*FindProgram("trainer", path), trainer);
  EXPECT_EQ(*FindProgram(trainer, ""), trainer);
  Write("bin/notes", "text", 0644);
  EXPECT_EQ(ErrorIdOf(FindProgram("notes", path).status()), ErrorId::kBadValue);
  EXPECT_EQ(ErrorIdOf(FindProgram((folder_ / "bin").string(), path).status()), ErrorId::kBadValue);
}

TEST_F(ProgramTest, TheReleaseOfLibtorchIsWhatItsFilesSay) {
  const std::string wheel = Write("wheel/lib/libtorch_cpu.so", "");
  EXPECT_EQ(TorchRelease(wheel), "");
  Write("wheel/version.py", "from typing import Optional\n__version__ = '2.9.1+cu130'\n");
  EXPECT_EQ(TorchRelease(wheel), "2.9");
  Write("wheel/include/torch/headeronly/version.h",
        "#define TORCH_VERSION_MAJOR 2\n\n#define TORCH_VERSION_MINOR 10\n");
  EXPECT_EQ(TorchRelease(wheel), "2.10");
  const std::string archive = Write("libtorch/lib/libtorch_cpu.so", "");
  Write("libtorch/build-version", "2.11.0+cpu\n");
  EXPECT_EQ(TorchRelease(archive), "2.11");
  EXPECT_EQ(TorchRelease(folder_ / "missing.so"), "");
}

TEST_F(ProgramTest, ALauncherOfRanksLeadsToWhatServesThem) {
  const auto refusal = [&](const char* name) {
    const absl::Status status = CheckPreloadable(Write(name, "#!/usr/bin/python3\n"), "");
    EXPECT_EQ(ErrorIdOf(status), ErrorId::kUnsupportedModel) << status;
    return std::string(status.message());
  };
  EXPECT_NE(refusal("bin/torchrun").find("Use torchrun -m offloadd"), std::string::npos);
  EXPECT_NE(refusal("bin/mpirun").find("docs/ranks.md"), std::string::npos);
  EXPECT_EQ(refusal("bin/train.py").find("starts ranks"), std::string::npos);
}

// As pyenv has it: a script of the shell.
TEST_F(ProgramTest, APythonThatIsAScriptLeadsToThePackage) {
  const std::string shim = Write("shims/python3", "#!/usr/bin/env bash\nexec pyenv exec python3\n");
  const absl::Status status = CheckPreloadable(shim, "");
  EXPECT_EQ(ErrorIdOf(status), ErrorId::kUnsupportedModel) << status;
  EXPECT_NE(status.message().find("python -m offloadd"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace offload::tools
