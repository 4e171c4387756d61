// offloadd/metrics_text.h
//
// A daemon's status in Prometheus' text format (version 0.0.4): base units, "_total" on counters,
// no label per tensor. docs/monitoring.md lists the metrics.
//
// Thread safety: pure.
#pragma once

#include <map>
#include <string>

#include "proto/offload.pb.h"

namespace offload::daemon {

// `pool_free_bytes`: of each pool whose free space is known.
std::string MetricsText(const proto::v1::StatusReply& status,
                        const std::map<std::string, uint64_t>& pool_free_bytes);

}  // namespace offload::daemon
