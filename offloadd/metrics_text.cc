#include "offloadd/metrics_text.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/string_view.h"
#include "proto/step_words.h"

namespace offload::daemon {
namespace {

namespace v1 = proto::v1;

// Names of labels and their values, in order.
using Labels = std::vector<std::pair<std::string_view, std::string_view>>;

std::string Escaped(std::string_view value) {
  std::string escaped;
  for (const char byte : value) {
    if (byte == '\\' || byte == '"') escaped += '\\';
    if (byte == '\n') {
      escaped += "\\n";
    } else {
      escaped += byte;
    }
  }
  return escaped;
}

// One metric: its head, then its samples.
class Family {
 public:
  Family(std::string* text, std::string_view name, std::string_view type, std::string_view help)
      : text_(*text), name_(name) {
    absl::StrAppend(&text_, "# HELP ", ToAbsl(name), " ", ToAbsl(help), "\n# TYPE ", ToAbsl(name),
                    " ", ToAbsl(type), "\n");
  }

  void Add(const Labels& labels, double value) { Add("", labels, value); }
  void Add(std::string_view suffix, const Labels& labels, double value) {
    text_.append(name_).append(suffix);
    const char* separator = "{";
    for (const auto& [label, label_value] : labels) {
      absl::StrAppend(&text_, separator, ToAbsl(label), "=\"", Escaped(label_value), "\"");
      separator = ",";
    }
    if (!labels.empty()) text_ += "}";
    absl::StrAppendFormat(&text_, " %.17g\n", value);
  }
  // `counts` are cumulative, up to each bound; `count` is of all.
  template <typename Bounds, typename Counts>
  void AddHistogram(Labels labels, const Bounds& bounds, const Counts& counts, uint64_t count,
                    double sum) {
    for (int i = 0; i < bounds.size() && i < counts.size(); ++i) {
      const std::string bound = absl::StrFormat("%.6g", bounds[i]);
      labels.emplace_back("le", bound);
      Add("_bucket", labels, static_cast<double>(counts[i]));
      labels.pop_back();
    }
    labels.emplace_back("le", "+Inf");
    Add("_bucket", labels, static_cast<double>(count));
    labels.pop_back();
    Add("_sum", labels, sum);
    Add("_count", labels, static_cast<double>(count));
  }

 private:
  std::string& text_;
  std::string_view name_;
};

class Writer {
 public:
  explicit Writer(const v1::StatusReply& status) : status_(status) {}

  std::string Write(const std::map<std::string, uint64_t>& pool_free_bytes) {
    WriteDaemon(pool_free_bytes);
    WriteSteps();
    WriteStalls();
    WriteAhead();
    WritePlan();
    WriteMemory();
    WriteGpus();
    WriteTransfers();
    WriteErrors();
    return std::move(text_);
  }

 private:
  Family Start(std::string_view name, std::string_view type, std::string_view help) {
    return {&text_, name, type, help};
  }

  void WriteDaemon(const std::map<std::string, uint64_t>& pool_free_bytes) {
    Start("offloadd_build_info", "gauge", "The release that runs.")
        .Add({{"version", status_.version()}}, 1);
    Start("offloadd_uptime_seconds", "gauge", "Since the daemon was started.")
        .Add({}, status_.uptime_seconds());
    size_t ranks = 0;
    for (const v1::JobStatus& job : status_.jobs()) ranks += job.ranks_size();
    Start("offloadd_clients", "gauge", "Ranks of all jobs.").Add({}, static_cast<double>(ranks));
    Family free = Start("offloadd_pool_free_bytes", "gauge", "Room in the file system of a pool.");
    for (const auto& [pool, bytes] : pool_free_bytes)
      free.Add({{"pool", pool}}, static_cast<double>(bytes));
  }

  // One sample per job, of those that answer.
  template <typename Value>
  void PerJob(std::string_view name, std::string_view type, std::string_view help,
              const Value& value) {
    Family family = Start(name, type, help);
    for (const v1::JobStatus& job : status_.jobs()) {
      if (job.has_figures()) family.Add({{"job", job.job()}}, static_cast<double>(value(job)));
    }
  }

  void WriteSteps() {
    PerJob("offloadd_step_total", "counter", "Optimizer steps of the job, also of earlier runs.",
           [](const v1::JobStatus& job) { return job.step(); });
    PerJob("offloadd_committed_step", "gauge", "The last step that a crash cannot take back.",
           [](const v1::JobStatus& job) { return job.durable_step(); });
    Family durations = Start("offloadd_step_duration_seconds", "histogram",
                             "From the call of a step to that of the next.");
    for (const v1::JobStatus& job : status_.jobs()) {
      if (!job.has_durations()) continue;
      const v1::StepDurations& of_job = job.durations();
      durations.AddHistogram({{"job", job.job()}}, of_job.upper_seconds(), of_job.counts(),
                             of_job.count(), of_job.sum_seconds());
    }
  }

