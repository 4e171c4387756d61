// offloadctl status: daemons, their jobs, and what these do.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "tools/command.h"
#include "tools/daemons.h"
#include "tools/plan_status.h"
#include "tools/rank_view.h"
#include "tools/step_figures.h"

namespace offload::tools {
namespace {

Json Describe(const proto::v1::OperationStatus& operation) {
  return {{"count", operation.count()},
          {"bytes", operation.bytes()},
          {"errors", operation.errors()},
          {"p50_seconds", operation.p50_seconds()},
          {"p99_seconds", operation.p99_seconds()},
          {"max_seconds", operation.max_seconds()}};
}

Json DescribeDevices(const proto::v1::JobStatus& job) {
  Json devices = Json::array();
  for (const proto::v1::DeviceStatus& device : job.devices()) {
    devices.push_back({{"file", device.file()},
                       {"engine", device.engine()},
                       {"read", Describe(device.read())},
                       {"write", Describe(device.write())},
                       {"flush", Describe(device.flush())},
                       {"refusals", device.refusals()},
                       {"retries", device.retries()},
                       {"short_transfers", device.short_transfers()},
                       {"registered_bytes", device.registered_bytes()}});
  }
  return devices;
}

std::string OperationText(const char* name, const proto::v1::OperationStatus& operation) {
  std::string text = absl::StrFormat("%s %d", name, operation.count());
  if (operation.count() > 0) {
    absl::StrAppendFormat(&text, " (p50 %.2g ms, p99 %.2g ms, max %.2g ms)",
                          operation.p50_seconds() * 1e3, operation.p99_seconds() * 1e3,
                          operation.max_seconds() * 1e3);
  }
  return text;
}

std::string Line(const proto::v1::DeviceStatus& device) {
  return absl::StrFormat(
      "  %-8s %s  %s  %s  errors %dr/%dw/%df  %d refused, %d repeated, %d short  %s registered\n",
      Printable(device.file()), OperationText("reads", device.read()),
      OperationText("writes", device.write()), OperationText("flushes", device.flush()),
      device.read().errors(), device.write().errors(), device.flush().errors(), device.refusals(),
      device.retries(), device.short_transfers(), FormatBytes(device.registered_bytes()));
}

// One count per kind.
Json DescribeErrors(const proto::v1::JobStatus& job) {
  const proto::v1::StoreErrors& errors = job.store_errors();
  return {{"checksum_mismatches", errors.checksum_mismatches()},
          {"read_errors", errors.read_errors()},
          {"write_errors", errors.write_errors()},
          {"flush_errors", errors.flush_errors()},
          {"lost_extents", errors.lost_extents()},
          {"repaired_copies", errors.repaired_copies()},
          {"found_by_scrubber", job.scrub().bad_extents()}};
}

Json DescribeScrub(const proto::v1::ScrubStatus& scrub) {
  Json names = Json::array();
  for (const std::string& name : scrub.bad_names()) names.push_back(name);
  return {{"passes", scrub.passes()},
          {"extents", scrub.extents()},
          {"bytes", scrub.bytes()},
          {"bad_extents", scrub.bad_extents()},
          {"bad_names", std::move(names)}};
}

Json Describe(const TwoAnswers& answers, const proto::v1::JobStatus& job) {
  const Rates rates = RatesOf(answers, job);
  return {{"job", job.job()},
          {"pool", job.pool()},
          {"phase", job.phase()},
          {"client_pid", job.client_pid()},
          {"ranks", DescribeRanks(answers, job)},
          {"step", job.step()},
          {"durable_step", job.durable_step()},
          {"seconds_per_step", job.seconds_per_step()},
          {"ram_bytes", job.ram_bytes()},
          {"allocated_bytes", job.allocated_bytes()},
          {"resident_bytes", job.resident_bytes()},
          {"bytes_read", job.bytes_read()},
          {"bytes_written", job.bytes_written()},
          {"read_bytes_per_second", rates.read},
          {"written_bytes_per_second", rates.written},
          {"last_step", job.has_last_step() ? DescribeRecord(job.last_step()) : Json(nullptr)},
          {"figures", DescribeFigures(job.figures())},
          {"updates_ahead",
           {{"used", job.updates_ahead().used()}, {"lost", job.updates_ahead().lost()}}},
          {"plan", DescribePlanStatus(job)},
          {"compute",
           {{"seconds", job.compute().seconds()}, {"core_seconds", job.compute().core_seconds()}}},
          {"io_engine", job.io_engine()},
          {"devices", DescribeDevices(job)},
          {"errors", DescribeErrors(job)},
          {"scrub", DescribeScrub(job.scrub())}};
}

// Empty for a job without a word of bad news.
std::string ErrorLine(const proto::v1::JobStatus& job) {
  const Json errors = DescribeErrors(job);
  std::string counts;
  for (const auto& [kind, count] : errors.items()) {
    if (count.get<uint64_t>() > 0) absl::StrAppend(&counts, "  ", kind, " ", count.get<uint64_t>());
  }
  std::string line;
  if (!counts.empty()) absl::StrAppend(&line, "errors  ", Printable(job.job()), counts, "\n");
  for (const std::string& name : job.scrub().bad_names()) {
    absl::StrAppend(&line, "lost    ", Printable(job.job()), "  ", Printable(name), "\n");
  }
  return line;
}

std::string Line(const proto::v1::JobStatus& job, const Rates& rates) {
  return absl::StrFormat(
      "job     %s  %s  pid %d  step %d committed %d  %.2f s/step  ram %s allocated of %s, %s "
      "resident  nvme %.2fr/%.2fw GB/s, %s read %s written in all  %s  pool %s\n",
      Printable(job.job()), Printable(job.phase()), job.client_pid(), job.step(),
      job.durable_step(), job.seconds_per_step(), FormatBytes(job.allocated_bytes()),
      FormatBytes(job.ram_bytes()), FormatBytes(job.resident_bytes()), rates.read * 1e-9,
      rates.written * 1e-9, FormatDecimalBytes(job.bytes_read()),
      FormatDecimalBytes(job.bytes_written()), Printable(job.io_engine()), Printable(job.pool()));
}

// What the daemon's threads lack is what others took who computed meanwhile.
std::string ComputeLine(const proto::v1::JobStatus& job) {
  const proto::v1::ComputeTime& compute = job.compute();
  if (compute.seconds() <= 0) return "";
  return absl::StrFormat("compute %s  %.3g s of update threads, %.0f%% of it on a core\n",
                         Printable(job.job()), compute.seconds(),
                         100 * std::min(1.0, compute.core_seconds() / compute.seconds()));
}

// One line for each of several ranks.
std::string RankLines(const proto::v1::JobStatus& job) {
  std::string lines;
  for (int i = 0; i < job.ranks_size() && job.ranks_size() > 1; ++i) {
    const proto::v1::RankStatus& rank = job.ranks(i);
    absl::StrAppend(
        &lines, absl::StrFormat("rank    %s  %d of %d  %s  pid %d  step %d  touch %d\n",
                                Printable(job.job()), rank.rank(), job.ranks_size(),
                                Printable(rank.phase()), rank.pid(), rank.step(), rank.position()));
  }
  return lines;
}

// One line for each rank that has a device.
std::string GpuLines(const TwoAnswers& answers, const proto::v1::JobStatus& job) {
  std::string lines;
  for (const proto::v1::RankStatus& rank : job.ranks()) {
    if (!rank.has_gpu()) continue;
    const proto::v1::GpuStatus& gpu = rank.gpu();
    absl::StrAppend(
        &lines,
        absl::StrFormat("gpu     %s  rank %d  %s, %.3g s in all  %s to the device %s back  host "
                        "waits %d\n",
                        Printable(job.job()), rank.rank(), GpuText(answers, job, rank),
                        gpu.stall_seconds(), FormatDecimalBytes(gpu.bytes_to_device()),
                        FormatDecimalBytes(gpu.bytes_to_host()), gpu.host_waits()));
  }
  return lines;
}

class StatusCommand : public Command {
 public:
  const char* name() const override { return "status"; }
  const char* summary() const override { return "Shows daemons, jobs, residency and traffic"; }
  const char* examples() const override {
    return "  offloadctl status\n  offloadctl status --socket /run/offloadd/offloadd.sock --json\n";
  }
  void DefineFlags(CLI::App& app) override {
    daemons_.DefineFlags(app);
    app.add_option("--interval", interval_seconds_, "over which rates are taken")
        ->check(CLI::Range(0.01, 60.0));
  }

