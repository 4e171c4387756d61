// offloadctl plan: what would live where, what a step would move, and how long the drive would
// take, by the same planner that a trainer attaches with.

#include <sys/statvfs.h>

#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "accelerator/copy_rates.h"
#include "accelerator/cuda_loader.h"
#include "base/byte_size.h"
#include "base/durability.h"
#include "base/error.h"
#include "base/parse_averaging.h"
#include "base/run_names.h"
#include "base/status_macros.h"
#include "client/rank_environment.h"
#include "proto/depths.h"
#include "proto/slab_layout.h"
#include "swap/store.h"
#include "tools/command.h"
#include "tools/drive_benchmark.h"
#include "tools/plan_advice.h"
#include "tools/plan_model.h"
#include "tools/plan_report.h"
#include "tools/plan_status.h"
#include "zero3/gpu/gpu_tensors.h"
#include "zero3/gpu/gpu_traffic.h"
#include "zero3/planner.h"

namespace offload::tools {
namespace {

// Filling and three patterns: below three seconds in all.
constexpr double kSecondsPerPattern = 0.6;
constexpr uint64_t kQuickFileBytes = uint64_t{1} << 30;

struct Flags {
  ModelSource source;
  std::string ram, gpu_ram, device, pool;
  std::string dtype = "bf16", optimizer = "adamw";
  std::string durability = "step", average = "none";
  std::string gradients = "added";
  int64_t micro_batches = 1;
  uint32_t ranks = 1;
  double read_gbps = 0, write_gbps = 0, mixed_gbps = 0;        // 0: not given
  double to_device_gbps = 0, to_host_gbps = 0, both_gbps = 0;  // likewise
  int64_t zero_stage = -1;
  std::string weights_home = "auto", state_home = "auto";
  zero3::ZeroPolicy hints;
  bool advise = false;
  double compute_seconds = 0;  // 0: not given, like the next two
  uint64_t tokens = 0;
  double gflops = 0;
};

// Rates that are given go before rates that would have to be measured.
absl::StatusOr<std::optional<Drive>> FindDrive(const Flags& flags) {
  const bool both = flags.read_gbps > 0 && flags.write_gbps > 0;
  const bool some = flags.read_gbps > 0 || flags.write_gbps > 0 || flags.mixed_gbps > 0;
  if (both) {
    return Drive{flags.read_gbps * 1e9, flags.write_gbps * 1e9, flags.mixed_gbps * 1e9, "given"};
  }
  if (some) {
    return MakeError(ErrorId::kBadValue, "one rate does not describe a drive",
                     "Give --read-gbps and --write-gbps, or --pool DIR to measure them");
  }
  if (flags.pool.empty()) return std::optional<Drive>();
  // Several pools work side by side: their rates add up, unless they share a drive.
  OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(flags.pool));
  Drive drive{0, 0, 0, pools.size() > 1 ? "measured one by one, added" : "measured"};
  for (const std::string& pool : pools) {
    OFFLOAD_ASSIGN_OR_RETURN(
        const DriveRates rates,
        MeasureDrive({.pool = pool, .file_bytes = kQuickFileBytes}, kSecondsPerPattern));
    drive.read += rates.read;
    drive.write += rates.write;
    drive.mixed += rates.mixed;
  }
  return drive;
}

// "cuda" or "cuda:1".
absl::StatusOr<int> NumberOf(absl::string_view device) {
  int number = 0;
  absl::string_view rest = device;
  const bool is_cuda = absl::ConsumePrefix(&rest, "cuda");
  if (is_cuda && rest.empty()) return number;
  if (is_cuda && absl::ConsumePrefix(&rest, ":") && absl::SimpleAtoi(rest, &number) && number >= 0)
    return number;
  return MakeError(ErrorId::kBadValue, absl::StrCat("--device ", device), "Name one: cuda:0");
}

// As FindDrive.
absl::StatusOr<std::optional<Link>> FindLink(const Flags& flags) {
  const bool both = flags.to_device_gbps > 0 && flags.to_host_gbps > 0;
  const bool some = flags.to_device_gbps > 0 || flags.to_host_gbps > 0 || flags.both_gbps > 0;
  if (both) {
    return Link{flags.to_device_gbps * 1e9, flags.to_host_gbps * 1e9, flags.both_gbps * 1e9,
                "given"};
  }
  if (some) {
    return MakeError(ErrorId::kBadValue, "one rate does not describe a link",
                     "Give --to-device-gbps and --to-host-gbps, or --device cuda:0 to measure "
                     "them");
  }
  if (flags.device.empty()) return std::optional<Link>();
  OFFLOAD_ASSIGN_OR_RETURN(const int number, NumberOf(flags.device));
  OFFLOAD_ASSIGN_OR_RETURN(const auto device,
                           accelerator::OpenCuda(number, accelerator::CudaPluginPath()));
  OFFLOAD_ASSIGN_OR_RETURN(const accelerator::CopyRates rates,
                           accelerator::MeasureCopyRates(device.get()));
  return Link{rates.to_device, rates.to_host, rates.both, "measured"};
}

// Seconds in which a machine of `gflops` does what a step of `tokens` takes, by the estimate of
// `offloadctl report`.
double EstimateSeconds(const proto::Catalogue& catalogue, uint64_t tokens, double gflops) {
  uint64_t elements = 0, trained_elements = 0;
  for (const proto::Tensor& tensor : catalogue.tensors) {
    if (tensor.shape.size() < 2) continue;
    elements += tensor.element_count;
    if (tensor.trainable) trained_elements += tensor.element_count;
  }
  return EstimateOperations(elements, trained_elements, tokens) / (gflops * 1e9);
}

std::vector<std::string> OptimizerChoices() {
  const auto names = kernels::OptimizerNames();
  return {names.begin(), names.end()};
}

class PlanCommand : public Command {
 public:
  const char* name() const override { return "plan"; }
  const char* summary() const override {
    return "Says what a model would need and how fast the drive would let it train";
  }
  const char* examples() const override {
    return "  offloadctl plan --params 8B --ram 32GiB --pool /nvme0\n"
           "  offloadctl plan /models/Llama-3.1-8B --ram 32GiB --read-gbps 6.8 --write-gbps 4.9\n"
           "  offloadctl plan --params 8B --advise --pool /nvme0 --compute-seconds 12\n"
           "  offloadctl plan --params 8B --ram 64GiB --gpu-ram 20GiB --device cuda:0 --pool "
           "/nvme0\n";
  }
  void DefineFlags(CLI::App& app) override {
    app.add_option("MODEL", flags_.source.model,
                   "config.json of a Llama, a safetensors file, or the directory of either");
    app.add_option("--config", flags_.source.config, "config.json, or the directory that holds it");
    app.add_option("--safetensors", flags_.source.safetensors,
                   "a checkpoint: all of its floating tensors are trained");
    app.add_option("--params", flags_.source.parameters,
                   "a Llama of about so many parameters: 150M, 8B");
    app.add_option("--vocabulary", flags_.source.vocabulary, "tokens, with --params")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
    app.add_option("--ram", flags_.ram, "the memory budget: 512MiB, 32GiB")
        ->envname("OFFLOADD_RAM");
    app.add_option("--gpu-ram", flags_.gpu_ram,
                   "of a model on a device: the budget of its memory for weights and gradients");
    app.add_option("--device", flags_.device, "with --gpu-ram: cuda:0, whose link is measured now");
    for (const auto& [flag, rate, copies] :
         {std::tuple{"--to-device-gbps", &flags_.to_device_gbps, "to the device"},
          {"--to-host-gbps", &flags_.to_host_gbps, "back"},
          {"--both-gbps", &flags_.both_gbps, "both ways at once, in all"}}) {
      app.add_option(flag, *rate,
                     absl::StrCat("of copies ", copies, ", in 1e9 bytes per second: what ",
                                  "offloadctl doctor says"))
          ->check(CLI::Range(1e-6, 1e6))
          ->default_str("");
    }
    app.add_flag("--advise", flags_.advise,
                 "what budgets from the least to everything in memory would buy");
    app.add_option("--compute-seconds", flags_.compute_seconds,
                   "what a step takes on this machine in memory: for the time of a step")
        ->check(CLI::Range(1e-6, 1e6))
        ->default_str("");
    app.add_option("--tokens", flags_.tokens,
                   "of a step, all micro-batches together: with --gflops, in place of that, for an "
                   "estimate")
        ->default_str("");
    app.add_option("--gflops", flags_.gflops, "that the machine, or the device, reaches")
        ->check(CLI::Range(0.001, 1e12))
        ->default_str("");
    app.add_option("--dtype", flags_.dtype, "of weights and gradients: bf16, fp16, fp32 or fp64")
        ->check(CLI::IsMember({"bf16", "fp16", "fp32", "fp64"}));
    app.add_option("--optimizer", flags_.optimizer, "adamw, sgd (with momentum), ...")
        ->check(CLI::IsMember(OptimizerChoices()));
    app.add_option("--average", flags_.average,
                   "of the weights: none, ema:0.999 or swa:1000:100, one more plane");
    app.add_option("--micro-batches", flags_.micro_batches, "whose gradients add up to one step")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
    app.add_option("--durability", flags_.durability,
                   "step, checkpoint:100 or checkpoint:10min: what is committed");
    app.add_option("--ranks", flags_.ranks, "processes on this node that train it together")
        ->check(CLI::Range(uint32_t{1}, client::kWorldSizeMax));
    app.add_option("--gradients", flags_.gradients,
                   "of several ranks: added, or reduced_by_trainer, each rank has whole ones")
        ->check(CLI::IsMember({"added", "reduced_by_trainer"}));
    app.add_option("--zero-stage", flags_.zero_stage,
                   "0 to 3: what memory is spent on first; -1: what saves most");
    app.add_option("--weights-home", flags_.weights_home,
                   "auto, ram, nvme, or the share of the weights that stays in memory");
    app.add_option("--state-home", flags_.state_home, "the same of masters and moments");
    app.add_option("--persistence", flags_.hints.persistence,
                   "a hint: weights of at most so many elements are the first to stay");
    app.add_option("--prefetch", flags_.hints.prefetch, "a hint: elements that are read ahead");
    app.add_option("--max-live", flags_.hints.max_live,
                   "a hint: elements of weights in memory at a time");
    app.add_option("--pool", flags_.pool, "a directory for the store; its drive is measured")
        ->envname("OFFLOADD_POOL");
    for (const auto& [flag, rate] : {std::pair{"--read-gbps", &flags_.read_gbps},
                                     std::pair{"--write-gbps", &flags_.write_gbps},
                                     std::pair{"--mixed-gbps", &flags_.mixed_gbps}}) {
      app.add_option(flag, *rate, "of the drive, in 1e9 bytes per second, instead of measuring")
          ->check(CLI::Range(1e-6, 1e6))
          ->default_str("");
    }
  }

