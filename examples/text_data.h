// examples/text_data.h
//
// Text files as byte-level tokens, and the batches a training step takes from them.
//
// Every batch is a pure function of (seed, step, micro-batch), so a run that resumes needs to know
// nothing but its step. The last part of the text is held out for evaluation and never trained on.
//
// Thread safety: a TextData is immutable after Make(); all methods may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "zero3/model_shapes.h"

namespace offload::examples {

// Bytes are tokens; three more mark beginning, end and padding.
inline constexpr int64_t kBeginOfText = 256;
inline constexpr int64_t kEndOfText = 257;
inline constexpr int64_t kPadding = 258;
static_assert(kPadding < zero3::kByteVocabulary);

// Where every Debian machine has some text.
inline constexpr char kDefaultTextFolder[] = "/usr/share/common-licenses";

// Reads files; of a folder, its regular files in the order of their names (no symbolic links, no
// folders below it). Every file becomes begin-of-text, its bytes, end-of-text.
absl::StatusOr<std::vector<uint16_t>> ReadTokens(const std::vector<std::string>& paths);

// Hashes an index under a seed to 64 well mixed bits.
uint64_t Mix(uint64_t seed, uint64_t index);

class TextData {
 public:
  // Splits the tokens; `sequence_length` is the number of tokens a row predicts. INVALID_ARGUMENT
  // when the held-out part would not fill one row.
  static absl::StatusOr<TextData> Make(std::vector<uint16_t> tokens, int64_t sequence_length);

  // `rows` rows of sequence_length + 1 tokens each, row after row: the first sequence_length are
  // inputs, the last sequence_length are what they predict.
  std::vector<int64_t> TrainingBatch(uint64_t seed, int64_t step, int64_t micro_batch,
                                     int64_t rows) const;

  // The index-th of `count` batches of the held-out part, evenly spread, always the same.
  std::vector<int64_t> EvaluationBatch(int64_t index, int64_t count, int64_t rows) const;

  // The first `length` tokens of the held-out part: a prompt nobody trained on.
  std::vector<int64_t> Prompt(int64_t length) const;

  int64_t training_tokens() const { return held_out_begin_; }
  int64_t held_out_tokens() const { return static_cast<int64_t>(tokens_.size()) - held_out_begin_; }

 private:
  TextData(std::vector<uint16_t> tokens, int64_t sequence_length, int64_t held_out_begin)
      : tokens_(std::move(tokens)),
        sequence_length_(sequence_length),
        held_out_begin_(held_out_begin) {}

  void AppendRow(int64_t begin, std::vector<int64_t>& batch) const;

  std::vector<uint16_t> tokens_;
  int64_t sequence_length_;
  int64_t held_out_begin_;
};

}  // namespace offload::examples
