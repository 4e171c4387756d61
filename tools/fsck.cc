// offloadctl fsck: reads all of a closed store, without a daemon.

#include "swap/fsck.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "tools/command.h"

namespace offload::tools {
namespace {

const char* StateText(const swap::FsckFinding& finding) {
  if (!finding.has_twin) return "LOST     ";
  if (finding.is_unfinished) return finding.repaired ? "written  " : "to write ";
  return finding.repaired ? "repaired " : "damaged  ";
}

class FsckCommand : public Command {
 public:
  const char* name() const override { return "fsck"; }
  const char* summary() const override {
    return "Reads all of a job's store that is not open; with --repair rewrites damaged copies "
           "from their intact twins";
  }
  const char* examples() const override {
    return "  offloadctl fsck /nvme0 run1\n  offloadctl fsck /nvme0,/nvme1 run1 --repair\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "as offloadctl ls names it")->required();
    app.add_flag("--repair", repair_, "rewrite damaged copies, never data")
        ->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    swap::FsckOptions options;
    options.repair = repair_;
    absl::StatusOr<swap::FsckReport> report = swap::CheckStore(pool_, job_, options);
    if (absl::IsNotFound(report.status()) && !ErrorIdOf(report.status()).has_value()) {
      return MakeError(ErrorId::kBadValue, absl::StrCat("pool ", pool_, " holds no job ", job_),
                       absl::StrCat("offloadctl ls ", pool_, " lists the jobs"));
    }
    OFFLOAD_RETURN_IF_ERROR(report.status());
    Answer answer;
    answer.data = Describe(*report);
    answer.text = Text(*report);
    answer.exit_code = report->has_loss() || report->has_open_repairs() ? kDamaged : kDone;
    if (report->has_loss()) {
      answer.advice = "Check the drive (smartctl), then restore the store from a copy.";
    } else if (report->has_open_repairs()) {
      answer.advice = absl::StrCat("Nothing is lost: offloadctl fsck ", pool_, " ", job_,
                                   " --repair rewrites the damaged copies.");
    } else if (report->has_unfinished()) {
      answer.advice =
          "Nothing is damaged: the next run, or --repair, writes what a killed one left.";
    }
    return answer;
  }

 private:
  Json Describe(const swap::FsckReport& report) const {
    Json findings = Json::array();
    for (const swap::FsckFinding& finding : report.findings) {
      findings.push_back({{"what", finding.what},
                          {"lost", !finding.has_twin},
                          {"unfinished", finding.is_unfinished},
                          {"repaired", finding.repaired}});
    }
    return {{"pool", pool_},
            {"job", job_},
            {"path", report.path},
            {"file_bytes", report.file_bytes},
            {"step", report.committed.epoch},
            {"copies_checked", report.copies_checked},
            {"extents_checked", report.extents_checked},
            {"extents_never_written", report.extents_never_written},
            {"extent_bytes_read", report.extent_bytes_read},
            {"clean", report.is_clean()},
            {"findings", std::move(findings)}};
  }

  static std::string Text(const swap::FsckReport& report) {
    std::string text;
    for (const swap::FsckFinding& finding : report.findings) {
      absl::StrAppend(&text, StateText(finding), finding.what, "\n");
    }
    absl::StrAppend(
        &text, report.path, ": step ", report.committed.epoch, ", ", report.extents_checked,
        " extents (", FormatDecimalBytes(report.extent_bytes_read), ") and ", report.copies_checked,
        " copies read, ",
        report.is_clean() ? "clean"
                          : absl::StrCat(report.findings.size(),
                                         report.findings.size() == 1 ? " finding" : " findings"),
        "\n");
    return text;
  }

  std::string pool_, job_;
  bool repair_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeFsckCommand() { return std::make_unique<FsckCommand>(); }

}  // namespace offload::tools
