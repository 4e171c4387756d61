// A job at the real daemon, seen from outside while it trains: offloadctl top and report, the
// metrics socket, and the trace that OFFLOADD_TRACE asks for, each against what was really done.

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/error.h"
#include "base/unique_fd.h"
#include "client/backward.h"
#include "tests/node_daemon.h"
#include "tests/spine_fixture.h"

namespace offload {
namespace {

using Json = nlohmann::json;

std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class MonitoringTest : public SpineFixture {
 protected:
  static std::string socket_path() { return getenv("OFFLOADD_SOCKET"); }

  // What it prints, which the exit code says is an answer.
  std::string Ctl(const std::string& arguments) const {
    const std::string out = pool_ + "/out";
    const std::string command =
        absl::StrCat(getenv("OFFLOADCTL_BINARY"), " ", arguments, " >'", out, "'");
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return ReadAll(out);
  }
  Json CtlJson(const std::string& arguments) const {
    return Json::parse(Ctl(arguments + " --json"), nullptr, /*allow_exceptions=*/false);
  }

  // As curl --unix-socket does.
  static std::string Metrics() {
    const std::string path = std::filesystem::path(socket_path()).parent_path() / "metrics.sock";
    const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX};
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const std::string request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(request.size()));
    std::string answer;
    char piece[4096];
    for (ssize_t length; (length = recv(socket.get(), piece, sizeof(piece), 0)) > 0;)
      answer.append(piece, static_cast<size_t>(length));
    return answer;
  }
  static double Metric(const std::string& text, const std::string& sample) {
    for (const auto& line : absl::StrSplit(text, '\n')) {
      double value = 0;
      if (absl::StartsWith(line, sample + " ") &&
          absl::SimpleAtod(line.substr(sample.size() + 1), &value))
        return value;
    }
    ADD_FAILURE() << sample << " is not in\n" << text;
    return -1;
  }

  // Of all steps of a report.
  static double PhaseSeconds(const Json& report, const char* phase) {
    return report["figures"]["phase_seconds"][phase].get<double>() + 1e-6;
  }

  // Forward, backward (which uses everything again) and a step.
  static void TrainStep(Job& job) {
    job.Forward();
    client::SetBackward(true);
    job.Forward();
    job.Step();
  }
};

TEST_F(MonitoringTest, TopMetricsAndReportTellWhatAJobHasDone) {
  const NodeDaemon daemon({"--pool", pool_});
  Job job(pool_, "seen", {.dtype = Dtype::kBFloat16});
  job.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  for (int i = 0; i < 5; ++i) TrainStep(job);
  ASSERT_TRUE(job.session().WaitDurable().ok());

  const Json top = CtlJson(absl::StrCat("top --once --interval 0.01 --socket ", socket_path()));
  ASSERT_EQ(top["daemons"][0]["jobs"].size(), 1u) << top;
  const Json& seen = top["daemons"][0]["jobs"][0];
  EXPECT_EQ(seen["job"], "seen");
  EXPECT_EQ(seen["step"], 5);
  EXPECT_EQ(seen["durable_step"], 5);
  EXPECT_EQ(seen["ranks"][0]["pid"], getpid());
  const Json& last = seen["last_step"];
  EXPECT_EQ(last["last_step"], 5);
  EXPECT_GT(last["seconds"], 0);
  EXPECT_GT(last["bytes_written"], 0);
  for (const char* phase : {"forward", "backward", "step"})
    EXPECT_GT(last["phase_seconds"][phase], 0) << phase;
  double phases = 0, waited = 0;
  for (const auto& seconds : last["phase_seconds"]) phases += seconds.get<double>();
  for (const auto& phase : seen["figures"]["stall_seconds"]) {
    for (const auto& seconds : phase) waited += seconds.get<double>();
  }
  EXPECT_NEAR(phases, last["seconds"].get<double>(), 0.5 * last["seconds"].get<double>());
  EXPECT_LE(waited, job.session().wait_seconds() + 1e-6);
  EXPECT_GT(waited, 0);
  const std::string text = Ctl(absl::StrCat("top --once --interval 0.01 --socket ", socket_path()));
  EXPECT_TRUE(absl::StrContains(text, "seen")) << text;
  for (const auto& line : absl::StrSplit(text, '\n')) EXPECT_LE(line.size(), 80u) << line;

  const std::string metrics = Metrics();
  EXPECT_TRUE(absl::StartsWith(metrics, "HTTP/1.1 200 OK\r\n")) << metrics.substr(0, 200);
  EXPECT_EQ(Metric(metrics, "offloadd_step_total{job=\"seen\"}"), 5);
  EXPECT_EQ(Metric(metrics, "offloadd_committed_step{job=\"seen\"}"), 5);
  EXPECT_EQ(Metric(metrics, "offloadd_step_duration_seconds_count{job=\"seen\"}"), 5);
  EXPECT_EQ(Metric(metrics, "offloadd_clients"), 1);
  const proto::SlabHeader& header = job.session().slab_header();
  const std::string labels = absl::StrCat("{job=\"seen\",pool=\"", pool_, "\",file=\"store\",op=");
  EXPECT_EQ(Metric(metrics, absl::StrCat("offloadd_io_bytes_total", labels, "\"write\"}")),
            static_cast<double>(header.bytes_written.load()));

  const std::string page = pool_ + "/report.html";
  const Json report = CtlJson(absl::StrCat("report seen -o '", page, "' --socket ", socket_path()));
  ASSERT_EQ(report["steps"].size(), 5u) << report;
  uint64_t read = 0, written = 0;
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(report["steps"][i]["first_step"], i + 1);
    EXPECT_EQ(report["steps"][i]["last_step"], i + 1);
  }
  std::set<std::string> layers;
  for (const Json& layer : report["layers"]) {
    layers.insert(layer["layer"]);
    read += layer["bytes_read"].get<uint64_t>();
    written += layer["bytes_written"].get<uint64_t>();
  }
  EXPECT_EQ(layers.count("embedding"), 1u) << report["layers"];
  // Every tensor is used in both phases, one after the other.
  for (const char* phase : {"forward", "backward"}) {
    double in_use = 0;
    for (const Json& layer : report["layers"]) {
      const double seconds = layer["use_seconds"][phase];
      if (!absl::EndsWith(layer["layer"].get<std::string>(), "small tensors")) {
        EXPECT_GT(seconds, 0) << layer << phase;
      }
      in_use += seconds;
    }
    EXPECT_LE(in_use, PhaseSeconds(report, phase)) << phase;
  }
  // Beside extents the drive has tables and superblocks.
  EXPECT_LE(written, header.bytes_written.load());
  EXPECT_GT(written, header.bytes_written.load() / 2);
  EXPECT_LE(read, header.bytes_read.load());
  EXPECT_TRUE(absl::StrContains(ReadAll(page), "<svg"));

  // A page that is followed has the end of the job.
  const std::string followed = pool_ + "/followed.html";
  std::thread follower([&] {
    Ctl(absl::StrCat("report seen --follow --interval 0.05 -o '", followed, "' --socket ",
                     socket_path()));
  });
  TrainStep(job);
  while (!absl::StrContains(ReadAll(followed), "step 6: ")) usleep(10000);
  job.Close();
  follower.join();
  EXPECT_EQ(CtlJson("top --once --socket " + socket_path())["daemons"][0]["jobs"].size(), 0u);
}

