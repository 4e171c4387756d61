// Does to a daemon what no trainer does. Every attack ends by itself, and with exit code 0 when the
// daemon did what it promises to the attacker; that its neighbours are unharmed is for the caller
// to see (tests/hostile_test.cc, tools/torture).
//
//   hostile_client --socket PATH --pool DIR --attack NAME [--count N] [--seed N]

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "proto/grpc_status.h"
#include "proto/ring.h"
#include "proto/shm_abi.h"
#include "tests/raw_rank.h"

namespace offload::tests {
namespace {

namespace v1 = proto::v1;
using proto::SubmissionEntry;

struct Options {
  std::string socket, pool, attack;
  uint64_t count = 0;  // 0: the attack's own
  uint64_t seed = 1;
};

// What went wrong; empty: nothing.
using Outcome = std::string;

std::string JobName(const Options& options) { return absl::StrCat("hostile-", options.attack); }

// Opens again after the daemon has closed; the old session may still be drained.
absl::StatusOr<RawRank> Reopen(const Options& options) {
  return RawRank::Open(options.socket, JobName(options), options.pool);
}

SubmissionEntry RandomEntry(std::mt19937_64& random) {
  SubmissionEntry entry = RawRank::GoodEntry(random());
  const auto wild = [&]() -> uint64_t {
    const uint64_t shifted = random() >> (random() % 64);
    return random() % 2 == 0 ? shifted : ~shifted;
  };
  switch (random() % 8) {
    case 0:
      entry.operation = static_cast<proto::RingOperation>(wild());
      break;
    case 1:
      entry.tensor = static_cast<uint32_t>(wild());
      break;
    case 2:
      entry.plane = static_cast<proto::Plane>(wild());
      break;
    case 3:
      entry.element_offset = wild();
      break;
    case 4:
      entry.element_count = wild();
      break;
    case 5:
      entry.region_offset = wild();
      break;
    case 6:
      entry.reserved1 = wild();
      break;
    default:
      entry.digest = wild();
      break;
  }
  return entry;
}

// ---- The ring ----------------------------------------------------------------------------------

// Flips fields of all entries while the daemon takes them; between forms that are all good for a
// while, so that the session lives, then to wild ones. `count` stores of an entry.
Outcome FlipEntries(const Options& options) {
  std::mt19937_64 random(options.seed);
  const uint64_t wanted = options.count != 0 ? options.count : 1'000'000;
  uint64_t flips = 0, sessions = 0;
  while (flips < wanted) {
    absl::StatusOr<RawRank> rank = Reopen(options);
    if (!rank.ok()) return rank.status().ToString();
    ++sessions;
    std::atomic<bool> stop{false};
    std::thread submitter([&] {
      while (!stop.load()) {
        // No more at a time than a rank may have: it is the entries that are to be judged.
        const uint32_t head = rank->header()->submission_head.load();
        const uint32_t completed = rank->header()->completion_tail.load();
        if (head - completed <= proto::kInFlightMax / 2)
          rank->header()->submission_tail.store(head + proto::kInFlightMax / 2);
        rank->header()->completion_head.store(completed);
        rank->RingBell();
        std::this_thread::yield();
      }
    });
    const uint64_t calm = random() % (wanted / 4 + 1);
    for (uint64_t i = 0; flips < wanted; ++i, ++flips) {
      SubmissionEntry entry = i < calm ? RawRank::GoodEntry(i) : RandomEntry(random);
      entry.region_offset += i < calm ? (random() % 64) * 4096 : 0;
      proto::StoreOnce(&rank->entries()[random() % proto::kSubmissionEntries], entry);
      if (i % 512 == 0 && !rank->IsAlive()) break;
    }
    stop = true;
    submitter.join();
  }
  std::printf("%llu flips in %llu sessions\n", static_cast<unsigned long long>(flips),
              static_cast<unsigned long long>(sessions));
  return "";
}

// Any value in both cursors that the rank writes, and in the words that belong to the daemon.
Outcome WildCursors(const Options& options) {
  std::mt19937_64 random(options.seed);
  const uint64_t sessions = options.count != 0 ? options.count : 20;
  for (uint64_t i = 0; i < sessions; ++i) {
    absl::StatusOr<RawRank> rank = Reopen(options);
    if (!rank.ok()) return rank.status().ToString();
    proto::RegionHeader* header = rank->header();
    for (int j = 0; j < 1000 && rank->IsAlive(); ++j) {
      for (std::atomic<uint32_t>* word :
           {&header->submission_tail, &header->completion_head, &header->submission_head,
            &header->completion_tail, &header->daemon_sleeping, &header->schedule_position}) {
        if (random() % 3 == 0) word->store(static_cast<uint32_t>(random()));
      }
      rank->RingBell();
    }
  }
  return "";
}

// Every forged entry ends its session and none is answered.
Outcome ForgedEntries(const Options& options) {
  std::mt19937_64 random(options.seed);
  const uint64_t wanted = options.count != 0 ? options.count : 40;
  for (uint64_t i = 0; i < wanted; ++i) {
    absl::StatusOr<RawRank> rank = Reopen(options);
    if (!rank.ok()) return rank.status().ToString();
    SubmissionEntry entry = RawRank::GoodEntry(7);
    entry.tensor = 1 + static_cast<uint32_t>(random() % 0xffffffffull);  // the job has tensor 0
    proto::StoreOnce(&rank->entries()[0], entry);
    rank->header()->submission_tail.store(1);
    rank->RingBell();
    pollfd watched{.fd = rank->socket(), .events = POLLIN};
    if (poll(&watched, 1, 30'000) != 1) return "a forged entry did not end its session";
    if (rank->header()->completion_tail.load() != 0) return "a forged entry was answered";
  }
  return "";
}

// Step commands of bytes that are nearly right, or random: each is answered or ends its session.
Outcome WildCommands(const Options& options) {
  std::mt19937_64 random(options.seed);
  v1::StepRequest request;
  request.set_step(1);
  *request.add_groups() = RawRank::PlainSgd();
  request.set_tensor_count(1);
  request.add_tensors(0);
  request.add_group_of(0);
  request.add_update_count(1);
  request.add_gradient_scale(1);
  const std::string good = request.SerializeAsString();
  const uint64_t wanted = options.count != 0 ? options.count : 400;
  absl::StatusOr<RawRank> rank = Reopen(options);
  uint32_t submitted = 0;  // by this session
  for (uint64_t i = 0; i < wanted; ++i) {
    if (!rank.ok()) return rank.status().ToString();
    std::string command = good;
    if (i % 4 == 0) command.resize(1 + random() % proto::kStepCommandBytes);
    for (uint64_t flips = 1 + random() % 4; flips > 0; --flips)
      command[random() % command.size()] = static_cast<char>(random());
    std::memcpy(rank->region().data() + proto::kStepCommandOffset, command.data(), command.size());
    SubmissionEntry entry{};
    entry.tag = i;
    entry.operation = i % 2 == 0 ? proto::RingOperation::kStep : proto::RingOperation::kBeginStep;
    entry.element_count = command.size();
    proto::StoreOnce(&rank->entries()[submitted % proto::kSubmissionEntries], entry);
    rank->header()->submission_tail.store(++submitted);
    rank->RingBell();
    pollfd watched{.fd = rank->socket(), .events = POLLIN};
    int waited = 0;
    while (rank->header()->completion_tail.load() != submitted && poll(&watched, 1, 1) == 0) {
      if (++waited > 30'000) return "a wild command was neither answered nor ended its session";
    }
    rank->header()->completion_head.store(rank->header()->completion_tail.load());
    if (watched.revents == 0) continue;
    rank = absl::UnavailableError("the session has ended");  // and the rank lets go of it
    rank = Reopen(options);
    submitted = 0;
  }
  return "";
}

// Submits as fast as it can and never reads a completion, then stays.
Outcome NeverDrain(const Options& options) {
  absl::StatusOr<RawRank> rank = Reopen(options);
  if (!rank.ok()) return rank.status().ToString();
  proto::SubmissionProducer ring(rank->entries(), &rank->header()->submission_tail,
                                 &rank->header()->submission_head);
  const uint64_t wanted = options.count != 0 ? options.count : 200'000;
  for (uint64_t i = 0; i < wanted && rank->IsAlive(); ++i) {
    if (ring.Room().value_or(0) > 0) {
      SubmissionEntry entry{};
      entry.tag = i;
      ring.Push(entry);
      ring.Publish();
    }
    rank->RingBell();
  }
  if (rank->header()->completion_tail.load() > proto::kCompletionEntries)
    return "completions were written over others";
  return "";
}

// ---- Memory ------------------------------------------------------------------------------------

Outcome MistreatMemory(const Options& options) {
  absl::StatusOr<RawRank> rank = RawRank::Greet(options.socket);
  if (!rank.ok()) return rank.status().ToString();
  absl::Status status = rank->OpenJob(JobName(options), options.pool);
  if (!status.ok()) return status.ToString();
  // The region is not sealed against this before it is mapped.
  fallocate(rank->region_fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 20);
  status = rank->Map();
  if (status.ok()) status = rank->Seal();
  if (!status.ok()) return status.ToString();
  std::map<std::string, bool> refused;
  for (const auto& [name, fd, map] : {std::tuple{"slab", rank->slab_fd(), &rank->slab()},
                                      std::tuple{"region", rank->region_fd(), &rank->region()}}) {
    const std::string who = name;
    refused[who + " shrinks"] = ftruncate(fd, 4096) != 0;
    refused[who + " grows"] = ftruncate(fd, 1ll << 40) != 0;
    refused[who + " is punched"] =
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) != 0;
    refused[who + " is written"] = pwrite(fd, "x", 1, 0) != 1;
    refused[who + " is mapped writable"] =
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED;
    refused[who + " loses its seals"] = fcntl(fd, F_ADD_SEALS, 0) != 0;
    const std::string path = absl::StrCat("/proc/self/fd/", fd);
    const int again = open(path.c_str(), O_RDWR | O_CLOEXEC);
    refused[who + " is mapped writable through /proc"] =
        again < 0 ||
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED;
    refused[who + " loses pages"] = madvise(map->data(), 4096, MADV_REMOVE) != 0;
  }
  refused["the slab becomes writable"] =
      mprotect(rank->slab().data(), 4096, PROT_READ | PROT_WRITE) != 0;
  for (const auto& [what, is_refused] : refused) {
    if (!is_refused) return what;
  }
  return "";
}

// Looks for the neighbour's bytes (words of the count given) in all that it can read.
Outcome LookForCanary(const Options& options) {
  absl::StatusOr<RawRank> rank = Reopen(options);
  if (!rank.ok()) return rank.status().ToString();
  const uint64_t canary = options.count;
  // Pages that the plan gives no meaning are asked for, too.
  const int slab_fd = rank->slab_fd();
  std::vector<uint64_t> page(512);
  for (const int fd : {slab_fd, rank->region_fd()}) {
    for (off_t offset = 0; pread(fd, page.data(), 4096, offset) == 4096; offset += 4096) {
      for (const uint64_t word : page) {
        if (word == canary) return absl::StrCat("the neighbour's bytes at ", offset);
      }
    }
  }
  return "";
}

// ---- Sockets -----------------------------------------------------------------------------------

UniqueFd ConnectTo(const std::string& path, int type) {
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    fd.reset();
  return fd;
}

// True when the daemon has closed within the time; what it said before is read.
bool IsClosed(int fd, int timeout_ms) {
  char bytes[2048];
  for (;;) {
    pollfd watched{.fd = fd, .events = POLLIN};
    if (poll(&watched, 1, timeout_ms) != 1) return false;
    if (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) <= 0) return true;
  }
}

// Messages of any size and content, some with descriptors; ended by the daemon each time.
Outcome GarbageHandshake(const Options& options) {
  std::mt19937_64 random(options.seed);
  const uint64_t wanted = options.count != 0 ? options.count : 300;
  for (uint64_t i = 0; i < wanted; ++i) {
    const UniqueFd fd = ConnectTo(options.socket, SOCK_SEQPACKET);
    if (!fd.valid()) return "the daemon does not listen any more";
    std::vector<char> bytes(1 + (random() >> (48 + random() % 12)));
    for (char& byte : bytes) byte = static_cast<char>(random());
    const proto::MessageHeader header{.type = static_cast<proto::MessageType>(random() % 9)};
    if (random() % 2 == 0)
      std::memcpy(bytes.data(), &header, std::min(sizeof(header), bytes.size()));
    iovec part{bytes.data(), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (random() % 4 == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* passed = CMSG_FIRSTHDR(&message);
      passed->cmsg_level = SOL_SOCKET;
      passed->cmsg_type = SCM_RIGHTS;
      passed->cmsg_len = CMSG_LEN(sizeof(int));
      const int own = fd.get();
      std::memcpy(CMSG_DATA(passed), &own, sizeof(own));
    }
    sendmsg(fd.get(), &message, MSG_NOSIGNAL);
    shutdown(fd.get(), SHUT_WR);
    if (!IsClosed(fd.get(), 30'000)) return "garbage did not end the session";
  }
  return "";
}

// Connects and says nothing: closed when the time is over.
Outcome SayNothing(const Options& options) {
  const UniqueFd fd = ConnectTo(options.socket, SOCK_SEQPACKET);
  return IsClosed(fd.get(), 60'000) ? "" : "the daemon waits for ever";
}

// Connections to both sockets, all at once, and held.
Outcome ManyConnections(const Options& options) {
  const uint64_t wanted = options.count != 0 ? options.count : 1000;
  const std::string control = options.socket.substr(0, options.socket.rfind('/')) + "/control.sock";
  std::vector<UniqueFd> held;
  for (uint64_t i = 0; i < wanted; ++i) {
    held.push_back(ConnectTo(options.socket, SOCK_SEQPACKET));
    held.push_back(ConnectTo(control, SOCK_STREAM));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  return "";
}

// ---- gRPC --------------------------------------------------------------------------------------

grpc::Status Ask(v1::Control::Stub& stub, const proto::Token& token) {
  grpc::ClientContext context;
  proto::AddToken(context, token);
  v1::ExplainFailureRequest request;
  v1::ExplainFailureReply reply;
  return stub.ExplainFailure(&context, request, &reply);
}

// Random tokens, and that of a session which has ended.
Outcome ForgedTokens(const Options& options) {
  std::mt19937_64 random(options.seed);
  const uint64_t wanted = options.count != 0 ? options.count : 2000;
  absl::StatusOr<RawRank> rank = Reopen(options);
  if (!rank.ok()) return rank.status().ToString();
  if (!Ask(rank->stub(), rank->token()).ok()) return "an honest token is refused";
  for (uint64_t i = 0; i < wanted; ++i) {
    proto::Token token = rank->token();
    token[random() % token.size()] ^= static_cast<uint8_t>(1u << (random() % 8));
    if (Ask(rank->stub(), token).ok()) return "a forged token was answered";
  }
  const proto::Token old = rank->token();
  absl::StatusOr<RawRank> second = RawRank::Greet(options.socket);
  if (!second.ok()) return second.status().ToString();
  shutdown(rank->socket(), SHUT_RDWR);
  for (int i = 0; Ask(second->stub(), old).ok(); ++i) {
    if (i > 1000) return "the token of an ended session is answered";
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return "";
}

// Messages that are too large, streams that are begun and never ended, more calls than allowed.
Outcome MisuseCalls(const Options& options) {
  absl::StatusOr<RawRank> rank = Reopen(options);
  if (!rank.ok()) return rank.status().ToString();
  {
    grpc::ClientContext context;
    proto::AddToken(context, rank->token());
    v1::PublishRequest request;
    request.set_trainer_state(std::string(16 << 20, 'x'));
    v1::Empty reply;
    if (rank->stub().Publish(&context, request, &reply).ok()) return "16 MiB were accepted";
  }
  struct Stream {
    grpc::ClientContext context;
    v1::Empty reply;
    std::unique_ptr<grpc::ClientWriter<v1::SetScheduleRequest>> writer;
  };
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 200; ++i) {
    auto stream = std::make_unique<Stream>();
    proto::AddToken(stream->context, rank->token());
    stream->writer = rank->stub().SetSchedule(&stream->context, &stream->reply);
    stream->writer->Write({});
    streams.push_back(std::move(stream));
  }
  // All but those that may be open at a time are refused while these stay open.
  bool refused = false;
  for (int i = 0; i < 1000 && !refused; ++i) {
    refused = !Ask(rank->stub(), rank->token()).ok();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (auto& stream : streams) {
    stream->context.TryCancel();
    stream->writer->Finish();
  }
  if (!refused) return "200 calls were under way at a time";
  // A stream without end is refused when it takes too much memory.
  grpc::ClientContext context;
  proto::AddToken(context, rank->token());
  v1::Empty reply;
  auto writer = rank->stub().SetSchedule(&context, &reply);
  v1::SetScheduleRequest request;
  for (int i = 0; i < 500'000; ++i) request.add_tensors(0);
  int messages = 0;
  while (messages < 10'000 && writer->Write(request)) ++messages;
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  return status.ok() ? "an endless stream was accepted" : "";
}

// Stops in the middle of its work, as a debugger does; goes on when it is told to.
Outcome Stop(const Options& options) {
  absl::StatusOr<RawRank> rank = Reopen(options);
  if (!rank.ok()) return rank.status().ToString();
  for (uint32_t i = 0; i < proto::kSubmissionEntries / 2; ++i)
    proto::StoreOnce(&rank->entries()[i], RawRank::GoodEntry(i));
  rank->header()->submission_tail.store(proto::kSubmissionEntries / 2);
  rank->RingBell();
  raise(SIGSTOP);
  return "";
}

// What an honest rank does, with the rights of whoever runs this; and what the tools do.
Outcome JustOpen(const Options& options) {
  absl::StatusOr<RawRank> rank = Reopen(options);
  return rank.ok() ? "" : rank.status().ToString();
}
Outcome ListJobs(const Options& options) {
  absl::StatusOr<RawRank> rank = RawRank::Greet(options.socket);
  if (!rank.ok()) return rank.status().ToString();
  grpc::ClientContext context;
  v1::ListJobsRequest request;
  v1::ListJobsReply reply;
  const grpc::Status status = rank->stub().ListJobs(&context, request, &reply);
  return status.ok() ? "" : status.error_message();
}

const std::map<std::string, Outcome (*)(const Options&), std::less<>> kAttacks = {
    {"open", JustOpen},         {"list", ListJobs},
    {"calls", MisuseCalls},     {"canary", LookForCanary},
    {"commands", WildCommands}, {"connections", ManyConnections},
    {"cursors", WildCursors},   {"flips", FlipEntries},
    {"forged", ForgedEntries},  {"garbage", GarbageHandshake},
    {"memory", MistreatMemory}, {"nodrain", NeverDrain},
    {"silent", SayNothing},     {"stop", Stop},
    {"tokens", ForgedTokens},
};

int Main(int argc, char** argv) {
  CLI::App app("Does to a daemon what no trainer does");
  Options options;
  app.add_option("--socket", options.socket)->required();
  app.add_option("--pool", options.pool)->required();
  app.add_option("--attack", options.attack)->required();
  app.add_option("--count", options.count);
  app.add_option("--seed", options.seed);
  CLI11_PARSE(app, argc, argv);
  const auto attack = kAttacks.find(options.attack);
  if (attack == kAttacks.end()) {
    std::fprintf(stderr, "no attack %s\n", options.attack.c_str());
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  const Outcome outcome = attack->second(options);
  if (outcome.empty()) return 0;
  std::fprintf(stderr, "hostile_client %s: %s\n", options.attack.c_str(), outcome.c_str());
  return 1;
}

}  // namespace
}  // namespace offload::tests

int main(int argc, char** argv) { return offload::tests::Main(argc, argv); }
