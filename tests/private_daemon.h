// tests/private_daemon.h
//
// The daemon that an engine has started for itself.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace offload {

// Where it is the only one. It is no child (base/detached_process.h); of the two processes with its
// arguments the other one waits for its end.
inline std::optional<pid_t> FindDaemon() {
  const auto read = [](pid_t pid, const char* name) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/" + name);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  };
  const std::string argument = std::string("--parent-pid") + '\0' + std::to_string(getpid()) + '\0';
  std::optional<pid_t> found;
  DIR* const folder = opendir("/proc");
  while (const dirent* entry = readdir(folder)) {
    const pid_t pid = atoi(entry->d_name);
    if (pid > 0 && read(pid, "cmdline").find(argument) != std::string::npos &&
        read(pid, "comm") != "offloadd-waits\n")
      found = pid;
  }
  closedir(folder);
  return found;
}

}  // namespace offload
