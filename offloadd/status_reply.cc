#include "offloadd/status_reply.h"

#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/version.h"

namespace offload::daemon {
namespace {

namespace v1 = proto::v1;

constexpr auto kPatience = std::chrono::milliseconds(500);

struct Question {
  std::shared_ptr<Job> job;
  std::future<std::optional<v1::JobStatus>> answer;  // missing: it is over
};

Question Ask(std::shared_ptr<Job> job) {
  auto promise = std::make_shared<std::promise<std::optional<v1::JobStatus>>>();
  Question question{job, promise->get_future()};
  // The job outlives its loop.
  job->loop().Post([raw = job.get(), promise] {
    std::optional<v1::JobStatus> status;
    if (raw->phase() != JobPhase::kDrained) raw->FillStatus(&status.emplace());
    promise->set_value(std::move(status));
  });
  return question;
}

void FillBusy(const JobIdentity& identity, v1::JobStatus* busy) {
  busy->set_job(identity.name);
  busy->set_pool(identity.pool);
  busy->set_client_pid(static_cast<uint32_t>(identity.pid));
  busy->set_phase("busy");
}

}  // namespace

v1::StatusReply MakeStatusReply(const JobTable& jobs, double started_seconds) {
  v1::StatusReply reply;
  reply.set_version(kVersion);
  reply.set_pid(static_cast<uint32_t>(getpid()));
  reply.set_uptime_seconds(Clock::Real().NowSeconds() - started_seconds);
  // All are asked before any is waited for.
  std::vector<Question> questions;
  for (std::shared_ptr<Job>& job : jobs.All()) questions.push_back(Ask(std::move(job)));
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (Question& question : questions) {
    if (question.answer.wait_until(deadline) == std::future_status::timeout) {
      FillBusy(question.job->identity(), reply.add_jobs());
    } else if (std::optional<v1::JobStatus> status = question.answer.get()) {
      *reply.add_jobs() = *std::move(status);
    }
  }
  return reply;
}

}  // namespace offload::daemon