  absl::StatusOr<Answer> Run() override {
    const std::vector<DaemonAddress> addresses = daemons_.Addresses();
    Answer answer;
    answer.data["daemons"] = Json::array();
    absl::Status failure;
    const auto replies = AskTwice(addresses, daemons_.timeout_seconds(), interval_seconds_);
    for (size_t i = 0; i < addresses.size(); ++i) {
      const absl::StatusOr<TwoAnswers>& reply = replies[i];
      if (reply.ok()) {
        Add(addresses[i], *reply, answer);
      } else if (!absl::IsUnavailable(reply.status()) || daemons_.is_named()) {
        failure = reply.status();  // a socket that a dead daemon left is no news
      }
    }
    if (answer.data["daemons"].empty() && failure.ok()) {
      failure = MakeError(ErrorId::kDaemonStart, "no daemon is running",
                          "A trainer starts a private one; offloadctl doctor checks this machine");
    }
    answer.exit_code = ExitCodeOf(failure);
    answer.problem = failure;
    return answer;
  }

 private:
  static void Add(const DaemonAddress& address, const TwoAnswers& answers, Answer& answer) {
    const proto::v1::StatusReply& reply = answers.reply;
    Json daemon = {{"socket", address.socket},
                   {"private", address.is_private},
                   {"version", reply.version()},
                   {"pid", reply.pid()},
                   {"uptime_seconds", reply.uptime_seconds()},
                   {"jobs", Json::array()}};
    absl::StrAppend(&answer.text, "daemon  ", address.socket,
                    address.is_private ? " (private)" : "", "  v", Printable(reply.version()),
                    "  pid ", reply.pid(), "  up ", FormatDuration(reply.uptime_seconds()),
                    "  jobs ", reply.jobs_size(), "\n");
    for (const proto::v1::JobStatus& job : reply.jobs()) {
      const Rates rates = RatesOf(answers, job);
      daemon["jobs"].push_back(Describe(answers, job));
      absl::StrAppend(&answer.text, Line(job, rates), PlanLines(job), ComputeLine(job),
                      RankLines(job), GpuLines(answers, job), ErrorLine(job));
      for (const proto::v1::DeviceStatus& device : job.devices()) answer.text += Line(device);
    }
    answer.data["daemons"].push_back(std::move(daemon));
  }

  DaemonChoice daemons_;
  double interval_seconds_ = 0.5;
};

}  // namespace

std::unique_ptr<Command> MakeStatusCommand() { return std::make_unique<StatusCommand>(); }

}  // namespace offload::tools