  absl::StatusOr<Answer> Run() override {
    const proto::Dtype dtype = flags_.dtype == "bf16"   ? proto::Dtype::kBFloat16
                               : flags_.dtype == "fp16" ? proto::Dtype::kFloat16
                               : flags_.dtype == "fp32" ? proto::Dtype::kFloat32
                                                        : proto::Dtype::kFloat64;
    OFFLOAD_ASSIGN_OR_RETURN(PlanModel model, ReadModel(flags_.source, dtype));
    PlanReport report;
    report.model = absl::StrCat(model.description, ", ", flags_.dtype, ", ", flags_.optimizer);
    report.micro_batches = flags_.micro_batches;
    report.compute_seconds = flags_.compute_seconds;
    report.input.world_size = flags_.ranks;
    report.input.gradients_reduced = flags_.ranks > 1 && flags_.gradients == "reduced_by_trainer";
    OFFLOAD_ASSIGN_OR_RETURN(report.input.durability, ParseDurability(flags_.durability));
    OFFLOAD_RETURN_IF_ERROR(CheckFlags());
    if (!flags_.ram.empty()) {
      OFFLOAD_ASSIGN_OR_RETURN(report.input.ram_bytes, ParseByteSize(flags_.ram));
    }
    OFFLOAD_ASSIGN_OR_RETURN(report.input.policy, ReadPolicy());
    kernels::OptimizerSpec optimizer(flags_.optimizer);
    if (flags_.optimizer == "sgd") optimizer.Set("momentum", 0.9);
    OFFLOAD_ASSIGN_OR_RETURN(const Averaging averaging, ParseAveraging(flags_.average));
    optimizer.SetAveraging(averaging);
    if (averaging.is_on()) absl::StrAppend(&report.model, ", average ", averaging.Text());
    OFFLOAD_ASSIGN_OR_RETURN(report.input.catalogue,
                             proto::BuildCatalogue(std::move(model.tensors), optimizer));
    if (flags_.tokens > 0) {
      report.compute_seconds =
          EstimateSeconds(report.input.catalogue, flags_.tokens, flags_.gflops);
      report.compute_is_estimated = true;
    }
    if (!flags_.gpu_ram.empty()) {
      OFFLOAD_ASSIGN_OR_RETURN(report.gpu, PlanGpu(report.input, optimizer));
    }
    absl::StatusOr<zero3::Plan> plan = zero3::Plan();
    if (!flags_.ram.empty()) plan = zero3::MakePlan(report.input);
    if (!plan.ok()) return ReportRefusal(report, plan.status());
    OFFLOAD_RETURN_IF_ERROR(LookAtPool(report));
    if (report.gpu.has_value()) {
      OFFLOAD_ASSIGN_OR_RETURN(report.gpu->link, FindLink(flags_));
    }
    if (flags_.advise) return ReportOffers(report);
    if (report.drive.has_value()) plan = zero3::MakePlan(report.input);
    if (!plan.ok()) return ReportRefusal(report, plan.status());
    return ReportPlan(report, *plan);
  }

