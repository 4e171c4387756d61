// client/trace_file.h
//
// A trace in Chrome's JSON object format, which Perfetto and chrome://tracing open: events are
// gathered in bounded memory and written in pieces.
//
// Invariants
//   * After every Write() the file is whole, valid JSON: a piece and the end of the document go in
//   one call, and the next piece overwrites that end. Who is killed leaves what was written last.
//   * At most kEventsMax events wait to be written, and the file has at most kFileBytesMax bytes;
//   what there is no room for is dropped, and the file's end says how many were.
//
// Thread safety: Add() from any thread; the rest from one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/unique_fd.h"

namespace offload::client {

// Times are of CLOCK_MONOTONIC, in nanoseconds. Texts outlive the trace.
struct TraceEvent {
  static constexpr uint32_t kNoTensor = UINT32_MAX;

  // X: a span of a thread. b, e: beginning and end of what overlaps, by id. s, f: the two ends of
  // an arrow between spans, by id. C: a counter, whose value is `bytes`.
  char type = 'X';
  const char* category = "";
  const char* name = "";  // "": that of the tensor
  uint32_t process = 0, thread = 0;
  int64_t begin_nanoseconds = 0, duration_nanoseconds = 0;
  uint64_t id = 0;
  uint32_t tensor = kNoTensor;
  uint32_t extent = 0;
  uint64_t bytes = 0;
};

// The event as one JSON object; `tensor_names` by TraceEvent::tensor.
std::string ToJson(const TraceEvent& event, const std::vector<std::string>& tensor_names);

// Of several ranks, and of several sessions of a process, each writes a file of its own:
// "run.json", "run.rank1.json", "run.2.json". `session` counts from 1.
std::string TracePath(const std::string& path, uint32_t rank, uint32_t session);

class TraceFile {
 public:
  static constexpr size_t kEventsMax = 1 << 16;
  static constexpr uint64_t kFileBytesMax = 1ull << 30;

  // Replaces what is at `path`. OFD-1002 when it cannot be written.
  static absl::StatusOr<std::unique_ptr<TraceFile>> Create(const std::string& path);
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // What TraceEvent::tensor counts. Any thread.
  void SetTensorNames(std::vector<std::string> names);
  // Metadata: what a process, or a thread of it, is called.
  void NameProcess(uint32_t process, const std::string& name);
  void NameThread(uint32_t process, uint32_t thread, const std::string& name);

  void Add(const TraceEvent& event);
  // Counts what somebody else has dropped.
  void AddDropped(uint64_t count);
  // Writes what was added. After an error, which is returned once, nothing is written any more.
  absl::Status Write();

  const std::string& path() const { return path_; }

 private:
  TraceFile(std::string path, UniqueFd file) : path_(std::move(path)), file_(std::move(file)) {}
  void AddText(const std::string& object);
  absl::Status WritePiece();

  const std::string path_;
  const UniqueFd file_;
  std::string piece_;  // objects to be written, all but the first of the file after a separator
  bool has_objects_ = false;
  uint64_t end_ = 0;  // of what was written, without the end of the document
  bool failed_ = false;
  std::vector<TraceEvent> writing_;

  absl::Mutex mutex_;
  std::vector<TraceEvent> events_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const std::vector<std::string>> tensor_names_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace offload::client