  void WriteStalls() {
    Family phases = Start("offloadd_phase_seconds_total", "counter",
                          "Time of a trainer in each phase of its steps, the mean of its ranks.");
    for (const v1::JobStatus& job : status_.jobs()) {
      for (int i = 0; i < job.figures().phase_seconds_size() && i < kPhases; ++i) {
        phases.Add({{"job", job.job()}, {"phase", proto::kStepPhaseNames[i]}},
                   job.figures().phase_seconds(i));
      }
    }
    Family stalls = Start("offloadd_stall_seconds_total", "counter",
                          "Time of a trainer's threads blocked, by phase and cause.");
    for (const v1::JobStatus& job : status_.jobs()) {
      for (int i = 0; i < job.figures().stall_seconds_size() && i < kPhases * kCauses; ++i) {
        stalls.Add({{"job", job.job()},
                    {"phase", proto::kStepPhaseNames[i / kCauses]},
                    {"cause", proto::kStallCauseNames[i % kCauses]}},
                   job.figures().stall_seconds(i));
      }
    }
    Family prefetches = Start("offloadd_prefetch_total", "counter",
                              "Uses of tensors that were not in memory, by how they came out.");
    for (const v1::JobStatus& job : status_.jobs()) {
      for (int i = 0; i < job.figures().prefetches_size() && i < kResults; ++i) {
        prefetches.Add({{"job", job.job()}, {"result", proto::kPrefetchResultNames[i]}},
                       static_cast<double>(job.figures().prefetches(i)));
      }
    }
  }

  void WriteAhead() {
    Family ahead = Start("offloadd_updates_ahead_total", "counter",
                         "Extents that were updated before their step was called for.");
    for (const v1::JobStatus& job : status_.jobs()) {
      if (!job.has_updates_ahead()) continue;
      const std::pair<const char*, uint64_t> results[] = {{"used", job.updates_ahead().used()},
                                                          {"lost", job.updates_ahead().lost()}};
      for (const auto& [name, extents] : results)
        ahead.Add({{"job", job.job()}, {"result", name}}, static_cast<double>(extents));
    }
  }

  void WritePlan() {
    Family planned = Start("offloadd_planned_step_bytes", "gauge",
                           "Bytes of the drive that are planned of a step, and of a checkpoint "
                           "beside it.");
    for (const v1::JobStatus& job : status_.jobs()) {
      if (!job.has_plan()) continue;
      const v1::PlannedStep& step = job.plan().step();
      const std::pair<const char*, uint64_t> operations[] = {
          {"read", step.weight_read_bytes() + step.state_read_bytes() + step.gradient_read_bytes()},
          {"write", step.written_bytes() + step.gradient_written_bytes()},
          {"checkpoint", step.checkpoint_bytes()}};
      for (const auto& [name, bytes] : operations)
        planned.Add({{"job", job.job()}, {"op", name}}, static_cast<double>(bytes));
    }
    PerJob("offloadd_replans_total", "counter",
           "How often the pool gave something else than was assumed.",
           [](const v1::JobStatus& job) { return job.plan().replans(); });
  }

  void WriteMemory() {
    PerJob("offloadd_ram_bytes", "gauge", "The budget of the job.",
           [](const v1::JobStatus& job) { return job.ram_bytes(); });
    PerJob("offloadd_allocated_bytes", "gauge", "Pages that the job's shared memory has.",
           [](const v1::JobStatus& job) { return job.allocated_bytes(); });
    Family resident = Start("offloadd_resident_bytes", "gauge", "What of the job is in memory.");
    for (const v1::JobStatus& job : status_.jobs()) {
      if (!job.has_resident()) continue;
      const std::pair<const char*, uint64_t> classes[] = {{"weights", job.resident().weights()},
                                                          {"optimizer", job.resident().state()},
                                                          {"gradients", job.resident().gradients()},
                                                          {"buffers", job.resident().buffers()}};
      for (const auto& [name, bytes] : classes) {
        resident.Add({{"job", job.job()}, {"tier", "ram"}, {"class", name}},
                     static_cast<double>(bytes));
      }
    }
  }

  // One sample per rank that has a device.
  template <typename Value>
  void PerGpu(std::string_view name, std::string_view type, std::string_view help,
              const Value& value) {
    Family family = Start(name, type, help);
    for (const v1::JobStatus& job : status_.jobs()) {
      for (const v1::RankStatus& rank : job.ranks()) {
        if (!rank.has_gpu()) continue;
        const std::string number = absl::StrCat(rank.rank());
        family.Add({{"job", job.job()}, {"rank", number}, {"device", rank.gpu().device()}},
                   static_cast<double>(value(rank.gpu())));
      }
    }
  }

