// tests/node_daemon.h
//
// A daemon that serves everybody on this machine, and variables of the environment that it is found
// by.
//
// Thread safety: one thread.
#pragma once

#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace offload {

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

  std::string socket_path() const { return directory_ + "/offloadd.sock"; }
  void Signal() const { kill(pid_, SIGTERM); }
  // Sends SIGTERM and waits for the end: the exit status, or -1 for a signal.
  int Terminate() {
    kill(pid_, SIGTERM);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  std::string directory_;
  pid_t pid_ = -1;
  std::unique_ptr<ScopedVariable> socket_;
};

}  // namespace offload
