// zero3/torch/given_memory.h
//
// Memory that set_data() or set_() gave a parameter of a job while the program has another tensor
// over it (the vector of vector_to_parameters()): in plain torch both are one memory. The
// parameter's values are in the job, so what is written on one side is copied to the other before
// somebody can look: into the memory when an operator or a step has written the parameter, out of
// it when the parameter is used next. Here is that memory, and what it had when both were the same.
//
// That is exact for one parameter, of one rank, in the memory of the host. Everything else may only
// be looked at (`is_followed`): a write on either side is an error.
//
// Thread safety: none; the owner has a lock. Different objects may be of one storage.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace offload::zero3 {

class GivenMemory {
 public:
  // Bytes [begin, begin + size_bytes) of `storage`, which is kept: what is written there just
  // before the program lets go of it is the parameter's, too. `version`: which all tensors over it
  // share. `is_of_program`: somebody may see the bytes without a tensor. `may_follow`: false where
  // copying is not exact.
  GivenMemory(c10::Storage storage, size_t begin, size_t size_bytes, c10::VariableVersion version,
              bool is_of_program, bool may_follow);
  ~GivenMemory();
  GivenMemory(const GivenMemory&) = delete;
  GivenMemory& operator=(const GivenMemory&) = delete;

  // Whether the program still has it.
  bool IsHeld() const;
  bool Is(const c10::Storage& storage, size_t begin) const;
  // False from the moment when a second parameter has been given a part of it.
  bool is_followed() const;
  // Since both sides were the same: by whatever means where it is followed, else by operators.
  bool WasWritten() const;

  // Both sides are the same afterwards. The first where it was written.
  void CopyTo(std::byte* bytes);
  void CopyFrom(const std::byte* bytes);
  // The memory itself, for a parameter whose job has ended.
  c10::DataPtr Share() const;

 private:
  struct Piece;
  struct AllPieces;

  bool IsThere() const;
  const std::byte* Bytes() const;
  uint64_t Digest(const std::byte* bytes) const;

  const std::shared_ptr<Piece> piece_;
  const bool is_of_program_;
  c10::VariableVersion version_;
  uint32_t version_then_;
  uint64_t digest_then_ = 0;
};

}  // namespace offload::zero3
