#include "tools/step_figures.h"

#include <cstddef>

namespace offload::tools {
namespace {

template <typename List>
double At(const List& list, size_t index) {
  return index < static_cast<size_t>(list.size())
             ? static_cast<double>(list[static_cast<int>(index)])
             : 0.0;
}

double StallAt(const proto::v1::StepFigures& figures, size_t phase, size_t cause) {
  return At(figures.stall_seconds(), phase * proto::kStallCauses + cause);
}

}  // namespace

double PhaseSeconds(const proto::v1::StepFigures& figures, proto::StepPhase phase) {
  return At(figures.phase_seconds(), static_cast<size_t>(phase));
}

double StallSeconds(const proto::v1::StepFigures& figures, proto::StallCause cause) {
  double sum = 0;
  for (size_t phase = 0; phase < proto::kStepPhases; ++phase)
    sum += StallAt(figures, phase, static_cast<size_t>(cause));
  return sum;
}

double StallSeconds(const proto::v1::StepFigures& figures) {
  double sum = 0;
  for (size_t cause = 0; cause < proto::kStallCauses; ++cause)
    sum += StallSeconds(figures, static_cast<proto::StallCause>(cause));
  return sum;
}

double StallShare(const proto::v1::StepFigures& figures) {
  double seconds = 0;
  for (const double phase : figures.phase_seconds()) seconds += phase;
  return seconds > 0 ? StallSeconds(figures) / seconds : 0;
}

double OnTimeShare(const proto::v1::StepFigures& figures) {
  double all = 0;
  for (const uint64_t count : figures.prefetches()) all += static_cast<double>(count);
  return all > 0 ? At(figures.prefetches(), 0) / all : -1;
}

Json DescribeFigures(const proto::v1::StepFigures& figures) {
  Json phases = Json::object(), stalls = Json::object(), prefetches = Json::object();
  for (size_t phase = 0; phase < proto::kStepPhases; ++phase) {
    const std::string name(proto::kStepPhaseNames[phase]);
    phases[name] = At(figures.phase_seconds(), phase);
    for (size_t cause = 0; cause < proto::kStallCauses; ++cause)
      stalls[name][std::string(proto::kStallCauseNames[cause])] = StallAt(figures, phase, cause);
  }
  for (size_t result = 0; result < proto::kPrefetchResults; ++result) {
    prefetches[std::string(proto::kPrefetchResultNames[result])] =
        result < static_cast<size_t>(figures.prefetches_size())
            ? figures.prefetches(static_cast<int>(result))
            : 0;
  }
  return {{"phase_seconds", std::move(phases)},
          {"stall_seconds", std::move(stalls)},
          {"stall_share", StallShare(figures)},
          {"prefetches", std::move(prefetches)}};
}

Json DescribeRecord(const proto::v1::StepRecord& record) {
  Json described = {{"first_step", record.first_step()},
                    {"last_step", record.last_step()},
                    {"end_unix_seconds", record.end_unix_seconds()},
                    {"seconds", record.seconds()},
                    {"bytes_read", record.bytes_read()},
                    {"bytes_written", record.bytes_written()},
                    {"commits", record.commits()},
                    {"resident_bytes", record.resident_bytes()}};
  described.update(DescribeFigures(record.figures()));
  return described;
}

}  // namespace offload::tools
