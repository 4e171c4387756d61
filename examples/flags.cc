#include "examples/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/byte_size.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "examples/text_data.h"

namespace offload::examples {
namespace {

constexpr double kFinalFraction = 0.1;  // of the peak learning rate

absl::Status UnknownFlag(const CLI::App& app, const std::string& word) {
  const std::string flag = word.substr(0, word.find('='));
  std::vector<std::string> known;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  }
  const std::string nearest = NearestWord(flag, known);
  const std::string what = absl::StrCat("unknown flag ", flag);
  if (nearest.empty()) return MakeError(ErrorId::kUnknownFlag, what);
  return MakeError(ErrorId::kUnknownFlag, what,
                   absl::StrCat("Did you mean ", nearest, "? --help lists all flags"));
}

// Flags whose text still has to become a value.
struct Words {
  std::string model = "llama";
  std::string parameters = "10M";
  std::string dtype = "fp32";
  std::string optimizer = "adamw";
  std::string offload = "off";
  std::string export_shard = "5GB";
};

void DefineModel(CLI::App& app, Flags& flags, Words& words) {
  app.add_option("--model", words.model, "llama or gpt2")->check(CLI::IsMember({"llama", "gpt2"}));
  auto* const parameters =
      app.add_option("--params", words.parameters, "about how many parameters: 150M, 1.5B");
  auto* const key_value_heads = app.add_option("--kv-heads", flags.key_value_heads,
                                               "heads of keys and values; 0: as many as heads")
                                    ->check(CLI::NonNegativeNumber);
  auto* const tied = app.add_flag("--tied", flags.tied_embedding,
                                  "use the embedding as output matrix (gpt2: always)");
  app.add_option("--dtype", words.dtype, "of weights and gradients: fp32 or bf16")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--init-from", flags.init_from,
                 "a Hugging Face folder of a llama, or its safetensors file: shape (config.json) "
                 "and weights of a new run; a run that continues keeps its own weights")
      ->excludes(parameters)
      ->excludes(key_value_heads)
      ->excludes(tied);
  app.add_option("--export", flags.export_folder,
                 "write the trained llama into this folder at the end, as --init-from reads it");
  app.add_option("--export-shard", words.export_shard, "bytes of one of its files: 500MB, 5GB");
}

void DefineTraining(CLI::App& app, Flags& flags, Words& words) {
  app.add_option("--steps", flags.steps, "of the whole run, earlier ones of a resumed run included")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--micro-batches", flags.micro_batches,
                 "of each rank, whose gradients add up to one step")
      ->check(CLI::PositiveNumber);
  app.add_option("--as-ranks", flags.as_ranks,
                 "one process computes what this many ranks would, whose micro-batches it takes: "
                 "each gradient is divided by it before it is added, the loss by the rest")
      ->check(CLI::PositiveNumber);
  app.add_option("--seq", flags.sequence_length, "tokens of one row")->check(CLI::PositiveNumber);
  app.add_option("--batch", flags.batch_rows, "rows of one micro-batch")
      ->check(CLI::PositiveNumber);
  app.add_option("--text", flags.text_paths, "files or folders to train on")->take_all();
  app.add_option("--eval-every", flags.eval_every, "steps between evaluations; 0: at the end only")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--sample", flags.sample_bytes, "bytes of text to write at the end; 0: none")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--optimizer", words.optimizer, "adamw or sgd")
      ->check(CLI::IsMember({"adamw", "sgd"}));
  app.add_option("--lr", flags.learning_rate, "peak learning rate; 0: 1e-3 (adamw), 1e-2 (sgd)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--warm-up", flags.warm_up_steps, "steps of rising rate; -1: a tenth of all")
      ->check(CLI::Range(-1.0, 1e15));
  app.add_option("--weight-decay", flags.weight_decay)->check(CLI::NonNegativeNumber);
  app.add_option("--momentum", flags.momentum, "of sgd")->check(CLI::NonNegativeNumber);
  app.add_option("--clip", flags.clip, "largest norm of the gradients; 0: no clipping")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", flags.seed, "of weights, batches and the sample");
}

void DefineOffloading(CLI::App& app, Flags& flags, Words& words) {
  app.add_option("--offload", words.offload,
                 "on: weights and optimizer state on NVMe; what --nvme-path says by itself")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--ram", flags.ram, "memory budget of the offloaded state: 512MiB, 8GiB");
  app.add_option("--gpu-ram", flags.gpu_ram,
                 "with --device: the budget of the device's memory for weights and gradients: "
                 "auto, 8GiB");
  app.add_option("--nvme-path", flags.nvme_path,
                 "folder on the drive, or several with commas between; turns offloading on");
  app.add_option("--job", flags.job, "names the run; the same name resumes it");
  app.add_option("--durability", flags.durability,
                 "step: every step is committed; checkpoint:N: every Nth; checkpoint:10min");
  app.add_option("--update-in-backward", flags.update_in_backward,
                 "auto: updates begin during the backward; never: at step(); losses are the same")
      ->check(CLI::IsMember({"auto", "never"}));
  app.add_option("--generations", flags.generations, "spare ones of a new job, for snapshots")
      ->check(CLI::Range(0, 14));
  app.add_option("--zero-stage", flags.zero_stage,
                 "0 to 3: what memory is spent on first; -1: what saves most")
      ->check(CLI::Range(-1, 3));
  app.add_option("--weights-home", flags.weights_home,
                 "auto, ram, nvme, or the share of the weights that stays in memory");
  app.add_option("--state-home", flags.state_home, "the same of masters and moments");
  app.add_flag(
      "--checksums", flags.checksums,
      "end with a checksum of all weights, of all masters and of all moments of each kind");
  app.add_option("--io", flags.io, "auto, uring, libaio or threads")
      ->check(CLI::IsMember({"auto", "uring", "libaio", "threads"}));
}

