// offloadctl import: a new job of a universal checkpoint of DeepSpeed, without daemon, trainer or
// torch.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/jobs.h"
#include "tools/stored_model.h"
#include "tools/universal_import.h"
#include "tools/universal_source.h"

namespace offload::tools {
namespace {

constexpr uint64_t kStepMax = uint64_t{1} << 53;  // exact in JSON, and far from an overflow

class ImportCommand : public Command {
 public:
  const char* name() const override { return "import"; }
  const char* summary() const override {
    return "Makes a new job of a universal checkpoint of DeepSpeed, with the model and the "
           "optimizer of a job; without --yes only says whether it fits";
  }
  const char* examples() const override {
    return "  offloadctl import /nvme0 run1 checkpoints --as run2 --yes\n"
           "  offloadctl import /nvme0 run1 checkpoints/global_step7_universal --as run2 "
           "--to /nvme1\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("POOL", pool_, "nvme_path of the trainer")->required();
    app.add_option("JOB", job_, "whose model and optimizer the new job has; nobody may use it")
        ->required();
    app.add_option("FOLDER", folder_, "the checkpoint, or what holds latest_universal")->required();
    app.add_option("--as", new_job_, "the new job's name")->required();
    app.add_option("--to", new_pool_, "the new job's pool; none: the same");
    app.add_option("--step", step_, "the new job's step; none: how often parameters were updated")
        ->check(CLI::Range(uint64_t{0}, kStepMax));
    app.add_option("--generations", generations_, "spare ones, for snapshots of the new job")
        ->check(CLI::Range(0u, swap::kGenerationsMax));
    app.add_flag("--yes", yes_, "do what takes space")->always_capture_default(false);
  }

  absl::StatusOr<Answer> Run() override {
    OFFLOAD_RETURN_IF_ERROR(FindJob(pool_, job_).status());
    OFFLOAD_ASSIGN_OR_RETURN(StoredModel model, StoredModel::Open(pool_, job_, /*snapshot=*/""));
    OFFLOAD_RETURN_IF_ERROR(model.is_of_one_kind());
    if (model.keeps_average()) {
      return MakeError(ErrorId::kUnsupportedOptimizer,
                       absl::StrCat("job \"", job_,
                                    "\" keeps an average of its weights, which a "
                                    "universal checkpoint does not have"),
                       "Make the job without average, or load the checkpoint as weights");
    }
    OFFLOAD_ASSIGN_OR_RETURN(UniversalSource source, UniversalSource::Open(folder_));
    OFFLOAD_ASSIGN_OR_RETURN(const CheckedImport checked, CheckImport(model, source));
    const uint64_t step = step_.value_or(checked.step);
    const std::string pool = new_pool_.empty() ? pool_ : new_pool_;
    OFFLOAD_RETURN_IF_ERROR(CheckIsNewJob(pool, new_job_));
    swap::StoreOptions options;
    options.generations = generations_;
    options.progress = ProgressLine();
    if (yes_) {
      OFFLOAD_RETURN_IF_ERROR(
          ImportUniversal(model, source, checked, step, pool, new_job_, options));
    }
    return Describe(model, source, checked, step, pool);
  }

 private:
  Answer Describe(const StoredModel& model, const UniversalSource& source,
                  const CheckedImport& checked, uint64_t step, const std::string& pool) const {
    swap::StoreSpec spec = model.store().spec();
    spec.job = new_job_;
    const uint64_t file_bytes = swap::FormattedBytes(spec, generations_);
    Answer answer;
    answer.data = {{"pool", pool},           {"job", new_job_},
                   {"like", job_},           {"folder", source.path()},
                   {"step", step},           {"weights", model.weight_count()},
                   {"bytes", checked.bytes}, {"file_bytes", file_bytes},
                   {"imported", yes_}};
    answer.text =
        absl::StrCat(yes_ ? "made job " : "would make job ", new_job_, " in ", pool, ", like job ",
                     job_, ", at step ", step, ": ", model.weight_count(), " weights and what ",
                     model.optimizer(), " keeps of them, ", FormatDecimalBytes(checked.bytes),
                     ", in a store of ", FormatDecimalBytes(file_bytes), "\n");
    answer.advice = yes_ ? absl::StrCat("attach() the model with job=\"", new_job_,
                                        "\" to go on. Buffers are those of job ", job_,
                                        "; options and schedules are the program's.")
                         : "It fits. Nothing was written. Add --yes.";
    return answer;
  }

  std::string pool_, job_, folder_, new_job_, new_pool_;
  std::optional<uint64_t> step_;
  uint32_t generations_ = 0;
  bool yes_ = false;
};

}  // namespace

std::unique_ptr<Command> MakeImportCommand() { return std::make_unique<ImportCommand>(); }

}  // namespace offload::tools
