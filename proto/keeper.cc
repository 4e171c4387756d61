#include "proto/keeper.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <initializer_list>

namespace offload::proto {
namespace {

void Tell(int socket, int number) {
  ssize_t sent = -1;
  do {
    sent = ::send(socket, &number, sizeof(number), MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
}

// False when the other end is gone.
bool Hear(int socket, void* bytes, size_t size) {
  ssize_t received = -1;
  do {
    received = ::recv(socket, bytes, size, MSG_WAITALL);
  } while (received < 0 && errno == EINTR);
  return received == static_cast<ssize_t>(size);
}

// It outlives the daemon, whatever a terminal or whoever ends daemons by their name sends it.
[[noreturn]] void Keep(pid_t daemon, int trainer) {
  for (const int signal : {SIGINT, SIGHUP, SIGTERM, SIGQUIT}) ::signal(signal, SIG_IGN);
  // What the daemon has (the lock of its directory, the terminal) is not held for it.
  ::dup2(trainer, STDIN_FILENO);
  ::closefrom(STDIN_FILENO + 1);
  Tell(STDIN_FILENO, daemon);
  char released = 0;
  Hear(STDIN_FILENO, &released, sizeof(released));
  int status = 0;
  while (::waitpid(daemon, &status, 0) < 0 && errno == EINTR) {
  }
  Tell(STDIN_FILENO, status);
  ::_exit(EXIT_SUCCESS);
}

}  // namespace

void LeaveToKeeper(int trainer) {
  const pid_t keeper = ::fork();
  if (keeper != 0) ::_exit(keeper > 0 ? EXIT_SUCCESS : EXIT_FAILURE);
  const pid_t daemon = ::fork();
  if (daemon > 0) Keep(daemon, trainer);
  if (daemon < 0) ::_exit(EXIT_FAILURE);
  ::close(trainer);
}

pid_t DaemonOfKeeper(int keeper) {
  int daemon = -1;
  return Hear(keeper, &daemon, sizeof(daemon)) ? daemon : -1;
}

void ReleaseNumber(int keeper) {
  ssize_t sent = -1;
  do {
    sent = ::send(keeper, "", 1, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
}

bool WaitStatusOfDaemon(int keeper, int timeout_ms, int& status) {
  pollfd told{.fd = keeper, .events = POLLIN};
  int count = -1;
  do {
    count = ::poll(&told, 1, timeout_ms);
  } while (count < 0 && errno == EINTR);
  return count > 0 && Hear(keeper, &status, sizeof(status));
}

}  // namespace offload::proto
