// examples/flags.h
//
// The command line of the example trainer.
//
// Thread safety: none needed; call ParseFlags() once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "zero3/model_shapes.h"

namespace offload::examples {

using zero3::ModelKind;

enum class Precision { kFloat32, kBFloat16 };
enum class OptimizerKind { kAdamW, kSgd };

struct Flags {
  bool help = false;  // help_text is all that the caller wants
  std::string help_text;

  ModelKind model = ModelKind::kLlama;
  int64_t parameters = 10'000'000;
  int64_t key_value_heads = 0;
  bool tied_embedding = false;
  Precision precision = Precision::kFloat32;

  int64_t steps = 100;        // of the whole run, with those before a resume
  int64_t micro_batches = 1;  // of each rank
  int64_t as_ranks = 1;       // whose arithmetic one process has: micro_batches is a multiple of it
  int64_t sequence_length = 256;
  int64_t batch_rows = 4;
  uint64_t seed = 1;
  std::vector<std::string> text_paths;
  int64_t eval_every = 0;     // 0: at the end only
  int64_t sample_bytes = 64;  // of the text written at the end
  std::string init_from;      // a Hugging Face folder, or a safetensors file; empty: random weights
  std::string export_folder;  // where the trained weights go at the end; empty: nowhere
  uint64_t export_shard_bytes = 5'000'000'000;
  bool checksums = false;  // of all that the job keeps, at the end

  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double learning_rate = 0;  // 0: 1e-3 for AdamW, 1e-2 for SGD
  double weight_decay = 0.01;
  double momentum = 0.9;
  double clip = 1.0;           // 0: off
  int64_t warm_up_steps = -1;  // -1: a tenth of the steps

  bool offload = false;
  std::string ram = "512MiB";
  std::string nvme_path;
  std::string job = "default";
  std::string io = "auto";
  std::string durability = "step";
  std::string update_in_backward = "auto";
  int64_t generations = 0;
  int64_t zero_stage = -1;  // -1: what saves most
  std::string weights_home = "auto", state_home = "auto";

  std::string device = "cpu";    // by torch's name: cuda, cuda:1
  std::string gpu_ram = "auto";  // of a device, with offloading

  int64_t threads = 0;  // 0: what torch chooses
  bool json = false;
};

// Reads the command line. An unknown flag is OFD-1001 with the nearest known one, a value that
// cannot be used OFD-1002; both are usage errors (exit code 2).
absl::StatusOr<Flags> ParseFlags(int argc, const char* const* argv);

// The rate of one step (0-based): a linear warm-up to the peak, then a cosine down to a tenth of it
// at the last step. A pure function, so a run that resumes continues on the same curve.
double LearningRate(const Flags& flags, int64_t step);

}  // namespace offload::examples
