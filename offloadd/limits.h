// offloadd/limits.h
//
// Every bound of the daemon in one place. Printed once at start, at debug level.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::daemon {

struct Limits {
  int sessions_max = 128;
  int sessions_per_process_max = 16;
  int sessions_per_other_user_max = 32;      // a user that the daemon was told to admit
  int calls_per_session_max = 8;             // control calls at a time
  uint64_t stream_bytes_max = 256ull << 20;  // memory of a session's streams of control messages
  uint64_t message_bytes_max = 4ull << 20;   // of one control message
  size_t threads_at_start = 20;              // that the system must give, with the job of one rank
  size_t threads_of_session = 10;  // with its job; pools work with fewer than they ask for
  int call_threads_max = 1100;  // of the control service: calls_per_session_max for all, and some
  uint32_t ring_entries_per_turn = 64;  // read from one ring before others get their turn
  uint32_t wishes_max = 64;             // prefetches that wait for room
  uint32_t pipeline_blocks_max = 4096;
  uint32_t update_threads_max = 64;
  uint64_t trainer_state_bytes_max = 1ull << 20;
  uint64_t scratch_bytes_max = 1ull << 50;
  uint32_t schedule_touches_max = 1u << 24;
  uint32_t groups_max = 4096;
  uint32_t ranks_max = 64;                   // of a job
  uint64_t exchange_bytes_max = 1ull << 20;  // of one rank, at a time
  uint32_t failure_texts_max = 256;          // kept for ExplainFailure
  uint64_t ram_bytes_max = 1ull << 46;
  int room_poll_ms = 1;                   // unpinning sends no message
  double schedule_stall_seconds = 0.2;    // after which the update stops waiting for the forward
  double room_timeout_seconds = 30;       // after which an acquire that nothing can serve fails
  double holder_patience_seconds = 1;     // for a job that another session of this daemon has open
  double join_timeout_seconds = 120;      // for the ranks of a launch that are missing
  double rank_report_seconds = 10;        // after which it is said which ranks are waited for
  double handshake_timeout_seconds = 30;  // for Hello, and for Mapped after the memory was sent
  double scrub_bytes_per_second = 16e6;   // read back in the background, of each job
  double scrub_delay_seconds = 60;        // before that begins
  double drain_timeout_seconds = 60;      // after SIGTERM; then the daemon ends as by a crash
};

inline constexpr Limits kLimits;

}  // namespace offload::daemon
