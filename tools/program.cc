#include "tools/program.h"

#include <elf.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"

extern char** environ;

namespace offload::tools {
namespace {

constexpr char kTorchLibrary[] = "libtorch_cpu.so";
constexpr char kUsePython[] = "Use python -m offloadd script.py (docs/python.md)";

absl::Status NotServed(const std::string& what, const std::string& fix) {
  return MakeError(ErrorId::kUnsupportedModel, what, fix);
}

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// What a program that only prints prints. Nothing when it cannot be run or fails.
std::string OutputOf(std::vector<std::string> words, const std::string& variable) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "";
  UniqueFd reading(ends[0]), writing(ends[1]);
  std::vector<char*> arguments, environment = {const_cast<char*>(variable.c_str())};
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  for (char** each = environ; *each != nullptr; ++each) {
    if (!absl::StartsWith(*each, "LD_PRELOAD=")) environment.push_back(*each);
  }
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, writing.get(), STDOUT_FILENO);
  pid_t pid = -1;
  const int error =
      ::posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environment.data());
  ::posix_spawn_file_actions_destroy(&actions);
  writing.reset();
  if (error != 0) return "";
  std::string output;
  char block[4096];
  for (;;) {
    const ssize_t count = ::read(reading.get(), block, sizeof(block));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    output.append(block, count);
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
  return status == 0 ? output : "";
}

// The part of a file that a program header names; empty when it is outside.
std::string TextAt(std::ifstream& file, uint64_t offset, uint64_t size_bytes) {
  std::string text(std::min<uint64_t>(size_bytes, 4096), '\0');
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  return file.gcount() == static_cast<std::streamsize>(text.size()) ? text.c_str() : std::string();
}

// The loader that an ELF file names, empty for one that names none.
std::string LoaderOf(std::ifstream& file, const Elf64_Ehdr& header) {
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr part;
    file.seekg(static_cast<std::streamoff>(header.e_phoff + i * sizeof(part)));
    if (!file.read(reinterpret_cast<char*>(&part), sizeof(part))) return "";
    if (part.p_type == PT_INTERP) return TextAt(file, part.p_offset, part.p_filesz);
  }
  return "";
}

const LoadedLibrary* FindLibrary(const std::vector<LoadedLibrary>& libraries,
                                 std::string_view prefix) {
  for (const LoadedLibrary& library : libraries) {
    if (library.name.starts_with(prefix)) return &library;
  }
  return nullptr;
}

// Programs that start the ranks, and are no trainers themselves.
absl::Status CheckIsNoLauncher(const std::string& program) {
  static constexpr std::string_view kPythons[] = {"torchrun", "accelerate", "deepspeed"};
  static constexpr std::string_view kOthers[] = {"mpirun",  "mpiexec", "mpiexec.hydra",
                                                 "orterun", "prterun", "srun"};
  const std::string name = BaseName(program);
  const std::string starts = absl::StrCat(name, " starts ranks, and offloadctl run serves one");
  if (std::ranges::find(kPythons, name) != std::end(kPythons))
    return NotServed(starts, "Use torchrun -m offloadd script.py (docs/python_reference.md)");
  if (std::ranges::find(kOthers, name) != std::end(kOthers))
    return NotServed(starts, absl::StrCat("Attach the model in the program (docs/ranks.md), which ",
                                          name, " then starts without offloadctl run"));
  return absl::OkStatus();
}

absl::Status CheckKind(const std::string& program, const ProgramKind& kind) {
  if (kind.kind == ProgramKind::kScript) {
    // pyenv's python is a script of the shell.
    const bool is_python = absl::StrContains(kind.interpreter, "python") ||
                           absl::StartsWith(BaseName(program), "python");
    return NotServed(
        absl::StrCat(program, " is a script for ", kind.interpreter),
        is_python ? kUsePython : "Put offloadctl run into it, in front of the trainer itself");
  }
  if (absl::StartsWith(BaseName(program), "python"))
    return NotServed(absl::StrCat(program, " is a Python interpreter"), kUsePython);
  if (kind.kind == ProgramKind::kStatic) {
    return NotServed(absl::StrCat(program,
                                  " is linked statically: nothing can be put in front of "
                                  "its libtorch"),
                     "Link libtorch dynamically, or attach the model in the program "
                     "(docs/attach.md)");
  }
  if (kind.kind != ProgramKind::kDynamic)
    return NotServed(absl::StrCat(program, " is no program for this machine"),
                     "Name the trainer's program");
  struct stat status = {};
  if (::stat(program.c_str(), &status) == 0 && (status.st_mode & (S_ISUID | S_ISGID)) != 0)
    return NotServed(absl::StrCat(program, " runs as another user: the loader preloads nothing"),
                     "Take its set-user-ID bit away");
  return absl::OkStatus();
}

absl::Status CheckLibraries(const std::string& program,
                            const std::vector<LoadedLibrary>& libraries) {
  for (const LoadedLibrary& library : libraries) {
    if (library.path.empty())
      return NotServed(absl::StrCat(program, " needs ", library.name, ", which is not found"),
                       "Set LD_LIBRARY_PATH to its folder");
  }
  if (FindLibrary(libraries, "libpython") != nullptr)
    return NotServed(absl::StrCat(program, " is a Python interpreter"), kUsePython);
  if (FindLibrary(libraries, "liboffload.so") != nullptr)
    return NotServed(absl::StrCat(program, " is linked with liboffload.so"),
                     "Start it as it is: it attaches its model itself");
  if (FindLibrary(libraries, kTorchLibrary) == nullptr)
    return NotServed(absl::StrCat(program, " does not load ", kTorchLibrary,
                                  ": it is no libtorch trainer, or has libtorch linked in, or "
                                  "loads it later"),
                     "Link libtorch dynamically, or attach the model in the program "
                     "(docs/attach.md)");
  return absl::OkStatus();
}

}  // namespace

