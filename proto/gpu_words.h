// proto/gpu_words.h
//
// What a rank says of its device, in the first page of its region behind the words of its steps
// (proto/step_words.h): what of gpu_ram is in use, what was copied, and how long the device waited
// for it. As with those, the daemon shows it to people and decides nothing by it.
//
// Thread safety: the words may be read and stored from any thread; the figures are plain data.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/shm_abi.h"
#include "proto/step_words.h"

namespace offload::proto {

// The words at one moment. Sums grow from the joining of the rank on.
struct GpuFigures {
  std::string device;          // torch's name
  uint64_t gpu_ram_bytes = 0;  // the budget
  uint64_t window_bytes = 0;   // of it, for weights
  uint64_t used_bytes = 0;     // of it in use: weights in the window, gradients at rest
  uint64_t peak_bytes = 0;     // held of it at most, with the whole window
  uint64_t bytes_to_device = 0;
  uint64_t bytes_to_host = 0;
  uint64_t stall_nanoseconds = 0;  // that streams waited for copies, all together
  uint64_t host_waits = 0;         // of the trainer's threads for copies
};

// Written by the rank. Zero in a new region.
struct GpuWords {
  static constexpr size_t kDeviceBytes = 32;

  std::atomic<uint64_t> gpu_ram_bytes;  // 0: the rank has no device. Released behind `device`
  std::atomic<uint64_t> window_bytes, used_bytes, peak_bytes;
  std::atomic<uint64_t> bytes_to_device, bytes_to_host;
  std::atomic<uint64_t> stall_nanoseconds;
  std::atomic<uint64_t> host_waits;
  std::array<std::atomic<char>, kDeviceBytes> device;  // up to the first zero
};
inline constexpr uint64_t kGpuWordsOffset = 3072;
static_assert(kStepWordsOffset + sizeof(StepWords) <= kGpuWordsOffset &&
              kGpuWordsOffset + sizeof(GpuWords) <= kSubmissionRingOffset);

inline GpuWords* GpuWordsOf(std::byte* region) {
  return reinterpret_cast<GpuWords*>(region + kGpuWordsOffset);
}
inline const GpuWords* GpuWordsOf(const std::byte* region) {
  return reinterpret_cast<const GpuWords*>(region + kGpuWordsOffset);
}

// Figures order nothing, so all but the budget is relaxed.
inline void StoreGpuWords(const GpuFigures& figures, GpuWords& words) {
  const auto store = [](std::atomic<uint64_t>& word, uint64_t value) {
    word.store(value, std::memory_order_relaxed);
  };
  for (size_t i = 0; i < std::min(figures.device.size(), GpuWords::kDeviceBytes); ++i)
    words.device[i].store(figures.device[i], std::memory_order_relaxed);
  store(words.window_bytes, figures.window_bytes);
  store(words.used_bytes, figures.used_bytes);
  store(words.peak_bytes, figures.peak_bytes);
  store(words.bytes_to_device, figures.bytes_to_device);
  store(words.bytes_to_host, figures.bytes_to_host);
  store(words.stall_nanoseconds, figures.stall_nanoseconds);
  store(words.host_waits, figures.host_waits);
  words.gpu_ram_bytes.store(figures.gpu_ram_bytes, std::memory_order_release);
}

inline GpuFigures ReadGpuWords(const GpuWords& words) {
  const auto read = [](const std::atomic<uint64_t>& word) {
    return word.load(std::memory_order_relaxed);
  };
  GpuFigures figures;
  figures.gpu_ram_bytes = words.gpu_ram_bytes.load(std::memory_order_acquire);
  for (const std::atomic<char>& letter : words.device) {
    const char read_letter = letter.load(std::memory_order_relaxed);
    if (read_letter == 0) break;
    figures.device += read_letter;
  }
  figures.window_bytes = read(words.window_bytes);
  figures.used_bytes = read(words.used_bytes);
  figures.peak_bytes = read(words.peak_bytes);
  figures.bytes_to_device = read(words.bytes_to_device);
  figures.bytes_to_host = read(words.bytes_to_host);
  figures.stall_nanoseconds = read(words.stall_nanoseconds);
  figures.host_waits = read(words.host_waits);
  return figures;
}

// The figures of `now`, and of the sums what was added since `before`; what went back counts as 0.
inline GpuFigures Difference(GpuFigures now, const GpuFigures& before) {
  const auto subtract = [](uint64_t& value, uint64_t then) {
    value = value > then ? value - then : 0;
  };
  subtract(now.bytes_to_device, before.bytes_to_device);
  subtract(now.bytes_to_host, before.bytes_to_host);
  subtract(now.stall_nanoseconds, before.stall_nanoseconds);
  subtract(now.host_waits, before.host_waits);
  return now;
}

}  // namespace offload::proto
