#include "client/step_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/error.h"

namespace offload::client {
namespace {

double UnixSeconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// An object of the values by name, in seconds.
template <typename Names, typename Values>
std::string SecondsByName(const Names& names, const Values& nanoseconds) {
  std::string json = "{";
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StrAppendFormat(&json, "%s\"%s\":%.9f", i == 0 ? "" : ",", std::string(names[i]),
                          static_cast<double>(nanoseconds[i]) * 1e-9);
  }
  return json + "}";
}

std::string StallsByName(const proto::StepSums& sums) {
  std::string json = "{";
  for (size_t phase = 0; phase < proto::kStepPhases; ++phase) {
    absl::StrAppend(&json, phase == 0 ? "" : ",", "\"", std::string(proto::kStepPhaseNames[phase]),
                    "\":", SecondsByName(proto::kStallCauseNames, sums.stall_nanoseconds[phase]));
  }
  return json + "}";
}

std::string PrefetchesByName(const proto::StepSums& sums) {
  std::string json = "{";
  for (size_t i = 0; i < proto::kPrefetchResults; ++i) {
    absl::StrAppend(&json, i == 0 ? "" : ",", "\"", std::string(proto::kPrefetchResultNames[i]),
                    "\":", sums.prefetches[i]);
  }
  return json + "}";
}

std::string GpuPart(const proto::GpuFigures& gpu) {
  if (gpu.gpu_ram_bytes == 0) return "";
  return absl::StrFormat(
      ",\"gpu\":{\"used_bytes\":%d,\"peak_bytes\":%d,\"bytes_to_device\":%d,\"bytes_to_host\":%d,"
      "\"stall_seconds\":%.9f,\"host_waits\":%d}",
      gpu.used_bytes, gpu.peak_bytes, gpu.bytes_to_device, gpu.bytes_to_host,
      static_cast<double>(gpu.stall_nanoseconds) * 1e-9, gpu.host_waits);
}

}  // namespace

std::string ToJsonLine(const StepLine& line) {
  return absl::StrCat(
      "{\"step\":", line.step, ",\"committed_step\":", line.committed_step,
      absl::StrFormat(",\"end_unix_seconds\":%.3f,\"seconds\":%.9f", line.end_unix_seconds,
                      line.seconds),
      ",\"phase_seconds\":", SecondsByName(proto::kStepPhaseNames, line.sums.phase_nanoseconds),
      ",\"stall_seconds\":", StallsByName(line.sums),
      ",\"prefetches\":", PrefetchesByName(line.sums), ",\"bytes_read\":", line.bytes_read,
      ",\"bytes_written\":", line.bytes_written, ",\"resident_bytes\":", line.resident_bytes,
      GpuPart(line.gpu), "}\n");
}

absl::StatusOr<std::unique_ptr<StepLog>> StepLog::Open(const std::string& path,
                                                       const proto::StepWords* words,
                                                       const proto::GpuWords* gpu,
                                                       const proto::SlabHeader* header) {
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file.valid()) {
    return MakeError(ErrorId::kBadValue,
                     absl::StrCat("the step log ", path, " cannot be written: ", ErrnoText(errno)),
                     "Set OFFLOADD_STEP_LOG to a file in a directory that exists, or to nothing");
  }
  return std::unique_ptr<StepLog>(new StepLog(path, std::move(file), words, gpu, header));
}

StepLog::StepLog(std::string path, UniqueFd file, const proto::StepWords* words,
                 const proto::GpuWords* gpu, const proto::SlabHeader* header)
    : path_(std::move(path)),
      file_(std::move(file)),
      words_(*words),
      gpu_(*gpu),
      header_(*header),
      last_(Now()) {}

StepLog::Moment StepLog::Now() const {
  return {.nanoseconds = Clock::Real().NowNanoseconds(),
          .sums = proto::ReadStepWords(words_),
          .bytes_read = header_.bytes_read.load(std::memory_order_relaxed),
          .bytes_written = header_.bytes_written.load(std::memory_order_relaxed),
          .gpu = proto::ReadGpuWords(gpu_)};
}

void StepLog::Add(uint64_t step) {
  if (!file_.valid()) return;
  const Moment now = Now();
  const std::string line =
      ToJsonLine({.step = step,
                  .committed_step = header_.durable_step.load(std::memory_order_relaxed),
                  .end_unix_seconds = UnixSeconds(),
                  .seconds = static_cast<double>(now.nanoseconds - last_.nanoseconds) * 1e-9,
                  .sums = proto::Difference(now.sums, last_.sums),
                  .bytes_read = now.bytes_read - last_.bytes_read,
                  .bytes_written = now.bytes_written - last_.bytes_written,
                  .resident_bytes = header_.resident_bytes.load(std::memory_order_relaxed),
                  .gpu = proto::Difference(now.gpu, last_.gpu)});
  last_ = now;
  const ssize_t written = ::write(file_.get(), line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return;
  std::fprintf(stderr, "offload: the step log %s ends at step %llu: %s\n", path_.c_str(),
               static_cast<unsigned long long>(step),
               written < 0 ? ErrnoText(errno).c_str() : "no room");
  file_.reset();
}

}  // namespace offload::client
