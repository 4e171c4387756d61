#include "proto/trainer_states.h"

#include <cstring>

namespace offload::proto {
namespace {

// No trainer begins its state with this by chance.
constexpr std::string_view kMagic("\x93OFFLOADD.RANKS\x01", 16);
constexpr uint64_t kLengthBytes = sizeof(uint32_t);

void Append(std::string& to, uint32_t number) {
  char bytes[kLengthBytes];
  std::memcpy(bytes, &number, sizeof(bytes));
  to.append(bytes, sizeof(bytes));
}

// Takes a number off the front of `bytes`; missing when there is none.
std::optional<uint32_t> Take(std::string_view& bytes) {
  if (bytes.size() < kLengthBytes) return std::nullopt;
  uint32_t number;
  std::memcpy(&number, bytes.data(), sizeof(number));
  bytes.remove_prefix(kLengthBytes);
  return number;
}

std::optional<std::vector<std::string>> DecodeContainer(std::string_view bytes) {
  if (!bytes.starts_with(kMagic)) return std::nullopt;
  bytes.remove_prefix(kMagic.size());
  const std::optional<uint32_t> count = Take(bytes);
  if (!count.has_value() || *count > bytes.size() / kLengthBytes) return std::nullopt;
  std::vector<std::string> states;
  for (uint32_t i = 0; i < *count; ++i) {
    const std::optional<uint32_t> length = Take(bytes);
    if (!length.has_value() || *length > bytes.size()) return std::nullopt;
    states.emplace_back(bytes.substr(0, *length));
    bytes.remove_prefix(*length);
  }
  if (states.empty() || !bytes.empty()) return std::nullopt;
  return states;
}

}  // namespace

std::string EncodeTrainerStates(const std::vector<std::string>& states) {
  if (states.size() == 1) return states.front();
  std::string blob(kMagic);
  Append(blob, static_cast<uint32_t>(states.size()));
  for (const std::string& state : states) {
    Append(blob, static_cast<uint32_t>(state.size()));
    blob += state;
  }
  return blob;
}

std::vector<std::string> DecodeTrainerStates(std::string_view blob) {
  std::optional<std::vector<std::string>> states = DecodeContainer(blob);
  if (states.has_value()) return *std::move(states);
  return {std::string(blob)};
}

uint64_t TrainerStateBytesMax(uint32_t world_size, uint64_t blob_bytes) {
  if (world_size == 1) return blob_bytes;
  return (blob_bytes - kMagic.size() - kLengthBytes) / world_size - kLengthBytes;
}

ResumedState StateOfRank(const std::vector<std::string>& states, uint32_t rank) {
  if (rank < states.size() && (rank == 0 || !states[rank].empty())) return {states[rank], true};
  return {states.front(), false};
}

}  // namespace offload::proto
