// Runs a program in a process tree that may not use io_uring, as default container profiles have
// it: EPERM from its system calls. Older ones refuse others, too.
//
//   no_uring [--also statx|pidfd_open|memfd_create] PROGRAM [ARGUMENT…]

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>

namespace {

struct Call {
  std::string_view name;
  unsigned number;
};
constexpr Call kCalls[] = {
    {"statx", SYS_statx}, {"pidfd_open", SYS_pidfd_open}, {"memfd_create", SYS_memfd_create}};

const Call* FindCall(std::string_view name) {
  for (const Call& call : kCalls) {
    if (call.name == name) return &call;
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const bool refuses_more = argc > 2 && std::string_view(argv[1]) == "--also";
  const Call* const more = refuses_more ? FindCall(argv[2]) : nullptr;
  char** const program_arguments = argv + (refuses_more ? 3 : 1);
  if (*program_arguments == nullptr || (refuses_more && more == nullptr)) {
    fprintf(stderr, "usage: no_uring [--also SYSTEM-CALL] PROGRAM [ARGUMENT...]\n");
    return 2;
  }
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, more == nullptr ? SYS_io_uring_setup : more->number, 2,
               0),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, SYS_io_uring_setup, 0, 2),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, SYS_io_uring_register, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    perror("seccomp");
    return 125;
  }
  execvp(*program_arguments, program_arguments);
  perror(*program_arguments);
  return 125;
}
