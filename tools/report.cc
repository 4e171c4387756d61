// offloadctl report: what a job that runs has done, as a page with charts.

#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "proto/pool_path.h"
#include "tools/command.h"
#include "tools/daemons.h"
#include "tools/plan_status.h"
#include "tools/report_page.h"

namespace offload::tools {
namespace {

std::string MadeAt() {
  const std::time_t now = std::time(nullptr);
  char text[64] = "";
  std::tm local = {};
  if (localtime_r(&now, &local) != nullptr)
    std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S %z", &local);
  return absl::StrCat("made by offloadctl ", kVersion, " at ", text);
}

class ReportCommand : public Command {
 public:
  const char* name() const override { return "report"; }
  const char* summary() const override {
    return "Writes a page with charts of what a running job has done, step by step";
  }
  const char* examples() const override {
    return "  offloadctl report run1 -o report.html\n  offloadctl report run1 --json\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("JOB", job_, "that is open in a daemon which this user can reach");
    app.add_option("-o,--output", output_, "the page, which is replaced");
    app.add_option("--pool", pool_, "of the job, where several pools have one of this name");
    app.add_flag("--follow", follow_, "make it anew until the job ends")
        ->always_capture_default(false);
    app.add_option("--interval", interval_seconds_,
                   "seconds between two reports that --follow makes")
        ->check(CLI::Range(0.01, 3600.0));
    app.add_option(
           "--tokens", operations_.tokens,
           "of a step, all micro-batches and ranks together: adds an estimate of operations")
        ->default_str("");
    app.add_option("--peak-gflops", peak_gflops_,
                   "that the processors could do: adds the share of it that was reached")
        ->check(CLI::Range(0.001, 1e12))
        ->default_str("");
    daemons_.DefineFlags(app);
  }

  absl::StatusOr<Answer> Run() override {
    if (job_.empty())
      return MakeError(ErrorId::kBadValue, "report needs a job",
                       "offloadctl status shows the jobs that run");
    if (peak_gflops_ > 0 && operations_.tokens == 0)
      return MakeError(ErrorId::kBadValue, "--peak-gflops without --tokens",
                       "Say how many tokens a step has");
    operations_.peak_per_second = peak_gflops_ * 1e9;
    OFFLOAD_ASSIGN_OR_RETURN(const Found found, Find());
    OFFLOAD_ASSIGN_OR_RETURN(JobReport report, Ask(found));
    OFFLOAD_RETURN_IF_ERROR(Save(report));
    if (follow_) OFFLOAD_RETURN_IF_ERROR(Follow(found, report));
    Answer answer;
    answer.data = DescribeReport(report, operations_);
    answer.text = absl::StrCat(report.steps.size(), " records of ", Printable(job_), " up to step ",
                               report.job.step(), "\n", PlanLines(report.job));
    if (output_.empty()) {
      answer.advice = "Add -o report.html for the page, or --json for the numbers.";
      return answer;
    }
    answer.data["output"] = output_;
    absl::StrAppend(&answer.text, output_, "\n");
    return answer;
  }

 private:
  struct Found {
    std::string socket, pool;
  };

  absl::StatusOr<JobReport> Ask(const Found& found) const {
    return AskReport(found.socket, found.pool, job_, daemons_.timeout_seconds());
  }

  // Makes it anew until the job is closed or its daemon gone; `report` is the last one then.
  absl::Status Follow(const Found& found, JobReport& report) const {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::duration<double>(interval_seconds_));
      absl::StatusOr<JobReport> next = Ask(found);
      if (!next.ok()) return absl::OkStatus();
      report = *std::move(next);
      OFFLOAD_RETURN_IF_ERROR(Save(report));
    }
  }

  // As a whole, or not at all.
  absl::Status Save(const JobReport& report) const {
    if (output_.empty()) return absl::OkStatus();
    const std::string unfinished = output_ + ".new";
    std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
    file << ReportPage(report, MadeAt(), operations_) << std::flush;
    std::error_code error;
    if (file.good()) std::filesystem::rename(unfinished, output_, error);
    if (file.good() && !error) return absl::OkStatus();
    std::filesystem::remove(unfinished, error);
    return MakeError(ErrorId::kFileWrite, absl::StrCat(output_, " cannot be written"),
                     "Name a file in a folder that this user may write to");
  }

  // The one job of that name.
  absl::StatusOr<Found> Find() const {
    const std::vector<DaemonAddress> addresses = daemons_.Addresses();
    std::vector<Found> found;
    absl::Status failure;
    for (const DaemonAddress& address : addresses) {
      const auto reply = AskStatus(address.socket, daemons_.timeout_seconds());
      if (!reply.ok() && daemons_.is_named()) return reply.status();
      if (!reply.ok()) continue;
      for (const proto::v1::JobStatus& known : reply->jobs()) {
        const bool fits = pool_.empty() || known.pool() == proto::AbsolutePools(pool_);
        if (known.job() == job_ && fits) found.push_back({address.socket, known.pool()});
      }
    }
    if (found.size() == 1) return found.front();
    if (found.empty())
      return MakeError(
          ErrorId::kBadValue,
          absl::StrCat("no daemon that this user can reach has job ", job_, " open"),
          "A report is made while the job runs; offloadctl status shows those that do");
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("job ", job_, " is open in ", found.front().pool, " and in ",
                                  found.back().pool),
                     "Name one with --pool");
  }

  std::string job_, output_, pool_;
  DaemonChoice daemons_;
  Operations operations_;
  double peak_gflops_ = 0;
  double interval_seconds_ = 5;
  bool follow_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeReportCommand() { return std::make_unique<ReportCommand>(); }

}  // namespace offload::tools
