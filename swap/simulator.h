// swap/simulator.h
//
// A store under simulated operation, judged against a model: a seed chooses a small store, some
// hundred operations on it, the faults of its drive and the crashes, and everything that follows is
// a function of that seed. A run that fails is repeated by its number.
//
// The fault model
//
// clang-format off
//   fault                        how often           what the store may do
//   read error, short read,      any, once or for    fail that read; refuse to open while it lasts,
//                                                    or lose a snapshot whose table it keeps from
//                                                    being read, and say so
//   again                        ever until reopened
//   bit flip, misdirected and    any, one read each  hand out bytes that do not match their stamp;
//   stale read                                       open as if nothing had happened
//   write error, no space,       any, once or for    fail the write and every later commit: the open
//   torn write, flush error      ever until reopened epoch is lost, verified reads go on
//   silent torn write, lost      one in a run, it    lose the extents that stand there until they are
//   write, a bit rotten at rest  stays               written again, and say so; open and commit as if
//                                                    nothing had happened
//   misdirected write            one in a run, it    as above, here and there; or refuse to open, for
//                                stays               twins are lost together when one write covers both
//   kill, power cut              0 to 3 cuts in a    lose what was not committed
//                                run, kills besides
// clang-format on
//
// The store over a device asks no clock and takes no lock, so the order of the drive's completions,
// which the seed chooses, is all the time there is.
//
// What always holds
//   * After any reopening the store equals, whole, the last acknowledged commit or the one that was
//     being made: extents, stamps, epoch and blob.
//   * So do the snapshots that this commit lists, each with the state that it names. Only what the
//     table above says may cost one.
//   * Bytes that Verify() accepts are the bytes that were written last; those that it rejects stand
//     where the drive has done damage, were read by a read that it spoilt, or belong to a rewrite
//     that failed halfway.
//   * Every call completes, and every error has the code of the table in aio/faulty_device.h or is
//     OFD-1207 or OFD-1210.
//   * At the end fsck finds nothing to say, unless the drive has done damage.
//   * Opening writes nothing but a superblock whose twin names the commit, and may be interrupted
//     anywhere and done again.
//
// Thread safety: runs are independent of each other.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "aio/faulty_device.h"

namespace offload::swap {

struct SimulationOptions {
  uint64_t seed = 1;
  uint32_t operation_count = 0;  // 0: 200 to 1000, as the seed says
  bool faults = true;            // faults and crashes that the seed chooses
  // For loops over the n-th operation: given to the drive before the first operation. The script
  // then reopens the store now and then, the fault still armed, and ends when the store has failed,
  // after a reopening that finds no fault.
  std::optional<aio::Fault> fault;
};

struct SimulationResult {
  std::string violation;    // empty: everything held
  uint64_t trace_hash = 0;  // over every operation of the drive, its bytes, and every outcome
  uint64_t operations = 0, device_operations = 0;
  uint64_t writes = 0, reads = 0, commits = 0, reopenings = 0;
  uint64_t snapshots = 0, growths = 0;  // made
  uint64_t snapshots_read = 0;          // whole, after a reopening
  uint64_t kills = 0, power_cuts = 0;
  uint64_t next_epochs_found = 0;  // reopenings that found the commit that was being made
  uint64_t mismatches_seen = 0;    // extents whose bytes did not match their stamp, after a fault
  uint64_t refusals_to_open = 0;
  uint64_t rotten_bits = 0;
  std::array<uint64_t, aio::kFaultKindCount> faults{};  // met, by kind

  uint64_t faults_met() const;
  void Add(const SimulationResult& other);  // counts only
};

SimulationResult Simulate(const SimulationOptions& options);

// Runs the script of `seed` with a fault of `kind` at its first, second, … operation until one run
// meets none. `violation` names the position.
SimulationResult SimulateEveryFault(uint64_t seed, uint32_t operation_count, aio::FaultKind kind,
                                    bool persistent, uint64_t* positions);

}  // namespace offload::swap
