// examples/report.h
//
// What the trainer says while it runs: JSON lines for programs, progress lines for people.
//
// Thread safety: none; one thread writes.
#pragma once

#include <cstdint>
#include <map>
#include <ostream>
#include <string>

namespace offload::examples {

struct StartReport {
  std::string model;  // in words
  int64_t parameters = 0;
  uint64_t state_bytes = 0;
  uint64_t gradient_bytes = 0;
  uint64_t ram_bytes = 0;
  int64_t resumed_step = 0;
  int64_t steps = 0;
  double planned_read_bytes = 0;   // per step, from the drive
  double planned_write_bytes = 0;  // per step, to the drive
  uint64_t planned_memory_bytes = 0;
};

struct StepSeconds {
  double forward = 0, backward = 0, step = 0;
  double wait = 0;  // blocked on the daemon; contained in the others
  double Total() const { return forward + backward + step; }
};

struct StepReport {
  int64_t step = 0;  // steps taken by the job, this one included
  int64_t steps = 0;
  double loss = 0;  // mean over the micro-batches
  double grad_norm = 0;
  double learning_rate = 0;
  int64_t tokens = 0;
  StepSeconds seconds;
  uint64_t bytes_read = 0, bytes_written = 0;  // since the last line
  uint64_t resident_bytes = 0, peak_bytes = 0;
  int64_t durable_epoch = 0;
};

// Of the first steps, beside what the plan said of one.
struct PlanComparison {
  int64_t steps = 0;  // so many, on average
  double planned_read_bytes = 0, planned_write_bytes = 0;
  double read_bytes = 0, written_bytes = 0;
  uint64_t planned_memory_bytes = 0, peak_bytes = 0;
};

class Reporter {
 public:
  // Writes to `out`, which must outlive this: JSON lines, or progress lines for people.
  Reporter(bool json, std::ostream& out) : json_(json), out_(out) {}

  void Start(const StartReport& report);
  void Step(const StepReport& report);
  void Plan(const PlanComparison& comparison);
  void Evaluation(int64_t step, double loss);
  void Sample(int64_t step, const std::string& text);
  // `checksums`: by name, of all that the job keeps under it; empty: none were asked for.
  void End(int64_t step, int64_t durable_epoch, const std::map<std::string, uint32_t>& checksums);

 private:
  const bool json_;
  std::ostream& out_;
};

// "the first 10 steps: read 1.502 GB a step (planned 1.499), …".
std::string PlanLine(const PlanComparison& comparison);

// One progress line: "step 118/2000 [ 5.9%] | 21.4 s | loss 2.113 | …".
std::string ProgressLine(const StepReport& report);

// Replaces bytes that are not text, so that a terminal and a JSON reader survive any sample.
std::string Printable(const std::string& bytes);

}  // namespace offload::examples