std::vector<LoadedLibrary> ParseLoaderTrace(std::string_view trace) {
  std::vector<LoadedLibrary> libraries;
  for (absl::string_view line :
       absl::StrSplit(absl::string_view(trace.data(), trace.size()), '\n')) {
    line = absl::StripAsciiWhitespace(line);
    const size_t arrow = line.find(" => ");
    if (arrow == absl::string_view::npos) continue;  // the loader, the kernel's, a preloaded one
    absl::string_view path = line.substr(arrow + 4);
    const size_t address = path.rfind(" (0x");
    path = address == absl::string_view::npos ? absl::string_view() : path.substr(0, address);
    libraries.push_back({std::string(line.substr(0, arrow)), std::string(path)});
  }
  return libraries;
}

absl::StatusOr<ProgramKind> KindOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return MakeError(ErrorId::kBadValue, absl::StrCat(path, " cannot be read: ", ErrnoText(errno)));
  Elf64_Ehdr header = {};
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  const std::string begin(reinterpret_cast<const char*>(&header),
                          static_cast<size_t>(file.gcount()));
  if (begin.starts_with("#!")) {
    file.clear();
    file.seekg(2);
    std::string line;
    std::getline(file, line);
    return ProgramKind{ProgramKind::kScript, std::string(absl::StripAsciiWhitespace(line))};
  }
  if (begin.size() < sizeof(header) || !begin.starts_with(ELFMAG) ||
      header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_phentsize != sizeof(Elf64_Phdr))
    return ProgramKind{};
  const std::string loader = LoaderOf(file, header);
  return ProgramKind{loader.empty() ? ProgramKind::kStatic : ProgramKind::kDynamic, loader};
}

absl::StatusOr<std::string> FindProgram(const std::string& name, const std::string& path_variable) {
  const auto is_program = [](const std::string& path) {
    std::error_code error;
    return ::access(path.c_str(), X_OK) == 0 && std::filesystem::is_regular_file(path, error);
  };
  if (name.find('/') != std::string::npos) {
    if (is_program(name)) return name;
    return MakeError(ErrorId::kBadValue, absl::StrCat(name, " is no program"),
                     "Name one that this user may run");
  }
  for (const absl::string_view folder : absl::StrSplit(path_variable, ':')) {
    const std::string path = absl::StrCat(folder.empty() ? "." : folder, "/", name);
    if (is_program(path)) return path;
  }
  return MakeError(ErrorId::kBadValue, absl::StrCat("no program ", name, " is on PATH"),
                   "Name it with its folder, ./trainer");
}

std::string TorchRelease(const std::string& library) {
  std::error_code error;
  const auto real = std::filesystem::canonical(library, error);
  if (error) return "";
  const std::filesystem::path folder = real.parent_path().parent_path();
  const auto contents = [](const std::filesystem::path& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  std::smatch found;
  for (const char* name : {"include/torch/headeronly/version.h", "include/torch/version.h"}) {
    const std::string text = contents(folder / name);
    static const std::regex kNumbers("TORCH_VERSION_MAJOR (\\d+)[^]*TORCH_VERSION_MINOR (\\d+)");
    if (std::regex_search(text, found, kNumbers))
      return absl::StrCat(found.str(1), ".", found.str(2));
  }
  for (const char* name : {"version.py", "build-version"}) {
    const std::string text = contents(folder / name);
    static const std::regex kVersion("(?:^|__version__ = ')(\\d+\\.\\d+)\\.");
    if (std::regex_search(text, found, kVersion)) return found.str(1);
  }
  return "";
}

absl::Status CheckPreloadable(const std::string& program, const std::string& offload_library) {
  OFFLOAD_RETURN_IF_ERROR(CheckIsNoLauncher(program));
  OFFLOAD_ASSIGN_OR_RETURN(const ProgramKind kind, KindOf(program));
  OFFLOAD_RETURN_IF_ERROR(CheckKind(program, kind));
  const std::vector<LoadedLibrary> libraries =
      ParseLoaderTrace(OutputOf({program}, "LD_TRACE_LOADED_OBJECTS=1"));
  OFFLOAD_RETURN_IF_ERROR(CheckLibraries(program, libraries));
  const std::vector<LoadedLibrary> own =
      ParseLoaderTrace(OutputOf({kind.interpreter, offload_library}, "LD_TRACE_LOADED_OBJECTS=1"));
  const LoadedLibrary* const torch = FindLibrary(own, kTorchLibrary);
  if (torch == nullptr || torch->path.empty())
    return NotServed(absl::StrCat(offload_library, " does not find its ", kTorchLibrary),
                     "Install it again: tools/install --prefix DIR");
  const std::string ours = TorchRelease(torch->path),
                    theirs = TorchRelease(FindLibrary(libraries, kTorchLibrary)->path);
  // Where files do not say it, the library itself does, when it is loaded.
  if (ours == theirs || ours.empty() || theirs.empty()) return absl::OkStatus();
  return NotServed(
      absl::StrCat(program, " runs with libtorch ", theirs, ", offload was built with ", ours),
      "Build one of them with the other's libtorch (TORCH_DIR=DIR tools/install)");
}

}  // namespace offload::tools
