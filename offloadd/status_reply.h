// offloadd/status_reply.h
//
// What a daemon tells of itself and all its jobs, to offloadctl and to who collects metrics.
//
// Thread safety: any thread but the jobs' loops, which are asked.
#pragma once

#include "offloadd/job_table.h"
#include "proto/offload.pb.h"

namespace offload::daemon {

// Waits for the jobs together, half a second at most; those that are busy for longer are shown with
// their names only, as "busy". `started_seconds`: by the real clock.
proto::v1::StatusReply MakeStatusReply(const JobTable& jobs, double started_seconds);

}  // namespace offload::daemon
