// zero3/torch/progress.h
//
// Tells on stderr how far work is that takes long.
//
// Thread safety: from one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "base/byte_size.h"
#include "zero3/torch/log.h"
#include "zero3/torch/weights_io.h"

namespace offload::zero3 {

// Every two seconds.
class Progress {
 public:
  explicit Progress(const char* work) : work_(work) {}
  void operator()(uint64_t done, uint64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_ < std::chrono::seconds(2)) return;
    last_ = now;
    Log().info("{}: {} of {}", work_, FormatDecimalBytes(done), FormatDecimalBytes(total));
  }

 private:
  const char* work_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// The same, one weight of a file after the other.
class FileProgress {
 public:
  FileProgress(const char* work, const std::vector<FileWeight>& weights) : progress_(work) {
    for (const FileWeight& weight : weights) total_bytes_ += SizeBytes(weight);
  }
  void Done(const FileWeight& weight) { progress_(done_bytes_ += SizeBytes(weight), total_bytes_); }

 private:
  static uint64_t SizeBytes(const FileWeight& weight) {
    return weight.ElementCount() * c10::elementSize(weight.dtype);
  }

  Progress progress_;
  uint64_t done_bytes_ = 0, total_bytes_ = 0;
};

}  // namespace offload::zero3