// Whatever the drive gives: it is planned in bytes.
TEST_F(MonitoringTest, PlannedBytesAreThoseThatStepsMove) {
  const NodeDaemon daemon({"--pool", pool_});
  Job job(pool_, "planned", {.state_resident = 1});
  job.UseNodeDaemon();
  ASSERT_NO_FATAL_FAILURE(job.Open());
  const auto report = [&] {
    EXPECT_TRUE(job.session().WaitDurable().ok());
    return CtlJson("report planned --socket " + socket_path());
  };
  const auto written = [](const Json& report) {
    uint64_t bytes = 0;
    for (const Json& layer : report["layers"]) bytes += layer["bytes_written"].get<uint64_t>();
    return bytes;
  };
  job.SetSchedule();
  TrainStep(job);
  const Json before = report();
  EXPECT_TRUE(before["plan"]["step"]["order_known"]) << before["plan"];
  EXPECT_TRUE(before["plan"]["comparison"].is_null()) << before["plan"];
  constexpr uint64_t kMore = 12;
  for (uint64_t i = 0; i < kMore; ++i) TrainStep(job);
  const Json after = report();
  const Json& step = after["plan"]["step"];
  EXPECT_EQ(written(after) - written(before), kMore * (step["written_bytes"].get<uint64_t>() +
                                                       step["checkpoint_bytes"].get<uint64_t>()));
  const Json& comparison = after["plan"]["comparison"];
  ASSERT_TRUE(comparison.is_object()) << after["plan"];
  EXPECT_GE(comparison["steps"], 10);
  EXPECT_EQ(comparison["checkpoints"], comparison["steps"]);
  // Beside extents there are tables and superblocks.
  EXPECT_GE(comparison["written_bytes"]["ratio"], 1);
  EXPECT_LT(comparison["written_bytes"]["ratio"], 2);
  EXPECT_GE(comparison["read_bytes"]["measured"], step["state_read_bytes"]);
  EXPECT_LE(comparison["memory_bytes"]["ratio"], 1);
  EXPECT_GT(comparison["seconds"]["measured"], 0);
  const std::string text = Ctl("status --interval 0.01 --socket " + socket_path());
  EXPECT_TRUE(absl::StrContains(text, "steps from ")) << text;
  EXPECT_TRUE(absl::StrContains(text, "of it on a core")) << text;
  EXPECT_EQ(Metric(Metrics(), "offloadd_planned_step_bytes{job=\"planned\",op=\"write\"}"),
            step["written_bytes"].get<double>());
  job.Close();
}