// Naming a place on a drive is enough; flags of offloading without it would do nothing.
absl::Status DecideOffloading(const CLI::App& app, const Words& words, Flags& flags) {
  flags.offload =
      words.offload == "on" || (app.count("--offload") == 0 && !flags.nvme_path.empty());
  if (flags.offload) return absl::OkStatus();
  for (const char* const flag :
       {"--nvme-path", "--ram", "--gpu-ram", "--job", "--durability", "--update-in-backward",
        "--generations", "--zero-stage", "--weights-home", "--state-home", "--checksums", "--io"}) {
    if (app.count(flag) == 0) continue;
    return MakeError(ErrorId::kBadValue, absl::StrCat(flag, " has no effect without offloading"),
                     app.count("--offload") == 0 ? "Add --nvme-path DIR, or leave it away"
                                                 : "Say --offload on, or leave it away");
  }
  return absl::OkStatus();
}

absl::Status CheckDevice(const CLI::App& app, const Flags& flags) {
  if (flags.device == "cpu" && app.count("--gpu-ram") > 0) {
    return MakeError(ErrorId::kBadValue, "--gpu-ram has no effect on the CPU",
                     "Add --device cuda, or leave it away");
  }
  return absl::OkStatus();
}

absl::Status ReadWords(const CLI::App& app, const Words& words, Flags& flags) {
  flags.model = words.model == "gpt2" ? ModelKind::kGpt2 : ModelKind::kLlama;
  flags.precision = words.dtype == "bf16" ? Precision::kBFloat16 : Precision::kFloat32;
  flags.optimizer = words.optimizer == "sgd" ? OptimizerKind::kSgd : OptimizerKind::kAdamW;
  OFFLOAD_RETURN_IF_ERROR(DecideOffloading(app, words, flags));
  OFFLOAD_RETURN_IF_ERROR(CheckDevice(app, flags));
  OFFLOAD_ASSIGN_OR_RETURN(const uint64_t parameters, ParseCount(words.parameters));
  flags.parameters = static_cast<int64_t>(std::min<uint64_t>(parameters, int64_t{1} << 50));
  OFFLOAD_RETURN_IF_ERROR(ParseByteSize(flags.ram).status());
  OFFLOAD_ASSIGN_OR_RETURN(flags.export_shard_bytes, ParseByteSize(words.export_shard));
  if (flags.offload && flags.nvme_path.empty()) {
    return MakeError(ErrorId::kBadValue, "--offload on needs a folder on a drive",
                     "Add --nvme-path DIR");
  }
  if (flags.model != ModelKind::kLlama && !(flags.init_from + flags.export_folder).empty()) {
    return MakeError(ErrorId::kBadValue, "--init-from and --export know only llama, not gpt2",
                     "Use --model llama");
  }
  if (flags.micro_batches % flags.as_ranks != 0) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("--micro-batches is ", flags.micro_batches,
                                  ", not a multiple of --as-ranks ", flags.as_ranks),
                     "Give the micro-batches of all ranks together");
  }
  if (flags.learning_rate == 0) {
    flags.learning_rate = flags.optimizer == OptimizerKind::kAdamW ? 1e-3 : 1e-2;
  }
  if (flags.text_paths.empty()) flags.text_paths.push_back(kDefaultTextFolder);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv) {
  CLI::App app(
      "Trains a language model on text, byte by byte. For example:\n"
      "  train --model llama --params 10M --steps 200\n"
      "  train --model llama --params 1B --dtype bf16 --offload on --nvme-path /nvme0 --ram 2GiB");
  app.name("train");
  app.option_defaults()->always_capture_default();
  app.allow_extras();
  Flags flags;
  Words words;
  DefineModel(app, flags, words);
  DefineTraining(app, flags, words);
  DefineOffloading(app, flags, words);
  app.add_option("--device", flags.device,
                 "where the model is: cpu, cuda (of several ranks each has its own), cuda:1");
  app.add_option("--threads", flags.threads, "of torch; 0: what it chooses")
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--json", flags.json, "one JSON object per line on stdout, messages on stderr");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    flags.help = true;
    flags.help_text = app.help();
    return flags;
  } catch (const CLI::ParseError& error) {
    return MakeError(ErrorId::kBadValue, error.what(), "See --help");
  }
  if (const std::vector<std::string> extras = app.remaining(); !extras.empty()) {
    return UnknownFlag(app, extras.front());
  }
  OFFLOAD_RETURN_IF_ERROR(ReadWords(app, words, flags));
  return flags;
}

double LearningRate(const Flags& flags, int64_t step) {
  const int64_t warm_up = flags.warm_up_steps >= 0 ? flags.warm_up_steps : flags.steps / 10;
  if (step < warm_up) {
    return flags.learning_rate * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  }
  const int64_t last = std::max<int64_t>(flags.steps - 1 - warm_up, 1);
  const double progress =
      std::min(1.0, static_cast<double>(step - warm_up) / static_cast<double>(last));
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return flags.learning_rate * (kFinalFraction + (1.0 - kFinalFraction) * cosine);
}

}  // namespace offload::examples
