// proto/trainer_states.h
//
// What ranks give with a step for themselves (random numbers, the place in their data), as the one
// blob that a commit holds. One rank's is kept as it was given; those of several stand in a
// container.
//
// Thread safety: pure functions; the blob comes from a file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace offload::proto {

// By rank. An empty one was never given.
std::string EncodeTrainerStates(const std::vector<std::string>& states);
// One for whatever is no container.
std::vector<std::string> DecodeTrainerStates(std::string_view blob);

// So many bytes each rank's may have, that all of them fit into a blob of `blob_bytes`.
uint64_t TrainerStateBytesMax(uint32_t world_size, uint64_t blob_bytes);

// What a rank is handed when it resumes.
struct ResumedState {
  std::string state;
  bool is_own = true;  // else rank 0's, of a run that had no such rank
};
ResumedState StateOfRank(const std::vector<std::string>& states, uint32_t rank);

}  // namespace offload::proto
