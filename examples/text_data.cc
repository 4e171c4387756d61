#include "examples/text_data.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random.h"
#include "base/status_macros.h"

namespace offload::examples {
namespace {

namespace fs = std::filesystem;

constexpr double kHeldOutFraction = 0.05;

absl::Status CannotRead(const fs::path& path, const std::error_code& error) {
  return MakeError(ErrorId::kBadValue,
                   absl::StrCat("text ", path.string(), " cannot be read: ", error.message()),
                   "Name a readable file or folder with --text");
}

absl::StatusOr<std::vector<fs::path>> FilesOf(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (error || !fs::exists(status)) {
    return CannotRead(path, error ? error : std::error_code(ENOENT, std::generic_category()));
  }
  if (!fs::is_directory(status)) return std::vector<fs::path>{path};
  std::vector<fs::path> files;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (fs::is_regular_file(entry->symlink_status(error)) && !error) files.push_back(entry->path());
  }
  if (error) return CannotRead(path, error);
  std::sort(files.begin(), files.end());
  return files;
}

absl::Status AppendFile(const fs::path& path, std::vector<uint16_t>& tokens) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return CannotRead(path, std::error_code(errno, std::generic_category()));
  tokens.push_back(kBeginOfText);
  char buffer[1 << 16];
  while (file.read(buffer, sizeof(buffer)), file.gcount() > 0) {
    for (std::streamsize i = 0; i < file.gcount(); ++i) {
      tokens.push_back(static_cast<unsigned char>(buffer[i]));
    }
  }
  if (file.bad()) return CannotRead(path, std::error_code(EIO, std::generic_category()));
  tokens.push_back(kEndOfText);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<uint16_t>> ReadTokens(const std::vector<std::string>& paths) {
  std::vector<uint16_t> tokens;
  for (const std::string& path : paths) {
    OFFLOAD_ASSIGN_OR_RETURN(const std::vector<fs::path> files, FilesOf(path));
    for (const fs::path& file : files) OFFLOAD_RETURN_IF_ERROR(AppendFile(file, tokens));
  }
  return tokens;
}

uint64_t Mix(uint64_t seed, uint64_t index) {
  uint64_t state = seed;
  state = SplitMix64(state) ^ index;
  return SplitMix64(state);
}

absl::StatusOr<TextData> TextData::Make(std::vector<uint16_t> tokens, int64_t sequence_length) {
  const int64_t count = static_cast<int64_t>(tokens.size());
  const int64_t row = sequence_length + 1;
  const int64_t held_out =
      std::max(row, static_cast<int64_t>(static_cast<double>(count) * kHeldOutFraction));
  if (count < held_out + row) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("the text has ", count, " tokens, and --seq ", sequence_length,
                                  " needs at least ", 2 * row),
                     "Give more text with --text, or a smaller --seq");
  }
  return TextData(std::move(tokens), sequence_length, count - held_out);
}

void TextData::AppendRow(int64_t begin, std::vector<int64_t>& batch) const {
  const auto first = tokens_.begin() + begin;
  batch.insert(batch.end(), first, first + sequence_length_ + 1);
}

std::vector<int64_t> TextData::TrainingBatch(uint64_t seed, int64_t step, int64_t micro_batch,
                                             int64_t rows) const {
  const uint64_t starts = static_cast<uint64_t>(held_out_begin_ - sequence_length_);
  const uint64_t batch_seed =
      Mix(Mix(seed, static_cast<uint64_t>(step)), static_cast<uint64_t>(micro_batch));
  std::vector<int64_t> batch;
  batch.reserve(static_cast<size_t>(rows * (sequence_length_ + 1)));
  for (int64_t row = 0; row < rows; ++row) {
    AppendRow(static_cast<int64_t>(Mix(batch_seed, static_cast<uint64_t>(row)) % starts), batch);
  }
  return batch;
}

std::vector<int64_t> TextData::EvaluationBatch(int64_t index, int64_t count, int64_t rows) const {
  const int64_t starts = held_out_tokens() - sequence_length_;
  std::vector<int64_t> batch;
  batch.reserve(static_cast<size_t>(rows * (sequence_length_ + 1)));
  for (int64_t row = index * rows; row < (index + 1) * rows; ++row) {
    AppendRow(held_out_begin_ + row * starts / (count * rows), batch);
  }
  return batch;
}

std::vector<int64_t> TextData::Prompt(int64_t length) const {
  const auto first = tokens_.begin() + held_out_begin_;
  return std::vector<int64_t>(first, first + std::min(length, held_out_tokens()));
}

}  // namespace offload::examples
