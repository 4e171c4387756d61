#include "tools/rank_view.h"

#include <cstdint>

#include "absl/strings/str_format.h"
#include "base/byte_size.h"

namespace offload::tools {
namespace {

namespace v1 = proto::v1;

const v1::GpuStatus* GpuBefore(const TwoAnswers& answers, const v1::JobStatus& job,
                               const v1::RankStatus& rank) {
  for (const v1::JobStatus& earlier : answers.jobs_before) {
    if (earlier.job() != job.job() || earlier.pool() != job.pool()) continue;
    for (const v1::RankStatus& before : earlier.ranks()) {
      const bool is_same = before.rank() == rank.rank() && before.pid() == rank.pid();
      if (is_same && before.has_gpu()) return &before.gpu();
    }
  }
  return nullptr;
}

Json DescribeGpu(const v1::GpuStatus& gpu, const GpuRates& rates) {
  return {{"device", gpu.device()},
          {"gpu_ram_bytes", gpu.gpu_ram_bytes()},
          {"window_bytes", gpu.window_bytes()},
          {"used_bytes", gpu.used_bytes()},
          {"peak_bytes", gpu.peak_bytes()},
          {"bytes_to_device", gpu.bytes_to_device()},
          {"bytes_to_host", gpu.bytes_to_host()},
          {"stall_seconds", gpu.stall_seconds()},
          {"host_waits", gpu.host_waits()},
          {"to_device_bytes_per_second", rates.to_device},
          {"to_host_bytes_per_second", rates.to_host},
          {"stall_share", rates.stall_share}};
}

}  // namespace

// The rank writes its words one by one: none of them may go back.
GpuRates GpuRatesOf(const TwoAnswers& answers, const v1::JobStatus& job,
                    const v1::RankStatus& rank) {
  const v1::GpuStatus* const before = GpuBefore(answers, job, rank);
  if (before == nullptr || !rank.has_gpu() || answers.seconds <= 0) return {};
  const v1::GpuStatus& now = rank.gpu();
  const auto per_second = [&](double then, double value) {
    return value > then ? (value - then) / answers.seconds : 0;
  };
  return {.to_device = per_second(static_cast<double>(before->bytes_to_device()),
                                  static_cast<double>(now.bytes_to_device())),
          .to_host = per_second(static_cast<double>(before->bytes_to_host()),
                                static_cast<double>(now.bytes_to_host())),
          .stall_share = per_second(before->stall_seconds(), now.stall_seconds())};
}

std::string GpuText(const TwoAnswers& answers, const v1::JobStatus& job,
                    const v1::RankStatus& rank) {
  if (!rank.has_gpu()) return "";
  const v1::GpuStatus& gpu = rank.gpu();
  const GpuRates rates = GpuRatesOf(answers, job, rank);
  return absl::StrFormat("%s  %s of %s, peak %s  %.2fin %.2fout GB/s  stall %.0f%%",
                         Printable(gpu.device()), FormatBytes(gpu.used_bytes()),
                         FormatBytes(gpu.gpu_ram_bytes()), FormatBytes(gpu.peak_bytes()),
                         rates.to_device * 1e-9, rates.to_host * 1e-9, rates.stall_share * 100);
}

Json DescribeRanks(const TwoAnswers& answers, const v1::JobStatus& job) {
  Json ranks = Json::array();
  for (const v1::RankStatus& rank : job.ranks()) {
    ranks.push_back(
        {{"rank", rank.rank()},
         {"pid", rank.pid()},
         {"phase", rank.phase()},
         {"step", rank.step()},
         {"position", rank.position()},
         {"gpu", rank.has_gpu() ? DescribeGpu(rank.gpu(), GpuRatesOf(answers, job, rank))
                                : Json(nullptr)}});
  }
  return ranks;
}

}  // namespace offload::tools
