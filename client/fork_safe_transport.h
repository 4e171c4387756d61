// client/fork_safe_transport.h
//
// Starts gRPC so that a child that is forked later may open a session of its own, while its
// parent's go on: what a fork duplicates must neither be shared with the parent nor wait for
// threads that are not there.
//
// Thread safety: may be called from any thread.
#pragma once

namespace offload::client {

// Before the first channel of the process; later calls do nothing. A strategy that the environment
// names (GRPC_POLL_STRATEGY) stays.
void StartForkSafeTransport();

}  // namespace offload::client
