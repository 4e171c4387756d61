// tools/rank_view.h
//
// The ranks of a job and their devices, for people and as JSON.
//
// Thread safety: pure.
#pragma once

#include <string>

#include "proto/offload.pb.h"
#include "tools/answer.h"
#include "tools/daemons.h"

namespace offload::tools {

// Of a rank's device between two answers; zeros for a rank that was not there before.
struct GpuRates {
  double to_device = 0, to_host = 0;  // bytes per second
  double stall_share = 0;  // of the time, that streams waited for copies; more than 1 for several
};
GpuRates GpuRatesOf(const TwoAnswers& answers, const proto::v1::JobStatus& job,
                    const proto::v1::RankStatus& rank);

// "cuda:0  18.2 GiB of 20.0 GiB, peak 19.9 GiB  12.10in 6.05out GB/s  stall 3%"; "" for a rank
// without a device.
std::string GpuText(const TwoAnswers& answers, const proto::v1::JobStatus& job,
                    const proto::v1::RankStatus& rank);

// A list of all; "gpu" is null for those without a device.
Json DescribeRanks(const TwoAnswers& answers, const proto::v1::JobStatus& job);

}  // namespace offload::tools