 private:
  absl::StatusOr<zero3::ZeroPolicy> ReadPolicy() const {
    zero3::ZeroPolicy policy = flags_.hints;
    OFFLOAD_ASSIGN_OR_RETURN(policy.stage, zero3::CheckStage(flags_.zero_stage));
    OFFLOAD_ASSIGN_OR_RETURN(policy.weights,
                             zero3::ParseHome("--weights-home", flags_.weights_home));
    OFFLOAD_ASSIGN_OR_RETURN(policy.state, zero3::ParseHome("--state-home", flags_.state_home));
    return policy;
  }

  absl::StatusOr<GpuTier> PlanGpu(const zero3::PlanInput& input,
                                  const kernels::OptimizerSpec& optimizer) const {
    GpuTier gpu;
    OFFLOAD_ASSIGN_OR_RETURN(gpu.ram_bytes, ParseByteSize(flags_.gpu_ram));
    const zero3::TierConditions conditions = {
        .optimizer = optimizer, .durability = input.durability, .world_size = input.world_size};
    gpu.why_no_tier = zero3::WhyNoTier(conditions);
    const std::vector<zero3::GpuTensor> tensors = zero3::GpuTensorsOf(input.catalogue, conditions);
    OFFLOAD_ASSIGN_OR_RETURN(gpu.plan, zero3::MakeGpuPlan(tensors, gpu.ram_bytes));
    gpu.traffic =
        zero3::PlanLinkTraffic(tensors, gpu.plan, static_cast<uint64_t>(flags_.micro_batches));
    return gpu;
  }

