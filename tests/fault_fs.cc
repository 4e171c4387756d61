// A FUSE file system over a folder whose n-th read, write or fsync fails or is short, for tests of
// the real I/O engines.
//
//   fault_fs FOLDER MOUNT_POINT
//
// Says "ready" when it is mounted, then obeys lines on standard input and answers each with one
// line: how many faults were met since the line before it.
//
//   KIND NTH ERRNO TIMES   KIND is read, write or fsync. The NTH such call from now on (from 1)
//   fails
//                          with ERRNO, and so do the TIMES - 1 after it; -1: all later ones. ERRNO
//                          0: a read or write of half as much. One fault at a time.
//   clear                  no fault any more
//
// The end of standard input unmounts. Root only: no setuid helper is asked.

#define FUSE_USE_VERSION 31

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

namespace {

std::string folder, mount_point;
fuse* session = nullptr;

std::string PathOf(const char* path) { return folder + path; }
int Result(int64_t outcome) { return outcome < 0 ? -errno : static_cast<int>(outcome); }
int FileOf(const fuse_file_info* info) { return static_cast<int>(info->fh); }

// The one fault that is armed.
class Plan {
 public:
  void Arm(const std::string& kind, int64_t nth, int error_number, int64_t times) {
    const std::lock_guard lock(mutex_);
    kind_ = kind;
    first_ = nth;
    last_ = times < 0 ? INT64_MAX : nth + times - 1;
    error_number_ = error_number;
    passed_ = 0;
  }
  // Whether this call meets the fault, and which.
  bool Meets(const char* kind, int* error_number) {
    const std::lock_guard lock(mutex_);
    if (kind_ != kind) return false;
    ++passed_;
    if (passed_ < first_ || passed_ > last_) return false;
    *error_number = error_number_;
    ++met_;
    return true;
  }
  int64_t TakeMet() {
    const std::lock_guard lock(mutex_);
    return std::exchange(met_, int64_t{0});
  }

 private:
  std::mutex mutex_;
  std::string kind_;
  int64_t first_ = 0, last_ = 0, passed_ = 0, met_ = 0;
  int error_number_ = 0;
} plan;

int GetAttr(const char* path, struct stat* out, fuse_file_info*) {
  return Result(lstat(PathOf(path).c_str(), out));
}
int MakeFolder(const char* path, mode_t mode) { return Result(mkdir(PathOf(path).c_str(), mode)); }
int RemoveFolder(const char* path) { return Result(rmdir(PathOf(path).c_str())); }
int Unlink(const char* path) { return Result(unlink(PathOf(path).c_str())); }
int Rename(const char* from, const char* to, unsigned flags) {
  return Result(renameat2(AT_FDCWD, PathOf(from).c_str(), AT_FDCWD, PathOf(to).c_str(), flags));
}
int ChangeMode(const char* path, mode_t mode, fuse_file_info*) {
  return Result(chmod(PathOf(path).c_str(), mode));
}
int Truncate(const char* path, off_t size, fuse_file_info*) {
  return Result(truncate(PathOf(path).c_str(), size));
}
int FileSystem(const char* path, struct statvfs* out) {
  return Result(statvfs(PathOf(path).c_str(), out));
}

int OpenWith(const char* path, int flags, mode_t mode, fuse_file_info* info) {
  const int file = open(PathOf(path).c_str(), (flags & ~O_DIRECT) | O_CLOEXEC, mode);
  if (file < 0) return -errno;
  info->fh = static_cast<uint64_t>(file);
  return 0;
}
int Open(const char* path, fuse_file_info* info) { return OpenWith(path, info->flags, 0, info); }
int Create(const char* path, mode_t mode, fuse_file_info* info) {
  return OpenWith(path, info->flags | O_CREAT, mode, info);
}
int Release(const char*, fuse_file_info* info) { return Result(close(FileOf(info))); }

int Read(const char*, char* bytes, size_t size, off_t offset, fuse_file_info* info) {
  int error_number;
  if (plan.Meets("read", &error_number)) {
    if (error_number != 0) return -error_number;
    size /= 2;
  }
  return Result(pread(FileOf(info), bytes, size, offset));
}
int Write(const char*, const char* bytes, size_t size, off_t offset, fuse_file_info* info) {
  int error_number;
  if (plan.Meets("write", &error_number)) {
    if (error_number != 0) return -error_number;
    size /= 2;
  }
  return Result(pwrite(FileOf(info), bytes, size, offset));
}
// The folder's own drive is not the one under test: nothing is flushed there.
int Fsync(const char*, int, fuse_file_info*) {
  int error_number;
  return plan.Meets("fsync", &error_number) ? -error_number : 0;
}
int FsyncFolder(const char*, int, fuse_file_info*) { return 0; }
int Allocate(const char*, int mode, off_t offset, off_t size, fuse_file_info* info) {
  return Result(fallocate(FileOf(info), mode, offset, size));
}

int ReadFolder(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*,
               fuse_readdir_flags) {
  DIR* const entries = opendir(PathOf(path).c_str());
  if (entries == nullptr) return -errno;
  while (const dirent* const entry = readdir(entries))
    fill(buffer, entry->d_name, nullptr, 0, static_cast<fuse_fill_dir_flags>(0));
  closedir(entries);
  return 0;
}

// Nothing is cached: every call of the engine arrives here.
void* Init(fuse_conn_info*, fuse_config* config) {
  config->kernel_cache = 0;
  config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
  config->use_ino = 1;
  std::cout << "ready" << std::endl;
  return nullptr;
}

void Obey() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string kind;
    int64_t nth = 0, times = 0;
    int error_number = 0;
    words >> kind >> nth >> error_number >> times;
    const int64_t met = plan.TakeMet();
    plan.Arm(kind == "clear" ? "" : kind, nth, error_number, times);
    std::cout << met << std::endl;
  }
  fuse_exit(session);
  umount2(mount_point.c_str(), MNT_DETACH);  // wakes the loop
}

fuse_operations Operations() {
  fuse_operations operations = {};
  operations.getattr = GetAttr;
  operations.mkdir = MakeFolder;
  operations.rmdir = RemoveFolder;
  operations.unlink = Unlink;
  operations.rename = Rename;
  operations.chmod = ChangeMode;
  operations.truncate = Truncate;
  operations.statfs = FileSystem;
  operations.open = Open;
  operations.create = Create;
  operations.release = Release;
  operations.read = Read;
  operations.write = Write;
  operations.fsync = Fsync;
  operations.fsyncdir = FsyncFolder;
  operations.fallocate = Allocate;
  operations.readdir = ReadFolder;
  operations.init = Init;
  return operations;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: fault_fs FOLDER MOUNT_POINT\n";
    return 2;
  }
  // Who ends this process unkindly would leave a dead mount: the end of standard input does it.
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) signal(number, SIG_IGN);
  folder = argv[1];
  mount_point = argv[2];
  umask(0);
  fuse_args arguments = FUSE_ARGS_INIT(0, nullptr);
  fuse_opt_add_arg(&arguments, argv[0]);
  const fuse_operations operations = Operations();
  session = fuse_new(&arguments, &operations, sizeof(operations), nullptr);
  if (session == nullptr || fuse_mount(session, mount_point.c_str()) != 0) return 1;
  std::thread commands(Obey);
  const int outcome = fuse_loop(session);
  commands.join();
  fuse_unmount(session);
  fuse_destroy(session);
  fuse_opt_free_args(&arguments);
  return outcome < 0 ? 1 : 0;
}