  void WriteGpus() {
    PerGpu("offloadd_gpu_ram_bytes", "gauge", "The budget of a rank's device.",
           [](const v1::GpuStatus& gpu) { return gpu.gpu_ram_bytes(); });
    PerGpu("offloadd_gpu_used_bytes", "gauge", "Of the budget: weights and gradients there now.",
           [](const v1::GpuStatus& gpu) { return gpu.used_bytes(); });
    PerGpu("offloadd_gpu_peak_bytes", "gauge", "Held of the budget at most.",
           [](const v1::GpuStatus& gpu) { return gpu.peak_bytes(); });
    PerGpu("offloadd_gpu_copied_to_device_bytes_total", "counter", "Copied to a rank's device.",
           [](const v1::GpuStatus& gpu) { return gpu.bytes_to_device(); });
    PerGpu("offloadd_gpu_copied_to_host_bytes_total", "counter", "Copied from a rank's device.",
           [](const v1::GpuStatus& gpu) { return gpu.bytes_to_host(); });
    PerGpu("offloadd_gpu_stall_seconds_total", "counter",
           "Time of a device's streams waiting for copies.",
           [](const v1::GpuStatus& gpu) { return gpu.stall_seconds(); });
    PerGpu("offloadd_gpu_host_waits_total", "counter",
           "Waits of a trainer's threads for copies to its device.",
           [](const v1::GpuStatus& gpu) { return gpu.host_waits(); });
  }

  // Calls `add` with the labels of each operation of each file, and what was counted.
  template <typename Add>
  void ForEachOperation(const Add& add) {
    for (const v1::JobStatus& job : status_.jobs()) {
      for (const v1::DeviceStatus& device : job.devices()) {
        const Labels labels = {{"job", job.job()}, {"pool", job.pool()}, {"file", device.file()}};
        const std::pair<const char*, const v1::OperationStatus*> operations[] = {
            {"read", &device.read()}, {"write", &device.write()}, {"flush", &device.flush()}};
        for (const auto& [name, operation] : operations) {
          Labels with_name = labels;
          with_name.emplace_back("op", name);
          add(with_name, device, *operation);
        }
      }
    }
  }

  void WriteTransfers() {
    Family bytes = Start("offloadd_io_bytes_total", "counter",
                         "Bytes moved, by file of the job and operation.");
    ForEachOperation([&](const Labels& labels, const auto&, const auto& operation) {
      bytes.Add(labels, static_cast<double>(operation.bytes()));
    });
    Family latency = Start("offloadd_io_latency_seconds", "histogram",
                           "Of operations that did not fail, queueing included.");
    ForEachOperation([&](const Labels& labels, const auto& device, const auto& operation) {
      latency.AddHistogram(labels, device.latency_bounds_seconds(), operation.latency_counts(),
                           operation.count(), operation.sum_seconds());
    });
    Family in_flight = Start("offloadd_io_inflight", "gauge", "Operations under way.");
    for (const v1::JobStatus& job : status_.jobs()) {
      for (const v1::DeviceStatus& device : job.devices()) {
        in_flight.Add({{"job", job.job()}, {"pool", job.pool()}, {"file", device.file()}},
                      static_cast<double>(device.in_flight()));
      }
    }
  }

  void WriteErrors() {
    Family errors = Start("offloadd_io_errors_total", "counter", "Operations that failed.");
    ForEachOperation([&](const Labels& labels, const auto&, const auto& operation) {
      errors.Add(labels, static_cast<double>(operation.errors()));
    });
    PerJob("offloadd_checksum_failures_total", "counter",
           "Reads that returned other bytes than were written.",
           [](const v1::JobStatus& job) { return job.store_errors().checksum_mismatches(); });
    PerJob("offloadd_lost_extents_total", "counter",
           "Reads that stayed wrong, however often they were tried.",
           [](const v1::JobStatus& job) { return job.store_errors().lost_extents(); });
    PerJob("offloadd_scrub_bytes_total", "counter", "Bytes read back in the background.",
           [](const v1::JobStatus& job) { return job.scrub().bytes(); });
  }

  static constexpr int kPhases = proto::kStepPhases;
  static constexpr int kCauses = proto::kStallCauses;
  static constexpr int kResults = proto::kPrefetchResults;

  const v1::StatusReply& status_;
  std::string text_;
};

}  // namespace

std::string MetricsText(const v1::StatusReply& status,
                        const std::map<std::string, uint64_t>& pool_free_bytes) {
  return Writer(status).Write(pool_free_bytes);
}

}  // namespace offload::daemon