// The events of a trace by their types and names, which are pairs where they have to be.
struct Trace {
  explicit Trace(const std::string& path) : json(Json::parse(ReadAll(path), nullptr, false)) {
    for (const Json& event : json["traceEvents"]) {
      const std::string type = event["ph"];
      ++names[type + " " + event["name"].get<std::string>()];
      if (type == "M") continue;
      if (last_ts.count(event["pid"]) == 0 || event["ts"] > last_ts[event["pid"]])
        last_ts[event["pid"]] = event["ts"];
      if (type == "b" || type == "e") open[event["id"]] += type == "b" ? 1 : -1;
      if (type == "s" || type == "f") arrows[event["id"]] += type == "s" ? 1 : -1;
    }
  }
  Json json;
  std::map<std::string, int> names;
  std::map<int64_t, double> last_ts;
  std::map<int64_t, int> open, arrows;
};

TEST_F(MonitoringTest, ATraceHasPhasesWaitsTransfersAndArrows) {
  const std::string path = pool_ + "/trace.json";
  const ScopedVariable variable("OFFLOADD_TRACE", path);
  Job job(pool_, "traced", {.dtype = Dtype::kBFloat16});
  ASSERT_NO_FATAL_FAILURE(job.Open());
  const int64_t daemon = job.session().daemon_pid();
  for (int i = 0; i < 5; ++i) TrainStep(job);
  job.Close();
  Trace trace(path);
  ASSERT_TRUE(trace.json.is_object());
  EXPECT_EQ(trace.json["otherData"]["dropped_events"], 0);
  for (const char* name : {"M process_name", "X forward", "X backward", "X step", "b read",
                           "e read", "b write", "b commit", "X wait: commit", "X embedding",
                           "X prefetch", "s prefetch", "f prefetch", "C resident"}) {
    EXPECT_GT(trace.names[name], 0) << name;
  }
  EXPECT_EQ(trace.names["X step"], 5);
  for (const auto& [id, balance] : trace.open) EXPECT_EQ(balance, 0) << "transfer " << id;
  size_t whole_arrows = 0;
  for (const auto& [id, balance] : trace.arrows) whole_arrows += balance == 0 ? 1 : 0;
  EXPECT_GT(whole_arrows, 0u);
  // One clock: the daemon's transfers lie among the trainer's phases.
  ASSERT_EQ(trace.last_ts.count(daemon), 1u);
  EXPECT_NEAR(trace.last_ts[daemon], trace.last_ts[getpid()], 60e6);
}

TEST_F(MonitoringTest, AStepLogHasALineForEveryStepOfAllRuns) {
  const std::string path = pool_ + "/run.jsonl";
  Job job(pool_, "logged", {.dtype = Dtype::kBFloat16});
  for (int run = 0; run < 2; ++run) {
    const ScopedVariable variable("OFFLOADD_STEP_LOG", path);
    ASSERT_NO_FATAL_FAILURE(job.Open());
    for (int i = 0; i < 3; ++i) TrainStep(job);
    job.Close();
  }
  // A process's second session has a file of its own.
  for (const std::string& file : {path, pool_ + "/run.2.jsonl"}) {
    std::istringstream lines(ReadAll(file));
    uint64_t step = file == path ? 0 : 3;
    for (std::string line; std::getline(lines, line);) {
      const Json object = Json::parse(line);
      EXPECT_EQ(object["step"], ++step);
      EXPECT_GT(object["phase_seconds"]["backward"].get<double>(), 0);
    }
    EXPECT_EQ(step, file == path ? 3u : 6u) << file;
  }
}

using MonitoringDeathTest = MonitoringTest;

TEST_F(MonitoringDeathTest, AKilledTrainerLeavesAWholeTrace) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const std::string path = pool_ + "/trace.json";
  const auto train_until_killed = [&] {
    setenv("OFFLOADD_TRACE", path.c_str(), 1);
    Job job(pool_, "killed", {.dtype = Dtype::kBFloat16});
    if (!job.TryOpen().ok()) return;
    while (!absl::StrContains(ReadAll(path), "\"name\":\"backward\"")) TrainStep(job);
    kill(getpid(), SIGKILL);
  };
  EXPECT_EXIT(train_until_killed(), testing::KilledBySignal(SIGKILL), "");
  Trace trace(path);
  EXPECT_TRUE(trace.json.is_object());
  EXPECT_GT(trace.names["X backward"], 0);
}

TEST_F(MonitoringTest, ATraceThatCannotBeWrittenIsAnErrorBeforeTheJobBegins) {
  const ScopedVariable variable("OFFLOADD_TRACE", pool_ + "/missing/trace.json");
  Job job(pool_, "job", {});
  const absl::Status opened = job.TryOpen();
  EXPECT_EQ(ErrorIdOf(opened), ErrorId::kBadValue) << opened;
  EXPECT_NE(opened.message().find("missing/trace."), std::string::npos) << opened;
}

}  // namespace
}  // namespace offload