  absl::Status CheckFlags() const {
    if (!flags_.gpu_ram.empty() && flags_.ranks > 1) {
      return MakeError(ErrorId::kBadValue, "--gpu-ram with --ranks",
                       "How ranks share a link their devices decide, when they are attached "
                       "(Engine::plan()): leave one of the two away");
    }
    if (flags_.gpu_ram.empty() && (!flags_.device.empty() || flags_.to_device_gbps > 0 ||
                                   flags_.to_host_gbps > 0 || flags_.both_gbps > 0)) {
      return MakeError(ErrorId::kBadValue, "a device or its link without --gpu-ram",
                       "Add --gpu-ram, the budget of the device's memory");
    }
    if ((flags_.tokens > 0) != (flags_.gflops > 0)) {
      return MakeError(ErrorId::kBadValue, "only one of --tokens and --gflops",
                       "An estimate of the computation takes both");
    }
    if (flags_.tokens > 0 && flags_.compute_seconds > 0) {
      return MakeError(ErrorId::kBadValue, "--compute-seconds beside an estimate",
                       "Leave --tokens and --gflops away");
    }
    if (flags_.ram.empty() && !flags_.advise) {
      return MakeError(ErrorId::kBadValue, "there is no --ram",
                       "Give a budget, or --advise to see what each would buy");
    }
    return absl::OkStatus();
  }

  // As the daemon of this machine would choose.
  static void UseRates(const Drive& drive, zero3::PlanInput& input) {
    const proto::MachineRates rates = {.read_bytes_per_second = drive.read,
                                       .write_bytes_per_second = drive.write,
                                       .cores = std::thread::hardware_concurrency()};
    input.good_pipeline_blocks = proto::ChooseDepths(rates).pipeline_blocks;
    input.write_cost = proto::WriteCost(rates);
  }

  // After the budget is known to do: measuring takes seconds.
  absl::Status LookAtPool(PlanReport& report) const {
    report.pool = flags_.pool;
    if (!flags_.pool.empty()) {
      OFFLOAD_RETURN_IF_ERROR(swap::CheckPool(flags_.pool));
      OFFLOAD_ASSIGN_OR_RETURN(const std::vector<std::string> pools, SplitPools(flags_.pool));
      for (const std::string& pool : pools) {
        struct statvfs space = {};
        if (statvfs(pool.c_str(), &space) == 0)
          report.free_bytes += space.f_bavail * space.f_frsize;
      }
    }
    OFFLOAD_ASSIGN_OR_RETURN(report.drive, FindDrive(flags_));
    if (report.drive.has_value()) UseRates(*report.drive, report.input);
    return absl::OkStatus();
  }

  Flags flags_;
};

}  // namespace

std::unique_ptr<Command> MakePlanCommand() { return std::make_unique<PlanCommand>(); }

}  // namespace offload::tools
