// offloadd/job_simulator.h
//
// A job under simulated operation, judged against a model: a seed chooses a model of a few tensors,
// its optimizer, how much of it fits into memory, and one to four launches of one to four ranks
// each, what their trainers do, who is slow, who dies and when; and everything that follows is a
// function of that seed. A run that fails is repeated by its number.
//
// The ranks speak through their rings and the calls of Job, as client::Session does. The job's loop
// and threads run turn by turn, in an order that the seed chooses (machine.h); its drive is memory
// that can be killed, cut off and spoilt (aio/faulty_device.h).
//
// clang-format off
//   what happens                                       what must be so
//   a rank uses a weight, as long as it has a pin      the bytes are those of the last step and put
//   ranks add gradients in passes, some slower,        a sum that was looked at is the chain in the
//   others on other paths; look, go on, begin anew     order of passes and ranks, whoever came first
//   a step, with clipping, with gradients that the     weights, masters, states, epoch and trainer
//   trainer wrote, of the same or another optimizer    states become the model's
//   a rank says what the step will be and which      nothing anybody sees changes before the step,
//   gradients are final, rightly or not                which becomes the model's all the same
//   a step whose gradients are not finite, or in       is refused to all ranks alike, and nothing has
//   which ranks differ                                 changed
//   the first rank puts weights                        others see them when they have followed; they
//                                                      are durable with a step or EndLoad, else gone
//   ranks make different values of a weight            is refused to all of them, and nothing is put
//   steps of one rank are partial: it has some         nothing is committed, and no snapshot made,
//   tensors elsewhere, puts them with a later step,    before a whole step or the end of a load, and
//   ends a load, or ends                               what is found is never between two of them
//   gets, looks at spilled sums                        the model's bytes
//   drives give something else than was assumed,     nothing of all this changes, and every place
//   a job replans between two steps, and places      in memory has one owner
//   pass between pipeline and what stays
//   a checkpoint is asked for, or ends an interval,    it is of the last step, whole
//   and steps go on beside it
//   snapshots are made and deleted meanwhile           they hold a committed state, whole
//   a rank is lost, all are, a read or write fails     the others are told; the job ends drained, at
//                                                      the last step that all had called for, or, if
//                                                      the drive has failed, at a whole one
//   the daemon is killed, the power fails              what was acknowledged as durable, or a later
//                                                      state that was begun, is found, whole
// clang-format on
//
// Thread safety: runs are independent of each other.
#pragma once

#include <cstdint>
#include <string>

namespace offload::daemon {

// What a replan, or a rank, must not do, done by the simulator itself: it is to be found.
enum class PlantedMistake : uint8_t {
  kNone,
  kControl,         // none, in the runs in which the others are planted
  kChangesAmid,     // what stays changes while a step is under way
  kDropsUnwritten,  // a place is taken from state that the store does not have
  kStaysUnread,     // what begins to stay is taken as read
  kKeepsBlock,      // a block is never given back
  kHasTwoOwners,    // a block that is given to what stays remains in the pipeline, too
  kHidesPartial,    // a rank does not say that its last step is partial
};

struct JobSimulationOptions {
  uint64_t seed = 1;
  PlantedMistake mistake = PlantedMistake::kNone;
};

struct JobSimulationResult {
  std::string violation;    // empty: everything held
  uint64_t trace_hash = 0;  // over every operation of the drive, its bytes, and every outcome
  uint64_t launches = 0, turns = 0;
  uint64_t steps = 0, refused_steps = 0;
  uint64_t uses = 0, acquires = 0;  // of weights; those that had to wait
  uint64_t parts = 0, looks = 0, rounds_anew = 0, spilled_looks = 0, own_gradients = 0;
  uint64_t puts = 0, state_puts = 0, master_puts = 0, loads = 0, gets = 0, exchanges = 0;
  uint64_t refused_puts = 0;              // answers to puts and follows of ranks that differ
  uint64_t checkpoints = 0;               // that were asked for
  uint64_t steps_beside_checkpoints = 0;  // that began before an interval's was durable
  uint64_t partial_steps = 0, partial_dropped = 0;  // and launches that ended with such
  uint64_t partial_loads = 0;                       // that were ended after them
  uint64_t snapshots = 0, snapshots_read = 0;
  uint64_t deaths = 0, kills = 0, power_cuts = 0, drive_faults = 0;
  uint64_t replans = 0;  // since the drive gave something else than was assumed
  uint64_t places_taken = 0, places_given = 0;  // by the pipeline, and to what stays
  uint64_t mistakes = 0;                        // that were planted
  uint64_t used_ahead = 0, lost_ahead = 0;  // extents that were updated before their step's call
  uint64_t newer_states_found = 0;          // than the one that was known to be durable
  uint64_t puts_dropped = 0;                // launches that ended with puts of no step and no load

  void Add(const JobSimulationResult& other);  // counts only
};

JobSimulationResult SimulateJob(const JobSimulationOptions& options);

}  // namespace offload::daemon
